"""Export of a study for optuna-dashboard: optuna's journal, a file that it opens as a storage."""

from __future__ import annotations

from pathlib import Path

from chronicals.config import ConfigurationError
from chronicals.tuning.search import Search
from chronicals.tuning.study import Study


def export(study: Study, search: Search, file: Path) -> int:
    """Write the trials of the search into a new journal, and return how many there are.

    ``optuna-dashboard FILE`` shows it. The study itself does not read it.

    Raises:
        ConfigurationError: the file exists already.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if file.exists():
        raise ConfigurationError(f"export={str(file)!r}: exists already; name another file")
    trials = [trial for trial in study.trials() if trial.repeats is None]
    in_memory = search.study([trial for trial in trials if trial.ended is not None])
    optuna.copy_study(
        from_study_name=in_memory.study_name,
        from_storage=in_memory._storage,
        to_storage=JournalStorage(JournalFileBackend(str(file))),
        to_study_name=study.folder.name,
    )
    return len(in_memory.trials)
