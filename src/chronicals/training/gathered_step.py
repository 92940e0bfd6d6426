"""Micro-steps over weights that are divided among processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from chronicals.batch import Batch
from chronicals.distributed import gathers_of
from chronicals.objectives import Count
from chronicals.training.step import EagerStep


class GatheredStep(EagerStep):
    """``EagerStep`` that sums gradients over copies of the weights only after the last micro-batch.

    The copies are those of several machines.
    """

    _left = 0

    def begin(self, hold: Callable[[], None], micro_batches: int = 1) -> None:
        self._left = micro_batches

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        self._left -= 1
        # FSDP all-reduces the sums among the copies after this backward pass, or not yet.
        self.model.model.set_requires_all_reduce(self._left == 0)
        return super().micro(batch, counts, first)


class FrozenGatheredStep(EagerStep):
    """``EagerStep`` over frozen weights that are gathered layer by layer.

    Every micro-step gathers the same weights in the same order, including all that it reads.
    """

    def __init__(self, *given: Any):
        super().__init__(*given)
        gathers = gathers_of(self.model.model)
        assert gathers is not None
        self.gathers = gathers

    def begin(self, hold: Callable[[], None], micro_batches: int = 1) -> None:
        self.gathers.forget()

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        with self.gathers.passing():
            return super().micro(batch, counts, first)
