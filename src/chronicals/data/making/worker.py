"""A program that tokenises chunks for another: it reads the tokenizer once and divides into
processes, which share it.

    python -m chronicals.data.making.worker FOLDER IN:OUT [IN:OUT ...]

The folder holds the tokenizer as ``save_pretrained`` writes it, and ``how.json``. Each process has
two pipes, given as file descriptors: chunks come in by one, what they become goes out by the other.
The first frame that goes out says whether this tokenizer is the same as there. A process ends where
its chunks do, and with the one that started it; one that fails ends them all.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from chronicals.bound_process import end_with_parent
from chronicals.data.making.chunks import Chunk, ChunkEncoder
from chronicals.data.making.frames import chunk_of_frame, frame_of_encoded, read_frame, write_frame
from chronicals.data.tokens.template import Tokenizer

HOW = "how.json"

AT_ONCE = 128
"""Rows that the tokenizer is given at once: it has one thread here, and many hold memory."""

Pipes = tuple[int, int]


def tokenizer_in(folder: Path, how: dict[str, Any]) -> Tokenizer:
    import transformers

    inner = getattr(transformers, how["class"]).from_pretrained(folder)
    trained = how["train_on"], how["train_on_roles"], how["train_on_turns"]
    return Tokenizer(
        inner, *trained, how["completions_as_chat"], how["kinds"], how["train_after_stop"]
    )


def serve(encoder: ChunkEncoder, same: bool, pipes: Pipes) -> None:
    chunks = os.fdopen(pipes[0], "rb")
    out = os.fdopen(pipes[1], "wb")
    write_frame(out, {"same": same})
    while (frame := read_frame(chunks)) is not None:
        for _, encoded in encoder.encoded([chunk_of_frame(*frame)]):
            write_frame(out, *frame_of_encoded(encoded))
        gc.collect(0)


def divided(pipes: list[Pipes], serving: Callable[[Pipes], None]) -> int:
    """Once all have ended: the status of the first process that failed, or 128 and the number of
    its signal; else 0.
    """
    processes = {_begun(pipes, own, serving) for own in pipes}
    signal.signal(
        signal.SIGTERM, lambda *_: None
    )  # it is sent to all of them, and this one sees them end
    _close(pipes)
    failed = 0
    while processes:
        process, status = os.wait()
        processes.remove(process)
        if status and not failed:
            failed = status
            for other in processes:
                os.kill(other, signal.SIGTERM)
    return 128 + os.WTERMSIG(failed) if os.WIFSIGNALED(failed) else os.WEXITSTATUS(failed)


def _begun(pipes: list[Pipes], own: Pipes, serving: Callable[[Pipes], None]) -> int:
    """The number of a new process that serves its own pipes, and holds no other's open.

    It serves them in a thread, whose memory is an arena of its own: the heap, full of holes that
        reading the tokenizer left,
    is not written to, and all processes go on sharing its pages.
    """
    parent = os.getpid()
    if process := os.fork():
        return process
    end_with_parent(parent)
    status = 1
    try:
        _close([pair for pair in pipes if pair != own])
        with ThreadPoolExecutor(1) as beside:
            beside.submit(serving, own).result()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _close(pipes: list[Pipes]) -> None:
    for pipe in (pipe for pair in pipes for pipe in pair):
        os.close(pipe)


def main() -> None:
    end_with_parent(os.getppid())
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if not installed: some transformers import it, 3 s and 270 MB
    gc.disable()
    folder = Path(sys.argv[1])
    pipes = [(int(chunks), int(out)) for chunks, out in (pair.split(":") for pair in sys.argv[2:])]
    how = json.loads((folder / HOW).read_text())
    tokenizer = tokenizer_in(folder, how)
    same = tokenizer.fingerprint() == how["fingerprint"]
    encoder = ChunkEncoder(tokenizer, how["width"], how["overlong"], AT_ONCE)
    encoder.rows.on_one_core()
    list(
        encoder.encoded([Chunk(0, ["a row"], [{"text": "a"}])])
    )  # what the first row makes, all share
    gc.freeze()
    sys.exit(divided(pipes, lambda own: serve(encoder, same, own)))


if __name__ == "__main__":
    main()
