"""The share of missing experts that the CPU computes, from its own memory.

Of m missing experts of few tokens, m_c are computed by the CPU while the others are copied. The share
is the one of which the longer of both takes the least time:

    max(m_c · t_cpu, (m − m_c) · t_bus)        t_cpu, t_bus: seconds of an expert, measured here

Activations travel instead of weights. The CPU's products sum in another order than those of the
device, so results differ by roundings: within 1e-5 in fp32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from chronicals.kernels.expert_glu import Gate
from chronicals.moe.offload.cpu_products import CpuProducts, TorchProducts
from chronicals.moe.offload.eviction import Expert

if TYPE_CHECKING:
    from chronicals.moe.offload.module import LayerSource

BUS_BYTES_A_SECOND = 25e9
"""Rate of the bus until a copy was timed: half of what a PCIe 5 bus carries."""

CPU_BYTES_A_SECOND = 10e9
"""Rate at which the CPU reads experts until it was timed: that of a few cores."""

MOST_TOKENS = 64
"""Tokens of a pass up to which the CPU computes: with more, its products take longer than copies."""

WEIGHT_OF_LAST = 0.2
"""Weight of the last measurement in the running means."""

MOST_OF_MEAN = 2.0
"""A measurement counts as this many times the mean at most.

The host may be held up for milliseconds, where an expert takes a fraction of one. Counted in full,
one such time would leave the CPU without experts, and so without further measurements.
"""

DIVISIONS_A_TRIAL = 256
"""Divisions that give the CPU or the bus nothing, of which one gives it an expert.

Otherwise its time would never be measured again. A CPU that takes 8 ms for an expert costs a layer
0.03 ms by this.
"""


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
    _computed: set[Expert] = field(default_factory=set)
    _calls: int = 0
    _one_sided: int = 0

    def __post_init__(self) -> None:
        self.bus_seconds = self.record_bytes / BUS_BYTES_A_SECOND
        self.cpu_seconds = self.record_bytes / CPU_BYTES_A_SECOND

    def of_missing(self, layer: int, missing: Sequence[int]) -> list[int]:
        """Return the missing experts of a layer that the CPU computes, in their order.

        Those that it computed when they were missing before are copied first: what tokens choose
        again and again gets a slot.
        """
        share = self._share(len(missing))
        before = [expert for expert in missing if (layer, expert) in self._computed]
        others = [expert for expert in missing if (layer, expert) not in self._computed]
        in_order = [*before, *others]
        copied = len(missing) - share
        self._computed.difference_update((layer, expert) for expert in in_order[:copied])
        self._computed.update((layer, expert) for expert in in_order[copied:])
        return sorted(in_order[copied:])

    def _share(self, count: int) -> int:
        """Return how many of the missing experts the CPU computes."""
        share = self._shortest(count)
        if count and share in (0, count):
            self._one_sided += 1
            if self._one_sided % DIVISIONS_A_TRIAL == 0:
                share = 1 if share == 0 else count - 1
        return share

    def _shortest(self, count: int) -> int:
        """Return of how many experts the CPU takes which share, so that both end soonest."""
        together = self.bus_seconds + self.cpu_seconds
        even = int(count * self.bus_seconds / together) if together else 0
        return min(
            range(even, min(even + 1, count) + 1),
            key=lambda share: max(share * self.cpu_seconds, (count - share) * self.bus_seconds),
        )

    def copy_took(self, seconds: float) -> None:
        """Note the seconds of a copy."""
        self.bus_seconds = _mean_with(self.bus_seconds, seconds)

    @contextmanager
    def computing(self, experts: int) -> Iterator[None]:
        """A context around the CPU's products of some experts, which times them.

        The first call is not counted: threads start in it, and products are prepared.
        """
        began = time.perf_counter()
        yield
        seconds = (time.perf_counter() - began) / experts
        self._calls += 1
        if self._calls > 1:
            self.cpu_seconds = _mean_with(self.cpu_seconds, seconds)


def _mean_with(mean: float, last: float) -> float:
    """Return a running mean with the last measurement."""
    return mean + WEIGHT_OF_LAST * (min(last, MOST_OF_MEAN * mean) - mean)


class HostShare:
    """Experts of a layer that the CPU computes; ``HostExperts`` of ``kernels/streamed_experts.py``.

    Args:
        source: the layer's experts.
        experts: their numbers, in their order.
    """

    def __init__(self, source: LayerSource, experts: Sequence[int]):
        self.source = source
        self.experts = list(experts)

    def outputs(self, x: Tensor, counts: Sequence[int], gate: Gate) -> Tensor:
        """Return the outputs of rows that are sorted by expert."""
        cpu = self.source.engine.cpu
        assert cpu is not None
        with cpu.computing(len(self.experts)):
            return cpu.products.outputs(self.source, self.experts, x, counts, gate)
