"""Program that tokenises chunks for another, and the frames that the two exchange.

It reads the tokenizer once and divides into processes, which share it:

    python -m chronicals.data.making.worker FOLDER IN:OUT [IN:OUT ...]

The folder holds the tokenizer as ``save_pretrained`` writes it, and ``how.json``. Each process has
two pipes, given as file descriptors: chunks come in by one, their documents go out by the other.
The first frame that goes out says whether the tokenizer is the one that was described. A process
ends when its chunks do, and with the one that started it; one that fails ends them all.

A frame is two lengths (uint64), a header in JSON, and a body: rows as JSON one behind the other, or
arrays.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from chronicals.bound_process import end_with_parent
from chronicals.data.kinds.messages import holds_media
from chronicals.data.making.documents import FlatDocuments
from chronicals.data.making.encoding import ChunkEncoder, Encoded
from chronicals.data.reading.gate import DataReport
from chronicals.data.reading.records import MEDIA_FIELDS, READ_FIELDS, BadRow, Line, RowChunk
from chronicals.data.tokens.template import Tokenizer

WORKER_SETTINGS = "how.json"

WORKER_ROWS_AT_ONCE = 128
"""Rows that the tokenizer gets at once: it has one thread here, and many rows hold memory."""

Frame = tuple[dict[str, Any], bytes]
"""Header and body."""

Pipes = tuple[int, int]
"""File descriptors of a process: chunks come in, documents go out."""


def write_frame(stream: IO[bytes], header: Mapping[str, Any], body: bytes = b"") -> None:
    """Write a frame and flush it."""
    described = json.dumps(header).encode()
    stream.write(np.array([len(described), len(body)], np.uint64).tobytes())
    stream.write(described)
    stream.write(body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Frame | None:
    """Return the next frame; None at the end.

    Raises:
        EOFError: the stream ends within a frame.
    """
    lengths = stream.read(16)
    if not lengths:
        return None
    if len(lengths) < 16:
        raise EOFError(f"{len(lengths)} of 16 bytes")
    parts = []
    for length in np.frombuffer(lengths, np.uint64).tolist():
        part = stream.read(length)
        if len(part) < length:
            raise EOFError(f"{len(part)} of {length} bytes")
        parts.append(part)
    header, body = parts
    return json.loads(header), body


def frame_of_chunk(chunk: RowChunk) -> Frame | None:
    """Return a chunk's rows without the fields that nobody reads.

    None if a row holds what JSON has no form for: this process then tokenises the chunk itself.
    """
    records = [*chunk.earlier, *chunk.records]
    lines = []
    for record in records:
        if isinstance(record, (Line, BadRow)):
            lines.append(record if isinstance(record, Line) else b"")
            continue
        if not isinstance(record, Mapping) or not all(isinstance(name, str) for name in record):
            return None
        fields = {}
        try:
            for name, value in record.items():
                if name in READ_FIELDS or value is None:
                    fields[name] = value
                else:
                    # 1 for pictures and sound, which the other process refuses, 0 for what nobody
                    # reads
                    fields[name] = int(name in MEDIA_FIELDS and holds_media(value))
            if any(isinstance(value, tuple) for value in fields.values()):
                return None  # a tuple would come back as a list
            lines.append(json.dumps(fields, ensure_ascii=False).encode())
        except (TypeError, ValueError, RecursionError):
            return None  # half of a surrogate pair is a ValueError, too
    bad = {n: [row.reason, row.rule] for n, row in enumerate(records) if isinstance(row, BadRow)}
    header = {
        "first": chunk.first,
        "places": chunk.places,
        "lengths": [*map(len, lines)],
        "bad": bad,
        "earlier": len(chunk.earlier),
    }
    return header, b"".join(lines)


def chunk_of_frame(header: Mapping[str, Any], body: bytes) -> RowChunk:
    """Return the chunk that ``frame_of_chunk`` wrote."""
    records = list[Any]()
    end = 0
    for length in header["lengths"]:
        records.append(Line(body[end : end + length]))
        end += length
    for number, fault in header["bad"].items():
        records[int(number)] = BadRow(*fault)
    earlier = header["earlier"]
    return RowChunk(header["first"], header["places"], records[earlier:], earlier=records[:earlier])


def frame_of_encoded(encoded: Encoded) -> Frame:
    """Return the documents of a chunk as a frame."""
    documents = encoded.documents
    arrays = [
        documents.offsets,
        documents.rows,
        documents.sides,
        documents.shared,
        documents.labels,
        encoded.hashes,
        documents.ids,
        documents.trained,
        encoded.row_kinds,
    ]
    header = {
        "documents": len(documents),
        "tokens": len(documents.ids),
        "report": asdict(encoded.report),
    }
    return header, b"".join(array.tobytes() for array in arrays)


def encoded_of_frame(header: Mapping[str, Any], body: bytes) -> Encoded:
    """Return the documents that ``frame_of_encoded`` wrote, as views of ``body``."""
    documents = header["documents"]
    tokens = header["tokens"]
    contents = (
        (np.int64, documents + 1),
        *[(np.int64, documents)] * 4,
        (np.uint64, documents),
        (np.int32, tokens),
        (np.uint8, tokens),
        (np.int8, documents),
    )
    arrays = []
    begin = 0
    for dtype, count in contents:
        arrays.append(np.frombuffer(body, dtype, count, begin))
        begin += arrays[-1].nbytes
    offsets, rows, sides, shared, labels, hashes, ids, trained, row_kinds = arrays
    return Encoded(
        FlatDocuments(ids, trained, offsets, rows, sides, shared, labels),
        hashes,
        row_kinds,
        DataReport.from_dict(header["report"]),
    )


def serve(encoder: ChunkEncoder, same: bool, pipes: Pipes) -> None:
    """Answer each chunk with its documents until there are no more chunks.

    Args:
        encoder: makes the documents.
        same: whether the tokenizer is the one that was described.
        pipes: where chunks come in and documents go out.
    """
    chunks = os.fdopen(pipes[0], "rb")
    out = os.fdopen(pipes[1], "wb")
    write_frame(out, {"same": same})
    while (frame := read_frame(chunks)) is not None:
        for _, encoded in encoder.encoded([chunk_of_frame(*frame)]):
            write_frame(out, *frame_of_encoded(encoded))
        gc.collect(0)


def forked(pipes: list[Pipes], serving: Callable[[Pipes], None]) -> int:
    """Fork a process for each pair of pipes, which holds no other's open, and wait for all of them.

    Returns:
        The status of the first process that failed, or 128 and the number of its signal; else 0.
    """
    parent = os.getpid()
    processes = set[int]()
    for own in pipes:
        process = os.fork()
        if process:
            processes.add(process)
            continue
        end_with_parent(parent)
        status = 1
        try:
            for pair in pipes:
                if pair != own:
                    os.close(pair[0])
                    os.close(pair[1])
            # A thread allocates in an arena of its own. The heap, full of holes since the tokenizer
            # was read, is not written to, so the processes go on sharing its pages.
            with ThreadPoolExecutor(1) as beside:
                beside.submit(serving, own).result()
            status = 0
        except BaseException:  # whatever it is, a fork ends here with its trace
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    # SIGTERM goes to the whole group; this process must stay to see the others end.
    signal.signal(signal.SIGTERM, lambda *_: None)
    for pipe in itertools.chain(*pipes):
        os.close(pipe)
    failed = 0
    while processes:
        process, status = os.wait()
        processes.remove(process)
        if status and not failed:
            failed = status
            for other in processes:
                os.kill(other, signal.SIGTERM)
    return 128 + os.WTERMSIG(failed) if os.WIFSIGNALED(failed) else os.WEXITSTATUS(failed)


def tokenise_for_parent() -> None:
    """Read the tokenizer, divide, and serve; the arguments are the command's."""
    end_with_parent(os.getppid())
    # As if torch were not installed: some versions of transformers import it, 3 s and 270 MB.
    sys.modules["torch"] = None  # type: ignore[assignment]
    gc.disable()
    folder = Path(sys.argv[1])
    pipes = []
    for pair in sys.argv[2:]:
        chunks, out = pair.split(":")
        pipes.append((int(chunks), int(out)))
    settings = json.loads((folder / WORKER_SETTINGS).read_text())
    import transformers

    tokenizer = Tokenizer(
        getattr(transformers, settings["class"]).from_pretrained(folder),
        settings["train_on"],
        settings["train_on_roles"],
        settings["train_on_turns"],
        settings["completions_as_chat"],
        settings["kinds"],
        settings["train_after_stop"],
    )
    same = tokenizer.fingerprint() == settings["fingerprint"]
    width = settings["width"]
    encoder = ChunkEncoder(tokenizer, width, settings["overlong"], WORKER_ROWS_AT_ONCE)
    encoder.batch_encoder.on_one_core()
    # The first row fills caches that all processes then share.
    list(encoder.encoded([RowChunk(0, ["a row"], [{"text": "a"}])]))
    gc.freeze()
    sys.exit(forked(pipes, lambda own: serve(encoder, same, own)))


if __name__ == "__main__":
    tokenise_for_parent()
