"""The folder beside the artefacts in which they are made, and what tells an export's own files from
others.

A process that is killed leaves its folder. The kernel has released the lock on it, by which the
next export knows that nobody writes there any more, and removes it.
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
"""The folder in a model's that artefacts are written to, unless another is given."""

PREFIX = ".export-"

PROOF = ".proof.json"
"""How the name of an artefact's proof ends."""


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """Within: a new folder in ``folder``, locked, which is removed afterwards. Those of killed
    processes are removed first.
    """
    for left in sorted(folder.glob(f"{PREFIX}*")):
        _remove_if_left(left)
    with ExitStack() as held:
        place = _made(folder, held)
        held.callback(shutil.rmtree, place, ignore_errors=True)
        yield place


def _remove_if_left(place: Path) -> None:
    """Remove the folder of an export unless somebody holds its lock, or the file system has no
    locks to tell.
    """
    try:
        with locked(place) as held:
            if held:
                logger.info("%s: left by an export that was killed; removed", place)
                remove(place)
    except (FolderInUse, FileNotFoundError):  # or another export has just removed it
        return


def _made(folder: Path, held: ExitStack) -> Path:
    """A new folder whose lock is held; another export may take it for left before it is locked,
    and remove it.
    """
    while True:
        place = Path(tempfile.mkdtemp(dir=folder, prefix=PREFIX))
        with ExitStack() as mine:
            try:
                mine.enter_context(locked(place))
            except (FolderInUse, FileNotFoundError):
                continue
            if place.exists():
                held.push(mine.pop_all())
                return place


def files_of_others(folder: Path) -> list[str]:
    """Names of what is in a folder of artefacts and was not written by an export: each of those
    has its proof beside it.
    """
    artefacts = [file.name.removesuffix(PROOF) for file in folder.glob(f"*{PROOF}")]
    own = {name for one in artefacts for name in (one, one + PROOF, f"{Path(one).stem}.Modelfile")}
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in own and not path.name.startswith(PREFIX)
    )
