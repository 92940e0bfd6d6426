"""AdamW (Loshchilov and Hutter, 2019, algorithm 2) with an exact master for bf16 weights.

    m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
    w ← w − lr · λ · w − lr · (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + ε)

States are fp32. A bf16 weight is the upper half of its fp32 master, the lower half is a state (see ``master.py``), so
that small updates are not lost. Clipping and the decision whether the step counts at all are tensors on the device:
nothing waits for the host, and a step with ``apply`` at zero changes nothing, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from chronicals.optimizers.master import join_master, split_master


class FusedAdamW(torch.optim.Optimizer):
    """AdamW whose bf16 weights train as fp32 weights do.

    Args:
        params: tensors or groups; a group may set ``lr`` and ``weight_decay``.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        if lr < 0 or eps <= 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: out of range")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._versions: dict[Tensor, tuple[int, int]] = {}

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, factor: Tensor | None = None, apply: Tensor | None = None
    ) -> float | None:
        """One update from ``p.grad``.

        Args:
            factor: scalar tensor every gradient is multiplied by (clipping, loss scale).
            apply: scalar bool tensor; where False the weights and states stay as they are.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, factor, apply)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], factor: Tensor | None, apply: Tensor | None) -> None:
        assert parameter.grad is not None
        state = self.state_of(parameter)
        gradient = parameter.grad.float() if factor is None else parameter.grad.float() * factor
        beta1, beta2 = group["betas"]
        master = self._master(parameter, state)
        old = (master, state["exp_avg"], state["exp_avg_sq"])
        step = state["step"] + 1
        mean = old[1] * beta1 + gradient * (1 - beta1)
        square = old[2] * beta2 + gradient.square() * (1 - beta2)
        # In fp64: 1 - 0.999 in fp32 is wrong in its fifth digit, and every update would be.
        correction1, correction2 = ((1 - beta ** step.double()).float() for beta in (beta1, beta2))
        root = (square / correction2).sqrt_().add_(group["eps"])
        updated = master * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * (mean / correction1) / root
        new: tuple[Tensor, ...] = (updated, mean, square, step)
        if apply is not None:
            new = tuple(torch.where(apply, a, b) for a, b in zip(new, (*old, state["step"])))
        self._store(parameter, state, new[0])
        state["exp_avg"].copy_(new[1])
        state["exp_avg_sq"].copy_(new[2])
        state["step"].copy_(new[3])

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The states of a weight, made at its first use: ``step``, ``exp_avg``, ``exp_avg_sq``, and ``low`` for bf16."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype == torch.bfloat16:
                state["low"] = torch.zeros_like(parameter, dtype=torch.int16)
                self._versions[parameter] = _stamp(parameter)
        return state

    @torch.no_grad()
    def set_master(self, parameter: Tensor, value: Tensor) -> None:
        """Give a weight its fp32 value: exactly, also where the weight is bf16."""
        self._store(parameter, self.state_of(parameter), value)

    def _master(self, parameter: Tensor, state: dict[str, Tensor]) -> Tensor:
        if parameter.dtype != torch.bfloat16:
            return parameter.float()
        if self._versions.get(parameter) != _stamp(parameter):  # somebody else wrote the weight
            state["low"].zero_()
        return join_master(parameter, state["low"])

    def _store(self, parameter: Tensor, state: dict[str, Tensor], value: Tensor) -> None:
        if parameter.dtype != torch.bfloat16:
            parameter.copy_(value)
            return
        high, low = split_master(value)
        parameter.copy_(high)
        state["low"].copy_(low)
        self._versions[parameter] = _stamp(parameter)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would cast every state, the lower halves too, to the type of its weight."""
        super().load_state_dict(state_dict)
        given = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(given, own):
            if number in state_dict["state"]:
                self.state[parameter] = {}
                self.load_state(parameter, state_dict["state"][number])

    @torch.no_grad()
    def load_state(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Put back what ``state_of`` held; the weight itself must already be what it was then.

        Raises:
            ValueError: a state is missing or has another shape.
        """
        own = self.state_of(parameter)
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape:
                raise ValueError(f"optimizer state {name!r} of a weight {tuple(parameter.shape)} is missing or misshapen")
            tensor.copy_(state[name])
        if "low" in own:
            self._versions[parameter] = _stamp(parameter)


def _stamp(parameter: Tensor) -> tuple[int, int]:
    """What changes when somebody writes a weight in place, or gives it other data."""
    return parameter._version, parameter.data_ptr()
