"""AdamW (Loshchilov and Hutter, 2019, algorithm 2) with an exact master for bf16 weights.

    m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
    w ← w − lr · λ · w − lr · (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + ε)

States are fp32, or bf16 with stochastic rounding. A bf16 weight is the upper half of its fp32
master, the lower half is a state (see ``kernels/master.py``), so small updates are not lost;
without a master, the weight is rounded stochastically, too. The learning rate, the clipping factor
and whether to apply the step are tensors on the device: there is no host synchronisation, a step
can be captured in a CUDA graph, and one with ``apply`` False changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.adamw import Tensors, fused_adamw_, looked_up
from chronicals.kernels.adamw_8bit import QuantizedTensors, adamw_8bit_, looked_up_in_8_bits
from chronicals.kernels.master import split_master
from chronicals.optimizers.host_states import HostStates


class FusedAdamW(torch.optim.Optimizer):
    """AdamW that trains bf16 weights as fp32 weights: exactly with a master, in the mean without.

    Args:
        params: tensors or groups; a group may set ``lr`` and ``weight_decay``.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        state_dtype: of both moments, fp32 or bf16.
        master: whether bf16 matrices have an fp32 master; bf16 vectors always have one, for they
            need little memory.
        host: keeps states of large weights in host memory; read them by ``state_of`` then, not by
            ``state``.

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
        state_dtype: torch.dtype = torch.float32,
        master: bool = True,
        host: HostStates | None = None,
    ):
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype={state_dtype}: expected torch.float32 or torch.bfloat16")
        if lr < 0 or eps <= 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: out of range"
            )
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.state_dtype = state_dtype
        self.master = master
        self.host = host
        self._rates: dict[tuple[int, torch.device], Tensor] = {}
        self._versions: dict[Tensor, tuple[int, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        self._wait()
        self.settle()
        return {
            **super().__getstate__(),
            "state_dtype": self.state_dtype,
            "master": self.master,
            "host": self.host,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rates = {}
        self._versions = {
            parameter: _stamp(parameter) for parameter, own in self.state.items() if "low" in own
        }
        if (
            state.get("host") is not None
        ):  # a copy, whose states were copied to memory that is not pinned
            for parameter, own in self.state.items():
                moved = {
                    name: self._filled(parameter, x, 0).copy_(x)
                    for name, x in own.items()
                    if name != "step"
                }
                own |= moved

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        factor: Tensor | None = None,
        apply: Tensor | None = None,
        used: Mapping[Tensor, Tensor] | None = None,
    ) -> float | None:
        """One update from ``p.grad``.

        Args:
            factor: scalar tensor by which every gradient is multiplied (clipping, loss scale).
            apply: scalar bool tensor; if False, no weight and no state changes.
            used: scalar bool tensor for each weight; if False, this weight and its states do not
                change.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.refresh_rates()
        self._update(
            [parameter for group in self.param_groups for parameter in group["params"]],
            factor,
            apply,
            used,
        )
        return loss

    @torch.no_grad()
    def step_of(self, parameters: Sequence[Tensor], apply: Tensor | None = None) -> None:
        """Update these weights only. Call ``refresh_rates`` once before the parts of a step.

        Raises:
            ValueError: a weight is in no group.
        """
        held = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        for parameter in parameters:
            if id(parameter) not in held:
                raise ValueError(
                    f"a weight {tuple(parameter.shape)} is in no group of the optimizer"
                )
        self._update(parameters, None, apply)

    def _update(
        self,
        parameters: Sequence[Tensor],
        factor: Tensor | None,
        apply: Tensor | None,
        used: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        everywhere = apply
        launches = self._launches(parameters)
        with nullcontext() if self.host is None else self.host.updating():
            for number, group, tensors in launches:
                if used is not None:
                    own = torch.stack([used[weight] for weight in tensors.weights])
                    apply = own if everywhere is None else own & everywhere
                rate = self._rates.get((number, tensors.weights[0].device), group["lr"])
                options = rate, group["betas"], group["eps"], group["weight_decay"], factor, apply
                if self.host is not None:
                    self.host.update(tensors, *options)
                elif isinstance(tensors, QuantizedTensors):
                    adamw_8bit_(tensors, *options)
                else:
                    fused_adamw_(tensors, *options)
                if tensors.lows:
                    self._versions |= {weight: _stamp(weight) for weight in tensors.weights}

    def _launches(self, parameters: Sequence[Tensor]) -> list[tuple[int, dict[str, Any], Tensors]]:
        """The kernel launches for the parameters that have a gradient: number of the group, the
        group, the tensors.
        """
        wanted = {id(parameter) for parameter in parameters}
        found = []
        for number, group in enumerate(self.param_groups):
            own = [parameter for parameter in group["params"] if id(parameter) in wanted]
            found += [(number, group, tensors) for tensors in self._by_type(own).values()]
        return found

    def refresh_rates(self) -> None:
        """Copy every group's ``lr`` to the scalar on the device that updates read. Call it
        before a captured step is replayed."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        for number, group in enumerate(self.param_groups):
            for device in {p.device for p in group["params"] if p.is_cuda}:
                rate = torch.tensor(group["lr"], dtype=torch.float32).pin_memory()
                held = self._rates.setdefault((number, device), torch.empty((), device=device))
                held.copy_(rate, non_blocking=True)

    @torch.no_grad()
    def looked_up(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The tables that an update of these parameters reads, built now; a captured update
        needs them.
        """
        found: list[Tensor] = []
        launched = [tensors for _, _, tensors in self._launches(parameters)]
        if self.host is not None:
            with self.host.updating():
                launched = [part for tensors in launched for part in self.host.parts_of(tensors)]
        for tensors in launched:
            if tensors.weights[0].is_cuda:
                found += (
                    looked_up_in_8_bits(tensors)
                    if isinstance(tensors, QuantizedTensors)
                    else looked_up(tensors)
                )
        return found

    def state_dict(self) -> dict[str, Any]:
        self._wait()
        self.settle()
        return super().state_dict()

    def settle(self) -> None:
        """Reset the lower half of a master to zero where other code wrote the weight. A replayed
        step does not check for that."""
        for parameter in self._versions:
            self._own(parameter)

    def _wait(self) -> None:
        """Until states in host memory are there."""
        if self.host is not None:
            self.host.wait()

    def weights_moved(self) -> None:
        """Call this after weights moved to another storage with the same values: the lower
        halves of masters stay valid.
        """
        self._versions = {parameter: _stamp(parameter) for parameter in self._versions}

    def _by_type(self, parameters: list[Tensor]) -> dict[tuple[object, ...], Tensors]:
        """Those that have a gradient, by device, the dtypes of weight, gradient and moments, and
        whether there is a master.
        """
        found: dict[tuple[object, ...], Tensors] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self._own(parameter)
            dtype = state["exp_avg"].dtype
            key = parameter.device, parameter.dtype, parameter.grad.dtype, dtype, "low" in state
            tensors = found.setdefault(
                key, QuantizedTensors() if dtype == torch.uint8 else Tensors()
            )
            tensors.weights.append(parameter)
            tensors.gradients.append(parameter.grad)
            tensors.means.append(state["exp_avg"])
            tensors.squares.append(state["exp_avg_sq"])
            tensors.steps.append(state["step"])
            if "low" in state:
                tensors.lows.append(state["low"])
            if isinstance(tensors, QuantizedTensors):
                tensors.mean_scales.append(state["exp_avg_amax"])
                tensors.square_scales.append(state["exp_avg_sq_amax"])
        return found

    @property
    def weights(self) -> list[Tensor]:
        """All that are trained."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def empty_states(self, parameter: Tensor) -> dict[str, Tensor]:
        """Tensors like the states of a weight, where the weight is, for ``load_state``."""
        return {
            name: torch.empty_like(state, device=parameter.device)
            for name, state in self.state_of(parameter).items()
        }

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The states of a weight, created at first use: ``step``, the moments, and ``low`` of a
        master.

        Those in host memory may be read and written there until the next update; for that, this
        waits for the last one.
        """
        if self.state[parameter]:
            self._wait()
        return self._own(parameter)

    def _own(self, parameter: Tensor) -> dict[str, Tensor]:
        """The same, where the last update may not have ended."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= self._new_moments(parameter)
            if parameter.dtype == torch.bfloat16 and (self.master or parameter.ndim < 2):
                state["low"] = self._filled(parameter, parameter, 0, torch.int16)
                self._versions[parameter] = _stamp(parameter)
        elif "low" in state and self._versions[parameter] != _stamp(
            parameter
        ):  # other code wrote the weight
            self._wait()
            state["low"].zero_()
            self._versions[parameter] = _stamp(parameter)
        return state

    def _new_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """``exp_avg`` and ``exp_avg_sq`` of a weight that was never updated."""
        return {
            name: self._filled(parameter, parameter, 0, self.state_dtype)
            for name in ("exp_avg", "exp_avg_sq")
        }

    def _filled(
        self, parameter: Tensor, like: Tensor, value: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A dense tensor of one value, shaped as ``like``, where states of a weight are kept."""
        if self.host is not None and self.host.takes(parameter):
            return self.host.full(like.shape, value, dtype or like.dtype, parameter.device)
        return torch.full_like(
            like, value, dtype=dtype, device=parameter.device, memory_format=torch.contiguous_format
        )

    @torch.no_grad()
    def set_master(self, parameter: Tensor, value: Tensor) -> None:
        """Set a weight to an fp32 value: exactly if it has a master, else rounded to its dtype."""
        state = self.state_of(parameter)
        if "low" not in state:
            parameter.copy_(value)
            return
        high, low = split_master(value)
        parameter.copy_(high)
        state["low"].copy_(low)
        self._versions[parameter] = _stamp(parameter)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which however would cast every state, the lower halves too, to the dtype
        of its weight, on its device.
        """
        held = self.state
        super().load_state_dict({**state_dict, "state": {}})
        given = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(given, own):
            if number in state_dict["state"]:
                if (
                    self.host is not None and parameter in held
                ):  # host memory is given back with the optimizer alone
                    self.state[parameter] = held[parameter]
                    self._versions[parameter] = _stamp(parameter)
                self.load_state(parameter, state_dict["state"][number])

    @torch.no_grad()
    def load_state(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Restore the states that ``state_of`` returned; the weight must already have the value it
        had then.

        Raises:
            ValueError: a state is missing, has another shape, or is of a code where it is a number
                here.
        """
        own = self.state_of(parameter)
        for name, tensor in own.items():
            if (
                name in state
                and torch.uint8 in (kinds := {state[name].dtype, tensor.dtype})
                and len(kinds) > 1
            ):
                found = (
                    f"optimizer state {name!r} of a weight {tuple(parameter.shape)} is "
                    f"{state[name].dtype}"
                )
                raise ValueError(
                    f"{found}, here {tensor.dtype}: one optimizer has states in 8 bits, the other "
                    "has not"
                )
            if name not in state or state[name].shape != tensor.shape:
                raise ValueError(
                    f"optimizer state {name!r} of a weight {tuple(parameter.shape)} is missing or "
                    "misshapen"
                )
            tensor.copy_(state[name])
        if "low" in own:
            self._versions[parameter] = _stamp(parameter)


def _stamp(parameter: Tensor) -> tuple[int, int]:
    """Changes when a weight is written in place, or gets another storage."""
    return parameter._version, parameter.data_ptr()
