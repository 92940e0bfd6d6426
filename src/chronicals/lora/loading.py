"""Reading adapters, ours or PEFT's, into a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from chronicals.lora.apply import apply_lora, linear_shape, targeted_paths
from chronicals.lora.config import LoRAConfig
from chronicals.lora.embeddings import Weights, rows_of, stored_embeddings, take_embeddings
from chronicals.lora.layers import adapters
from chronicals.lora.peft_format import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from chronicals.models.loading import DAMAGED

NEEDED = ("r", "lora_alpha", "target_modules")
"""Fields without which an adapter cannot be read."""


def load_adapter(model: Any, folder: str | Path) -> Any:
    """Attach the adapters in ``folder``, ours or PEFT's, to a model that has none; or refill those it has.

    Where an embedding is stored with them, because tokens were added, the model's becomes that one.

    Raises:
        ValueError: the folder holds something else than plain LoRA, or its tensors do not fit the model, which is as it was.
    """
    folder = Path(folder)
    described = describe_adapter(folder)
    attached = dict(adapters(model))
    config = _config(model, described, attached)
    if attached and model.chronicals_lora.scale != config.scale:
        raise ValueError(f"{folder}: is scaled by {config.scale:g}, the model's adapters by {model.chronicals_lora.scale:g}")
    tensors = _tensors(folder)
    embeddings = _embeddings(model, folder, tensors, fixed=bool(attached))
    shapes = {path: (layer.lora_A.shape, layer.lora_B.shape) for path, layer in attached.items()}
    for path in [] if attached else targeted_paths(model, config.target_modules):
        layer = model.get_submodule(path)
        wide, narrow = linear_shape(layer) or (0, 0)
        narrow = rows_of(model, embeddings) if layer is model.get_output_embeddings() else narrow
        shapes[path] = torch.Size((config.rank, wide)), torch.Size((narrow, config.rank))
    matrices = _matrices(folder, tensors, shapes)
    take_embeddings(model, embeddings)
    if not attached:
        apply_lora(model, config)
    with torch.no_grad():
        for path, layer in adapters(model):
            for own, stored in zip((layer.lora_A, layer.lora_B), matrices[path], strict=True):
                own.copy_(stored)
    return model


def describe_adapter(folder: Path) -> dict[str, Any]:
    """What ``adapter_config.json`` says of a plain LoRA adapter.

    Raises:
        ValueError: it cannot be read, lacks a field, or is something else than plain LoRA.
    """
    try:
        described = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: no readable {CONFIG_FILE}: {error}") from error
    _refuse_what_is_not_plain_lora(folder, described)
    absent = [field for field in NEEDED if described.get(field) is None]
    if absent:
        raise ValueError(
            f"{folder / CONFIG_FILE}: {', '.join(absent)} is missing; it was cut or changed, save the adapter again"
        )
    return described


def _config(model: Any, described: dict[str, Any], attached: Mapping[str, Any]) -> LoRAConfig:
    wanted, excluded = described["target_modules"], described.get("exclude_modules")
    return LoRAConfig(
        rank=described["r"],
        alpha=described["lora_alpha"],
        dropout=described.get("lora_dropout", 0.0),
        target_modules=targeted_paths(model, wanted, excluded) if excluded and not attached else wanted,
        use_rslora=described.get("use_rslora", False),
    )


def _tensors(folder: Path) -> dict[str, Tensor]:
    with _readable(folder):
        return load_file(folder / WEIGHTS_FILE)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Within, the file of weights is read; what goes wrong is a ValueError that names it."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: cannot be read ({error}): {DAMAGED}") from error
    except OSError as error:
        raise ValueError(f"{folder}: no readable {WEIGHTS_FILE}: {error}") from error


def stored_rows(folder: Path) -> int | None:
    """Rows of the embedding that is stored with an adapter; None where there is none."""
    with _readable(folder), safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        names = [name for name in list(file.keys()) if ".lora_" not in name]
        return max((file.get_slice(name).get_shape()[0] for name in names), default=None)


def _embeddings(model: Any, folder: Path, tensors: dict[str, Tensor], fixed: bool) -> Weights:
    """Taken out of ``tensors``; ``fixed``: the model's embedding must have as many rows."""
    try:
        found = stored_embeddings(model, tensors, PREFIX)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    there, here = rows_of(model, found), model.get_input_embeddings().weight.shape[0]
    if fixed and there != here:
        raise ValueError(f"{folder}: its embedding has {there} rows, the model's {here}: add the tokens that were added before")
    return found


def _matrices(
    folder: Path, tensors: dict[str, Tensor], shapes: Mapping[str, tuple[torch.Size, torch.Size]]
) -> dict[str, list[Tensor]]:  # fmt: skip
    """A and B by path, all of ``shapes`` and no others."""
    found: dict[str, list[Tensor]] = {path: [] for path in shapes}
    for path, expected in shapes.items():
        for name, shape in zip(("lora_A", "lora_B"), expected, strict=True):
            stored = tensors.pop(f"{PREFIX}{path}.{name}.weight", None)
            if stored is None or stored.shape != shape:
                raise ValueError(f"{folder}: {path}.{name} is missing or not {tuple(shape)}: of another model?")
            found[path].append(stored)
    if tensors:
        raise ValueError(f"{folder}: holds {len(tensors)} tensors that fit nothing, the first is {next(iter(tensors))}")
    return found


def _refuse_what_is_not_plain_lora(folder: Path, described: dict[str, Any]) -> None:
    if described.get("peft_type") != "LORA":
        raise ValueError(f"{folder}: peft_type={described.get('peft_type')!r}: only LORA adapters can be loaded")
    for field in (
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "layers_to_transform",
        "layer_replication",
        "target_parameters",
        "trainable_token_indices",
        "alora_invocation_tokens",
        "use_qalora",
        "use_bdlora",
        "velora_config",
        "monteclora_config",
        "arrow_config",
        "kasa_config",
        "megatron_config",
    ):
        if described.get(field):
            remedy = "merge the adapter into its base with PEFT's merge_and_unload and load that model"
            raise ValueError(f"{folder}: {field}={described[field]!r} is not supported in this version; {remedy}")
    start = described.get("init_lora_weights", True)
    if start not in (True, False, "gaussian", "orthogonal", "eva"):  # the others change the weights of the base
        raise ValueError(f"{folder}: init_lora_weights={start!r}: an adapter over changed base weights cannot be loaded")
    if described.get("bias", "none") != "none" or described.get("lora_bias"):
        raise ValueError(f"{folder}: adapters with a trained bias are not supported in this version")
