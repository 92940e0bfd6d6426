"""Quantises linear layers and stacked experts of decoder layers to 4 bits.

This happens while a checkpoint is read, or afterwards to a model in memory. The head, embeddings,
norms, routers, and everything that is neither a plain linear layer nor stacked experts stay
unchanged. While reading, at most one weight to be quantised exists in 16 bit, together with the
tensors of a file that it is made of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from chronicals.memory import decoder_layers
from chronicals.models.base_format import BaseFormat
from chronicals.models.rows import SHARING_RANKS
from chronicals.quantization import (
    FourBits,
    PackedExperts,
    PackedWeight,
    format_of_files,
    packed_experts,
    packed_layers,
    packed_modules,
)
from chronicals.quantization.bitsandbytes import has_foreign_layers, packed_description
from chronicals.quantization.experts import can_be_packed

logger = logging.getLogger(__name__)

WATCHED = "_chronicals_watched_quantising"
"""Attribute of a model: the ``Watch`` that saw its weights while they were quantised."""

Watch = Callable[[str, Tensor, PackedWeight], None]
"""A function that is called for every quantised layer.

Its arguments are the path, the weight ``[out, in]`` and the packed weight.
"""

Take = Callable[[nn.Linear, Tensor], nn.Module]
"""A function of a linear layer and the weight read for it that returns the layer's replacement.

The replacement must have a parameter ``weight``.
"""

QUANTISED_FROM = "_chronicals_quantised_from"
"""Attribute of a model whose layers were quantised here: the dtype of their weights before."""

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of router layers, or of modules around them, which stay unquantised.

Rounding errors in a router would change which experts are chosen.
"""

TRANSPOSED = "Conv1D"
"""Name of the class of linear layers with weight ``[in, out]``, as in GPT-2."""

NO_LAYERS = (
    "quantization='nf4': {} has no list of decoder layers with plain linear layers, so nothing "
    "would be quantised; leave it out"
)
"""Error text, with the class of the model."""


def has_4bit_layers(model: nn.Module) -> bool:
    """Return True if linear layers were quantised to 4 bits, here or by bitsandbytes."""
    return any(layer.recipe is not None for _, layer in packed_layers(model))


def has_4bit_experts(model: nn.Module) -> bool:
    """Return True if stacked experts are packed."""
    return next(packed_experts(model), None) is not None


def has_packed_layers(model: nn.Module) -> bool:
    """Return True if linear layers have packed weights.

    They are in 4 bits, or in another format that is dequantised for each product.
    """
    return next(packed_layers(model), None) is not None


def quantise_layers(
    model: Any,
    watch: Watch | None = None,
    form: BaseFormat | None = None,
    device: torch.device | None = None,
) -> int:
    """Quantise the linear layers and stacked experts of the decoder layers in place.

    The format is NF4 unless ``form`` says otherwise. Layers are quantised one after the other.

    Args:
        model: a causal language model without adapters on its experts.
        watch: called with each weight of a linear layer; also stored on the model.
        form: the layers to quantise instead, and their formats.
        device: where codes and scales are computed, before they go to the device of the weight; by
            default that device. The mean of nested scales has other bits on another device.

    Returns:
        The number of linear layers that were quantised.

    Raises:
        ValueError: no layer can be quantised and none is in 4 bits already, or experts have
            adapters.
    """
    layers = named_layers(model, form)
    experts = stacked_experts(model, form)
    _check_bare(experts)
    if form is None and not layers and not has_4bit_layers(model):
        raise ValueError(NO_LAYERS.format(type(model).__name__))
    for path, layer in layers.items():
        weight = layer.weight.detach()
        matrix = weight.t() if type(layer).__name__ == TRANSPOSED else weight
        kind = kind_of_layer(path, form)
        quantised = _quantised_on(device, kind, matrix).to(weight.dtype)
        if watch is not None:
            watch(path, matrix, quantised)
        setattr(model, QUANTISED_FROM, weight.dtype)
        model.set_submodule(path, quantised.layer(layer.bias).train(layer.training))
    if experts:
        quantise_experts(model, form, device)
    if layers and watch is not None:
        setattr(model, WATCHED, watch)
    report_quantised(model)
    return len(layers)


def _quantised_on(device: torch.device | None, kind: FourBits, matrix: Tensor) -> PackedWeight:
    """Return a matrix quantised on ``device``, and kept where the matrix is."""
    if device is None or matrix.is_meta:
        return kind.quantise(matrix)
    return kind.quantise(matrix.to(device)).moved(matrix.device)


def quantise_experts(
    model: Any, form: BaseFormat | None = None, device: torch.device | None = None
) -> int:
    """Quantise only the stacked experts of the decoder layers, in place, and freeze them.

    Args:
        model: a causal language model without adapters on its experts.
        form: the experts to quantise, and their formats; by default all, to NF4.
        device: as of ``quantise_layers``.

    Returns:
        The number of modules that were quantised.

    Raises:
        ValueError: there are no stacked experts, or they have adapters.
    """
    found = stacked_experts(model, form)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no stacked experts: nothing would be quantised"
        )
    _check_bare(found)
    for path, module in found.items():
        setattr(model, QUANTISED_FROM, next(module.parameters()).dtype)
        quantise = partial(_quantised_on, device, kind_of_layer(path, form))
        model.set_submodule(path, PackedExperts.of(module, quantise))
    return len(found)


def named_layers(model: Any, form: BaseFormat | None) -> dict[str, Any]:
    """Return the layers to quantise by path: those that ``form`` names, else the usual ones."""
    if form is None or form.layers is None:
        return dict(linear_layers(model))
    named = {path: module for path, module in model.named_modules() if path in form.layers}
    return {
        path: module
        for path, module in named.items()
        if type(module) is nn.Linear or type(module).__name__ == TRANSPOSED
    }


def kind_of_layer(path: str, form: BaseFormat | None) -> FourBits:
    """Return the format of a layer or of experts: what ``form`` says of the path, else NF4."""
    return (None if form is None else form.kind_of(path)) or FourBits()


def _check_bare(experts: Iterable[str]) -> None:
    """Raise ValueError if experts have adapters already.

    Adapters depend on the sizes of the module they wrap, which packing changes.
    """
    wrapped = next((path for path in experts if path.rpartition(".")[2] == "base_layer"), None)
    if wrapped is not None:
        raise ValueError(f"{wrapped}: has adapters; quantise experts before they are attached")


def stacked_experts(model: Any, form: BaseFormat | None = None) -> dict[str, nn.Module]:
    """Return the modules in decoder layers with stacked 16- or 32-bit experts, by path.

    With ``form`` only those that it quantises.
    """
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {
        path: module
        for path, module in model.named_modules()
        if id(module) in inside
        and can_be_packed(module)
        and (form is None or form.kind_of(path) is not None)
    }


def quantising_while_reading(
    watch: Watch | None = None, take: Take | None = None, form: BaseFormat | None = None
) -> Any:
    """Return a ``quantization_config`` with which ``from_pretrained`` quantises to NF4 as it reads.

    It quantises the linear layers and stacked experts of the decoder layers, and leaves no trace in
    the model's configuration.

    Args:
        watch: called with each weight of a linear layer.
        take: replaces each linear layer; nothing is quantised then.
        form: the layers to quantise instead, and their formats.
    """
    from chronicals.models.reading_quantiser import Configuration  # it imports quantisers

    return Configuration(watch, take, form)


def count_values(model: nn.Module) -> int:
    """Return the number of weights that a model's parameters represent.

    Packed weights count the weights behind the codes. Other uint8 parameters count two weights a
    byte. A parameter that is divided among ranks counts the parts of all ranks.
    """
    packed = set[int]()
    total = 0
    for _, module in packed_modules(model):
        packed |= {id(weight.codes) for weight in module.weights.values()}
        total += module.values
    for parameter in model.parameters():
        if id(parameter) not in packed:
            values = 2 if parameter.dtype == torch.uint8 else 1  # two 4-bit codes a byte
            total += parameter.numel() * getattr(parameter, SHARING_RANKS, 1) * values
    return total


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Return the plain linear layers that ``load_model`` quantises, by path."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {
        path: module
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and id(module) in inside
        and not any(part in ROUTERS for part in path.split("."))
    }


def report_quantised(model: Any) -> None:
    """Log what was quantised, and which experts were not."""
    modules = [module for _, module in packed_modules(model) if module.recipe is not None]
    layers = sum(1 for _, layer in packed_layers(model) if layer.recipe is not None)
    experts = len(modules) - layers
    values = sum(module.values for module in modules)
    size = sum(module.bytes for module in modules)
    words = f"{layers} linear layers" + (f" and the experts of {experts} layers" if experts else "")
    percent = 100 * values / count_values(model)
    logger.info(
        "quantization: %s in NF4, %.1f %% of the weights, in %.2f GiB",
        words,
        percent,
        size / 2**30,
    )
    left = set()
    for layer in decoder_layers(model):
        for module in layer.modules():
            own = [] if isinstance(module, _ConvNd) else module.parameters(recurse=False)
            if any(p.ndim == 3 and min(p.shape) > 1 for p in own):
                left.add(type(module).__name__)
    if left:
        logger.warning(
            "quantization: these experts stay in 16 bit, for they are no module of stacked "
            "weights and biases alone: %s",
            ", ".join(sorted(left)),
        )


__all__ = ["describe_packed", "packed_description"]


def describe_packed(model: Any) -> None:
    """Add ``quantization_config`` for packed layers, or remove it if no layer is packed.

    An existing one is kept while any layer is packed. Call this after layers were packed or
    unpacked, and before ``save_pretrained``.

    Raises:
        ValueError: layers or experts are in a format that transformers cannot store.
    """
    for path, module in packed_modules(model):
        reason = module.why_not_saved(path, type(model).__name__)
        if reason is not None:
            raise ValueError(
                f"{reason}; save its adapters, or what model.merge_and_unload() returns"
            )
    there = getattr(model.config, "quantization_config", None)
    layers = dict(packed_layers(model))
    if layers and there is None:
        first = next(iter(layers.values()))
        described = first.packed.quantization_config(model, layers.keys())
        if described is not None:
            model.config.quantization_config = described
        return
    stated = isinstance(there, dict) and format_of_files(there) is not None
    if stated and not layers and not has_foreign_layers(model):
        del model.config.quantization_config
        vars(model).pop("is_quantized", None)
