"""The folder beside the artefacts in which they are made, and names of an export's own files.

A process that is killed leaves its folder. The kernel has released the lock on it then, so the next
export knows that nobody writes there any more, and removes it.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from chronicals.saving.folders import remove
from chronicals.training.lock import FolderInUse, locked

logger = logging.getLogger(__name__)

EXPORTS = "export"
"""Folder in a model's folder to which artefacts are written, unless another is given."""

WORKSPACE_PREFIX = ".export-"

PROOF = ".proof.json"
"""End of the name of an artefact's proof."""


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """Yield a new, locked folder in ``folder``, which is removed afterwards.

    Folders of killed processes are removed first.
    """
    for left in sorted(folder.glob(f"{WORKSPACE_PREFIX}*")):
        _remove_if_left(left)
    with ExitStack() as stack:
        place = _make_locked(folder, stack)
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        yield place


def _remove_if_left(place: Path) -> None:
    """Remove the folder of an export, unless it is locked or the file system has no locks."""
    try:
        with locked(place) as is_locked:
            if is_locked:
                logger.info("%s: left by an export that was killed; removed", place)
                remove(place)
    except (FolderInUse, FileNotFoundError):  # or another export has just removed it
        return


def _make_locked(folder: Path, stack: ExitStack) -> Path:
    """Make a new folder whose lock is held until a stack is closed.

    Before it is locked, another export may take it for one of a killed process and remove it; then
    another one is made.
    """
    while True:
        place = Path(tempfile.mkdtemp(dir=folder, prefix=WORKSPACE_PREFIX))
        with ExitStack() as attempt:
            try:
                attempt.enter_context(locked(place))
            except (FolderInUse, FileNotFoundError):
                continue
            if place.exists():
                stack.push(attempt.pop_all())
                return place


def files_of_others(folder: Path) -> list[str]:
    """Return the names in a folder of artefacts that no export wrote; artefacts have a proof."""
    own = set()
    for proof in folder.glob(f"*{PROOF}"):
        artefact = proof.name.removesuffix(PROOF)
        own |= {artefact, proof.name, f"{Path(artefact).stem}.Modelfile"}
    names = [path.name for path in folder.iterdir() if path.name not in own]
    return sorted(name for name in names if not name.startswith(WORKSPACE_PREFIX))
