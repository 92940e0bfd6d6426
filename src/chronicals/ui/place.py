"""The folder whose runs the page shows, and the files that the page keeps there."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicals.config import ConfigurationError
from chronicals.standard_json import to_json

KEPT = ".chronicals-page"
"""Folder in the root with the key, drafts, queues and records of processes."""


class OutsideRoot(ConfigurationError):
    """A path that leads out of the root, by ``..``, by a link or by its beginning."""


@dataclass(frozen=True)
class Place:
    """The root of the page.

    Attributes:
        root: absolute path without links; commands run in it, and relative paths begin there.
    """

    root: Path

    @property
    def kept(self) -> Path:
        """Folder with the page's own files; only its owner can read it."""
        folder = self.root / KEPT
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def inside(self, path: str | Path) -> Path:
        """Return a path as an absolute one, links resolved.

        Raises:
            OutsideRoot: it is not in the root.
        """
        try:
            resolved = (self.root / os.path.expanduser(path)).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a NUL, or links in a circle
            raise OutsideRoot(f"{str(path)!r}: is no path ({error})") from None
        if not resolved.is_relative_to(self.root):
            raise OutsideRoot(
                f"{str(path)!r}: is outside of {str(self.root)!r}; name a path in this folder, or "
                "start chronicals ui with another --root"
            )
        return resolved

    def check_below(self, folder: Path) -> None:
        """Check the links below a folder, as far as rows are read there: what is hidden is left out.

        Raises:
            OutsideRoot: one of them, or one in a folder that they lead to, leads out of the root.
        """
        pending = [folder]
        seen = set[Path]()
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            for entry in os.scandir(current):
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():
                    target = self.inside(entry.path)
                    if target.is_dir():
                        pending.append(target)
                elif entry.is_dir():
                    pending.append(Path(entry.path))

    def name(self, path: Path) -> str:
        """Return a path in the root as it is shown: relative to the root."""
        return str(path.relative_to(self.root))


def replace_file(path: Path, text: str) -> None:
    """Write a file that is whole or as it was before, whatever ends this process."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def write_record(path: Path, record: Any) -> None:
    """Write JSON values to a file, whole or not at all."""
    replace_file(path, to_json(record) + "\n")


def read_record(path: Path, missing: Any = None) -> Any:
    """Return the JSON values of a file; ``missing`` if there is none, or it is torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return missing
