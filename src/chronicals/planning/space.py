"""Space of a run by part: on a card at its largest moment, in host memory, and on the disk.

The bytes on a card are those of the estimate from which the trainer decides
(``policies.needed_memory``). What the driver and the allocator hold beside tensors is added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chronicals.config import ChronicalsConfig
from chronicals.memory import Moment
from chronicals.policies.cuda_graphs import CUDA_GRAPHS
from chronicals.policies.facts import Facts
from chronicals.policies.policy import Fitted
from chronicals.training.run.guard import planned_disk_use

DRIVER_BYTES = 616 << 20
"""Bytes that `nvidia-smi` shows of a process without tensors: the CUDA context.

616 MiB of a process that had only pinned host memory (LMCache, issue 4019), 426 MiB on an
RTX 6000 Ada with torch 2.10 and CUDA 13.0 (unsloth-zoo, pull request 1053). Kernels that are loaded
later add to it, and NCCL its buffers.
"""

SEGMENT_BYTES = 2 << 20
"""Bytes to whose multiples torch's allocator rounds a block of 10 MiB or more.

``kRoundLarge`` of ``c10/cuda/CUDACachingAllocator``; smaller ones share blocks.
"""

LARGE_BYTES = 10 << 20
"""Bytes from which a tensor gets a block of its own (``kMinLargeAlloc``)."""

KEPT_BY_MALLOC = "blocks of host memory that the C library keeps after they were freed"

UNCOUNTED = (
    "blocks that torch's allocator keeps after they were freed, which nvidia-smi shows and which "
    "it gives back when memory is short",
    "host memory of Python and its libraries, and of the model while it is read",
    "the token store, which is read through the page cache",
    "what chronicals merge and export write, which are commands of their own: merged weights in 16 "
    "bits take 2 bytes a weight of the model",
)
"""Space that no part counts, in words."""


@dataclass(frozen=True)
class Space:
    """Bytes of a run, by part.

    Attributes:
        peak: largest moment of a step on a card.
        moments: bytes of each moment of a step, by name, in their order.
        rounding: bytes by which the allocator rounds weights up to whole blocks.
        graphs: bytes of the pool of CUDA graphs, beside a micro-step that no graph has.
        driver: bytes of the driver on a card.
        total: bytes of the card.
        host: bytes in host memory.
        disk: bytes on the disk.
        uncounted: what is not counted, in words.
        is_on_card: False if the run is on the CPU; moments are then of host memory.
    """

    peak: Moment
    moments: Mapping[str, int]
    rounding: int
    graphs: int
    driver: int
    total: int
    host: Mapping[str, int]
    disk: Mapping[str, int]
    uncounted: tuple[str, ...] = UNCOUNTED
    is_on_card: bool = True

    @property
    def on_card(self) -> int:
        """Bytes of a card that the run takes, with what is not in tensors; 0 on the CPU."""
        beside = self.rounding + self.graphs + self.driver
        return self.peak.held + beside if self.is_on_card else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the space as plain JSON values, with the sums."""
        return {
            "moment": self.peak.name,
            "parts": dict(self.peak.parts),
            "held": self.peak.held,
            "moments": dict(self.moments),
            "rounding": self.rounding,
            "graphs": self.graphs,
            "driver": self.driver,
            "on_card": self.on_card,
            "total": self.total,
            "host": dict(self.host),
            "disk": dict(self.disk),
            "uncounted": list(self.uncounted),
        }


def space_of(facts: Facts, fitted: Fitted) -> Space:
    """Return the space of a run that was fitted to its card.

    Args:
        facts: of the run.
        fitted: result of ``fit_to_memory``.
    """
    disk = planned_disk_use(facts.model, facts.config)
    host = fitted.memory.in_host_memory(*fitted.plan)
    if facts.on_host:
        host |= fitted.peak.parts
    if disk.at_a_time > 1:  # the last one is written while nothing changes
        host["staging of a checkpoint"] = disk.checkpoint
    written = {
        f"{disk.at_a_time} checkpoints": disk.checkpoint * disk.at_a_time,
        "the trained model": disk.model,
    }
    moments = fitted.memory.moments(*fitted.plan)
    return Space(
        peak=fitted.peak,
        moments={moment.name: moment.held for moment in moments},
        rounding=0 if facts.on_host else rounding_of(facts.model, facts.config),
        graphs=0 if CUDA_GRAPHS.has_no_room(facts, fitted) else fitted.pool,
        driver=0 if facts.on_host else DRIVER_BYTES,
        total=facts.total,
        host=host,
        disk=written,
        uncounted=(KEPT_BY_MALLOC, *UNCOUNTED[1:]) if facts.on_host else UNCOUNTED,
        is_on_card=not facts.on_host,
    )


def rounding_of(model: Any, config: ChronicalsConfig) -> int:
    """Return the bytes by which blocks of large weights are larger than the weights."""
    narrow = config.mixed_precision == "bf16"
    total = 0
    for parameter in model.parameters():
        size = parameter.nbytes
        if parameter.is_floating_point():
            trained_adapter = config.use_lora and parameter.requires_grad
            size = parameter.numel() * (2 if narrow and not trained_adapter else 4)
        if size >= LARGE_BYTES:
            total += -size % SEGMENT_BYTES
    return total
