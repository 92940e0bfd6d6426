"""The records of layers with experts, and how many of them go into slots and waves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chronicals.moe.offload.slab import record_stride
from chronicals.quantization.expert_records import RecordLayout, StackFormat

WAVE_BYTES = 96 << 20
"""Bytes of the missing experts of a wave, at most, but one expert at least.

They take a bus of 55 GB/s 1.8 ms. The host takes about 1 ms to launch the products of a wave in both
passes, so with fewer bytes copies would wait for it; with more, the products of a layer's first wave
wait longer, since nothing runs beside its copies.
"""

DENSE_BYTES = 576 << 20
"""Bytes of dequantised values of a wave, at most, but those of one expert at least.

A wave takes the host as long whatever its experts. Where the slots hold the experts of two layers,
those of a layer are there when it begins, so that this alone divides them: 128 experts of 9.4 MB,
Qwen3-30B-A3B's, into two waves. 512 MiB would give a third one of 16 experts; all at once would take
1.1 GiB.
"""

SPARE_SLOTS = 2
"""Slots beside the k experts of a token, at least: for copies beside its products."""


SLOT_GAP = 0.005
"""Share of a slot that may be left empty behind its record; a page is 0.0015 of one of 2.65 MB."""


class WaveLimits(NamedTuple):
    """Limits of a wave: experts, and missing ones among them."""

    experts: int
    missing: int


@dataclass(frozen=True)
class LayerRecords:
    """The experts of a layer.

    Attributes:
        path: path of their module in the model.
        formats: of its weights and biases, by name.
        layout: of its records.
        first: number of the first expert's record in the slab.
        each: k, experts of a token.
    """

    path: str
    formats: Mapping[str, StackFormat]
    layout: RecordLayout
    first: int
    each: int

    @property
    def count(self) -> int:
        """The number E of experts."""
        return next(iter(self.formats.values())).count

    @property
    def dense_bytes(self) -> int:
        """Bytes of the values that products of many rows make of an expert; 0 if they make none."""
        return sum(form.dense_bytes for form in self.formats.values())

    @property
    def limits(self) -> WaveLimits:
        """Limits of a wave of this layer."""
        dense = self.dense_bytes
        experts = max(1, DENSE_BYTES // dense) if dense else self.count
        return WaveLimits(experts, max(1, WAVE_BYTES // self.layout.bytes))


def slot_bytes_of(layers: Sequence[LayerRecords]) -> int:
    """Return the bytes of a slot: of the largest record, and up to ``SLOT_GAP`` more.

    With these slots lie as records do in host memory, and several are one copy.
    """
    largest = max(layer.layout.bytes for layer in layers)
    stride = record_stride(largest)
    return stride if stride <= (1 + SLOT_GAP) * largest else largest


def wave_dense_bytes(layers: Sequence[LayerRecords], slots: int) -> int:
    """Return the bytes of dequantised values that products of many rows make at a time, at most.

    Args:
        layers: the records of all layers.
        slots: number of slots.
    """
    return max(
        layer.dense_bytes * min(layer.limits.experts, layer.count, slots) for layer in layers
    )


def least_slots_of(layers: Sequence[LayerRecords]) -> int:
    """Return the slots that are needed: the k experts of a token and ``SPARE_SLOTS`` more."""
    return max(layer.each for layer in layers) + SPARE_SLOTS
