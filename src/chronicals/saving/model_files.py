"""A model's folder: weights as Hugging Face or PEFT reads them, the tokenizer, and ``chronicals.json``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from chronicals.lora import adapters, load_adapter, name_base_by_absolute_path, save_adapter
from chronicals.models import load_whole, save_processors, within_lora
from chronicals.standard_json import to_json

SHAPED_BY = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora")
"""Fields of PEFT's configuration without whose values an adapter's matrices mean something else."""


def save_model(folder: Path, model: Any, tokenizer: Any, about: dict[str, Any]) -> None:
    """The weights as Hugging Face or PEFT reads them, the tokenizer, and ``chronicals.json`` with what was trained."""
    folder.mkdir(parents=True, exist_ok=True)
    if next(adapters(model), None) is not None:
        save_adapter(model, folder)
    else:
        model.save_pretrained(folder)
        name_base_by_absolute_path(folder)
    save_processors(within_lora(model), folder)
    tokenizer.save_pretrained(folder)
    (folder / "chronicals.json").write_text(to_json(about, indent=1))


@torch.no_grad()
def load_weights(folder: Path, model: Any) -> None:
    """Copy the weights, or adapters, that ``save_model`` wrote into the model.

    Raises:
        ValueError, KeyError, OSError, RuntimeError: they belong to another model, which has nothing of them then.
    """
    if next(adapters(model), None) is not None:
        load_adapter(model, folder)
    elif hasattr(model, "get_base_model"):
        _load_peft(folder, model)
    else:
        _load_whole_model(folder, model)


def _load_whole_model(folder: Path, model: Any) -> None:
    """Through ``from_pretrained``, which undoes whatever ``save_pretrained`` did to names and shapes."""
    if (folder / "adapter_config.json").exists():
        raise ValueError("it holds adapters, and the model has none; set use_lora as before")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # which holds what any of them holds
    stored = load_whole(type(model), folder, dtype=dtype, use_safetensors=True).state_dict()
    own = model.state_dict()
    if stored.keys() != own.keys():
        raise ValueError(
            f"{len(stored.keys() ^ own.keys())} tensors are not in both, the first is {min(stored.keys() ^ own.keys())}"
        )
    for name, tensor in own.items():
        if tensor.shape != stored[name].shape:
            raise ValueError(f"{name} is {list(stored[name].shape)} there and {list(tensor.shape)} here")
    for name, tensor in own.items():
        tensor.copy_(stored[name])


def _load_peft(folder: Path, model: Any) -> None:
    """What PEFT's wrapping of a model saved: its adapters, those that are not ``default`` in folders by their names."""
    from peft import PeftConfig, set_peft_model_state_dict

    own = {name: tensor.clone() for name, tensor in trained(model)}
    try:
        for adapter, config in model.peft_config.items():
            place = folder if adapter == "default" else folder / adapter
            before = PeftConfig.from_pretrained(str(place))
            for field in SHAPED_BY:
                if getattr(before, field, None) != getattr(config, field, None):
                    values = getattr(before, field, None), getattr(config, field, None)
                    raise ValueError(f"adapter {adapter!r} has {field}={values[0]!r} there and {values[1]!r} here")
            found = set_peft_model_state_dict(model, load_file(place / "adapter_model.safetensors"), adapter_name=adapter)
            if found.unexpected_keys:
                raise ValueError(f"the model has no {found.unexpected_keys[0]}")
    except Exception:
        for name, tensor in trained(model):
            tensor.copy_(own[name])
        raise


def trained(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the trained parameters."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
