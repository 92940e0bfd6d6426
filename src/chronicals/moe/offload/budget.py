"""Budgets of memory for experts: on the device and on the host."""

from __future__ import annotations

import re

from chronicals.moe.offload.engine import ExpertEngine

UNITS = {
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
"""Bytes of a unit."""


def bytes_of(value: int | str, name: str) -> int:
    """Return a size in bytes: an int is that, a text has a unit (``16GiB``, ``24GB``).

    Raises:
        ValueError: it is no size above 0.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*", str(value), re.IGNORECASE)
    size = 0
    if match is not None and match[2].upper() in UNITS:
        size = int(float(match[1]) * UNITS[match[2].upper()])
    if size <= 0:
        raise ValueError(f"{name}={value!r}: is no size; give one as '16GiB' or '24GB'")
    return size


def size_words(size: int) -> str:
    """Return a size as a text that is not smaller than it and that ``bytes_of`` reads."""
    for unit in ("GiB", "MiB", "KiB"):
        of_unit = UNITS[unit.upper()]
        if size >= of_unit:
            hundredths = -(-size * 100 // of_unit)
            return f"{hundredths / 100:.2f}{unit}"
    return f"{size}B"


def slots_within(engine: ExpertEngine, size: int, name: str) -> int:
    """Return the number of slots in so many bytes.

    Args:
        engine: the engine.
        size: bytes on the device.
        name: how the budget is asked for, with its value.

    Raises:
        ValueError: they are too few for the experts of a token and two more.
    """
    slots = size // engine.slot_bytes
    if slots < engine.least_slots:
        least = size_words(engine.least_slots * engine.slot_bytes)
        raise ValueError(
            f"{name}: holds {slots} experts of {engine.slot_bytes / 2**20:,.2f} MiB, and the "
            f"{engine.least_slots - 2} experts of a token and two more are needed; the least that "
            f"works is {least}"
        )
    return slots


def check_host(engine_bytes: int, size: int, name: str) -> None:
    """Check that host memory holds all records.

    Args:
        engine_bytes: bytes of the records.
        size: bytes of host memory that may be taken.
        name: how the budget is asked for, with its value.

    Raises:
        ValueError: it does not hold them.
    """
    if engine_bytes > size:
        raise ValueError(
            f"{name}: all experts take {engine_bytes / 2**30:,.2f} GiB of host memory (what is on "
            f"the card is there, too); the least that works is {size_words(engine_bytes)}, or a "
            "smaller format (load_in_4bit)"
        )
