"""Pinned host memory, with which a card copies while its kernels run, and the memory available."""

from __future__ import annotations

import logging
import mmap
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PIN_CALL_BYTES = 1 << 28
"""Bytes pinned by one call of the driver; no kernel can be launched during such a call."""

SMALL_TENSOR_POOL_BYTES = 1 << 26
"""Bytes of a memory that small tensors share; a larger tensor gets one of its own."""

HOST_ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes."""


@dataclass(eq=False)
class PinnedMemory:
    """Pinned bytes, allocated once and kept until ``release``.

    Attributes:
        registered: bytes pinned by one call, ``PIN_CALL_BYTES`` by default. No copy to or from a
            card may cross a multiple of it.
        size: bytes allocated.
    """

    registered: int | None = None
    size: int = field(default=0, init=False)
    _map: mmap.mmap | None = field(default=None, init=False)
    _chunks: list[Tensor] = field(default_factory=list, init=False)

    def allocate(self, size: int) -> None:
        """Grow to at least ``size`` bytes. If this grows, tensors in the memory become invalid."""
        if size <= self.size:
            return
        self.release()
        self._map = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        runtime = torch.cuda.cudart()
        for chunk in torch.frombuffer(self._map, dtype=torch.uint8).split(
            self.registered or PIN_CALL_BYTES
        ):
            chunk.zero_()  # the system allocates the pages here and not in the driver's call
            if int(runtime.cudaHostRegister(chunk.data_ptr(), chunk.nbytes, 0)):
                logger.warning(
                    "%.1f GiB of host memory cannot be pinned: copies hold training for longer",
                    size / 2**30,
                )
                break
            self._chunks.append(chunk)
        self.size = size

    def tensor(self, offset: int, like: Tensor) -> Tensor:
        """Return a dense tensor shaped and typed like ``like``, with a storage of its own.

        It begins at byte ``offset`` of the memory, a multiple of 64.
        """
        assert self._map is not None
        if not like.nbytes:
            return torch.empty(like.shape, dtype=like.dtype)
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=like.nbytes, offset=offset)
        return data.view(like.dtype).view(like.shape)

    def release(self) -> None:
        """Unpin the memory; it is freed when no tensor uses it any more."""
        for chunk in self._chunks:
            torch.cuda.cudart().cudaHostUnregister(chunk.data_ptr())
        self._chunks = []
        self._map = None
        self.size = 0


class PinnedTensors:
    """Tensors in pinned memory without waste; torch would round each size up to a power of two.

    They stay pinned as long as this object lives, and are valid even longer.
    """

    def __init__(self) -> None:
        self._memories: list[PinnedMemory] = []
        self._shared: PinnedMemory | None = None
        self._used = 0
        self._devices: set[torch.device] = set()
        weakref.finalize(self, _unpin, self._memories, self._devices).atexit = False
        for memories, devices in [_left.pop() for _ in range(len(_left))]:
            _unpin(memories, devices)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a dense uninitialised tensor with a storage of its own, pinned by one call.

        Args:
            shape: shape of the tensor.
            dtype: dtype of the tensor.
            device: the card that it is copied to and from.
        """
        self._devices.add(device)
        like = torch.empty(tuple(shape), dtype=dtype, device="meta")
        is_large = like.nbytes > SMALL_TENSOR_POOL_BYTES
        if self._shared is None or is_large or self._used + like.nbytes > SMALL_TENSOR_POOL_BYTES:
            size = like.nbytes if is_large else SMALL_TENSOR_POOL_BYTES
            memory = PinnedMemory(registered=size)
            memory.allocate(size)
            self._memories.append(memory)
            if is_large:
                return memory.tensor(0, like)
            self._shared = memory
            self._used = 0
        offset = self._used
        self._used = -(-(self._used + like.nbytes) // HOST_ALIGNMENT) * HOST_ALIGNMENT
        return self._shared.tensor(offset, like)


_left: list[tuple[list[PinnedMemory], set[torch.device]]] = []
"""Memories that could not be unpinned when their owner was deleted, and their devices."""


def _unpin(memories: list[PinnedMemory], devices: set[torch.device]) -> None:
    """Unpin after all copies of these devices have ended.

    During a CUDA graph's capture, which waiting would break, they are left for the next
    ``PinnedTensors``.
    """
    if devices and torch.cuda.is_current_stream_capturing():
        _left.append((memories, devices))
        return
    for device in devices:
        torch.cuda.synchronize(device)
    for memory in memories:
        memory.release()


def sent(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device; the host does not wait for the device.

    Args:
        values: numbers, or lists of them of one length.
        dtype: dtype of the tensor.
        device: where it is needed.
    """
    x = torch.tensor(values, dtype=dtype)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def received(x: Tensor) -> Tensor:
    """Return a copy in host memory, which is complete when the current stream has come so far."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def available_memory(system: Path = Path("/")) -> int | None:
    """Return the bytes of host memory that can still be used; None if unknown.

    It is the least of what the machine and its container (cgroup v2) have left.
    """
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read(system / "proc/meminfo"))
    left = [int(match[1]) * 1024] if match else []
    group = system / "sys/fs/cgroup"
    limit = _read(group / "memory.max").strip()
    used = _read(group / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        cache = re.search(r"^inactive_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
        left.append(int(limit) - int(used) + (int(cache[1]) if cache else 0))
    return min(left, default=None)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
