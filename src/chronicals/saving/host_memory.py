"""Host memory that a card copies into beside its kernels, and how much there is."""

from __future__ import annotations

import logging
import mmap
import re
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

REGISTERED = 1 << 28
"""Bytes that are pinned by one call of the driver, during which no kernel can be launched."""


class PinnedMemory:
    """Pinned bytes, allocated once and kept until ``release``."""

    def __init__(self) -> None:
        self.size = 0
        self._map: mmap.mmap | None = None
        self._chunks: list[Tensor] = []

    def allocate(self, size: int) -> None:
        """Hold at least ``size`` bytes; tensors of a smaller memory that was held before must not be used any more."""
        if size <= self.size:
            return
        self.release()
        self._map = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        runtime = torch.cuda.cudart()
        for chunk in torch.frombuffer(self._map, dtype=torch.uint8).split(REGISTERED):
            chunk.zero_()  # the system gives the pages here, outside of the driver
            if int(runtime.cudaHostRegister(chunk.data_ptr(), chunk.nbytes, 0)):
                logger.warning("%.1f GiB of host memory cannot be pinned: a save holds training for longer", size / 2**30)
                break
            self._chunks.append(chunk)
        self.size = size

    def tensor(self, offset: int, like: Tensor) -> Tensor:
        """A dense tensor of the shape and dtype of ``like`` at ``offset``, a multiple of 64, with a storage of its own."""
        assert self._map is not None
        if not like.nbytes:
            return torch.empty(like.shape, dtype=like.dtype)
        own = torch.frombuffer(self._map, dtype=torch.uint8, count=like.nbytes, offset=offset)
        return own.view(like.dtype).view(like.shape)

    def release(self) -> None:
        """Unpin; the memory itself is given back when no tensor uses it any more."""
        for chunk in self._chunks:
            torch.cuda.cudart().cudaHostUnregister(chunk.data_ptr())
        self._chunks, self._map, self.size = [], None, 0


def available_memory(system: Path = Path("/")) -> int | None:
    """Bytes of host memory that can still be used, on the machine and in its container (cgroup v2); None where unknown."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read(system / "proc/meminfo"))
    left = [int(found[1]) * 1024] if found else []
    group = system / "sys/fs/cgroup"
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        cache = re.search(r"^inactive_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
        left.append(int(limit) - int(used) + (int(cache[1]) if cache else 0))
    return min(left, default=None)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
