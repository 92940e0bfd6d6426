"""Updates in the backward pass: each weight as soon as its gradient is there, which is then dropped.

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


class UpdatesInBackward:
    """Of ``parameters``, from ``begin`` to ``finish`` of every step, until the end of ``with``.

    A gradient that is not finite, and all that come after it in this step, change nothing.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: FusedAdamW):
        self.optimizer = optimizer
        self.inspect: Callable[[], None] | None = None
        self.squares = torch.zeros((), device=parameters[0].device)
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._update) for parameter in parameters]

    def begin(self, inspect: Callable[[], None] | None = None) -> None:
        """Before a backward pass; ``inspect`` is called while each gradient is there."""
        self.inspect = inspect
        self.squares.zero_()
        self.optimizer.refresh_rates()

    def _update(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.squares += gradient_norm([parameter.grad]).square()
        if self.inspect is not None:
            self.inspect()
        self.optimizer.step_of(parameter, apply=torch.isfinite(self.squares))
        parameter.grad = None

    def finish(self) -> dict[str, Tensor]:
        """``grad_norm`` of all gradients of the step, and whether all were ``applied``; scalars on the device."""
        grad_norm = self.squares.sqrt()
        return {"grad_norm": grad_norm, "applied": torch.isfinite(grad_norm)}

    def __enter__(self) -> UpdatesInBackward:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
