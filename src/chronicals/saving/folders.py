"""Folders that are whole or not there.

A folder is written under a temporary name beside its place. Each file is synced and described in
``manifest.json`` (size and SHA-256), the manifest is written last, then the folder is renamed. A
process that is killed at any moment leaves either the new folder or what was there before. A folder
that has its name but does not match its manifest was damaged later.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"

PARALLEL_FILES = 8
"""Files that are synced and hashed at a time."""


class CheckpointError(RuntimeError):
    """A checkpoint or a model could not be written or read; what was there before is intact."""


def write_folder(
    target: Path, fill: Callable[[Path], None], ready: Callable[[], None] | None = None
) -> None:
    """Write a folder so that it appears whole or not at all.

    The caller holds the lock of the run, so that a temporary folder with such a name was left by a
    process that was killed; it is removed.

    Args:
        target: the folder; one of this name is replaced.
        fill: writes the files into the temporary folder that it is given.
        ready: called when the folder is whole, before it gets its name.

    Raises:
        CheckpointError: the disk is full or not writable; nothing of the new folder stays, nothing
            else is touched.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Temporary folders that killed processes left, of this folder or of one whose name differs
        # only in a number. One that was about to be replaced, and has lost its name, gets it back.
        kin = re.sub(r"\d+", r"\\d+", re.escape(target.name))
        for folder in sorted(target.parent.glob(".*")):
            found = re.fullmatch(rf"\.(replaced-)?({kin})\.\d+", folder.name)
            if found and found[1] and not os.path.lexists(folder.with_name(found[2])):
                os.rename(folder, folder.with_name(found[2]))
            elif found:
                remove_folder(folder)
        aside.mkdir()
        fill(aside)
        # Files, the manifest, then the folders are synced, so that only what is on the disk gets a
        # name.
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        with ThreadPoolExecutor(PARALLEL_FILES) as readers:
            names = [str(path.relative_to(aside)) for path in files]
            described = dict(zip(names, readers.map(manifest_entry, files)))
        (aside / MANIFEST).write_text(json.dumps(described, indent=1))
        _sync(aside / MANIFEST)
        for inner in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
            _sync(inner)
        if ready is not None:
            ready()
        # A folder that has the name now is removed when the new one has it.
        replaced = aside.with_name(f".replaced-{aside.name[1:]}")
        if os.path.lexists(target):
            os.rename(target, replaced)
        try:
            os.rename(aside, target)
        except OSError:
            if os.path.lexists(replaced):
                os.rename(replaced, target)
            raise
        _sync(target.parent)
        remove_folder(replaced)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        # safetensors raises an error of its own with the system's words in it.
        full = errno.ENOSPC, errno.EDQUOT
        in_words = any(f"os error {number})" in str(error) for number in full)
        if getattr(error, "errno", None) in full or in_words:
            free = shutil.disk_usage(target.parent).free / 2**20
            raise CheckpointError(
                f"{target}: the disk is full ({free:.0f} MiB free); free some or lower "
                "save_total_limit; the checkpoints written before are intact"
            ) from error
        if isinstance(error, OSError) or "I/O error" in str(error):
            raise CheckpointError(f"{target}: cannot be written: {error}") from error
        raise


def check_folder(folder: Path, hashed: Callable[[Path], str] | None = None) -> str | None:
    """Return the damage of a folder that ``write_folder`` made, None if it is whole.

    Args:
        folder: with its manifest.
        hashed: returns the SHA-256 of a file in hexadecimal; ``hash_file`` if None.
    """
    try:
        described = json.loads((folder / MANIFEST).read_text())
        if not isinstance(described, dict):
            return f"{MANIFEST} is no description of files"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    with ThreadPoolExecutor(PARALLEL_FILES) as readers:
        damages = readers.map(
            partial(_damage, folder, hashed or hash_file), described, described.values()
        )
        return next((damage for damage in damages if damage is not None), None)


def _damage(folder: Path, hashed: Callable[[Path], str], name: str, expected: Any) -> str | None:
    """Return the damage of one of its files, None if it is whole."""
    if not isinstance(expected, dict) or not {"size", "sha256"} <= expected.keys():
        return f"{MANIFEST} does not describe {name}"
    path = folder / name
    try:
        if not path.is_file():
            return f"{name} is missing"
        whole = path.stat().st_size == expected["size"] and hashed(path) == expected["sha256"]
    except OSError as error:
        return f"{name} cannot be read ({error})"
    return None if whole else f"{name} is damaged"


def manifest_entry(path: Path) -> dict[str, Any]:
    """Sync a file, and return its entry in the manifest."""
    _sync(path)
    return {"size": path.stat().st_size, "sha256": hash_file(path)}


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_folder(path: Path) -> None:
    """Remove a folder, or a link to one; one that cannot be removed is named in the log."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s: could not be removed (%s)", path, error)
