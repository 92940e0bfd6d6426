"""Choice of the checkpoint that a run resumes from, and of the run that may write to a folder.

Rank 0 chooses for all ranks: only its ``output_dir`` counts, other machines may have none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from chronicals.config import ConfigurationError
from chronicals.distributed import Mesh
from chronicals.saving import MANIFEST
from chronicals.training.errors import CheckpointError
from chronicals.training.run import checkpoint
from chronicals.training.run.earlier_run import put_back
from chronicals.training.run.lock import FolderInUse, locked

logger = logging.getLogger(__name__)


@contextmanager
def sole_writer(output_dir: Path) -> Iterator[None]:
    """Return a context in which no other run writes to ``output_dir``.

    The folder is made if it is missing, and removed if nothing was written. An earlier run that a
    killed run was to replace is put back first.

    Raises:
        CheckpointError: another run does.
    """
    is_new = False
    try:
        with ExitStack() as held:
            try:
                is_new = not output_dir.exists()
                output_dir.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(output_dir))
                put_back(output_dir)
            except FolderInUse:
                raise CheckpointError(
                    f"output_dir={str(output_dir)!r}: another run is writing there; wait until it "
                    "ends, or choose another output_dir"
                ) from None
            except OSError as error:
                raise CheckpointError(
                    f"output_dir={str(output_dir)!r}: cannot be written: {error}"
                ) from error
            yield
    finally:
        if is_new:
            with suppress(OSError):  # something was written
                output_dir.rmdir()


def holds_a_run(output_dir: Path) -> bool:
    """Return whether a run left checkpoints or a model in a folder."""
    return bool(checkpoint.checkpoints(output_dir)) or (output_dir / checkpoint.MODEL).exists()


def how_to_resume(output_dir: Path) -> str:
    """Say how a run goes on from its newest checkpoint."""
    return f"go on with train(..., resume=True) and output_dir={str(output_dir)!r}"


def checkpoint_to_resume(
    output_dir: Path, resume: bool | str | Path, ranks: Mesh, overwrite: bool = False
) -> Path | None:
    """Return the checkpoint that a run resumes from; None if it begins at step 0.

    Args:
        output_dir: folder of the run.
        resume: False for a new run. True for the newest complete checkpoint in ``output_dir``, if
            there is one. A folder for that checkpoint, or for the newest one of that run.
        ranks: all ranks; the first one chooses for all.
        overwrite: allow a new run to replace what is in ``output_dir``.

    Raises:
        ConfigurationError: the run to resume is the one to replace.
        CheckpointError: what is in ``output_dir`` would be overwritten, or the named checkpoint
            cannot be used.
    """
    named = None if isinstance(resume, bool) else Path(resume).expanduser()
    if overwrite and (
        resume is True
        or (named is not None and named.resolve().is_relative_to(output_dir.resolve()))
    ):
        raise ConfigurationError(
            f"overwrite=True replaces the run in output_dir={str(output_dir)!r}, with which "
            "resume goes on; leave out one of "
            "the two"
        )

    def choose() -> str | None:
        if named is not None:
            found: Path | None = _named(named, output_dir, overwrite)
        elif resume:
            found = checkpoint.newest_valid(output_dir)
            if found is None:
                _refuse_to_replace_a_model(output_dir)
                logger.warning(
                    "%s holds no checkpoint to go on from: the run begins at step 0", output_dir
                )
        else:
            found = None
            if not overwrite:
                _refuse_to_overwrite(output_dir)
        return None if found is None else str(found)

    chosen = ranks.writer_does(choose, CheckpointError)
    return None if chosen is None else Path(chosen)


def _refuse_to_overwrite(output_dir: Path) -> None:
    found = checkpoint.checkpoints(output_dir)
    if found:
        raise CheckpointError(
            f"output_dir={str(output_dir)!r} holds a run ({found[0].name}): "
            f"{how_to_resume(output_dir)}, replace it with "
            "overwrite=True, or choose another output_dir"
        )
    _refuse_to_replace_a_model(output_dir)


def _refuse_to_replace_a_model(output_dir: Path) -> None:
    if (output_dir / checkpoint.MODEL).exists():
        raise CheckpointError(
            f"output_dir={str(output_dir)!r} holds {checkpoint.MODEL}/, which a run that begins "
            "anew would replace, and no "
            "whole checkpoint to go on from; move it, replace it with overwrite=True, or choose "
            "another output_dir"
        )


def _named(folder: Path, output_dir: Path, overwrite: bool) -> Path:
    """Return the checkpoint that ``folder`` is, or the newest one of the run that it holds.

    Raises:
        CheckpointError: there is none, or going on from it would mix two runs in ``output_dir``.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder to go on from")
    if (folder / MANIFEST).exists() or (folder / checkpoint.STATE_FILE).exists():
        damage = checkpoint.check_checkpoint(folder)
        if damage:
            raise CheckpointError(
                f"{folder}: {damage}, so no run can go on from it; name another checkpoint"
            )
        chosen = folder
    else:
        newest = checkpoint.newest_valid(folder)
        if newest is None:
            raise CheckpointError(
                f"{folder}: is no checkpoint to go on from, and no run with a whole one"
            )
        chosen = newest
    if chosen.resolve().parent != (output_dir / checkpoint.CHECKPOINTS).resolve():
        if not overwrite:
            _refuse_to_overwrite(output_dir)
        return chosen
    later = [other for other in checkpoint.checkpoints(output_dir) if other.name > chosen.name]
    whole = [other.name for other in later if checkpoint.check_checkpoint(other) is None]
    if whole:
        raise CheckpointError(
            f"output_dir={str(output_dir)!r} holds a later checkpoint than {chosen.name} "
            f"({whole[0]}), with which what is "
            f"trained now would mix; choose another output_dir, where the run goes on from {chosen}"
        )
    return chosen
