"""Updates in the backward pass: weights as soon as some gradients are there, which are then
dropped.

Gradients never exist all at once (Lv et al., 2023, section 3.1), so their norm is known only when
it is too late to clip by it, and they cannot be added up over micro-batches or ranks: a step has
one micro-batch. Weights are otherwise those of an update afterwards, bit by bit, but for the random
numbers by which states in bf16 are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from chronicals.batch import Batch
from chronicals.models import PresentedModel
from chronicals.objectives import Count, Objective
from chronicals.optimizers import FusedAdamW
from chronicals.training.precision import Precision
from chronicals.training.step import micro_step

HELD = 1 << 26
"""Bytes of gradients that are there when their weights are updated, by one launch: a small
weight by itself would take the host longer than the card."""


class UpdatesInBackward:
    """The parts of a step whose weights are updated by ``micro``, until the end of ``with``.

    If a gradient is not finite, it and all that come after it in this step change nothing.

    Args:
        parameters: those that are trained; the states of all of them are made at once, so that a
            step can be captured.
        norm: of some gradients.

    Attributes:
        inspect: called whenever some gradients are there, before they are used; each is seen once.
    """

    inspect: Callable[[], None] | None = None

    def __init__(
        self,
        model: PresentedModel,
        objective: Objective,
        parameters: list[Tensor],
        optimizer: FusedAdamW,
        precision: Precision,
        norm: Callable[[Sequence[Tensor]], Tensor],
    ):
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.precision = precision
        self.norm = norm
        self.squares = torch.zeros((), device=parameters[0].device)
        self.waiting: list[Tensor] = []
        self.held = 0
        for parameter in parameters:
            optimizer.state_of(parameter)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._collect) for parameter in parameters
        ]

    def begin(self, hold: Callable[[], None], micro_batches: int = 1) -> None:
        hold()

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        self._forget()
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
        self.optimizer.step_of(self.waiting, apply=torch.isfinite(self.squares))
        for parameter in self.waiting:
            parameter.grad = None
        self._forget()

    def _forget(self) -> None:
        self.waiting.clear()
        self.held = 0

    def update(self, holders: Tensor | None) -> dict[str, Tensor]:
        """Weights are updated already: the norm of all gradients, and whether all were applied."""
        grad_norm = self.squares.sqrt()
        return {"grad_norm": grad_norm, "applied": torch.isfinite(grad_norm)}

    def __enter__(self) -> UpdatesInBackward:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._forget()
