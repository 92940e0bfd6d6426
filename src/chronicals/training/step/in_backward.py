"""Weight updates during the backward pass: gradients are applied in groups and then dropped.

Gradients never exist all at once (Lv et al., 2023, section 3.1). Their norm is therefore known too
late to clip by it, and they cannot be accumulated over micro-batches or ranks: a step has one
micro-batch. The updated weights are bit-identical to those of a separate update, except for the
random numbers that round bf16 states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from chronicals.batch import Batch
from chronicals.models import PresentedModel
from chronicals.objectives import Count, Objective
from chronicals.optimizers import FusedAdamW
from chronicals.training.step.precision import Precision
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

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self.waiting.clear()
        self.held = 0
