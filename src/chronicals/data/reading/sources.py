"""Sources of rows: lists, files, folders, hub names, and weighted mixtures of them."""

from __future__ import annotations

import contextlib
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
from chronicals.data.reading.records import (
    IDENTIFYING_FIELDS,
    KIND_FIELDS,
    BadRow,
    PlacedRow,
    RowRecord,
    Unparsed,
    parsed,
)

logger = logging.getLogger(__name__)

_DATASET_DESCRIPTIONS = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}
"""Files that ``datasets`` writes beside rows."""

RowSource = str | Path | DataSource | Sequence[str | Path | DataSource] | Iterable[RowRecord]
"""One source, several, or rows in memory."""


def read_records(source: RowSource, seed: int = 0) -> Iterator[PlacedRow]:
    """Yield ``(place, record)`` for each row; ``place`` is what an error message calls it.

    A row that cannot be read (a line that does not parse, a wrong number of fields, a missing
    column) comes as ``(place, BadRow)``. Rows that a weight repeats have the same ``place``.

    Args:
        source: the path of a file or folder, a pattern, a hub name; a ``DataSource``; a list of
            these; or rows in memory (a list of mappings, a ``Dataset`` or ``IterableDataset`` of
            ``datasets``). ``docs/sources.md`` has a row each.
        seed: chooses the rows that a fractional weight takes.

    Raises:
        DataError: a source does not exist, is of a kind that cannot be read, or is damaged.
    """
    for place, record in read_unparsed(source, seed):
        yield place, parsed(record)


def read_unparsed(source: RowSource, seed: int = 0) -> Iterator[Unparsed]:
    """Yield rows as ``read_records`` does, but lines of JSON unparsed, for ``parsed``."""
    parts = _named(source)
    if parts is None:
        records = _cleaned(_in_memory(source), source)
        for number, record in enumerate(records, 1):
            yield f"row {number}", record
        return
    for position, part in enumerate(parts):
        repeats, share = divmod(part.weight, 1)
        for _ in range(int(repeats)):
            yield from _rows(part)
        if share:
            for number, row in enumerate(_rows(part)):
                # A row drawn at one share is drawn at larger ones.
                text = f"{seed} {position} {number}"
                digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
                if int.from_bytes(digest) < share * 2**64:
                    yield row


def source_fingerprint(source: RowSource, cache_dir: Path, seed: int = 0) -> str:
    """Return a hash of the content of ``read_records(source, seed)``.

    Files count by their bytes and endings, not by their names; a hub name by its present revision;
    a ``Dataset`` by its own fingerprint; other rows by their values.

    Args:
        source: what ``read_records`` reads.
        cache_dir: where digests of files are remembered.
        seed: as that of ``read_records``.

    Raises:
        DataError: a source does not exist, or is a generator, which could not be read a second
            time.
    """
    parts = _named(source)
    if parts is None:
        rows = _in_memory(source)
        of_dataset = getattr(rows, "_fingerprint", None)  # it has no public name
        if isinstance(of_dataset, str):
            return hashlib.sha256(of_dataset.encode()).hexdigest()
        if iter(rows) is rows:
            raise DataError("a generator can be read only once; give list(rows)")
        digest = hashlib.sha256()
        for record in rows:
            # Arrays whole: ``repr`` omits their middle.
            text = json.dumps(
                record,
                default=lambda value: value.tolist() if hasattr(value, "tolist") else repr(value),
            )
            digest.update(text.encode() + b"\n")
        return digest.hexdigest()
    described = []
    with FileDigests(cache_dir) as digests:
        for part in parts:
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
                content = [
                    ["".join(file.suffixes[-2:]).lower(), digests.of(file)] for file in _files(path)
                ]
            described.append(
                {
                    "content": content,
                    "split": part.split,
                    "weight": part.weight,
                    "columns": sorted((part.columns or {}).items()),
                    "seed": seed if part.weight % 1 else None,
                }
            )
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def bytes_to_read(source: RowSource) -> int:
    """Return the bytes of the files that are read; other sources count nothing."""
    total = 0.0
    for part, files in _local(source):
        total += part.weight * sum(file.stat().st_size for file in files)
    return int(total)


def file_digests(source: RowSource, cache_dir: Path) -> dict[Path, str]:
    """Return a digest of each file that is read; ``cache_dir`` remembers digests."""
    digests = {}
    with FileDigests(cache_dir) as known:
        for _, files in _local(source):
            for file in files:
                digests[file] = known.of(file)
    return digests


def _local(source: RowSource) -> Iterator[tuple[DataSource, list[Path]]]:
    """Yield the sources that are files of the formats in ``READERS``, with their files."""
    for part in _named(source) or ():
        path = Path(part.path).expanduser()
        if not (_is_saved_dataset(path) or _is_hub_name(path, part.path)):
            yield part, _files(path)


def _named(source: RowSource) -> list[DataSource] | None:
    """Return the sources that are named; None if the rows themselves were given."""
    parts = source if isinstance(source, (list, tuple)) else [source]
    if not parts or not all(isinstance(part, (str, Path, DataSource)) for part in parts):
        return None
    return [part if isinstance(part, DataSource) else DataSource(str(part)) for part in parts]


def _in_memory(source: Any) -> Iterable[RowRecord]:
    """Return rows in memory.

    Raises:
        DataError: these are no rows.
    """
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


def _cleaned(rows: Iterable[RowRecord], dataset: Any) -> Iterable[RowRecord]:
    """Return rows without the nulls that a dataset of ``datasets`` fills objects with.

    Args:
        rows: of the dataset.
        dataset: what the rows come from.
    """
    if not hasattr(dataset, "features"):
        return rows
    clean = cleaner(dataset.features.arrow_schema) if dataset.features else without_nulls
    return map(clean, rows) if clean else rows


def _rows(part: DataSource) -> Iterator[Unparsed]:
    """Yield every row of a source once: columns renamed, the source's name before its place."""
    for place, record in _read(part):
        if part.columns:
            record = _renamed(parsed(record), part.columns)
        yield f"{part.name}: {place}" if part.name else place, record


def _renamed(record: RowRecord | BadRow, columns: Mapping[str, str]) -> RowRecord | BadRow:
    """Return the record with columns under the names of ``records``.

    Other columns stay as they are, except fields that would identify another kind of row than the
    named ones do. A prompt by itself identifies none: its answers keep their names. Answers that are
    compared leave the prompt its name.

    Args:
        record: the row; a bad one is returned as it is.
        columns: the record's names by the new ones; a dot leads into an object.
    """
    if not isinstance(record, Mapping):
        return record
    of_other_kinds = frozenset[str]()
    if {"responses", "scores"} <= columns.keys():
        of_other_kinds = frozenset({"chosen", "rejected"})
    elif not {"chosen", "rejected"} <= columns.keys():
        for kind, fields in KIND_FIELDS:
            if kind != "prompt" and fields <= columns.keys():
                of_other_kinds = IDENTIFYING_FIELDS
    dropped = {*columns.values(), *of_other_kinds}
    renamed = {name: value for name, value in record.items() if name not in dropped}
    for ours, theirs in columns.items():
        value: Any = record
        for name in [theirs] if theirs in record else theirs.split("."):
            if is_null(value):  # a row without the object has none of its fields
                break
            if not isinstance(value, Mapping) or name not in value:
                there = type(value).__name__
                if isinstance(value, Mapping):
                    there = ", ".join(map(repr, value))
                return BadRow(
                    f"column {theirs!r} is missing (no {name!r} in {there}); columns={{{ours!r}: "
                    f"'THEIR_NAME'}} must name one "
                    "that every row has",
                    "missing_field",
                )
            value = value[name]
        renamed[ours] = None if is_null(value) else value
    return renamed


def _read(part: DataSource) -> Iterator[Unparsed]:
    """Yield the rows of a source, wherever they are."""
    path = Path(part.path).expanduser()
    if _is_saved_dataset(path):
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
        for number, record in enumerate(_cleaned(saved, saved), 1):
            yield f"{path}: row {number}", record
        return
    if _is_hub_name(path, part.path):
        datasets = _datasets(part.path)
        with _hub_faults(part):
            rows = datasets.load_dataset(
                part.path, part.subset, split=part.split or "train", streaming=True
            )
            for number, record in enumerate(_cleaned(rows, rows), 1):
                yield f"{part.path}: row {number}", record
        return
    for field, value in (("subset", part.subset), ("split", part.split)):
        if value is not None:
            raise DataError(
                f"{path}: {field}={value!r} belongs to a hub name; here, name the files themselves"
            )
    for file in _files(path, log=True):
        yield from read_file(file)


def _files(path: Path, log: bool = False) -> list[Path]:
    """Return the files that a path or pattern stands for, sorted.

    Args:
        path: of a file or folder, or a pattern.
        log: log what is left out of folders.

    Raises:
        DataError: there is no file.
    """
    if path.is_file():
        return [path]
    if path.is_dir():
        return _readable_files(path, log)
    if not glob.has_magic(str(path)):
        raise DataError(f"{path}: no such file or folder")
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    # Of the matches that are one of ``own_files`` or lie in one, that one. Folders that the pattern
    # spells out are wanted, whatever they hold.
    spelled = len(list(itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)))
    own_in = dict[Path, set[str]]()
    left_out = dict[Path, Path]()
    for match in matches:
        for depth in range(spelled, len(match.parts)):
            place = Path(*match.parts[: depth + 1])
            folder = place.parent
            if folder not in own_in:
                own_in[folder] = own_files(folder, os.listdir(folder))
            if place.name in own_in[folder]:
                left_out[match] = place
                break
    if log:
        _log_own_files(path, left_out.values())
    matches = [match for match in matches if match not in left_out]
    for match in filter(_is_saved_dataset, matches):
        raise DataError(
            f"{path}: matches {match}, a folder of save_to_disk, which may hold several splits; "
            "name it itself"
        )
    files = []
    for match in matches:
        files += _readable_files(match, log) if match.is_dir() else [match]
    if not files:
        raise DataError(f"{path}: no file matches this pattern")
    return list(dict.fromkeys(files))


def _readable_files(folder: Path, log: bool) -> list[Path]:
    """Return the files below ``folder`` that hold rows, or texts if there are no others.

    Beside files of rows, a text such as a README is no row.
    """
    files, own = _visible_files(folder)
    if log:
        _log_own_files(folder, own)
    readable = [
        file
        for file in files
        if reader_of(file) and file.is_file() and file.name not in _DATASET_DESCRIPTIONS
    ]
    chosen = [file for file in readable if not is_text(file)] or readable
    if not chosen:
        raise DataError(
            f"{folder}: holds no file that can be read; those end in {', '.join(READERS)}"
        )
    taken = set(chosen)
    left_out = [str(file.relative_to(folder)) for file in files if file not in taken]
    if left_out and log:
        logger.info("%s: %d files read, left out: %s", folder, len(chosen), ", ".join(left_out))
    return chosen


def _log_own_files(path: Path, own: Iterable[Path]) -> None:
    names = sorted({str(place) for place in own})
    if names:
        logger.info(
            "%s: left out, files of runs, models and token stores: %s", path, ", ".join(names)
        )


def _visible_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files in and below ``folder``, and the ``own_files`` there.

    Hidden files and folders are left out. Links are followed; one to nowhere counts as a file.
    """
    files = list[Path]()
    own = list[Path]()
    seen = set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # links may lead here several times, or in a circle
            folders.clear()
            continue
        seen.add(real)
        ours = own_files(Path(place), {*folders, *names})
        own += [Path(place, name) for name in ours]
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in ours
        )
        files += [
            Path(place, name) for name in names if not name.startswith(".") and name not in ours
        ]
    return sorted(files), own


def _is_saved_dataset(path: Path) -> bool:
    """Return whether ``save_to_disk`` of ``datasets`` wrote this folder."""
    if (path / "dataset_dict.json").is_file():
        return True
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _is_hub_name(path: Path, name: str) -> bool:
    """Return True for ``owner/name``, if it is no path here and does not end like a file."""
    return (
        bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name))
        and not path.exists()
        and reader_of(path) is None
    )


@contextlib.contextmanager
def _hub_faults(part: DataSource) -> Iterator[None]:
    """Turn whatever ``datasets`` raises into a DataError that names the source."""
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
