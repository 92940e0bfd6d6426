"""Digests of files, remembered beside the stores.

A file of many gigabytes is read once, and then known by its size, inode and times of change.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

from chronicals.data.reading.gate import DataError

logger = logging.getLogger(__name__)

REMEMBERED_FILES = 10_000
"""Number of digests that are kept; the earliest are forgotten first."""

CLOCK_TICK = 0.1
"""Age in seconds from which on a file's digest is remembered.

A file that is written again within one tick of its file system's clock (4 to 10 ms on ext4 and xfs)
keeps its stamp.
"""


class FileDigests:
    """SHA-256 of files' contents, saved at the end of a ``with`` statement.

    Args:
        folder: keeps the digests.
    """

    def __init__(self, folder: Path):
        self.path = folder / "file-digests.json"
        self._known = self._load()
        self._new: dict[str, Any] = {}

    def __enter__(self) -> FileDigests:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Add the new digests to the file, which another process may have changed meanwhile.

        Of two processes at once the later wins; the other's files are read again some time.
        """
        if not self._new:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        earlier = {name: entry for name, entry in self._load().items() if name not in self._new}
        entries = list({**earlier, **self._new}.items())[-REMEMBERED_FILES:]
        aside = self.path.with_name(f".{self.path.stem}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        try:
            aside.write_text(json.dumps(dict(entries), indent=0))
            os.replace(aside, self.path)
        finally:
            aside.unlink(missing_ok=True)

    def of(self, file: Path) -> str:
        """Return the digest of a file.

        Raises:
            DataError: it cannot be read, or was written to meanwhile.
        """
        try:
            name = str(file.resolve())
            stamp = _stamp(file)
            began = time.time()
            known = self._known.get(name, {})
            if known.get("stamp") == stamp:
                return known["sha256"]
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            after = _stamp(file)
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror})") from error
        if after != stamp:
            raise DataError(
                f"{file}: was written to while it was read; start again when it is whole"
            )
        if began - max(stamp[1:3]) / 1e9 > CLOCK_TICK:
            self._known[name] = self._new[name] = {"stamp": stamp, "sha256": digest}
        return digest

    def _load(self) -> dict[str, Any]:
        try:
            known = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError:
            logger.warning("%s: not JSON; files are read again", self.path)
            return {}
        return known if isinstance(known, dict) else {}


def _stamp(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
