"""Gradients that are used during the backward pass: weights are updated, or gradients summed.

``UpdatesInBackward`` applies gradients in groups and then drops them. Gradients never exist all at
once (Lv et al., 2023, section 3.1). Their norm is therefore known too late to clip by it, and they
cannot be accumulated over micro-batches or ranks: a step has one micro-batch. The updated weights
are bit-identical to those of a separate update, except for the random numbers that round bf16
states.

``ScatteredStep`` reduce-scatters gradients (Rajbhandari et al., 2020, section 5.2). A bucket of
64 MiB is sent and freed as soon as all its weights have gradients. Communication overlaps with
computation, and gradients never exist all at once. Every micro-batch is sent separately.

All ranks must send the buckets in one order. It is the order in which a backward pass usually
completes them, last weights first. A bucket whose gradients are incomplete is sent at the end of
the pass and delays those behind it. So after the first step, buckets with a weight that lacked a
gradient on some rank are moved to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from chronicals.batch import Batch
from chronicals.distributed.shards import Bucket, Shards
from chronicals.models import PresentedModel
from chronicals.objectives import Count, Objective
from chronicals.optimizers import FusedAdamW
from chronicals.training.step.optimizer import Precision
from chronicals.training.step.training_step import EagerStep, micro_step

HELD = 1 << 26
"""Bytes of gradients after which their weights are updated, in one launch.

Launching for each small weight would take the host longer than the GPU.
"""


class UpdatesInBackward(EagerStep, AbstractContextManager["UpdatesInBackward"]):
    """The parts of a step whose ``micro`` updates the weights, until the end of ``with``.

    If a gradient is not finite, it and all that follow in this step change nothing.

    Args:
        parameters: the trained parameters; all their states are created at once, so that a step can
            be captured.
        norm: returns the norm of some gradients.

    Attributes:
        inspect: called with each group of gradients before they are used.
    """

    def __init__(
        self,
        model: PresentedModel,
        objective: Objective,
        parameters: list[Tensor],
        optimizer: FusedAdamW,
        precision: Precision,
        norm: Callable[[Sequence[Tensor]], Tensor],
    ):
        super().__init__(model, objective, parameters, optimizer, precision, None, norm)
        self.squares = torch.zeros((), device=parameters[0].device)
        self.waiting: list[Tensor] = []
        self.held = 0
        self._rehearses = False
        for parameter in parameters:
            optimizer.state_of(parameter)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._collect) for parameter in parameters
        ]

    def begin(self, hold: Callable[[], None], micro_batches: int = 1) -> None:
        """Wait until weights may change, since ``micro`` changes them."""
        hold()

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        """Run forward and backward of the step's only micro-batch, which updates the weights."""
        self.waiting.clear()
        self.held = 0
        self.squares.zero_()
        self.optimizer.refresh_rates()
        moved = batch.to(self.precision.device, non_blocking=True)
        scalars = micro_step(self.model, self.objective, moved, counts, self.precision)
        if self.waiting:
            self._update()
        return scalars

    def _collect(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.waiting.append(parameter)
        self.held += parameter.grad.nbytes
        if self.held >= HELD:
            self._update()

    def _update(self) -> None:
        gradients = [parameter.grad for parameter in self.waiting if parameter.grad is not None]
        self.squares += self.norm(gradients).square()
        if self.inspect is not None:
            self.inspect()
        if not self._rehearses:
            self.optimizer.step_of(self.waiting, apply=torch.isfinite(self.squares))
        for parameter in self.waiting:
            parameter.grad = None
        self.waiting.clear()
        self.held = 0

    def update(self, holders: Tensor | None) -> dict[str, Tensor]:
        """Return the norm of all gradients and whether all were applied.

        Weights are updated already.
        """
        grad_norm = self.squares.sqrt()
        return {"grad_norm": grad_norm, "applied": torch.isfinite(grad_norm)}

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Return a context in which ``micro`` drops the gradients without applying them."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self.waiting.clear()
        self.held = 0


class ScatteredStep(EagerStep, AbstractContextManager["ScatteredStep"]):
    """``EagerStep`` whose gradients are being reduced when ``micro`` returns; a context manager.

    Args:
        given: arguments of ``EagerStep``.
        shards: shards of the optimizer.
    """

    def __init__(self, *given: Any, shards: Shards):
        super().__init__(*given)
        self.shards = shards
        self.held = set[Tensor]()
        self._settled = False
        self._put_in_order(shards.buckets[::-1])
        self._missing: list[int] = []
        self._next = 0
        self._adds = False
        self._sends = False
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._arrived) for weight in self._place
        ]

    def _put_in_order(self, buckets: list[Bucket]) -> None:
        self._order = buckets
        self._place = {
            weight: place for place, bucket in enumerate(buckets) for weight in bucket.weights
        }

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        """Run forward and backward of a micro-batch, which sends its gradients bucket by bucket."""
        self._missing = [len(bucket.weights) for bucket in self._order]
        self._next = 0
        self._adds = not first
        self._sends = True
        if first:
            self.held.clear()
        try:
            scalars = super().micro(batch, counts, first)
        finally:
            self._sends = False
        while self._next < len(self._order):
            self._send()
        return scalars

    def reduce(self, parameters: Sequence[Tensor], scalars: Sequence[Tensor]) -> Tensor:
        """Finish the sums like ``Shards.reduce``, for gradients that were sent already.

        Only the first step waits for the device.
        """
        holders = self.shards.finish(parameters, scalars, self.held)
        if not self._settled:
            everywhere = {
                p
                for p, ranks in zip(parameters, holders.tolist())
                if ranks == self.shards.ranks.count
            }
            self._put_in_order(
                sorted(self._order, key=lambda bucket: not everywhere.issuperset(bucket.weights))
            )
            self._settled = True
        return holders

    def _arrived(self, weight: Tensor) -> None:
        if not self._sends:  # a backward pass outside of `micro`, such as a user's
            return
        place = self._place[weight]
        if place < self._next:
            raise RuntimeError(
                "a gradient was added to after it was summed over the processes: leave out "
                "memory=['reduce_in_backward'], or "
                "set sharding='none' where it is not set"
            )
        self.held.add(weight)
        self._missing[place] -= 1
        while self._next < len(self._order) and not self._missing[self._next]:
            self._send()

    def _send(self) -> None:
        bucket = self._order[self._next]
        self._next += 1
        self.shards.scatter(bucket, self._adds)
        for weight in bucket.weights:
            weight.grad = None

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
