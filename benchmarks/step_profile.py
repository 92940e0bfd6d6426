"""Seconds of one step of a long document by part, from a trace of what the card did.

Parts are kernels by kind, attention's passes apart, and copies to and from host memory. Copies run
beside kernels: what they cost is the time in which a copy runs and no kernel does. The rest of the
step is time in which the card does nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chronicals.benchmark.measurement import category_of

ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a Chrome trace that the card runs."""

HOST_COPIES = {"DtoH": "copies to the host", "HtoD": "copies from the host"}
"""Parts of copies, by what their names hold."""

BACKWARD = re.compile(r"bwd|backward|bprop|dot_do_o|convert_dq|_dq|_dk", re.IGNORECASE)
"""Names of kernels of attention's backward pass."""

LISTED = 30
"""Kernels that are listed, those that take longest."""


def part_of(name: str) -> str:
    """Return the part of a step that a kernel or a copy belongs to, by its name."""
    for direction, part in HOST_COPIES.items():
        if name.startswith("Memcpy") and direction in name:
            return part
    category = category_of(name)
    if category == "attention":
        return "attention, backward" if BACKWARD.search(name) else "attention, forward"
    return category


def profile_of(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the seconds of a step by part.

    Args:
        events: of a Chrome trace of the step, times in microseconds.

    Returns:
        ``seconds`` from the first to the last event of the card; ``parts``: seconds by part, which
        overlap where copies and kernels do; ``waiting_for_copies``: seconds in which a copy to or
        from the host runs and no kernel; ``idle``: seconds in which neither does; ``kernels``: those
        that take longest, with their calls and seconds. Empty without events of a card.
    """
    on_card = [event for event in events if event.get("cat") in ON_CARD]
    if not on_card:
        return {}
    parts: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    times: Counter[str] = Counter()
    kernels = []
    everything = []
    for event in on_card:
        span = (event["ts"], event["ts"] + event["dur"])
        part = part_of(event["name"])
        parts[part] += event["dur"]
        calls[event["name"]] += 1
        times[event["name"]] += event["dur"]
        everything.append(span)
        if part not in HOST_COPIES.values():
            kernels.append(span)
    first = min(begin for begin, _ in everything)
    last = max(end for _, end in everything)
    busy = covered(everything)
    longest = times.most_common(LISTED)
    return {
        "seconds": (last - first) / 1e6,
        "parts": {name: time / 1e6 for name, time in parts.most_common()},
        "waiting_for_copies": (busy - covered(kernels)) / 1e6,
        "idle": (last - first - busy) / 1e6,
        "kernels": [
            {"name": name[:160], "calls": calls[name], "seconds": time / 1e6}
            for name, time in longest
        ],
    }


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans, each a beginning and an end."""
    length = 0.0
    reached = float("-inf")
    for begin, end in sorted(spans):
        length += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return length


def words_of_profile(profile: Mapping[str, Any]) -> str:
    """Return a profile in a line."""
    if not profile:
        return "no events of a card"
    parts = [f"{name} {seconds:.2f}" for name, seconds in profile["parts"].items()]
    parts.append(f"of it copies that nothing hides {profile['waiting_for_copies']:.2f}")
    parts.append(f"nothing runs {profile['idle']:.2f}")
    return f"{profile['seconds']:.2f} s: {', '.join(parts)}"
