"""Sizes of a native mixture of experts as dimensions: ``moe.num_experts``, ``moe.kv_lora_rank``.

A model of another size has other weights, so every trial of such a study begins with random ones,
made from the recipe's model with the seed of the trial; the first trial's too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chronicals.config import ConfigurationError, Recipe
from chronicals.saving import write_folder

PREFIX = "moe"
"""Name before a size, as that of a section."""

MODEL_FOLDER = "initial-model"
"""Folder of a trial's model with random weights."""

MODEL_TYPE = "chronicals_moe"

OF_THE_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of the model's configuration that other trials must share, and its tokenizer decides."""


def sizes_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes among the values of a trial, by their names in the model's configuration."""
    return {
        name.removeprefix(f"{PREFIX}."): value
        for name, value in params.items()
        if name.startswith(f"{PREFIX}.")
    }


def native_configuration(recipe: Recipe) -> dict[str, Any] | None:
    """Return the configuration of the recipe's model; None if it is no native mixture in a folder."""
    file = Path(recipe.model) / "config.json"
    if not file.is_file():
        return None
    configuration = json.loads(file.read_text())
    return configuration if configuration.get("model_type") == MODEL_TYPE else None


def is_untrained(recipe: Recipe) -> bool:
    """Return whether the recipe's model is a native mixture that no run has trained."""
    trained = (Path(recipe.model) / "chronicals.json").exists()
    return native_configuration(recipe) is not None and not trained


def own_size(recipe: Recipe, size: str) -> Any:
    """Return a size of the recipe's model."""
    return (native_configuration(recipe) or {}).get(size)


def check_size(recipe: Recipe, size: str, values: Any) -> None:
    """Check that a size can be tuned.

    Raises:
        ConfigurationError: there is no such size, or the model's weights would be lost.
    """
    said = f"tune={{'{PREFIX}.{size}': {values!r}}}"
    if native_configuration(recipe) is None:
        raise ConfigurationError(
            f"{said}: model={recipe.model!r} is no native mixture of experts in a folder; make one "
            "with chronicals moe new, or leave it out"
        )
    if not is_untrained(recipe):
        raise ConfigurationError(
            f"{said}: model={recipe.model!r} is trained, and a model of another size begins with "
            "random weights; leave it out"
        )
    from chronicals.moe import ChronicalsMoeConfig

    known = {field.name for field in dataclasses.fields(ChronicalsMoeConfig)}
    if size not in known - {*OF_THE_TOKENIZER}:
        raise ConfigurationError(f"{said}: the model has no such size; docs/moe.md names them")


def make_model(recipe: Recipe, sizes: Mapping[str, Any], folder: Path, seed: int) -> None:
    """Write the recipe's model with other sizes and random weights, unless the folder is there.

    Raises:
        ConfigurationError: the sizes do not fit each other.
    """
    if folder.exists():
        return
    import torch
    from huggingface_hub.errors import StrictDataclassError

    from chronicals.models import load_tokenizer
    from chronicals.moe import ChronicalsMoeConfig, ChronicalsMoeForCausalLM

    own = native_configuration(recipe) or {}
    if "num_hidden_layers" in sizes:
        own.pop("layer_types", None)  # a kind for each layer
    try:
        config = ChronicalsMoeConfig(**{**own, **sizes})
    except StrictDataclassError as error:
        words = ", ".join(f"{PREFIX}.{name}={value}" for name, value in sizes.items())
        raise ConfigurationError(f"{words}: {error.__cause__ or error}") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ChronicalsMoeForCausalLM(config).to(config.dtype or torch.bfloat16)

    def fill(aside: Path) -> None:
        model.save_pretrained(aside)
        load_tokenizer(recipe.model).save_pretrained(aside)

    write_folder(folder, fill)
