"""Predictions of the experts that a layer will want, for copies before they are chosen.

A predictor may be wrong at any time: then copies were made in vain, and no result changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class Predictor(ABC):
    """Says which experts the next layer will choose."""

    def __init__(self) -> None:
        self._last: dict[int, list[int]] = {}

    def ask(self, layer: int, x: Tensor) -> Tensor | None:
        """Return expert ids of layer ``layer + 1`` on the device, or None if it needs no device.

        They are read together with the rows of this layer's experts.

        Args:
            layer: number of the layer among those with experts.
            x: ``[T, D]``, the input of its experts.
        """
        return None

    def expect(self, layer: int, chosen: Sequence[int], told: Sequence[int]) -> list[int]:
        """Return the experts that layer ``layer + 1`` is expected to choose, the likeliest first.

        Args:
            layer: number of the layer.
            chosen: the experts that it chose now.
            told: the ids that ``ask`` returned.
        """
        self._last[layer] = list(chosen)
        return self.expected(layer + 1, told)

    def last(self, layer: int) -> list[int]:
        """Return the experts that a layer chose last, for a backward pass."""
        return self._last.get(layer, [])

    def close(self) -> None:  # noqa: B027  most predictors change nothing
        """Undo what it changed of a model; called when the engine closes."""

    @abstractmethod
    def expected(self, layer: int, told: Sequence[int]) -> list[int]:
        """Return the experts that a layer is expected to choose."""


class Repeating(Predictor):
    """Expects of each layer what it chose the last time."""

    def expected(self, layer: int, told: Sequence[int]) -> list[int]:
        """Return the experts of the last pass."""
        return self.last(layer)
