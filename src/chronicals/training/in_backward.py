"""Updates in the backward pass: weights as soon as some gradients are there, which are then dropped.

Gradients never exist all at once (Lv et al., 2023, section 3.1), so their norm is known only when it is too late to clip by
it, and they cannot be added up over micro-batches. Weights are otherwise those of an update afterwards, bit by bit, but for
the random numbers by which states in bf16 are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from chronicals.kernels.gradient_norm import gradient_norm
from chronicals.optimizers import FusedAdamW

HELD = 1 << 26
"""Bytes of gradients that are there when their weights are updated, by one launch: a small weight by itself would take the host
longer than the card."""


class UpdatesInBackward:
    """Of ``parameters``, from ``begin`` to ``end`` of every step, until the end of ``with``.

    Gradients of which one is not finite, and all that come after them in this step, change nothing.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: FusedAdamW):
        self.optimizer = optimizer
        self.inspect: Callable[[], None] | None = None
        self.squares = torch.zeros((), device=parameters[0].device)
        self.waiting: list[Tensor] = []
        self.held = 0
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._collect) for parameter in parameters]

    def begin(self, inspect: Callable[[], None] | None = None) -> None:
        """Before a backward pass; ``inspect`` is called while gradients are there, for each of them once."""
        self.inspect = inspect
        self._forget()
        self.squares.zero_()
        self.optimizer.refresh_rates()

    def _collect(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.waiting.append(parameter)
        self.held += parameter.grad.nbytes
        if self.held >= HELD:
            self._update()

    def _update(self) -> None:
        gradients = [parameter.grad for parameter in self.waiting if parameter.grad is not None]
        self.squares += gradient_norm(gradients).square()
        if self.inspect is not None:
            self.inspect()
        self.optimizer.step_of(self.waiting, apply=torch.isfinite(self.squares))
        for parameter in self.waiting:
            parameter.grad = None
        self._forget()

    def _forget(self) -> None:
        self.waiting.clear()
        self.held = 0

    def end(self) -> None:
        """After a backward pass."""
        if self.waiting:
            self._update()

    def scalars(self) -> dict[str, Tensor]:
        """``grad_norm`` of all gradients of the step, and whether all were ``applied``, on the device."""
        grad_norm = self.squares.sqrt()
        return {"grad_norm": grad_norm, "applied": torch.isfinite(grad_norm)}

    def __enter__(self) -> UpdatesInBackward:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._forget()
