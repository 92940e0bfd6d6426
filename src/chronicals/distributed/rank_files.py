"""Collection of files from all ranks in one folder that rank 0 writes, without collectives.

Ranks communicate over the store:

1. Rank 0 announces the folder, in which it has created a token file.
2. A rank that sees the token writes its files into the folder. A rank on another file system writes
them to a temporary folder and sends them to rank 0 in pieces.
3. Each rank reports that it is done, or why it failed.
4. When all files are there, the ranks that see the folder may each write a share of further files
made from all of them.
5. Rank 0 then writes the manifest and renames the folder. A failure before leaves no folder under
the final name.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from chronicals.distributed.mesh import Mesh, awaited

SENT_PIECE = 1 << 22
"""Bytes that are sent at a time.

torch's store refuses values of more than 8 MiB and then drops the connection.
"""

_PAUSE = 0.005
"""Seconds between two checks whether rank 0 has read a piece."""

_folders = itertools.count()
"""Counter for the keys of folders; equal on all ranks, which write them in the same order."""

Write = Callable[[Path], None]
"""Function that writes this rank's files into a folder."""

WriteShare = Callable[[Path, int, int], None]
"""Function of a folder, an index from 0 and a count: writes that share of the further files."""


class RankFiles:
    """Protocol of all ranks for one folder.

    All ranks must create it, in their main threads; its methods may be called from other threads.

    Args:
        error: exception type to raise if another rank could not write.
        store: the store over which the ranks communicate, by default that of the process group.
    """

    def __init__(self, ranks: Mesh, error: type[Exception], store: dist.Store | None = None):
        self.ranks = ranks
        self.error = error
        self._key = f"chronicals/files/{next(_folders)}"
        self._token = f".{uuid.uuid4().hex}"
        self._seeing = [0]
        if store is None:
            store = dist.distributed_c10d._get_default_store()
        self._store = store

    @contextmanager
    def collecting(self, folder: Path) -> Iterator[None]:
        """Context manager on rank 0, in which it writes its own files into ``folder``.

        On exit it has received the files of all other ranks.

        Raises:
            Exception: ``error``, with the message of a rank that could not write its files.
        """
        token = folder / self._token
        token.touch()
        self._store.set(f"{self._key}/place", json.dumps([str(folder.resolve()), self._token]))
        yield
        for rank in range(1, self.ranks.count):
            self._receive(rank, folder)
        token.unlink()

    def share(self, folder: Path, write: WriteShare) -> None:
        """Write rank 0's share, while the other ranks that see the folder write theirs.

        Called on rank 0 after ``collecting``. Returns when all shares are written.

        Raises:
            Exception: ``error``, with the message of a rank that could not write its share.
        """
        self._store.set(f"{self._key}/turns", json.dumps(self._seeing))
        write(folder, 0, len(self._seeing))
        for rank in self._seeing[1:]:
            self._receive(rank, folder)

    def give_up(self) -> None:
        """Release the ranks that wait for rank 0, after it has failed."""
        for what in ("place", "turns"):
            self._store.set(f"{self._key}/{what}", json.dumps(None))
        self._store.set(f"{self._key}/over", "yes")

    def deliver(self, write: Write, share: WriteShare | None = None) -> None:
        """Write this rank's files into the folder of rank 0, or send them there; not on rank 0.

        Then write a share, if this rank sees the folder and rank 0 calls ``share``.

        Raises:
            Exception: what ``write`` or ``share`` raised, after it was reported to rank 0.
        """
        place = json.loads(awaited(self._store, f"{self._key}/place"))
        if place is None:
            return
        folder = Path(place[0])
        token = place[1]
        # A folder of this name on another file system has no such token.
        seen = (folder / token).exists()
        with self._saying_failures():
            if seen:
                write(folder)
            else:
                with tempfile.TemporaryDirectory(prefix="chronicals-") as aside:
                    write(Path(aside))
                    for file in sorted(Path(aside).iterdir()):
                        with file.open("rb") as content:
                            piece: bytes | None = None  # one empty piece for an empty file
                            while piece is None or len(piece) == SENT_PIECE:
                                piece = content.read(SENT_PIECE)
                                self._say({"file": file.name}, piece)
        self._say({"done": True, "sees": seen})
        if seen and share is not None:
            turns = json.loads(awaited(self._store, f"{self._key}/turns"))
            if turns is None:
                return
            with self._saying_failures():
                share(folder, turns.index(self.ranks.rank), len(turns))
            self._say({"done": True})

    @contextmanager
    def _saying_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as failure:
            self._say({"failed": f"{type(failure).__name__}: {failure}"})
            raise

    def _say(self, what: dict[str, object], content: bytes | None = None) -> None:
        """Send one message to rank 0; if it has content, wait until rank 0 has read it."""
        key = f"{self._key}/{self.ranks.rank}"
        if content is not None:
            # It takes bytes too.
            self._store.set(f"{key}/content", content)  # type: ignore[arg-type]
        self._store.set(key, json.dumps(what))
        while content is not None and self._store.check([key]):
            if self._store.check([f"{self._key}/over"]):
                raise self.error("the first rank has given this folder up")
            time.sleep(_PAUSE)

    def _receive(self, rank: int, folder: Path) -> None:
        """Read the messages of a rank until it is done, and write its files into ``folder``."""
        key = f"{self._key}/{rank}"
        while True:
            said = json.loads(awaited(self._store, key))
            content = b""
            if "file" in said:
                content = self._store.get(f"{key}/content")
                self._store.delete_key(f"{key}/content")
            self._store.delete_key(key)
            if "failed" in said:
                raise self.error(f"rank {rank} could not write its part: {said['failed']}")
            if "done" in said:
                self._seeing += [rank] if said.get("sees") else []
                return
            with (folder / said["file"]).open("ab") as file:
                file.write(content)
