"""Program that tokenises chunks for another.

It reads the tokenizer once and divides into processes, which share it:

    python -m chronicals.data.making.worker FOLDER IN:OUT [IN:OUT ...]

The folder holds the tokenizer as ``save_pretrained`` writes it, and ``how.json``. Each process has
two pipes, given as file descriptors: chunks come in by one, their documents go out by the other.
The first frame that goes out says whether the tokenizer is the one that was described. A process
ends when its chunks do, and with the one that started it; one that fails ends them all.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from chronicals.data.making.chunks import Chunk
from chronicals.data.making.encoding import ChunkEncoder
from chronicals.data.making.frames import chunk_of_frame, frame_of_encoded, read_frame, write_frame
from chronicals.data.tokens.template import Tokenizer
from chronicals.lifeline import end_with_parent

WORKER_SETTINGS = "how.json"

WORKER_ROWS_AT_ONCE = 128
"""Rows that the tokenizer gets at once: it has one thread here, and many rows hold memory."""

Pipes = tuple[int, int]
"""File descriptors of a process: chunks come in, documents go out."""


def tokenizer_in(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of a folder."""
    import transformers

    return Tokenizer(
        getattr(transformers, settings["class"]).from_pretrained(folder),
        settings["train_on"],
        settings["train_on_roles"],
        settings["train_on_turns"],
        settings["completions_as_chat"],
        settings["kinds"],
        settings["train_after_stop"],
    )


def serve(encoder: ChunkEncoder, same: bool, pipes: Pipes) -> None:
    """Answer each chunk with its documents until there are no more chunks.

    Args:
        same: whether the tokenizer is the one that was described.
    """
    chunks = os.fdopen(pipes[0], "rb")
    out = os.fdopen(pipes[1], "wb")
    write_frame(out, {"same": same})
    while (frame := read_frame(chunks)) is not None:
        for _, encoded in encoder.encoded([chunk_of_frame(*frame)]):
            write_frame(out, *frame_of_encoded(encoded))
        gc.collect(0)


def divided(pipes: list[Pipes], serving: Callable[[Pipes], None]) -> int:
    """Fork a process for each pair of pipes, and wait for all of them.

    Returns:
        The status of the first process that failed, or 128 and the number of its signal; else 0.
    """
    processes = {_fork(pipes, own, serving) for own in pipes}
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


def _fork(pipes: list[Pipes], own: Pipes, serving: Callable[[Pipes], None]) -> int:
    """Return the number of a new process that serves its own pipes, and holds no other's open."""
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    end_with_parent(parent)
    status = 1
    try:
        for pair in pipes:
            if pair != own:
                os.close(pair[0])
                os.close(pair[1])
        # A thread allocates in an arena of its own. The heap, full of holes since the tokenizer was
        # read, is not written to, so the processes go on sharing its pages.
        with ThreadPoolExecutor(1) as beside:
            beside.submit(serving, own).result()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def main() -> None:
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
    tokenizer = tokenizer_in(folder, settings)
    same = tokenizer.fingerprint() == settings["fingerprint"]
    width = settings["width"]
    encoder = ChunkEncoder(tokenizer, width, settings["overlong"], WORKER_ROWS_AT_ONCE)
    encoder.batch_encoder.on_one_core()
    # The first row fills caches that all processes then share.
    list(encoder.encoded([Chunk(0, ["a row"], [{"text": "a"}])]))
    gc.freeze()
    sys.exit(divided(pipes, lambda own: serve(encoder, same, own)))


if __name__ == "__main__":
    main()
