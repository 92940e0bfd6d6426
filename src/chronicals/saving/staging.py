"""Copies of a run's state in host memory, and work in a thread, while the device trains."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from chronicals.kernels.host_memory import PinnedMemory, available_memory

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)

COPY_PIECE_BYTES = 1 << 26
"""Bytes of one copy from the device. Metrics use the same copy engine, and wait for at most one
copy.
"""

TENSOR_ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes."""


class Background:
    """Runs at most one piece of work at a time. The process may end without waiting for it.

    Args:
        device: becomes the thread's current GPU, which would be the first one otherwise.

    Attributes:
        error: raised by the last piece of work; ``wait`` raises it again.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start a piece of work; the one before must have been waited for."""
        assert self._thread is None

        def run() -> None:
            try:
                if self.device is not None and self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                work()
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while a piece of work is running."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until no work is running.

        Raises:
            BaseException: raised by the work.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self.error
        self.error = None
        if error is not None:
            raise error


class Staging:
    """Copies tensors into host memory that is allocated once.

    From a GPU they are copied by a stream of their own, into pinned memory; code that changes the
    tensors afterwards calls ``hold_update`` first. On the CPU they are copied at once.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory = PinnedMemory()
        self._allocating: threading.Thread | None = None
        self._copied: torch.cuda.Event | None = None
        self._holds = False
        self._sources: list[Tensor] = []

    def needed(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes that are still to be allocated for the copies."""
        self._finish_allocating()
        size = _size(tensors)
        return 0 if size <= self._memory.size else size

    def fits(self, tensors: Iterable[Tensor], beside: int = 0) -> bool:
        """Return whether there is enough host memory for the copies.

        There is if it is allocated already, or if the copies, with ``beside`` bytes for others,
        take no more than half of the memory that is available.
        """
        size = self.needed(tensors) + beside
        available = available_memory()
        return not size or available is None or size <= available // 2

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Allocate the memory for copies in a thread, so that the first copies need not wait."""
        size = _size(tensors)
        if self._stream is None or size <= self._memory.size:
            return
        logger.info("checkpoints are staged in %.2f GiB of pinned host memory", size / 2**30)
        self._allocating = threading.Thread(target=self._allocate, args=(size,), daemon=True)
        self._allocating.start()

    def _allocate(self, size: int) -> None:
        torch.cuda.set_device(self.device)  # a new thread begins with the first GPU
        self._memory.allocate(size)

    def copy(self, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return dense copies; a tensor that is given twice is copied once.

        From a GPU they are valid inside ``reading`` and until the next call.
        """
        copies: dict[int, Tensor] = {}
        if self._stream is None:
            for tensor in tensors.values():
                copies[id(tensor)] = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            self._finish_allocating()
            self._memory.allocate(_size(tensors.values()))
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                for offset, tensor in _places(tensors.values()):
                    copy = self._memory.tensor(offset, tensor)
                    copies[id(tensor)] = copy
                    _copy_in_pieces(tensor.detach(), copy, offset)
            self._copied = self._stream.record_event()
            self._holds = True
            self._sources = list(tensors.values())  # keeps their memory until they are copied
        return {key: copies[id(tensor)] for key, tensor in tensors.items()}

    def hold_update(self) -> None:
        """Let later work on the current stream wait for the copies; the host does not wait."""
        if self._holds and self._copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied)
            self._holds = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wait for the copies, in a thread that reads them.

        Inside the context the current stream is that of the copies, so that tensors that were not
        copied are read in another stream than that of training.
        """
        if self._copied is not None:
            self._copied.synchronize()
            self._sources = []
        with torch.cuda.stream(self._stream):  # no effect if it is None
            yield

    def release(self) -> None:
        """Give the memory back; copies must not be used any more."""
        self._finish_allocating()
        self._memory.release()

    def _finish_allocating(self) -> None:
        if self._allocating is not None:
            self._allocating.join()
            self._allocating = None


def _copy_in_pieces(tensor: Tensor, copy: Tensor, offset: int) -> None:
    """Enqueue copies that end at multiples of ``COPY_PIECE_BYTES`` in the pinned memory.

    Args:
        tensor: on the device.
        copy: the target, a part of the pinned memory.
        offset: its beginning in that memory.
    """
    source = tensor.contiguous().reshape(-1).view(torch.uint8)
    target = copy.reshape(-1).view(torch.uint8)
    begin = 0
    end = COPY_PIECE_BYTES - offset % COPY_PIECE_BYTES
    while begin < len(target):
        target[begin:end].copy_(source[begin:end], non_blocking=True)
        begin = end
        end = end + COPY_PIECE_BYTES


def _places(tensors: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield each tensor once, behind the offset of its copy."""
    offset = 0
    seen = set()
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield offset, tensor
            offset += -(-tensor.nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


def _size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of their copies."""
    return max((offset + tensor.nbytes for offset, tensor in _places(tensors)), default=0)
