"""Report of the engine on itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from chronicals.moe.offload.engine import ExpertEngine


@dataclass(frozen=True)
class LayerReport:
    """Counts of the experts of a layer.

    Attributes:
        path: path of their module.
        hits, misses: chosen experts that were in slots, or on their way, and that were not.
        by_cpu: misses that the CPU computed.
        loads: records that were copied, of which ``prefetched`` before they were chosen.
        used: prefetched records that were then chosen.
        evictions: experts that gave up their slot.
        bytes: that were copied.
        fallback_mass: share of the routing weight that shared experts stood in for.
    """

    path: str
    hits: int
    misses: int
    by_cpu: int
    loads: int
    prefetched: int
    used: int
    evictions: int
    bytes: int
    fallback_mass: float


@dataclass(frozen=True)
class OffloadReport:
    """Counts of the engine since it was made.

    Attributes:
        mode: ``exact``, ``numerical`` or ``soft``.
        slots: slots on the device.
        slot_bytes: bytes of all slots.
        host_bytes: bytes of all records.
        pinned_bytes: bytes of them that are pinned.
        steps: passes over the first layer with experts.
        hit_rate: share of the chosen experts that were in slots; None before the first.
        precision: share of the prefetched records that were then chosen; None without any.
        recall: share of the experts that had to come and were prefetched; None without any.
        stall_ms, copy_ms: milliseconds that products waited, and that copies took; timed only
            where lines of events are written (``io``), copies in ``mode="numerical"``, too.
        fallback_mass: share of the routing weight that shared experts stood in for; 0 unless
            ``mode="soft"``.
        layers: the same of each layer.
    """

    mode: str
    slots: int
    slot_bytes: int
    host_bytes: int
    pinned_bytes: int
    steps: int
    hits: int
    misses: int
    bytes: int
    hit_rate: float | None
    precision: float | None
    recall: float | None
    stall_ms: float
    copy_ms: float
    fallback_mass: float
    layers: tuple[LayerReport, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rate = "none were chosen yet" if self.hit_rate is None else f"{self.hit_rate:.1%} in slots"
        lines = [
            f"experts: {self.slots} slots, {self.slot_bytes / 2**30:.2f} GiB; "
            f"{self.host_bytes / 2**30:.2f} GiB in host memory, of which "
            f"{self.pinned_bytes / 2**30:.2f} pinned",
            f"chosen: {self.hits + self.misses:,}, {rate}; {self.bytes / 2**30:.2f} GiB copied in "
            f"{self.steps:,} passes",
        ]
        if self.precision is not None and self.recall is not None:
            lines.append(
                f"prefetched: {self.precision:.1%} were chosen, {self.recall:.1%} of those that "
                "had to come"
            )
        if self.copy_ms:
            lines.append(
                f"copies took {self.copy_ms:,.0f} ms, of which products waited "
                f"{self.stall_ms:,.0f} ms"
            )
        if self.mode == "soft":
            lines.append(
                f"shared experts stood in for {self.fallback_mass:.2%} of the routing weight"
            )
        return "\n".join(lines)


def report_of(engine: ExpertEngine, mode: str) -> OffloadReport:
    """Return the report of an engine."""
    log = engine.log
    log.read_timings()
    layers = tuple(
        LayerReport(layer.path, **vars(counts), fallback_mass=log.fallback_mass(number))
        for number, (layer, counts) in enumerate(zip(engine.layers, log.layers))
    )
    hits = sum(layer.hits for layer in layers)
    misses = sum(layer.misses for layer in layers)
    prefetched = sum(layer.prefetched for layer in layers)
    used = sum(layer.used for layer in layers)
    came = used + misses
    return OffloadReport(
        mode=mode,
        slots=engine.slots,
        slot_bytes=engine.allocated_bytes,
        host_bytes=engine.slab.bytes,
        pinned_bytes=engine.slab.pinned,
        steps=log.steps,
        hits=hits,
        misses=misses,
        bytes=sum(layer.bytes for layer in layers),
        hit_rate=hits / (hits + misses) if hits + misses else None,
        precision=used / prefetched if prefetched else None,
        recall=used / came if prefetched and came else None,
        stall_ms=log.stall_ms,
        copy_ms=log.copy_ms,
        fallback_mass=log.fallback_mass(),
        layers=layers,
    )
