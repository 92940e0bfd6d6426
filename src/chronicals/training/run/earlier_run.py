"""Earlier run in a folder, kept until the new one has its first checkpoint (``overwrite``).

- As the new run begins, files whose names it uses too (metrics, report, recipe, ...) move to
  ``.earlier-run``. Checkpoints and the model stay where they are.
- When its first checkpoint is written, before that gets its name, they move there, too. Once it has
  its name, the folder is removed.
- A run that ends in between, in any way, is followed by ``put_back``: at its own end, or, where the
  process was killed, when the next one claims the folder.

Every step is one rename. ``.moving-run`` is the folder's name while files move in or out: then
nothing of a new run is there. ``.discarded-run`` is its name while it is removed.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicals.config import ChronicalsConfig
from chronicals.data.reading.own_files import RUN_FILES
from chronicals.models import within_adapters
from chronicals.moe.router_terms import FILE as ANCHOR
from chronicals.saving import MANIFEST, remove_folder
from chronicals.training.columns.start_columns import REFERENCE_FILE
from chronicals.training.errors import CheckpointError
from chronicals.training.run.checkpoint import CHECKPOINTS, MODEL, STEP, checkpoints
from chronicals.training.run.lock import LOCK_FILE

logger = logging.getLogger(__name__)

EARLIER = ".earlier-run"
MOVING = ".moving-run"
DISCARDED = ".discarded-run"

REPLACED_BY = "replaced-by"
"""File in ``.earlier-run`` with the name of the checkpoint that replaced the whole earlier run."""

BESIDE = (RUN_FILES | {REFERENCE_FILE, ANCHOR}) - {CHECKPOINTS, MODEL}
"""Names of the files of a run other than its checkpoints and its model."""

LEFT = re.compile(
    rf"\.(replaced-)?\.?({MODEL}|resume\.yaml|step-\d+)\.\d+|.*\.aside|{re.escape(LOCK_FILE)}"
)
"""Pattern of the lock file, and of files and folders that a killed run may leave."""


@dataclass
class EarlierRun:
    """The earlier run in ``output_dir``; the caller has locked the folder."""

    output_dir: Path
    kept: bool = True

    def begin(self) -> None:
        """Move the files whose names the new run uses aside."""
        moving = self.output_dir / MOVING
        moving.mkdir()
        for name in BESIDE:
            _move(self.output_dir / name, moving / name)
        os.rename(moving, self.output_dir / EARLIER)

    def give_way_to(self, name: str) -> None:
        """Move checkpoints and model aside, just before checkpoint ``name`` gets its name."""
        aside = self.output_dir / EARLIER
        (aside / CHECKPOINTS).mkdir(exist_ok=True)
        for folder in checkpoints(self.output_dir):
            _move(folder, aside / CHECKPOINTS / folder.name)
        _move(self.output_dir / MODEL, aside / MODEL)
        (aside / REPLACED_BY).write_text(name)

    def discard(self) -> None:
        """Remove the earlier run, once the new run has a checkpoint."""
        self.kept = False
        os.rename(self.output_dir / EARLIER, self.output_dir / DISCARDED)
        remove_folder(self.output_dir / DISCARDED)
        logger.info("the run that was in %s before is replaced", self.output_dir)


@contextmanager
def replacing(output_dir: Path) -> Iterator[EarlierRun]:
    """Return a context in which a new run replaces the one in ``output_dir``.

    If the new run ends without a checkpoint, the earlier one is restored.

    Raises:
        CheckpointError: the earlier run cannot be moved.
    """
    earlier = EarlierRun(output_dir)
    try:
        earlier.begin()
    except OSError as error:
        put_back(output_dir)
        raise CheckpointError(
            f"output_dir={str(output_dir)!r}: the run there cannot be replaced: {error}"
        ) from error
    try:
        yield earlier
    finally:
        if earlier.kept:
            put_back(output_dir)


def put_back(output_dir: Path) -> None:
    """Restore an earlier run if the new run has no checkpoint; do nothing if there is none."""
    earlier = output_dir / EARLIER
    moving = output_dir / MOVING
    remove_folder(output_dir / DISCARDED)
    if earlier.exists():
        replaced_by = earlier / REPLACED_BY
        if replaced_by.exists() and (output_dir / CHECKPOINTS / replaced_by.read_text()).exists():
            os.rename(earlier, output_dir / DISCARDED)
            remove_folder(output_dir / DISCARDED)
            return
        for name in BESIDE:
            remove_folder(output_dir / name)
        replaced_by.unlink(missing_ok=True)
        os.rename(earlier, moving)
    if moving.exists():
        for folder in sorted((moving / CHECKPOINTS).glob("*")):
            _move(folder, output_dir / CHECKPOINTS / folder.name)
        for name in (*BESIDE, MODEL):
            _move(moving / name, output_dir / name)
        remove_folder(moving)
        logger.warning(
            "%s holds the earlier run again: the one that was to replace it had no checkpoint yet",
            output_dir,
        )


def _move(source: Path, target: Path) -> None:
    if os.path.lexists(source):
        os.rename(source, target)


def check_replaceable(output_dir: Path, model: Any, config: ChronicalsConfig) -> None:
    """Check that only runs wrote to the folder, and that the new run reads nothing from it.

    Raises:
        CheckpointError: the check failed; the message names the file.
    """
    said = f"output_dir={str(output_dir)!r} cannot be replaced (overwrite=True)"
    foreign = next(foreign_files(output_dir), None)
    if foreign is not None:
        raise CheckpointError(
            f"{said}: no run wrote {str(foreign)!r}; move it, or choose another output_dir"
        )
    # What the run reads: its model, and the models that settings of the objective name.
    trained = getattr(within_adapters(model).config, "_name_or_path", "")
    read = [str(trained or model.config._name_or_path)]
    for settings in config.sections.values():
        read += [value for value in settings.values() if isinstance(value, str)]
    for name in read:
        if Path(name).exists() and Path(name).resolve().is_relative_to(output_dir.resolve()):
            raise CheckpointError(
                f"{said}: the new run itself reads {name!r}; copy that out of the folder, or "
                "choose another output_dir"
            )


def foreign_files(output_dir: Path) -> Iterator[Path]:
    """Yield the files and folders in a run's folder that no run wrote."""
    for path in sorted(output_dir.iterdir()):
        if path.name == MODEL:
            yield from _beside_manifest(path)
        elif path.name == CHECKPOINTS:
            for folder in sorted(path.iterdir()):
                if STEP.fullmatch(folder.name):
                    yield from _beside_manifest(folder)
                elif not LEFT.fullmatch(folder.name):
                    yield folder
        elif path.name == "tensorboard":
            yield from (
                file
                for file in path.rglob("*")
                if file.is_file() and not file.name.startswith("events.out.")
            )
        elif path.name not in BESIDE and not LEFT.fullmatch(path.name):
            yield path


def _beside_manifest(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that its manifest does not list.

    Without a manifest it is the folder itself.
    """
    try:
        described = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        yield folder
        return
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_dir() and name != MANIFEST and name not in described:
            yield path
