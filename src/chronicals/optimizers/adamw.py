"""AdamW (Loshchilov and Hutter, 2019, algorithm 2) with an exact master for bf16 weights.

    m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
    w ← w − lr · λ · w − lr · (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + ε)

States are fp32, or bf16 with stochastic rounding. A bf16 weight is the upper half of its fp32
master and the lower half is a state (see ``kernels/adamw.py``), so small updates are not lost.
Without a master the weight is rounded stochastically. The learning rate, the clipping factor and
whether to apply the step are tensors on the device, so the host never waits, a CUDA graph can
capture a step, and a step with ``apply`` False changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels.adamw import Tensors, fused_adamw_, split_master
from chronicals.kernels.adamw_8bit import (
    MOMENT_BLOCK,
    QuantizedTensors,
    adamw_8bit_,
    quantize_moment,
)
from chronicals.optimizers.host_states import HostStates

MIN_8BIT_ELEMENTS = 4096
"""Weights with fewer elements keep fp32 moments."""


# The caching allocator serves up to 1 MiB from blocks of 2 MiB, which it keeps once they are free
# (kSmallSize in c10/core/AllocatorConfig.h); a launch takes 12 bytes for each weight.
LAUNCH_ROOM = 1 << 20
"""Bytes of the largest small allocation, whose block then has room for the launches' tensors."""


class FusedAdamW(torch.optim.Optimizer):
    """AdamW that updates bf16 weights like fp32 ones: exactly with a master, on average without.

    Args:
        params: tensors or groups; a group may set ``lr`` and ``weight_decay``.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        state_dtype: dtype of both moments, fp32 or bf16.
        master: whether bf16 matrices have an fp32 master; bf16 vectors always have one, since they
            need little memory.
        host: keeps the states of large weights in host memory. Then read them by ``state_of``, not
            by ``state``.

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
        self._updated: set[int] = set()

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
        self._updated = set()
        self._versions = {
            parameter: _stamp(parameter)
            for parameter, states in self.state.items()
            if "low" in states
        }
        if state.get("host") is not None:
            # A deep copy has its states in ordinary memory; move them to pinned memory.
            for parameter, states in self.state.items():
                moved = {
                    name: self._filled(parameter, x, 0).copy_(x)
                    for name, x in states.items()
                    if name != "step"
                }
                states |= moved

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        factor: Tensor | None = None,
        apply: Tensor | None = None,
        used: Mapping[Tensor, Tensor] | None = None,
        resume: bool = False,
    ) -> float | None:
        """Update all weights from their ``grad``.

        Args:
            closure: computes the loss, as in torch.
            factor: scalar tensor by which every gradient is multiplied (clipping, loss scale).
            apply: scalar bool tensor; if False, no weight and no state changes.
            used: scalar bool tensor for each weight; if False, this weight and its states do not
                change.
            resume: go on with an update of the same gradients that an error ended (``is_begun``):
                weights that it has updated stay as they are.

        Returns:
            The loss of ``closure``, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.refresh_rates()
        # Not ``self.weights``: those of a divided optimizer are whole, its groups hold shares.
        members = [parameter for group in self.param_groups for parameter in group["params"]]
        self.step_of(members, apply, factor=factor, used=used, resume=resume)
        return loss

    @torch.no_grad()
    def step_of(
        self,
        parameters: Sequence[Tensor],
        apply: Tensor | None = None,
        *,
        factor: Tensor | None = None,
        used: Mapping[Tensor, Tensor] | None = None,
        resume: bool = False,
    ) -> None:
        """Update only these weights; the other arguments are those of ``step``.

        Call ``refresh_rates`` once before the parts of a step.

        Raises:
            ValueError: a weight is in no group.
        """
        known = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        for parameter in parameters:
            if id(parameter) not in known:
                raise ValueError(
                    f"a weight {tuple(parameter.shape)} is in no group of the optimizer"
                )
        if not resume:
            self._updated.clear()
        everywhere = apply
        launches = self._launches([p for p in parameters if id(p) not in self._updated])
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        with nullcontext() if self.host is None else self.host.updating():
            for number, group, tensors in launches:
                if used is not None:
                    flags = torch.stack([used[weight] for weight in tensors.weights])
                    apply = flags if everywhere is None else flags & everywhere
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
                if not captured:  # what is captured has not run yet
                    self._updated |= {id(weight) for weight in tensors.weights}
        self._updated.clear()

    @property
    def is_begun(self) -> bool:
        """True if an error ended an update between two launches, so that some weights are updated."""
        return bool(self._updated)

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate on the card what an update of the present gradients needs.

        An update that follows finds its tables, and room for the small tensors of a launch, so it
        does not run out of memory between two launches.
        """
        members = [parameter for group in self.param_groups for parameter in group["params"]]
        self.looked_up(members)
        for device in {parameter.device for parameter in members if parameter.is_cuda}:
            torch.empty(LAUNCH_ROOM, dtype=torch.uint8, device=device)

    def _launches(self, parameters: Sequence[Tensor]) -> list[tuple[int, dict[str, Any], Tensors]]:
        """Return the launches for the parameters that have a gradient.

        Each is the number of a group, the group, and the tensors of one launch: those of one
        device and the same dtypes of weight, gradient and moments, with or without a master.
        """
        wanted = {id(parameter) for parameter in parameters}
        launches: dict[tuple[object, ...], tuple[int, dict[str, Any], Tensors]] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in wanted or parameter.grad is None:
                    continue
                state = self._states(parameter)
                moments = state["exp_avg"].dtype
                dtypes = parameter.dtype, parameter.grad.dtype, moments
                key = number, parameter.device, dtypes, "low" in state
                if key not in launches:
                    made = QuantizedTensors() if moments == torch.uint8 else Tensors()
                    launches[key] = number, group, made
                tensors = launches[key][2]
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
        return list(launches.values())

    def refresh_rates(self) -> None:
        """Copy every group's ``lr`` to the device scalar that updates read.

        Call this before a captured step is replayed. During a capture it does nothing.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        for number, group in enumerate(self.param_groups):
            for device in {p.device for p in group["params"] if p.is_cuda}:
                rate = torch.tensor(group["lr"], dtype=torch.float32).pin_memory()
                scalar = self._rates.setdefault((number, device), torch.empty((), device=device))
                scalar.copy_(rate, non_blocking=True)

    @torch.no_grad()
    def looked_up(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Build and return the tables that an update of these parameters reads.

        Call this before an update is captured in a CUDA graph, and keep the result with the graph.
        """
        tables: list[Tensor] = []
        launched = [tensors for _, _, tensors in self._launches(parameters)]
        if self.host is not None:
            with self.host.updating():
                launched = [part for tensors in launched for part in self.host.parts_of(tensors)]
        for tensors in launched:
            if tensors.weights[0].is_cuda:
                for table in tensors.tables():
                    tables += table.on_device
        return tables

    def state_dict(self) -> dict[str, Any]:
        """Return all states, after the copies of the last update to host memory have ended."""
        self._wait()
        self.settle()
        return super().state_dict()

    def settle(self) -> None:
        """Reset the lower half of each master whose weight other code has written.

        Eager updates do this themselves; a replayed CUDA graph does not check.
        """
        for parameter in self._versions:
            self._states(parameter)

    def _wait(self) -> None:
        """Wait until copies of states to host memory have ended."""
        if self.host is not None:
            self.host.wait()

    def weights_moved(self) -> None:
        """Keep the lower halves of masters after weights moved to another storage.

        Call this after such a move; the values must be the same.
        """
        self._versions = {parameter: _stamp(parameter) for parameter in self._versions}

    @property
    def weights(self) -> list[Tensor]:
        """All weights of all groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def empty_states(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return empty tensors like the states of a weight, on the weight's device.

        They can be filled and passed to ``load_state``.
        """
        return {
            name: torch.empty_like(state, device=parameter.device)
            for name, state in self.state_of(parameter).items()
        }

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the states of a weight, created at first use.

        They are ``step``, the moments, and ``low`` if the weight has a master. Waits for the last
        update, so that states in host memory can be read and written until the next one.
        """
        if self.state[parameter]:
            self._wait()
        return self._states(parameter)

    def _states(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the states of a weight without waiting for the last update."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= self._new_moments(parameter)
            if parameter.dtype == torch.bfloat16 and (self.master or parameter.ndim < 2):
                state["low"] = self._filled(parameter, parameter, 0, torch.int16)
                self._versions[parameter] = _stamp(parameter)
        elif "low" in state and self._versions[parameter] != _stamp(parameter):
            # Other code wrote the weight, so the lower half does not belong to it any more.
            self._wait()
            state["low"].zero_()
            self._versions[parameter] = _stamp(parameter)
        return state

    def _new_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return initial ``exp_avg`` and ``exp_avg_sq`` of a weight."""
        return {
            name: self._filled(parameter, parameter, 0, self.state_dtype)
            for name in ("exp_avg", "exp_avg_sq")
        }

    def _filled(
        self, parameter: Tensor, like: Tensor, value: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a dense tensor of one value, shaped like ``like``, for the states of a weight.

        It is on the weight's device, or in host memory.
        """
        if self.host is not None and self.host.takes(parameter):
            return self.host.full(like.shape, value, dtype or like.dtype, parameter.device)
        return torch.full_like(
            like, value, dtype=dtype, device=parameter.device, memory_format=torch.contiguous_format
        )

    @torch.no_grad()
    def set_master(self, parameter: Tensor, value: Tensor) -> None:
        """Set a weight to an fp32 value, exactly if it has a master, else rounded to its dtype."""
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
        """Load what ``state_dict`` returned, with every state in its own dtype and memory.

        torch's own method would cast all states, lower halves too, to the dtype of their weight.
        """
        before = self.state
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, self.weights):
            if number in state_dict["state"]:
                # Pinned memory is freed only with the optimizer, so existing states are reused.
                if self.host is not None and parameter in before:
                    self.state[parameter] = before[parameter]
                    self._versions[parameter] = _stamp(parameter)
                self.load_state(parameter, state_dict["state"][number])

    @torch.no_grad()
    def load_state(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Restore states that ``state_of`` returned. Set the weight to its value of then first.

        Raises:
            ValueError: a state is missing, has another shape, or only one of the two is in 8 bits.
        """
        states = self.state_of(parameter)
        for name, tensor in states.items():
            dtypes = {state[name].dtype, tensor.dtype} if name in state else set()
            if len(dtypes) > 1 and torch.uint8 in dtypes:
                raise ValueError(
                    f"optimizer state {name!r} of a weight {tuple(parameter.shape)} is "
                    f"{state[name].dtype}, here {tensor.dtype}: one optimizer has states in 8 "
                    "bits, the other has not"
                )
            if name not in state or state[name].shape != tensor.shape:
                raise ValueError(
                    f"optimizer state {name!r} of a weight {tuple(parameter.shape)} is missing or "
                    "misshapen"
                )
            tensor.copy_(state[name])
        if "low" in states:
            self._versions[parameter] = _stamp(parameter)


class Adam8bit(FusedAdamW):
    """``FusedAdamW`` whose moments are in 8 bits (Dettmers et al., 2022): 2.03 bytes a weight, not 8.

    Vectors and small matrices keep fp32 moments. ``"full_moments"`` in a group decides for all its
    weights whether their moments are in fp32. Those of embeddings should be, since their gradients
    differ most between rows (ibid., section 2.3).
    """

    def _new_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return initial moments: uint8 codes of zero with fp32 scales, or fp32 moments."""
        group = next(
            group
            for group in self.param_groups
            if any(parameter is member for member in group["params"])
        )
        is_large = parameter.ndim >= 2 and parameter.numel() >= MIN_8BIT_ELEMENTS
        if group.get("full_moments", not is_large):
            return super()._new_moments(parameter)
        states: dict[str, Tensor] = {}
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            codes, _ = quantize_moment(torch.zeros(1), signed)
            scales = torch.empty(-(-parameter.numel() // MOMENT_BLOCK), device="meta")
            states[name] = self._filled(parameter, parameter, int(codes), torch.uint8)
            states[f"{name}_amax"] = self._filled(parameter, scales, 0)
        return states


def keep_full_moments(model: nn.Module, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split each group in two: weights with 8-bit moments, and weights with fp32 moments.

    ``Adam8bit`` keeps fp32 moments of the embeddings and small weights of ``model``.
    """
    narrow = {id(p) for p in moments_in_8_bits(model)}
    halves = []
    for group in groups:
        for full in (False, True):
            halves.append(
                {
                    **group,
                    "params": [p for p in group["params"] if (id(p) not in narrow) == full],
                    "full_moments": full,
                }
            )
    return [group for group in halves if group["params"]]


def moments_in_8_bits(model: nn.Module) -> list[Tensor]:
    """Return the trained weights of ``model`` that have 8-bit moments by ``keep_full_moments``."""
    # Embeddings, with tied heads, adapters of embeddings and trained tokens.
    tables = {
        id(p)
        for name, p in model.named_parameters()
        if "lora_embedding" in name or "lora_tokens" in name
    }
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            tables |= {id(p) for p in module.parameters(recurse=False)}
    return [
        p
        for p in model.parameters()
        if p.requires_grad
        and p.ndim >= 2
        and p.numel() >= MIN_8BIT_ELEMENTS
        and id(p) not in tables
    ]


def moment_bytes(model: nn.Module, weights: Iterable[Tensor]) -> int:
    """Return the bytes of both moments of some trained weights of ``model``, scales included.

    Their groups must be from ``keep_full_moments``.
    """
    narrow = {id(p) for p in moments_in_8_bits(model)}
    return sum(
        2 * (p.numel() + 4 * -(-p.numel() // MOMENT_BLOCK)) if id(p) in narrow else 8 * p.numel()
        for p in weights
    )


def _stamp(parameter: Tensor) -> tuple[int, int]:
    """Return a value that changes when a weight is written in place or gets another storage."""
    return parameter._version, parameter.data_ptr()
