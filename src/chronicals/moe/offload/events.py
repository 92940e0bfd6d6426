"""Events of the engine: counts for its report, and lines for ``io.jsonl``.

A line is ``{t, kind, tier, layer, expert, bytes, us}``; ``kind`` is one of ``hit``, ``miss``,
``load``, ``evict``, ``prefetch``, ``stall`` and ``step``, ``tier`` where the expert was looked for
(``vram``) or read from (``ram``), ``t`` seconds since the epoch, ``us`` microseconds. The file is a
ring: it begins anew after ``RING_LINES`` lines.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from chronicals.moe.offload.eviction import Expert

IO_FILE = "io.jsonl"
"""Name of the file of lines in a run's folder."""

VRAM = "vram"
RAM = "ram"

RING_LINES = 200_000
"""Lines after which the file begins anew: about 20 MB."""

FLUSH_LINES = 256
"""Lines after which all are written to the file."""


class _Timed(NamedTuple):
    """A line whose microseconds are not known yet.

    Attributes:
        line: the line up to them.
        is_stall: products waited; else a copy was made.
        timing: tells the microseconds, or None.
    """

    line: str
    is_stall: bool
    timing: Callable[[], float | None]


@dataclass
class LayerCounts:
    """Counts of the experts of a layer.

    Attributes:
        hits, misses: chosen experts that were in slots, or on their way there, and that were not.
        by_cpu: misses that the CPU computed.
        loads: records that were copied into slots, of which ``prefetched`` before they were chosen.
        used: prefetched records that were then chosen while they were there.
        evictions: experts that gave up their slot.
        bytes: that were copied.
    """

    hits: int = 0
    misses: int = 0
    by_cpu: int = 0
    loads: int = 0
    prefetched: int = 0
    used: int = 0
    evictions: int = 0
    bytes: int = 0


@dataclass
class EventLog:
    """Counts of all layers, and the lines of a file.

    Attributes:
        layers: counts by layer.
        file: where lines are written; None for counts alone.
        steps: forward passes of the model.
        stall_ms: milliseconds that products waited for copies, as far as that was timed.
        copy_ms: milliseconds of copies, as far as they were timed.
        copied: copies that were timed.
        weights: of layers where experts may be stood in for: the sum of routing weights that fell
            back to shared experts, and of all, ``[2]`` on the device.
    """

    layers: list[LayerCounts]
    file: Path | None = None
    steps: int = 0
    stall_ms: float = 0.0
    copy_ms: float = 0.0
    copied: int = 0
    weights: dict[int, Tensor] = field(default_factory=dict)
    _out: IO[str] | None = field(default=None, init=False)
    _lines: list[str] = field(default_factory=list, init=False)
    _written: int = field(default=0, init=False)
    _timed: deque[_Timed] = field(default_factory=deque, init=False)

    def hit(self, experts: Collection[Expert]) -> None:
        """Note that chosen experts were in slots."""
        for layer, _ in experts:
            self.layers[layer].hits += 1
        self._lines_of("hit", VRAM, experts)

    def miss(self, experts: Collection[Expert]) -> None:
        """Note that chosen experts were in no slot."""
        for layer, _ in experts:
            self.layers[layer].misses += 1
        self._lines_of("miss", VRAM, experts)
        self._lines_of("hit", RAM, experts)

    def used(self, experts: Collection[Expert]) -> None:
        """Note that experts were chosen that had been prefetched."""
        for layer, _ in experts:
            self.layers[layer].used += 1

    def evict(self, experts: Collection[Expert]) -> None:
        """Note that experts gave up their slots."""
        for layer, _ in experts:
            self.layers[layer].evictions += 1
        self._lines_of("evict", VRAM, experts)

    def prefetch(self, experts: Collection[Expert]) -> None:
        """Note that copies were asked for that nothing waits for yet."""
        for layer, _ in experts:
            self.layers[layer].prefetched += 1
        self._lines_of("prefetch", RAM, experts)

    def load(
        self, layer: int, expert: int, size: int, timing: Callable[[], float | None] | None
    ) -> None:
        """Note a copy; ``timing`` tells its microseconds once it is done, and is None if untimed."""
        counts = self.layers[layer]
        counts.loads += 1
        counts.bytes += size
        if timing is not None:
            line = _line("load", RAM, layer, expert, size, _now())
            self._timed.append(_Timed(line, False, timing))

    def stall(self, layer: int, timing: Callable[[], float | None]) -> None:
        """Note that products waited; ``timing`` tells the microseconds."""
        if self.file is not None:
            line = _line("stall", VRAM, layer, "null", 0, _now())
            self._timed.append(_Timed(line, True, timing))

    def stand_in(self, layer: int, fell_back: Tensor | None, shares: Tensor) -> None:
        """Add the routing weights of a pass; the host does not wait for the device.

        Args:
            layer: number of the layer.
            fell_back: weights with which shared experts stood in; None for none.
            shares: weights of the experts that were there.
        """
        there = shares.double().sum()
        fallen = torch.zeros_like(there) if fell_back is None else fell_back.double().sum()
        both = torch.stack((fallen, fallen + there))
        before = self.weights.get(layer)
        self.weights[layer] = both if before is None else before + both

    def fallback_mass(self, layer: int | None = None) -> float:
        """Return the share of the routing weight that fell back, of a layer or of all; 0 for none."""
        sums = [both for number, both in self.weights.items() if layer in (None, number)]
        if not sums:
            return 0.0
        fallen, whole = torch.stack(sums).sum(0).tolist()
        return fallen / whole if whole else 0.0

    def step(self) -> None:
        """Note that a forward pass begins."""
        self.steps += 1
        if self.file is not None:
            self._write([_line("step", None, "null", "null", 0, _now()) + _UNTIMED])
        self._flush()

    def read_timings(self) -> float | None:
        """Write the lines of copies and waits that are done; the host does not wait.

        Returns:
            The mean seconds of the copies that were not timed before; None if there are none.
        """
        milliseconds, copies = self.copy_ms, self.copied
        lines = []
        while self._timed:
            line, is_stall, timing = self._timed[0]
            microseconds = timing()
            if microseconds is None:
                break
            self._timed.popleft()
            if is_stall:
                self.stall_ms += microseconds / 1e3
            else:
                self.copy_ms += microseconds / 1e3
                self.copied += 1
            lines.append(f"{line}{microseconds:.1f}}}")
        self._write(lines)
        fresh = self.copied - copies
        return (self.copy_ms - milliseconds) / 1e3 / fresh if fresh else None

    def close(self) -> None:
        """Write what is left, and close the file."""
        self.read_timings()
        self._flush()
        if self._out is not None:
            self._out.close()
            self._out = None
        self.file = None

    def _lines_of(self, kind: str, tier: str, experts: Collection[Expert]) -> None:
        if self.file is None:
            return
        now = _now()
        self._write(
            [_line(kind, tier, layer, expert, 0, now) + _UNTIMED for layer, expert in experts]
        )

    def _write(self, lines: list[str]) -> None:
        if self.file is None:
            return
        self._lines += lines
        if len(self._lines) >= FLUSH_LINES:
            self._flush()

    def _flush(self) -> None:
        if self.file is None or not self._lines:
            return
        if self._out is None or self._written >= RING_LINES:
            if self._out is not None:
                self._out.close()
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._out = self.file.open("w", encoding="utf-8")
            self._written = 0
        self._out.write("\n".join(self._lines) + "\n")
        self._out.flush()
        self._written += len(self._lines)
        self._lines = []


_UNTIMED = "0.0}"
"""End of a line of something that takes no time."""


def _now() -> str:
    return f"{time.time():.6f}"


def _line(
    kind: str, tier: str | None, layer: int | str, expert: int | str, size: int, now: str
) -> str:
    """Return a line of the file up to its microseconds; ``null`` stands for no layer or expert.

    It is written by hand: a pass of training over 128 experts of a layer has 400 lines, and json
    takes 6 µs for each.
    """
    of = "null" if tier is None else f'"{tier}"'
    return (
        f'{{"t":{now},"kind":"{kind}","tier":{of},"layer":{layer},"expert":{expert},'
        f'"bytes":{size},"us":'
    )
