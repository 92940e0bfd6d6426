"""Residuals in fp32 between fused decoder layers, in decode steps of generation.

A training step and a step of generation round the same tensors, but their products add in other
orders. Where a sum lies near the middle between two numbers of 16 bits the two round apart, and
after some layers their roundings are independent: each one adds to the difference between the two
passes. Most of it comes from the residual, which is rounded twice a layer, and from the branches
that are added to it. From then on generation keeps both in fp32, and comes nearer to fp32 and to the
step:

    a step        x = round(x + round(branch))               all layers
    generation    x = round(x + round(branch))               the first ``ROUNDED_LAYERS``
                  x = x + branch, in fp32                    later ones

In the first layers roundings are the same in both passes but for few, and in fp32 the passes would
be further apart: there even the weights of attention are rounded alike (``kernels/paged_attention``).
Passes over prompts round as training does in all layers. ``benchmarks/roundings.py`` shows all that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from chronicals.memory import decoder_layers
from chronicals.patching.decoder_layer import Anatomy, fused_layers, halves_of
from chronicals.patching.halves import FusedHalf

RESIDUAL = torch.float32
"""Dtype of the residual between two layers that can take it."""

ROUNDED_LAYERS = 2
"""Layers that round the residual and their branches as training does.

By a model of the roundings of small layers with the gains of a 0.5B, generation differs from a step by
0.84 of what that differs from fp32; with 1, 4 or 8 layers by 0.89, 0.87 and 0.91, with none by 0.97,
and if all layers round by 0.98. The standard error is 0.02.
"""


def residual_dtypes(model: Any) -> dict[nn.Module, torch.dtype]:
    """Return the dtype of the residual that each layer hands on, of layers that can take fp32.

    The first, the last, and one before a layer that cannot, hand on the dtype of their products.

    Args:
        model: a causal language model within a pass of generation.
    """
    anatomies = dict(fused_layers(model))
    layers = decoder_layers(model)
    own = [_product_dtype(anatomies.get(layer), layer) for layer in layers]
    found = dict[nn.Module, torch.dtype]()
    for number, (layer, dtype, following) in enumerate(zip(layers, own, [*own[1:], None]), 1):
        if dtype is not None:
            rounds = number < ROUNDED_LAYERS or following is None
            found[layer] = dtype if rounds else RESIDUAL
    return found


def _product_dtype(anatomy: Anatomy | None, layer: nn.Module) -> torch.dtype | None:
    """Return the dtype of a layer's products if it can take a residual in fp32, else None.

    Both halves are fused, and begin with a norm, whose result has the dtype of the products.
    """
    if anatomy is None:
        return None
    dtypes = set[torch.dtype]()
    for half in halves_of(anatomy, layer, over_pages=True):
        if not isinstance(half, FusedHalf) or half.norms.before is None:
            return None
        dtypes.add(half.first.dtype)
    return dtypes.pop() if len(dtypes) == 1 else None
