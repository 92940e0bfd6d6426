"""bitsandbytes layers of an existing model, as transformers creates them from
``BitsAndBytesConfig``.

``shared`` wraps such a layer, ``bitsandbytes.nn.Linear4bit``, as one of our layers over the same
codes, scales and bias.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from chronicals.kernels.nf4 import BLOCK_SIZES, CODE_VALUES, Scales
from chronicals.quantization.bitsandbytes_format import DTYPES
from chronicals.quantization.nf4 import FourBits, Linear4bit, Packed
from chronicals.quantization.packed_linear import packed_weight

logger = logging.getLogger(__name__)

_LAYERS = {f"bitsandbytes.nn.modules.{name}" for name in ("Linear4bit", "LinearNF4", "LinearFP4")}

_SHARED = "_chronicals_shared"
"""Attribute of a bitsandbytes layer that holds our layer over the same memory."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_of_bitsandbytes(layer: Any) -> bool:
    """Return whether ``layer`` is a bitsandbytes linear layer with a 4-bit weight."""
    return f"{type(layer).__module__}.{type(layer).__qualname__}" in _LAYERS


def has_foreign_layers(model: nn.Module) -> bool:
    """Return whether ``model`` has bitsandbytes linear layers in 4 bits."""
    return any(is_of_bitsandbytes(layer) for layer in model.modules())


def recipe_of(layer: Any) -> FourBits | None:
    """Return how the weight of a linear layer was quantised, for our layers and bitsandbytes'.

    It is None if the weight is not quantised, and for every other module.

    Raises:
        ValueError: as for ``weight_of_layer``.
    """
    if is_of_bitsandbytes(layer):
        weight = weight_of_layer(layer)
        return FourBits.of(weight, layer.compute_dtype or weight.dtype)
    packed = packed_weight(layer)
    return None if packed is None else packed.recipe


def as_ours(layer: Any) -> Any:
    """Return ``shared(layer)`` for a bitsandbytes layer, and any other layer unchanged.

    Raises:
        ValueError: as for ``shared``.
    """
    return shared(layer) if is_of_bitsandbytes(layer) else layer


class _Shared(NamedTuple):
    """Our layer, and the tensors it was made from."""

    ours: Linear4bit
    state: Any
    places: tuple[int | None, ...]


def shared(layer: Any) -> Linear4bit:
    """Return ``layer`` as one of our layers, with the same memory and hooks.

    The same object is returned as long as the layer keeps its weight. It multiplies in the layer's
    ``bnb_4bit_compute_dtype`` if that has 16 bits. Otherwise it uses the dtype that the weight had
    before quantisation, which is logged once.

    Raises:
        ValueError: as for ``weight_of_layer``; or the layer has its own forward, or trains a bias
            in another dtype.
    """
    if "forward" in vars(layer):
        raise ValueError("has another forward than its class")
    known: _Shared | None = vars(layer).get(_SHARED)
    if (
        known is not None
        and known.state is layer.weight.quant_state
        and known.places == _places(layer)
    ):
        return known.ours
    packed = weight_of_layer(layer)
    dtype = packed.dtype if layer.compute_dtype in (None, torch.float32) else layer.compute_dtype
    ours = Linear4bit(packed.to(dtype)).train(layer.training)
    ours.bias = _bias_in(layer, dtype)
    vars(ours).update({hooks: vars(layer)[hooks] for hooks in HOOKS})
    if layer.compute_dtype not in (None, dtype):
        _say_dtype(layer.compute_dtype, dtype)
    vars(layer)[_SHARED] = _Shared(ours, layer.weight.quant_state, _places(layer))
    return ours


def _places(layer: Any) -> tuple[int | None, ...]:
    """Return the addresses of a layer's tensors; a moved, replaced or cast one has another."""
    state = layer.weight.quant_state
    bias = layer.bias
    return (
        layer.weight.data_ptr(),
        state.absmax.data_ptr(),
        None if bias is None else id(bias),
        getattr(bias, "_version", None),
    )


def _bias_in(layer: Any, dtype: torch.dtype) -> nn.Parameter | None:
    """Return the layer's bias, or a copy in ``dtype`` if its dtype differs.

    bitsandbytes casts it in the same way in its forward pass.
    """
    if layer.bias is None or layer.bias.dtype == dtype:
        return layer.bias  # type: ignore[no-any-return]
    if layer.bias.requires_grad:
        raise ValueError(f"trains a bias in {layer.bias.dtype}, its products are in {dtype}")
    return nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)


@cache
def _say_dtype(asked: torch.dtype, dtype: torch.dtype) -> None:
    logger.warning(
        "bnb_4bit_compute_dtype=%s: fused layers multiply in %s, which the weights were quantized "
        "from; layers that are not "
        "fused do as it says",
        asked,
        dtype,
    )


def weight_of_layer(layer: Any) -> Packed:
    """Return the weight of a ``bitsandbytes.nn.Linear4bit``, sharing its memory.

    Raises:
        ValueError: the weight is not quantised yet, or is in a form without stored tensors; the
            message continues a sentence after the layer's name.
    """
    if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
        layer.state_dict()  # which puts the codes, laid out for this CPU by a call in evaluation mode, back in order
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        raise ValueError(
            "has 4-bit weights that are not quantized yet; move the model to its device first"
        )
    if (
        state.quant_type not in CODE_VALUES
        or state.blocksize not in BLOCK_SIZES
        or state.dtype not in DTYPES.values()
    ):
        raise ValueError(
            f"has weights in {state.quant_type}, of {state.dtype}, in blocks of {state.blocksize}"
        )
    scales = Scales(state.absmax)
    nested = state.state2
    (rows, columns) = state.shape
    if nested is not None:
        scales = Scales(state.absmax, nested.absmax, nested.code, state.offset, nested.blocksize)
    codes = layer.weight.data.view(torch.uint8).view(-1)
    return Packed(
        codes, scales, (rows, columns), state.dtype, state.blocksize, state.quant_type, state.dtype
    )
