"""Dense copies of packed weights, for as long as a model multiplies by them again and again.

Answers are generated in hundreds of steps, between which no weight changes. A weight that is
dequantised in each of them is read and written 4.5 bytes a value where a dense one is read 2.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from torch import nn

from chronicals.quantization.packed_linear import PackedLinear, packed_layers

logger = logging.getLogger(__name__)


@contextmanager
def dense_copies(model: nn.Module, rows: int, memory: int) -> Iterator[None]:
    """Context manager in which packed linear layers hold their dense values, as far as they fit.

    Layers that multiply so many rows as fast without one get none. How many layers have a copy is
    logged once. The weights are the same, in products of few rows sums may be in another order.

    Args:
        model: the model; nothing may change its weights meanwhile.
        rows: rows of the products.
        memory: bytes that the copies may take.
    """
    layers = [layer for _, layer in packed_layers(model) if _gains(layer, rows)]
    copied = list[PackedLinear]()
    taken = 0
    try:
        for layer in layers:
            needed = layer.out_features * layer.in_features * layer.dtype.itemsize
            if taken + needed <= memory:
                layer.dense_copy = layer.packed.dense()
                copied.append(layer)
                taken += needed
        if layers:
            _say_how_many(len(copied), len(layers), taken)
        yield
    finally:
        for layer in copied:
            del layer.dense_copy


def _gains(layer: PackedLinear, rows: int) -> bool:
    """Return whether a layer's products of so many rows are faster with a dense copy."""
    packed = layer.packed
    one = packed.codes.new_empty((1, 1), dtype=layer.dtype)
    return packed.is_faster_dense(one.expand(rows, layer.in_features))


@cache
def _say_how_many(copied: int, layers: int, taken: int) -> None:
    """Log once, by the cache, how many layers have a copy."""
    if copied:
        logger.info(
            "%d of %d packed layers have a dense copy while answers are generated (%.2f GiB)",
            copied,
            layers,
            taken / 2**30,
        )
    else:
        logger.info(
            "no memory is spare for dense copies, with which answers would be faster: %d packed "
            "layers are dequantised in each step",
            layers,
        )
