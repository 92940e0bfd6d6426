"""Budgets of memory for experts: on the device and on the host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from chronicals.moe.offload.layers import (
    SPARE_SLOTS,
    LayerRecords,
    least_slots_of,
    slot_bytes_of,
)
from chronicals.moe.offload.slab import record_stride

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


def slots_within(layers: Sequence[LayerRecords], size: int, name: str) -> int:
    """Return the number of slots in so many bytes.

    Args:
        layers: the records of all layers.
        size: bytes on the device.
        name: how the budget is asked for, with its value.

    Raises:
        ValueError: they are too few for the experts of a token and two more.
    """
    each = slot_bytes_of(layers)
    slots = size // each
    least = least_slots_of(layers)
    if slots < least:
        raise ValueError(
            f"{name}: holds {slots} experts of {each / 2**20:,.2f} MiB, and the "
            f"{least - SPARE_SLOTS} experts of a token and two more are needed; the least that "
            f"works is {size_words(least * each)}"
        )
    return slots


def check_host(needed: int, size: int | None, name: str) -> None:
    """Check that host memory holds all records.

    Args:
        needed: bytes of the records.
        size: bytes of host memory that may be taken; None if unknown.
        name: how the budget is asked for, with its value.

    Raises:
        ValueError: it does not hold them.
    """
    if size is not None and needed > size:
        raise ValueError(
            f"{name}: all experts take {needed / 2**30:,.2f} GiB of host memory (what is on the "
            f"card is there, too), and {size / 2**30:,.2f} GiB are there for them; the least that "
            f"works is {size_words(needed)}, or a smaller format (load_in_4bit)"
        )


@dataclass(frozen=True)
class Budgets:
    """Memory that experts may take, and how it is asked for, with the value, for messages.

    Attributes:
        device: bytes of the slots.
        device_name: how they are asked for.
        host: bytes of the records; None for any.
        host_name: how they are asked for.
    """

    device: int
    device_name: str
    host: int | None = None
    host_name: str = "host memory"

    def check(self, layers: Sequence[LayerRecords]) -> None:
        """Check that the records of all layers, and the least of slots, fit.

        Raises:
            ValueError: they do not; the message says the least that works.
        """
        slots_within(layers, self.device, self.device_name)
        records = sum(layer.count for layer in layers)
        check_host(records * record_stride(slot_bytes_of(layers)), self.host, self.host_name)
