"""The share of missing experts that the CPU computes, from its own memory.

Of m missing experts of few tokens, m_c are computed by the CPU while the others are copied, so that
both end together:

    m_c · t_cpu ≈ (m − m_c) · t_bus        t_cpu, t_bus: seconds of an expert, measured here

Activations travel instead of weights. The CPU's products sum in another order than those of the
device, so results differ by roundings: within 1e-5 in fp32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from chronicals.moe.offload.cpu_products import CpuProducts, TorchProducts

BUS_BYTES_A_SECOND = 25e9
"""Rate of the bus until a copy was timed: half of what a PCIe 5 bus carries."""

CPU_BYTES_A_SECOND = 10e9
"""Rate at which the CPU reads experts until it was timed: that of a few cores."""

MOST_TOKENS = 64
"""Tokens of a pass up to which the CPU computes: with more, its products take longer than copies."""

WEIGHT_OF_LAST = 0.2
"""Weight of the last measurement in the running means."""


@dataclass
class CpuShare:
    """Running means of the seconds of an expert.

    Attributes:
        record_bytes: bytes of a record.
        products: what the CPU computes by.
        bus_seconds, cpu_seconds: mean seconds of a copy, and of the CPU's products of an expert.
    """

    record_bytes: int
    products: CpuProducts = field(default_factory=TorchProducts)
    bus_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.bus_seconds = self.record_bytes / BUS_BYTES_A_SECOND
        self.cpu_seconds = self.record_bytes / CPU_BYTES_A_SECOND

    def of_missing(self, missing: Sequence[int]) -> list[int]:
        """Return the missing experts that the CPU computes: the last of them."""
        together = self.bus_seconds + self.cpu_seconds
        share = round(len(missing) * self.bus_seconds / together) if together else 0
        return list(missing[len(missing) - share :])

    def copy_took(self, seconds: float) -> None:
        """Note the seconds of a copy."""
        self.bus_seconds += WEIGHT_OF_LAST * (seconds - self.bus_seconds)

    @contextmanager
    def computing(self, experts: int) -> Iterator[None]:
        """A context around the CPU's products of some experts, which times them."""
        began = time.perf_counter()
        yield
        seconds = (time.perf_counter() - began) / experts
        self.cpu_seconds += WEIGHT_OF_LAST * (seconds - self.cpu_seconds)
