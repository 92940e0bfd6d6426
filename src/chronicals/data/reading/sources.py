"""Sources: what can be given as data, from a list of rows to a weighted mixture of files,
folders and hub names.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chronicals.config import DataSource
from chronicals.data.reading.digests import FileDigests
from chronicals.data.reading.formats import READERS, is_text, read_file, reader_of
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.nulls import cleaner, without_nulls
from chronicals.data.reading.own_files import own_files
from chronicals.data.reading.plain_values import is_null
from chronicals.data.reading.records import BadRow, Record, Row, Unparsed, parsed
from chronicals.data.reading.row_fields import IDENTIFYING_FIELDS, KIND_FIELDS

logger = logging.getLogger(__name__)

DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""What ``datasets`` writes beside rows."""

Source = str | Path | DataSource | Sequence[str | Path | DataSource] | Iterable[Record]
"""One source, several, or rows in memory."""


def read_records(source: Source, seed: int = 0) -> Iterator[Row]:
    """Yield ``(where, record)`` for each row; ``where`` is what an error message calls it.

    A row that cannot be read (a line that does not parse, a wrong number of fields, a column that
    is not there) comes as ``(where, BadRow)``. Rows that a weight repeats have the same ``where``.

    Args:
        source: the path of a file or folder, a pattern, a hub name; a ``DataSource``; a list of
            these; or rows in memory (a list of mappings, a ``Dataset`` or ``IterableDataset`` of
            ``datasets``). ``docs/sources.md`` has a row each.
        seed: chooses the rows that a fractional weight takes.

    Raises:
        DataError: a source does not exist, is of a kind that cannot be read, or is damaged.
    """
    yield from ((where, parsed(record)) for where, record in read_unparsed(source, seed))


def read_unparsed(source: Source, seed: int = 0) -> Iterator[Unparsed]:
    """``read_records``, with lines of JSON that are files' own as they lie there, for
    ``records.parsed``.
    """
    parts = _named(source)
    if parts is None:
        records = _cleaned(_in_memory(source), source)
        yield from ((f"row {number}", record) for number, record in enumerate(records, 1))
        return
    for position, part in enumerate(parts):
        whole, share = divmod(part.weight, 1)
        for _ in range(int(whole)):
            yield from _rows(part)
        if share:
            rows = enumerate(_rows(part))
            yield from (row for number, row in rows if _drawn(f"{seed} {position} {number}", share))


def source_fingerprint(source: Source, cache_dir: Path, seed: int = 0) -> str:
    """What the rows of ``read_records(source, seed)`` are known by: it changes when their content
    does.

    Files count by their bytes and endings, not by their names; a hub name by the revision it stands
    for now; a ``Dataset`` by its own fingerprint; other rows by their values.

    Args:
        cache_dir: where digests of files are remembered.

    Raises:
        DataError: a source does not exist, or is a generator, which could not be read a second
            time.
    """
    parts = _named(source)
    if parts is None:
        return _fingerprint_of_rows(_in_memory(source))
    with FileDigests(cache_dir) as digests:
        described = [_description(part, digests, seed) for part in parts]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def bytes_to_read(source: Source) -> int:
    """Bytes of the files that are known to be read; none of what comes from elsewhere."""
    return int(
        sum(
            part.weight * sum(file.stat().st_size for file in files)
            for part, files in _local(source)
        )
    )


def file_digests(source: Source, cache_dir: Path) -> dict[Path, str]:
    """The content of each file that is read, as ``source_fingerprint`` knows it."""
    with FileDigests(cache_dir) as digests:
        return {file: digests.of(file) for _, files in _local(source) for file in files}


def _local(source: Source) -> Iterator[tuple[DataSource, list[Path]]]:
    """The sources that are files in formats of ours, with these."""
    for part in _named(source) or ():
        path = Path(part.path).expanduser()
        if not (_is_saved_dataset(path) or _is_hub_name(path, part.path)):
            yield part, _files(path)


def _named(source: Source) -> list[DataSource] | None:
    """The sources that are named; None where the rows themselves were given."""
    several = source if isinstance(source, (list, tuple)) else [source]
    if not several or not all(isinstance(one, (str, Path, DataSource)) for one in several):
        return None
    return [one if isinstance(one, DataSource) else DataSource(str(one)) for one in several]


def _in_memory(source: Any) -> Iterable[Record]:
    if isinstance(source, Mapping) and all(hasattr(part, "features") for part in source.values()):
        raise DataError(
            f"rows are wanted, this is a {type(source).__name__}; choose one of "
            f"{', '.join(map(str, source))}"
        )
    if isinstance(source, Mapping):
        raise DataError(
            f"rows are wanted, this is a {type(source).__name__} of "
            f"{', '.join(map(str, source))}; give a list of objects, one "
            "a row (of a DataFrame, frame.to_dict('records'))"
        )
    if hasattr(source, "to_dict") and hasattr(source, "iloc"):
        raise DataError("rows are wanted, this is a DataFrame; give frame.to_dict('records')")
    if not isinstance(source, Iterable):
        raise DataError(
            f"rows are wanted, or the name of what holds them; this is {type(source).__name__}"
        )
    return source


def _cleaned(rows: Iterable[Record], dataset: Any) -> Iterable[Record]:
    """The rows without the nulls that ``dataset``, where it is one of ``datasets``, fills
    objects with.
    """
    if not hasattr(dataset, "features"):
        return rows
    clean = cleaner(dataset.features.arrow_schema) if dataset.features else without_nulls
    return map(clean, rows) if clean else rows


def _drawn(text: str, share: float) -> bool:
    """True for ``share`` of all texts; what is drawn at one share is drawn at every larger one."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) < share * 2**64


def _rows(part: DataSource) -> Iterator[Unparsed]:
    """Every row of a source once, with our names of columns, and its place behind the source's
    name.
    """
    rows = _read(part)
    columns = part.columns
    if columns:
        rows = ((where, _renamed(parsed(record), columns)) for where, record in rows)
    if part.name:
        rows = ((f"{part.name}: {where}", record) for where, record in rows)
    return rows


def _renamed(record: Record | BadRow, columns: Mapping[str, str]) -> Record | BadRow:
    """The record with ``columns`` under our names; those that were not named stay as they are,
    but for fields that would tell another kind of row than the named ones do."""
    if not isinstance(record, Mapping):
        return record
    gone = {*columns.values(), *_of_another_kind(columns)}
    renamed = {name: value for name, value in record.items() if name not in gone}
    for ours, theirs in columns.items():
        value: Any = record
        for name in [theirs] if theirs in record else theirs.split("."):
            if is_null(value):  # of an object that a row does not have it has no fields either
                break
            if not isinstance(value, Mapping) or name not in value:
                there = (
                    ", ".join(map(repr, value))
                    if isinstance(value, Mapping)
                    else type(value).__name__
                )
                return BadRow(
                    f"column {theirs!r} is missing (no {name!r} in {there}); columns={{{ours!r}: "
                    f"'THEIR_NAME'}} must name one "
                    "that every row has",
                    "missing_field",
                )
            value = value[name]
        renamed[ours] = None if is_null(value) else value
    return renamed


def _of_another_kind(named: Mapping[str, str]) -> frozenset[str]:
    """Fields that would tell another kind of row than our names ``named`` do. A prompt alone
    tells none: its answers have their names; answers that are compared leave theirs to the
    prompt."""
    if {"responses", "scores"} <= named.keys():
        return frozenset({"chosen", "rejected"})
    if {"chosen", "rejected"} <= named.keys():
        return frozenset()
    return (
        IDENTIFYING_FIELDS
        if any(fields <= named.keys() for kind, fields in KIND_FIELDS if kind != "prompt")
        else frozenset()
    )


def _read(part: DataSource) -> Iterator[Unparsed]:
    path = Path(part.path).expanduser()
    if _is_saved_dataset(path):
        return _read_saved(path, part)
    if _is_hub_name(path, part.path):
        return _read_hub(part)
    for field in ("subset", "split"):
        if getattr(part, field) is not None:
            raise DataError(
                f"{path}: {field}={getattr(part, field)!r} belongs to a hub name; here, name the "
                "files themselves"
            )
    return itertools.chain.from_iterable(map(read_file, _files(path, say=True)))


def _files(path: Path, say: bool = False) -> list[Path]:
    """The files that a path or pattern stands for, sorted; what is left out of folders is logged
    if asked.
    """
    if path.is_file():
        return [path]
    if path.is_dir():
        return _readable_files(path, say)
    if not glob.has_magic(str(path)):
        raise DataError(f"{path}: no such file or folder")
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    own = _own_among(matches, path)
    _say_own(path, own.values(), say)
    matches = [match for match in matches if match not in own]
    for match in filter(_is_saved_dataset, matches):
        raise DataError(
            f"{path}: matches {match}, a folder of save_to_disk, which may hold several splits; "
            "name it itself"
        )
    files = [
        file
        for match in matches
        for file in (_readable_files(match, say) if match.is_dir() else [match])
    ]
    if not files:
        raise DataError(f"{path}: no file matches this pattern")
    return list(dict.fromkeys(files))


def _readable_files(folder: Path, say: bool) -> list[Path]:
    """Files below ``folder`` that can be read: those with rows, or texts where there are none (a
    README is no row).
    """
    files, own = _visible_files(folder)
    _say_own(folder, own, say)
    readable = [
        file
        for file in files
        if reader_of(file) and file.is_file() and file.name not in DESCRIPTIONS
    ]
    chosen = [file for file in readable if not is_text(file)] or readable
    if not chosen:
        raise DataError(
            f"{folder}: holds no file that can be read; those end in {', '.join(READERS)}"
        )
    taken = set(chosen)
    left_out = [str(file.relative_to(folder)) for file in files if file not in taken]
    if left_out and say:
        logger.info("%s: %d files read, left out: %s", folder, len(chosen), ", ".join(left_out))
    return chosen


def _say_own(path: Path, own: Iterable[Path], say: bool) -> None:
    names = sorted({str(one) for one in own})
    if names and say:
        logger.info(
            "%s: left out, files of runs, models and token stores: %s", path, ", ".join(names)
        )


def _own_among(matches: Iterable[Path], pattern: Path) -> dict[Path, Path]:
    """Matches that are or lie in one of ``own_files``, and which; folders that the pattern
    spells out are not asked about.
    """
    spelled = len(list(itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts)))

    @functools.cache
    def own_in(folder: Path) -> set[str]:
        return own_files(folder, os.listdir(folder))

    found = dict[Path, Path]()
    for match in matches:
        places = (Path(*match.parts[: depth + 1]) for depth in range(spelled, len(match.parts)))
        first = next((place for place in places if place.name in own_in(place.parent)), None)
        found |= {match: first} if first is not None else {}
    return found


def _visible_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Everything in and below ``folder`` but folders, what is hidden, and ``own_files``; and these,
    files and folders.

    Links are followed, those to nowhere are there.
    """
    found = list[Path]()
    own = list[Path]()
    seen = set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        ours = own_files(Path(place), {*folders, *names}) if real not in seen else set()
        own += [Path(place, name) for name in ours]
        folders[:] = (
            []
            if real in seen
            else sorted(name for name in folders if not name.startswith(".") and name not in ours)
        )
        found += (
            []
            if real in seen
            else [
                Path(place, name) for name in names if not name.startswith(".") and name not in ours
            ]
        )
        seen.add(real)
    return sorted(found), own


def _is_saved_dataset(path: Path) -> bool:
    """Whether ``save_to_disk`` of ``datasets`` wrote this folder."""
    several = ("dataset_dict.json",)
    single = ("state.json", "dataset_info.json")
    return any(all((path / name).is_file() for name in names) for names in (several, single))


def _read_saved(path: Path, part: DataSource) -> Iterator[Row]:
    if part.subset is not None:
        raise DataError(
            f"{path}: subset={part.subset!r} belongs to a hub name; a saved folder has splits at "
            "most"
        )
    saved = _datasets(path).load_from_disk(str(path))
    if isinstance(saved, Mapping):
        split = part.split or "train"
        if split not in saved:
            raise DataError(
                f"{path}: split={split!r}: there is no such split; choose one of {', '.join(saved)}"
            )
        saved = saved[split]
    elif part.split is not None:
        raise DataError(
            f"{path}: split={part.split!r}: this folder holds a single dataset without splits; "
            "leave split out"
        )
    yield from (
        (f"{path}: row {number}", record) for number, record in enumerate(_cleaned(saved, saved), 1)
    )


def _is_hub_name(path: Path, name: str) -> bool:
    """``owner/name``, which is no path here and does not end like a file."""
    return (
        bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name))
        and not path.exists()
        and reader_of(path) is None
    )


def _read_hub(part: DataSource) -> Iterator[Row]:
    datasets = _datasets(part.path)
    with _hub_faults(part):
        rows = datasets.load_dataset(
            part.path, part.subset, split=part.split or "train", streaming=True
        )
        for number, record in enumerate(_cleaned(rows, rows), 1):
            yield f"{part.path}: row {number}", record


@contextlib.contextmanager
def _hub_faults(part: DataSource) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:500]
        raise DataError(
            f"{part.path}: no such file or folder here, and the hub does not give it "
            f"({type(error).__name__}: {reason}). Check "
            "path, subset and split; without a network, write it elsewhere with save_to_disk and "
            "give that folder"
        ) from error


def _datasets(path: str | Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path}: no file here that can be read without datasets: pip install "
            "'chronicals[data]'"
        ) from error
    return datasets


def _description(part: DataSource, digests: FileDigests, seed: int) -> dict[str, Any]:
    """What makes the rows of a source what they are, as JSON."""
    path = Path(part.path).expanduser()
    content: list[Any]
    if _is_saved_dataset(path):
        content = [
            [str(file.relative_to(path)), digests.of(file)]
            for file in _visible_files(path)[0]
            if file.is_file()
        ]
    elif _is_hub_name(path, part.path):
        datasets = _datasets(part.path)
        with _hub_faults(part):
            builder = datasets.load_dataset_builder(part.path, part.subset)
        content = [builder.repo_id, builder.config_id, builder.hash]
    else:
        content = [["".join(file.suffixes[-2:]).lower(), digests.of(file)] for file in _files(path)]
    return {
        "content": content,
        "split": part.split,
        "weight": part.weight,
        "columns": sorted((part.columns or {}).items()),
        "seed": seed if part.weight % 1 else None,
    }


def _fingerprint_of_rows(rows: Iterable[Record]) -> str:
    own = getattr(rows, "_fingerprint", None)  # of a Dataset; it has no public name
    if isinstance(own, str):
        return hashlib.sha256(own.encode()).hexdigest()
    if iter(rows) is rows:
        raise DataError("a generator can be read only once; give list(rows)")
    digest = hashlib.sha256()
    for record in rows:
        digest.update(json.dumps(record, default=_as_list).encode() + b"\n")
    return digest.hexdigest()


def _as_list(value: Any) -> Any:
    """What JSON does not know: arrays whole (``repr`` would leave out their middle)."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
