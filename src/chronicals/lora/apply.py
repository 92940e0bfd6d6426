"""Attaching adapters to a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from chronicals.lora.config import LoRAConfig
from chronicals.lora.layers import LoRALinear


def apply_lora(model: Any, config: LoRAConfig) -> Any:
    """Attach an adapter to each targeted linear layer, in place; everything else is frozen.

    Args:
        model: a Hugging Face model.
        config: shape and targets; see ``LoRAConfig``.

    Returns:
        ``model``, with ``model.chronicals_lora`` set to ``config``.

    Raises:
        ValueError: the model has adapters already, a target matches nothing, or is not a linear layer.
    """
    if next(adapters(model), None) is not None:
        raise ValueError("the model has adapters already; load it anew to attach others")
    targets = _targets(model, config.target_modules)
    model.requires_grad_(False)
    for path in targets:
        layer = model.get_submodule(path)
        shape = linear_shape(layer)
        assert shape is not None
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, LoRALinear(layer, config, *shape).train(layer.training))
    model.chronicals_lora = config
    return model


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Paths and modules of the adapted layers."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear))


def linear_shape(layer: Any) -> tuple[int, int] | None:
    """``(in, out)`` of a linear layer, None if it is something else."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"):  # GPT-2's linear layer, weight [in, out]
        return layer.nx, layer.nf
    return None


def _targets(model: Any, wanted: list[str] | str | None) -> list[str]:
    head = model.get_output_embeddings()
    linear = {path for path, layer in model.named_modules() if linear_shape(layer) and layer is not head}
    if wanted is None or wanted == "all-linear":
        found = sorted(linear)
    elif isinstance(wanted, str):
        found = [path for path, _ in model.named_modules() if re.fullmatch(wanted, path)]
    else:
        found = []
        for name in wanted:
            matches = [path for path, _ in model.named_modules() if path == name or path.endswith(f".{name}")]
            if not matches:
                names = sorted({path.rpartition(".")[2] for path in linear})
                raise ValueError(f"lora_target_modules: {name!r} matches no layer; linear layers here: {', '.join(names)}")
            found += matches
    if not found:
        raise ValueError(f"lora_target_modules={wanted!r}: matches no layer, so nothing would be trained")
    for path in found:
        layer = model.get_submodule(path)
        if linear_shape(layer) is None:
            raise ValueError(f"lora_target_modules: {path!r} is {type(layer).__name__}; only linear layers can be adapted")
    return sorted(set(found))
