"""Artefacts: the interface of their formats, and the folder in which they are made.

A format is a class in a file of its own (``whole``, ``adapter``, ``gguf`` …), which an entry in
``export.FORMATS`` names.

An artefact is made in a locked folder beside its place. A process that is killed leaves its folder.
The kernel has released the lock on it then, so the next export knows that nobody writes there any
more, and removes it.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from chronicals.export.proof import Proof
from chronicals.export.source import SourceModel
from chronicals.saving.folders import remove_folder
from chronicals.training.run.lock import FolderInUse, locked

logger = logging.getLogger(__name__)

EXPORTS = "export"
"""Folder in a model's folder to which artefacts are written, unless another is given."""

WORKSPACE_PREFIX = ".export-"

PROOF = ".proof.json"
"""End of the name of an artefact's proof."""


@dataclass(frozen=True)
class ArtefactFormat(ABC):
    """A form in which a model is written for others: a file or a folder.

    Attributes:
        kind: type of the weights, or the part of the model, by which an artefact's name ends.
        prefix: beginning of an artefact's name.
        extension: end of a file's name; empty for folders.
        takes_projector: a server may be given the file of the part that reads images beside it.
        served_by: shell command of a server that takes ``{artefact}`` as it is; None if none does.
    """

    kind: str
    prefix: ClassVar[str] = ""
    extension: ClassVar[str] = ""
    takes_projector: ClassVar[bool] = False
    served_by: ClassVar[str | None] = "vllm serve {artefact}"

    def name(self, model: str) -> str:
        """Return the name of a model's artefact."""
        return f"{self.prefix}{model}-{self.kind}{self.extension}"

    @abstractmethod
    def size(self, source: SourceModel) -> int:
        """Return about how many bytes an artefact takes on the disk while it is made."""

    @abstractmethod
    def write(self, source: SourceModel, aside: Path) -> None:
        """Write an artefact to a path that does not exist.

        Raises:
            NotExpressible: the format has no form for the model.
            ValueError: the model or this machine lacks what the format needs.
        """

    @abstractmethod
    def prove(self, source: SourceModel, aside: Path, proof: Proof) -> None:
        """Read an artefact back by its own clients, and add the checks to a proof."""

    def command(self, source: SourceModel, artefact: Path) -> str | None:
        """Return the shell command by which a server takes an artefact; None if none does."""
        if self.served_by is None:
            return None
        return self.served_by.format(artefact=shlex.quote(str(artefact)))


def proof_of(artefact: Path) -> Path:
    """Return the file of an artefact's proof, which is beside it."""
    return artefact.with_name(f"{artefact.name}{PROOF}")


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """Yield a new, locked folder in ``folder``, which is removed afterwards.

    Folders of killed processes are removed first.
    """
    for left in sorted(folder.glob(f"{WORKSPACE_PREFIX}*")):
        try:
            with locked(left) as is_locked:
                if is_locked:  # else the file system has no locks, and its export may be alive
                    logger.info("%s: left by an export that was killed; removed", left)
                    remove_folder(left)
        except (FolderInUse, FileNotFoundError):  # or another export has just removed it
            continue
    with ExitStack() as stack:
        place = None
        while place is None:
            made = Path(tempfile.mkdtemp(dir=folder, prefix=WORKSPACE_PREFIX))
            # Before it is locked, another export may take it for one of a killed process and remove
            # it; then another one is made.
            with ExitStack() as attempt, suppress(FolderInUse, FileNotFoundError):
                attempt.enter_context(locked(made))
                if made.exists():
                    stack.push(attempt.pop_all())
                    place = made
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        yield place


def files_of_others(folder: Path) -> list[str]:
    """Return the names in a folder of artefacts that no export wrote; artefacts have a proof."""
    own = set()
    for proof in folder.glob(f"*{PROOF}"):
        artefact = proof.name.removesuffix(PROOF)
        own |= {artefact, proof.name, f"{Path(artefact).stem}.Modelfile"}
    names = [path.name for path in folder.iterdir() if path.name not in own]
    return sorted(name for name in names if not name.startswith(WORKSPACE_PREFIX))
