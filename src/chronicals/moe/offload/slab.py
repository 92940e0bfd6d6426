"""Host memory for the records of all experts: one slab, pinned in chunks.

A record never crosses the end of a chunk, so that each is one copy to a card. With a name the slab
lies in shared memory: the first process of a machine that asks for it fills it, and the others read
the same bytes.

    /dev/shm/chronicals-NAME          the records
    /dev/shm/chronicals-NAME.json     their number, size and checksums, once all are there
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from chronicals.kernels.host_memory import PIN_CALL_BYTES

logger = logging.getLogger(__name__)

RECORD_ALIGNMENT = 4096
"""Records begin at multiples of this many bytes, a page."""

SHARED_FOLDER = Path("/dev/shm")
"""Memory that the processes of a machine share."""


def record_stride(record_bytes: int) -> int:
    """Return the bytes from one record to the next."""
    return -(-record_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


class HostSlab:
    """Records in host memory.

    Args:
        count: number of records.
        record_bytes: bytes of a record.
        name: name of shared memory; None for memory of this process.

    Attributes:
        pinned: bytes that are pinned.
        checksums: checksum of each record that was written; None for the others.
        is_owner: True if this process fills the slab.

    Raises:
        ValueError: there is no shared memory of that size, or it has records of another size.
    """

    def __init__(self, count: int, record_bytes: int, name: str | None = None):
        self.count = count
        self.record_bytes = record_bytes
        self.stride = record_stride(record_bytes)
        self.pinned = 0
        self.checksums: list[int | None] = [None] * count
        self._verified = [False] * count
        self._registered: list[Tensor] = []
        self._lock: int | None = None
        self.path = None if name is None else SHARED_FOLDER / f"chronicals-{name}"
        self.is_owner = True
        if self.path is None:
            self._map: mmap.mmap | None = mmap.mmap(-1, max(self.bytes, RECORD_ALIGNMENT))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        else:
            with ExitStack() as undo:
                undo.callback(self._let_go)
                self._map = self._shared(self.path)
                undo.pop_all()
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        """Bytes of all records."""
        return self.count * self.stride

    @property
    def chunk_bytes(self) -> int:
        """Bytes that are pinned by one call: whole records."""
        return max(1, PIN_CALL_BYTES // self.stride) * self.stride

    def record(self, number: int) -> Tensor:
        """Return a record, uint8 ``[bytes]``."""
        begin = number * self.stride
        return self._memory[begin : begin + self.record_bytes]

    def records(self, first: int, count: int, size: int | None = None) -> Tensor:
        """Return some records, uint8 ``[count, bytes]``, or their first ``size`` bytes."""
        begin = first * self.stride
        whole = self._memory[begin : begin + count * self.stride].view(count, self.stride)
        return whole[:, : size or self.record_bytes]

    def chunk_ends(self, first: int, count: int) -> frozenset[int]:
        """Return those of some records that are the last of their chunk, as numbers from 0.

        What is pinned by two calls cannot be copied by one.
        """
        each = self.chunk_bytes // self.stride
        return frozenset(n for n in range(count) if (first + n + 1) % each == 0)

    def is_pinned(self, number: int) -> bool:
        """Return whether a record is in pinned memory."""
        return (number + 1) * self.stride <= self.pinned

    def written(self, number: int) -> None:
        """Note that a record is complete."""
        self.checksums[number] = checksum_of(self.record(number))

    def check(self, number: int) -> str | None:
        """Return what is wrong with a record, or None; each is computed once in a process."""
        if self._verified[number]:
            return None
        if self.checksums[number] is None:
            return "its record was never written"
        if checksum_of(self.record(number)) != self.checksums[number]:
            return "its record in host memory is not what was loaded (checksum)"
        self._verified[number] = True
        return None

    def check_all(self) -> dict[int, str]:
        """Check all records anew, and return what is wrong with which."""
        self._verified = [False] * self.count
        found = {number: self.check(number) for number in range(self.count)}
        return {number: reason for number, reason in found.items() if reason is not None}

    def pin(self) -> None:
        """Pin the memory for copies to a card, chunk by chunk.

        Raises:
            ValueError: not even the first chunk can be pinned.
        """
        runtime = torch.cuda.cudart()
        for chunk in self._memory[: self.bytes].split(self.chunk_bytes):
            if int(runtime.cudaHostRegister(chunk.data_ptr(), chunk.nbytes, 0)):
                break
            self._registered.append(chunk)
            self.pinned += chunk.nbytes
        if self.bytes and not self.pinned:
            raise ValueError(
                f"host memory for experts: not even {min(self.chunk_bytes, self.bytes) / 2**20:,.0f} "
                f"MiB of {self.bytes / 2**30:,.1f} GiB can be pinned; raise the limit of locked "
                "memory (ulimit -l), or give the container more memory"
            )
        if self.pinned < self.bytes:
            logger.warning(
                "experts: %.1f of %.1f GiB of host memory are pinned; the records behind them are "
                "copied by the driver through its own buffer, which takes longer",
                self.pinned / 2**30,
                self.bytes / 2**30,
            )

    def finish(self) -> None:
        """Let other processes read a shared slab, of which all records are written."""
        if self.path is None or not self.is_owner:
            return
        said = {"count": self.count, "record_bytes": self.record_bytes, "sums": self.checksums}
        written = _about(self.path).with_suffix(".new")
        written.write_text(json.dumps(said))
        written.replace(_about(self.path))
        assert self._lock is not None
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Unpin and free the memory; shared memory is freed by the last process."""
        for chunk in self._registered:
            torch.cuda.cudart().cudaHostUnregister(chunk.data_ptr())
        self._registered = []
        self.pinned = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._map = None  # unmapped when no tensor is in it any more
        if self.path is None or self._lock is None:
            return
        if self._locked_alone():
            for file in (self.path, _about(self.path)):
                file.unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        """Release the lock of shared memory."""
        if self._lock is not None:
            # The map has a descriptor of its own, which would keep the lock.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def _locked_alone(self) -> bool:
        """Take the lock of shared memory for this process alone, if no other one has it.

        Otherwise a lock that this process shares is released.
        """
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _shared(self, path: Path) -> mmap.mmap:
        """Map shared memory: as its owner if no process has it, else when it is complete.

        Memory that no process has was left by one that was killed, and is filled anew.
        """
        self.is_owner = self._lock_shared(path)
        assert self._lock is not None
        if self.is_owner:
            self._make_room(path)
        else:
            self._check_shared(path)
        return mmap.mmap(self._lock, max(self.bytes, RECORD_ALIGNMENT))

    def _lock_shared(self, path: Path) -> bool:
        """Lock shared memory; return whether it is this process that fills it."""
        while True:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            alone = self._locked_alone()
            if not alone:
                fcntl.flock(self._lock, fcntl.LOCK_SH)  # until its owner has written all records
            is_there = path.exists() and os.fstat(self._lock).st_ino == path.stat().st_ino
            if is_there and (alone or _about(path).exists()):
                return alone
            # Its owner ended before it was complete: one of those that waited takes its place.
            if is_there and self._locked_alone():
                return True
            self._let_go()  # its last reader freed it meanwhile, or another one takes its place

    def _make_room(self, path: Path) -> None:
        """Make shared memory as large as the records, of which none is there."""
        assert self._lock is not None
        _about(path).unlink(missing_ok=True)
        os.ftruncate(self._lock, 0)
        free = os.statvfs(path.parent)
        if self.bytes > free.f_bavail * free.f_frsize:
            path.unlink()
            raise ValueError(
                f"{path}: the experts need {self.bytes / 2**30:,.1f} GiB of shared memory, and "
                f"{free.f_bavail * free.f_frsize / 2**30:,.1f} are free"
            )
        os.ftruncate(self._lock, max(self.bytes, RECORD_ALIGNMENT))

    def _check_shared(self, path: Path) -> None:
        """Read the checksums of shared memory, and check that its records are of this size."""
        assert self._lock is not None
        said = json.loads(_about(path).read_text())
        if (said["count"], said["record_bytes"]) != (self.count, self.record_bytes):
            raise ValueError(
                f"{path}: holds {said['count']} records of {said['record_bytes']} bytes, not "
                f"{self.count} of {self.record_bytes}; give another name"
            )
        if os.fstat(self._lock).st_size < self.bytes:
            raise ValueError(f"{path}: was cut, so records at its end are missing; remove it")
        self.checksums = said["sums"]


def _about(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def checksum_of(record: Tensor) -> int:
    """Return the sum of a record's 64-bit words; any single changed word changes it."""
    whole = record[: len(record) // 8 * 8].view(torch.int64).sum()
    return int(whole) + int(record[len(record) // 8 * 8 :].sum())


@contextmanager
def filling(slab: HostSlab) -> Iterator[bool]:
    """A context for the process that fills a slab; yields whether that is this one.

    The slab is closed if the context ends with an error.
    """
    with ExitStack() as undo:
        undo.callback(slab.close)
        yield slab.is_owner
        undo.pop_all()
    slab.finish()
