"""Methods that a model with our adapters has of its own, where transformers' would write or do something wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from chronicals.lora.embeddings import STORED
from chronicals.lora.merging import merge_adapters
from chronicals.lora.peft_format import CHANGED, save_adapter


def take_over(model: Any) -> None:
    """Give ``model`` these methods, until its adapters are merged; a deep copy of it has its own."""
    for name, method in METHODS.items():
        setattr(model, name, functools.partial(method, model))


def save_pretrained(
    model: Any, save_directory: str | Path, is_main_process: bool = True, state_dict: Mapping[str, Tensor] | None = None,
    push_to_hub: bool = False, max_shard_size: int | str | None = None, safe_serialization: bool = True, **hub: Any,
) -> None:  # fmt: skip
    """Write the adapter in PEFT's format, which ``AutoModelForCausalLM`` and PEFT load over the model's base.

    Args:
        save_directory: folder for ``adapter_config.json`` and ``adapter_model.safetensors``.
        is_main_process: False writes nothing.
        state_dict: takes the values from here, by the names of ``model.state_dict()``.
        push_to_hub: also upload the folder, to ``repo_id`` or a repository of its name.
        max_shard_size: an adapter is one file; here because ``push_to_hub`` passes it.
        hub: arguments of ``model.push_to_hub``.

    Raises:
        ValueError: ``safe_serialization=False``: no other format is written.
    """
    if not safe_serialization:
        raise ValueError("safe_serialization=False: adapters are written as safetensors only; leave it out")
    if hub.keys() - {"token"} and not push_to_hub:
        raise TypeError(f"save_pretrained of a model with adapters takes no {', '.join(sorted(hub))}")
    if is_main_process:
        save_adapter(model, save_directory, state_dict=state_dict)
    if is_main_process and push_to_hub:
        model.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)


def merge_and_unload(model: Any) -> Any:
    """``model`` without adapters, their products in its weights: a plain model of transformers, changed in place.

    No file holds these weights yet, so adapters trained on them later name no base until the model is saved and loaded.

    Raises:
        ValueError: there are no adapters of ours, or a weight is quantised; the model is as it was.
    """
    merge_adapters(model)
    for name in (*METHODS, "chronicals_lora", STORED):
        vars(model).pop(name, None)
    setattr(model, CHANGED, True)
    return model


def _refuse(method: str, model: Any, *_: Any, **__: Any) -> None:
    remedy = "chronicals.lora.load_adapter refills them" if method == "load_adapter" else "chronicals trains them"
    raise ValueError(
        f"{method}: the model has adapters of chronicals, beside which PEFT's would not be saved; {remedy}, and "
        "merge_and_unload() first makes the model plain"
    )


METHODS: dict[str, Callable[..., Any]] = {
    "save_pretrained": save_pretrained,
    "merge_and_unload": merge_and_unload,
    "add_adapter": functools.partial(_refuse, "add_adapter"),
    "load_adapter": functools.partial(_refuse, "load_adapter"),
}
