"""Files of all ranks in one folder, which the first rank writes: agreed over the store, by no
collective of the device.

The first says where the folder is being written. A rank that sees it (a token lies there) writes
its files into it; one on a machine with disks of its own writes them aside and sends them, a piece
at a time. Each says when it is done, or why it is not. When all files are there, those ranks that
see the folder may write more, out of what all wrote, each a share. The first goes on, to the
manifest and the rename, when all are done; whatever happens before leaves no folder with a name.
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
from typing import Any

import torch.distributed as dist

from chronicals.distributed.mesh import Mesh, awaited

PIECE = 1 << 22
"""Bytes that are sent at a time; torch's store refuses values of more than 8 MiB, and the
connection with them.
"""

PAUSE = 0.005
"""Seconds between two looks whether a piece was fetched."""

_folders = itertools.count()
"""Numbers of the folders, the same in all processes, which write them in the same order."""

Write = Callable[[Path], None]

Share = Callable[[Path, int, int], None]
"""Writes into a folder what falls to one of several: the folder, which one (from 0), how many."""


class RankFiles:
    """Of one folder. Made by all ranks, in their main threads; its methods may be called in others.

    Args:
        error: what is raised where another rank could not write.
    """

    def __init__(self, ranks: Mesh, error: type[Exception]):
        self.ranks = ranks
        self.error = error
        self._key = f"chronicals/files/{next(_folders)}"
        self._token = f".{uuid.uuid4().hex}"
        self._seeing = [0]

    @property
    def _store(self) -> dist.Store:
        return dist.distributed_c10d._get_default_store()

    @contextmanager
    def collecting(self, folder: Path) -> Iterator[None]:
        """On the first rank, which within writes its own files into ``folder``: have the others'
        there, too.

        Raises:
            Exception: ``error``, with the words of a rank that could not write its own.
        """
        token = folder / self._token
        token.touch()
        self._store.set(f"{self._key}/place", json.dumps([str(folder.resolve()), self._token]))
        yield
        for rank in range(1, self.ranks.count):
            self._receive(rank, folder)
        token.unlink()

    def share(self, folder: Path, write: Share) -> None:
        """On the first rank, after ``collecting``: do one share of what is written, while all
        others that see the folder do theirs.

        Raises:
            Exception: ``error``, with the words of a rank that could not write its own.
        """
        self._store.set(f"{self._key}/turns", json.dumps(self._seeing))
        write(folder, 0, len(self._seeing))
        for rank in self._seeing[1:]:
            self._receive(rank, folder)

    def give_up(self) -> None:
        """On the first rank, where it failed: nobody needs to wait for a place, or until it has
        heard.
        """
        for what in ("place", "turns"):
            self._store.set(f"{self._key}/{what}", json.dumps(None))
        self._store.set(f"{self._key}/over", "yes")

    def deliver(self, write: Write, share: Share | None = None) -> None:
        """On another rank: write its files, by ``write``, into the folder that the first is
        writing; then, if it sees that folder and the first does so, its share.

        Raises:
            Exception: what ``write`` or ``share`` raised; the first rank was told.
        """
        place = json.loads(awaited(self._store, f"{self._key}/place"))
        if place is None:
            return
        folder = Path(place[0])
        token = place[1]
        seen = is_seen(folder, token)
        with self._saying_failures():
            if seen:
                write(folder)
            else:
                with tempfile.TemporaryDirectory(prefix="chronicals-") as aside:
                    write(Path(aside))
                    self._send(Path(aside))
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
        """Tell the first rank one thing, and wait until it has heard."""
        key = f"{self._key}/{self.ranks.rank}"
        if content is not None:
            self._store.set(f"{key}/content", content)  # type: ignore[arg-type]  # takes bytes, too
        self._store.set(key, json.dumps(what))
        while content is not None and self._store.check([key]):
            if self._store.check([f"{self._key}/over"]):
                raise self.error("the first rank has given this folder up")
            time.sleep(PAUSE)

    def _send(self, aside: Path) -> None:
        for file in sorted(aside.iterdir()):
            with file.open("rb") as content:
                piece: bytes | None = None
                while piece is None or len(piece) == PIECE:  # of an empty file, one
                    piece = content.read(PIECE)
                    self._say({"file": file.name}, piece)

    def _heard(self, rank: int) -> Iterator[tuple[dict[str, Any], bytes]]:
        """What a rank says, one thing after the other."""
        key = f"{self._key}/{rank}"
        while True:
            said = json.loads(awaited(self._store, key))
            content = b""
            if "file" in said:
                content = self._store.get(f"{key}/content")
                self._store.delete_key(f"{key}/content")
            self._store.delete_key(key)
            yield said, content

    def _receive(self, rank: int, folder: Path) -> None:
        for said, content in self._heard(rank):
            if "failed" in said:
                raise self.error(f"rank {rank} could not write its part: {said['failed']}")
            if "done" in said:
                self._seeing += [rank] if said.get("sees") else []
                return
            with (folder / said["file"]).open("ab") as file:
                file.write(content)


def is_seen(folder: Path, token: str) -> bool:
    """Whether a folder here is the one in which another process laid a token."""
    return (folder / token).exists()
