"""Metrics of a step, copied back without waiting: they are read one step later."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step: a line of ``metrics.jsonl``.

    Attributes:
        step: number of the step, from 1.
        loss: mean over the step's targets.
        grad_norm: before clipping.
        learning_rate: of the first group.
        tokens: documents' tokens in the step; filler is not counted.
        targets: trained targets in the step.
        fill: share of positions that hold a document's token.
        tokens_per_second: ``tokens`` over the time since the step before.
        epoch: passes over the data so far.
        skipped: True if the gradient was not finite and nothing was changed.
        memory_gib: most device memory held so far; 0 without a card.
        others: further terms and metrics of the objective, by name.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    targets: int
    fill: float
    tokens_per_second: float
    epoch: float
    skipped: bool
    memory_gib: float
    others: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, float]:
        """Return all metrics by name.

        Raises:
            ValueError: the objective calls something by a name that a step's metrics have.
        """
        own = {name: value for name, value in vars(self).items() if name != "others"}
        taken = own.keys() & self.others
        if taken:
            raise ValueError(
                f"the objective calls something {', '.join(sorted(taken))}, as metrics of a step "
                "are; rename it"
            )
        return {**own, **self.others}


class DeviceMoment:
    """A point in the device's work: a CUDA event, or a host time for the CPU."""

    def __init__(self, device: torch.device):
        self.event = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))
        self.clock = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device reaches it."""
        if self.event is not None:
            self.event.synchronize()


class PendingMetrics:
    """Scalars of a step that are being copied from the device.

    Args:
        began: start of the step.
        passes: end of each of its micro-batches.
        shown: metrics that the host knew before, by name.

    Attributes:
        told: True if a rank wants all ranks to stop; known after ``arrive``.
    """

    def __init__(
        self,
        scalars: dict[str, Tensor],
        began: DeviceMoment,
        passes: Sequence[DeviceMoment] = (),
        shown: Mapping[str, float] | None = None,
        **known: float,
    ):
        self.names = list(scalars)
        self.known = known
        self.began = began
        self.passes = passes
        self.shown = shown or {}
        stacked = torch.stack([scalar.float() for scalar in scalars.values()])
        self.device = stacked.device
        on_card = self.device.type == "cuda"
        self.values = torch.empty_like(stacked, device="cpu", pin_memory=on_card)
        self.values.copy_(stacked, non_blocking=on_card)
        self.moment = DeviceMoment(self.device)
        self.told = False

    def arrive(self, passed: Callable[[], None]) -> StepMetrics:
        """Wait until the step is done.

        Args:
            passed: called whenever the device is done with a micro-batch.
        """
        memory = 0.0
        for moment in self.passes:
            moment.wait()
            passed()
        self.moment.wait()
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device) / 2**30
        ended = self.moment
        if ended.event is None or self.began.event is None:
            seconds = ended.clock - self.began.clock
        else:
            seconds = self.began.event.elapsed_time(ended.event) / 1000
        got = dict(zip(self.names, self.values.tolist()))
        self.told = got.pop("told", 0.0) > 0
        return StepMetrics(
            loss=got.pop("loss"),
            grad_norm=got.pop("grad_norm"),
            skipped=not got.pop("applied"),
            tokens_per_second=self.known["tokens"] / max(seconds, 1e-9),
            memory_gib=memory,
            others={**got, **self.shown},
            **self.known,  # type: ignore[arg-type]
        )
