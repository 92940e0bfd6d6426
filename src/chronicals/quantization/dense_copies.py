"""Dense copies of packed weights, for as long as a model multiplies by them again and again.

Answers are generated in hundreds of steps, between which no weight changes. A weight that is
dequantised in each of them is read and written 4.5 bytes a value where a dense one is read 2.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from chronicals.log_once import log_once
from chronicals.quantization.packed import PackedWeight
from chronicals.quantization.packed_linear import PackedLinear

logger = logging.getLogger(__name__)


class PackedProduct(ABC):
    """A product of one input with one packed weight or several, which may hold their dense values.

    Attributes:
        weights: the weights.
    """

    weights: list[PackedWeight]

    @property
    def copy_bytes(self) -> int:
        """Bytes of the dense values."""
        outputs = sum(weight.shape[0] for weight in self.weights)
        first = self.weights[0]
        return int(outputs * first.shape[1] * first.dtype.itemsize)

    def gains(self, rows: int) -> bool:
        """Return whether the product of so many rows is faster with a dense copy."""
        first = self.weights[0]
        one = first.codes.new_empty((1, 1), dtype=first.dtype)
        return any(
            weight.is_faster_dense(one.expand(rows, weight.shape[1])) for weight in self.weights
        )

    @abstractmethod
    def hold_copy(self) -> None:
        """Dequantise the weights, and multiply by their values from here on."""

    @abstractmethod
    def drop_copy(self) -> None:
        """Free the dense values, and multiply by the codes again."""


class LayerProduct(PackedProduct):
    """The product of a packed linear layer that is called as a module."""

    def __init__(self, layer: PackedLinear):
        self.layer = layer
        self.weights = [layer.packed]

    def hold_copy(self) -> None:
        """Give the layer a copy."""
        self.layer.dense_copy = self.layer.packed.dense()

    def drop_copy(self) -> None:
        """Take it from the layer."""
        del self.layer.dense_copy


@contextmanager
def dense_copies(products: Sequence[PackedProduct], rows: int, memory: int) -> Iterator[None]:
    """Context manager in which products with packed weights hold dense values, as far as they fit.

    Those that are as fast for so many rows without get none. How many weights have a copy is logged
    once. The weights are the same, in products of few rows sums may be in another order.

    Args:
        products: the products; nothing may change their weights meanwhile.
        rows: rows of the products.
        memory: bytes that the copies may take.
    """
    gaining = [product for product in products if product.gains(rows)]
    copied = list[PackedProduct]()
    taken = 0
    try:
        for product in gaining:
            if taken + product.copy_bytes <= memory:
                product.hold_copy()
                copied.append(product)
                taken += product.copy_bytes
        if gaining:
            _say_how_many(_weights(copied), _weights(gaining), taken)
        yield
    finally:
        for product in copied:
            product.drop_copy()


def _weights(products: Sequence[PackedProduct]) -> int:
    return sum(len(product.weights) for product in products)


def _say_how_many(copied: int, weights: int, taken: int) -> None:
    """Log how many weights have a copy, once for each number of them."""
    if copied:
        log_once(
            logger.info,
            f"{copied} of {weights} packed weights have a dense copy while answers are generated "
            f"({taken / 2**30:.2f} GiB)",
        )
    else:
        log_once(
            logger.info,
            "no memory is spare for dense copies, with which answers would be faster: "
            f"{weights} packed weights are dequantised in each step",
        )
