"""Locks on folders, which end with the process that holds them, however it ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

HELD_ELSEWHERE = (errno.EWOULDBLOCK, errno.EACCES)
"""Error numbers of a lock that is held, by another process or in this one."""

LOCK_FILE = "run.lock"
"""File that is locked instead of the folder if the file system (NFS) locks only writable files."""


class FolderInUse(Exception):
    """Another process, or another part of this one, holds the lock."""


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Context manager that holds an exclusive lock on ``folder``.

    It yields True, or False if the file system has no locks, which is logged.

    Raises:
        FolderInUse: somebody else holds the lock.
        OSError: the folder cannot be opened.
    """
    handle = None
    try:
        handle = _open_and_lock(folder, os.O_RDONLY)
    except OSError as error:
        if error.filename is not None:  # from open, not from the lock
            raise
        try:
            handle = _open_and_lock(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        except OSError as unlocked:
            logger.warning(
                "%s: cannot be locked (%s); see that no other run writes there", folder, unlocked
            )
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _open_and_lock(path: Path, flags: int) -> int:
    handle = os.open(path, flags, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in HELD_ELSEWHERE:
            raise FolderInUse(path) from None
        raise
    return handle
