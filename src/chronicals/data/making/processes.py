"""Processes that tokenise chunks for the one that builds a store, which by itself renders and
checks on one core only.

They are those of ``chronicals.data.making.worker``, a program of its own, so that neither the caller's
script nor its threads nor its device come along. Whoever is free takes the next chunk; what chunks
become comes back in their order.

A standard pool with an initializer starts later: it imports transformers and reads the tokenizer in
every process, where the worker does so once and forks. Four processes, a tokenizer of 128 thousand
tokens, 2 cores: 3.6 s of CPU and 185 MiB in all; of ``ProcessPoolExecutor`` with spawn 17 s and 719
MiB, and ``forkserver`` is no better. Both also run the caller's script again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO

from chronicals.data.making.chunks import Chunk, ChunkEncoder, Encoded
from chronicals.data.making.frames import (
    Frame,
    encoded_of_frame,
    frame_of_chunk,
    read_frame,
    write_frame,
)
from chronicals.data.making.worker import HOW
from chronicals.data.tokens.batch_encoding import is_plain

logger = logging.getLogger(__name__)

LETTERS_ALONE = 1 << 21
BYTES_AT_LEAST = 1 << 24
"""Letters that the building process takes before it asks for help, a second of work: a process
starts in two. Of files that hold so many bytes it asks at once."""

MOST = 32
"""Processes, unless told; beyond it, whoever reads the rows and writes the store is what they
wait for.
"""

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def one_a_core() -> int:
    """Processes for the cores that this one may use: by its affinity, and by its container's
    quota (cgroup v2).
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
        quota, period = map(int, QUOTA.read_text().split())
        cores = min(cores, max(quota // period, 1))
    return min(cores, MOST)


class TokenizingProcesses:
    """Processes with the tokenizer of ``encoder``, which begin when there is enough to do and end
    with the context.

    Args:
        count: how many; by default ``one_a_core()``. With one there is no other.
        expected: bytes that the rows are made of, as far as that is known.
    """

    def __init__(self, encoder: ChunkEncoder, count: int | None = None, expected: int = 0):
        self.encoder = encoder
        self.expected = expected
        self.count = one_a_core() if count is None else count
        self._free: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self._changing = threading.Lock()
        self._ended = False
        self._doubted = False
        self._program: _Program | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> TokenizingProcesses:
        self._threads = ThreadPoolExecutor(max(self.count, 1), thread_name_prefix="tokenizing")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changing:
            self._ended = True
            if self._program is not None:
                self._program.end()
        self._free.put(None)
        self._threads.shutdown(cancel_futures=True)
        if self._folder is not None:
            self._folder.cleanup()

    def encoded(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        """What ``ChunkEncoder.encoded`` gives. This process begins, and hands over when the first
        of the others is ready.

        Raises:
            ChildProcessError: one of them has died.
        """
        yield from self.encoder.encoded(self._until_helped(chunks))
        yield from self._by_others(chunks)

    def _until_helped(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        letters = 0
        asked = self.count < 2
        for chunk in chunks:
            letters += chunk.letters
            if not asked and (letters >= LETTERS_ALONE or self.expected >= BYTES_AT_LEAST):
                asked = True
                self._threads.submit(self._start)
            yield chunk
            if not self._free.empty() and frame_of_chunk(chunk):
                return

    def _by_others(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        waiting: deque[tuple[Chunk, Future[Encoded] | None]] = deque()
        for chunk in chunks:
            if frame := frame_of_chunk(chunk):
                waiting.append((replace(chunk, records=[]), self._threads.submit(self._ask, frame)))
            else:
                waiting.append((chunk, None))
            if len(waiting) > 2 * self.count:
                yield self._answer(*waiting.popleft())
        while waiting:
            yield self._answer(*waiting.popleft())

    def _answer(self, chunk: Chunk, answer: Future[Encoded] | None) -> tuple[Chunk, Encoded]:
        return next(self.encoder.encoded([chunk])) if answer is None else (chunk, answer.result())

    def _ask(self, frame: Frame) -> Encoded:
        process = self._free.get()
        try:
            if process is None:
                raise ChildProcessError("the processes that tokenise have ended")
            return encoded_of_frame(*process.answer(frame))
        finally:
            self._free.put(
                process
            )  # also one that has died: whoever waits for one must learn of it

    # --- their beginning, beside what this process does
    # ----------------------------------------------------------

    def _start(self) -> None:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="chronicals-")
            folder = Path(self._folder.name)
            self._describe(folder)
            with self._changing:
                if self._ended:
                    return
                self._program = _Program(folder, self.count)
            for process in self._program.processes:
                self._threads.submit(self._welcome, process)
        except Exception as error:  # whatever a tokenizer of another's raises where it is written
            self._doubt(f"{type(error).__name__}: {error}")

    def _describe(self, folder: Path) -> None:
        import transformers

        tokenizer = self.encoder.tokenizer
        inner = tokenizer.tokenizer
        kind = type(tokenizer.tokenizer)
        changed = {"_encode_plus", "apply_chat_template"} & vars(inner).keys()
        if getattr(transformers, kind.__name__, None) is not kind or not is_plain(inner) or changed:
            raise TypeError(
                f"{kind.__name__} is no fast tokenizer of transformers' own, as another process "
                "would read it"
            )
        inner.save_pretrained(folder)
        how = {
            "class": kind.__name__,
            "fingerprint": tokenizer.fingerprint(),
            "width": self.encoder.width,
            "overlong": self.encoder.overlong,
            "train_on": tokenizer.train_on,
            "train_on_roles": sorted(tokenizer.train_on_roles),
            "train_on_turns": tokenizer.train_on_turns,
            "completions_as_chat": tokenizer.completions_as_chat,
            "kinds": sorted(tokenizer.kinds),
            "train_after_stop": tokenizer.train_after_stop,
        }
        (folder / HOW).write_text(json.dumps(how))

    def _welcome(self, process: _Process) -> None:
        try:
            same = process.answer()[0]["same"]
        except ChildProcessError as error:
            self._doubt(str(error).splitlines()[0])
            return
        if same:
            self._free.put(process)
        else:
            self._doubt("the tokenizer that save_pretrained writes is another")

    def _doubt(self, reason: str) -> None:
        with self._changing:
            if not (self._ended or self._doubted):
                self._doubted = True
                logger.warning("dataset_num_proc: %s; the store is built by one process", reason)


class _Program:
    """``chronicals.data.making.worker``, which divides into ``processes``.

    Args:
        folder: as the worker reads it; what it says of itself is kept there, too.
    """

    def __init__(self, folder: Path, count: int):
        self._log = folder / "said.log"
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            questions = [_pipe(theirs, ours) for _ in range(count)]
            answers = [_pipe(ours, theirs) for _ in range(count)]
            self._program = self._begun(
                folder, [(question[0], answer[1]) for question, answer in zip(questions, answers)]
            )
            ours.pop_all()
        self.processes = [
            _Process(self, os.fdopen(question[1], "wb"), os.fdopen(answer[0], "rb"))
            for question, answer in zip(questions, answers, strict=True)
        ]

    def _begun(self, folder: Path, pipes: list[tuple[int, int]]) -> subprocess.Popen[bytes]:
        alone = {
            "RAYON_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "MALLOC_ARENA_MAX": "3",
        }
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        command = [sys.executable, "-P", "-m", "chronicals.data.making.worker", str(folder)]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [*command, *(f"{chunks}:{out}" for chunks, out in pipes)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **alone, **quiet, "PYTHONPATH": path},
                start_new_session=True,
                pass_fds=[*itertools.chain(*pipes)],
            )

    def last_words(self) -> str:
        """What is to be said of it when one of its processes has ended."""
        status = self._program.wait()
        status = 128 - status if status > 128 else status
        said = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        ended = (
            f"a process that tokenises has ended with status {status}: "
            f"{(said or 'it said nothing').splitlines()[-1]}"
        )
        if status < 0:
            return (
                f"{ended}; a machine short of memory ends them so: set dataset_num_proc to "
                "fewer, 1 for none but this one"
            )
        return f"{ended}\n{said}"

    def end(self) -> None:
        """End all of its processes, whatever they do."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._program.pid, signal.SIGTERM)
        self._program.wait()
        for process in self.processes:
            process.answers.close()
            with contextlib.suppress(BrokenPipeError):  # of what it did not take any more
                process.questions.close()


def _pipe(readers: contextlib.ExitStack, writers: contextlib.ExitStack) -> tuple[int, int]:
    """Both ends of a new pipe, each closed with those of its side."""
    read, write = os.pipe()
    readers.callback(os.close, read)
    writers.callback(os.close, write)
    return read, write


@dataclass(frozen=True, eq=False)
class _Process:
    """One of them, and the pipes to it and from it."""

    program: _Program
    questions: IO[bytes]
    answers: IO[bytes]

    def answer(self, question: Frame | None = None) -> Frame:
        """The next frame that comes from it, after it has been given ``question``."""
        try:
            if question is not None:
                write_frame(self.questions, *question)
            answer = read_frame(self.answers)
        except (BrokenPipeError, EOFError):
            answer = None
        if answer is None:
            raise ChildProcessError(self.program.last_words())
        return answer
