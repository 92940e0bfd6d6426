"""Processes that tokenise chunks for the one that builds a store.

By itself that one renders and checks on one core only. The others run
``chronicals.data.making.worker``, a program of its own, so that neither the caller's script nor its
threads nor its device come along. Whoever is free takes the next chunk; the documents come back in
the order of the chunks.

A standard pool with an initializer starts later: it imports transformers and reads the tokenizer in
every process, while the worker does so once and forks. Four processes, a tokenizer of 128 thousand
tokens, 2 cores: 3.6 s of CPU and 185 MiB in all; ``ProcessPoolExecutor`` with spawn takes 17 s and
719 MiB, and ``forkserver`` is no better. Both also run the caller's script again.
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

from chronicals.data.making.encoding import ChunkEncoder, Encoded
from chronicals.data.making.worker import (
    WORKER_SETTINGS,
    Frame,
    encoded_of_frame,
    frame_of_chunk,
    read_frame,
    write_frame,
)
from chronicals.data.reading.records import RowChunk
from chronicals.data.tokens.batch_encoding import calls_rust_only

logger = logging.getLogger(__name__)

LETTERS_ALONE = 1 << 21
"""Letters that the building process tokenises before it starts others: a second of work, while a
process starts in two."""

BYTES_FOR_HELP = 1 << 24
"""Size of the files from which on it starts others at once."""

MAX_TOKENIZING_PROCESSES = 32
"""Default number of processes. More would wait for the one that reads rows and writes."""

CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
"""Quota and period of a container (cgroup v2)."""


class TokenizingProcesses:
    """Processes with the tokenizer of ``encoder``.

    They start when there is enough to do, and end with the context.

    Args:
        encoder: makes documents of chunks.
        count: number of processes; by default one for each core that this process may use, by its
            affinity and its quota. With one, no other is started.
        expected: bytes that the rows are made of, as far as that is known.
    """

    def __init__(self, encoder: ChunkEncoder, count: int | None = None, expected: int = 0):
        self.encoder = encoder
        self.expected = expected
        if count is None:
            count = os.cpu_count() or 1
            if hasattr(os, "sched_getaffinity"):
                count = len(os.sched_getaffinity(0))
            with contextlib.suppress(OSError, ValueError):  # there is no quota, or it is "max"
                quota, period = map(int, CPU_QUOTA_FILE.read_text().split())
                count = min(count, max(quota // period, 1))
            count = min(count, MAX_TOKENIZING_PROCESSES)
        self.count = count
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

    def encoded(self, chunks: Iterator[RowChunk]) -> Iterator[tuple[RowChunk, Encoded]]:
        """Yield each chunk and its documents, as ``ChunkEncoder.encoded`` does.

        This process begins, and hands over when the first of the others is ready. It then makes
        only what the others cannot read.

        Raises:
            ChildProcessError: a process has died.
        """
        yield from self.encoder.encoded(self._until_helped(chunks))
        waiting: deque[tuple[RowChunk, Future[Encoded] | None]] = deque()

        def first_waiting() -> tuple[RowChunk, Encoded]:
            chunk, answer = waiting.popleft()
            if answer is None:
                return next(self.encoder.encoded([chunk]))
            return chunk, answer.result()

        for chunk in chunks:
            frame = frame_of_chunk(chunk)
            if frame:
                answer = self._threads.submit(self._ask, frame)
                waiting.append((replace(chunk, records=[]), answer))
            else:
                waiting.append((chunk, None))
            if len(waiting) > 2 * self.count:
                yield first_waiting()
        while waiting:
            yield first_waiting()

    def _until_helped(self, chunks: Iterator[RowChunk]) -> Iterator[RowChunk]:
        """Yield chunks until another process is free to take the next one."""
        letters = 0
        asked = self.count < 2
        for chunk in chunks:
            letters += chunk.letters
            if not asked and (letters >= LETTERS_ALONE or self.expected >= BYTES_FOR_HELP):
                asked = True
                self._threads.submit(self._start)
            yield chunk
            if not self._free.empty() and frame_of_chunk(chunk):
                return

    def _ask(self, frame: Frame) -> Encoded:
        process = self._free.get()
        try:
            if process is None:
                raise ChildProcessError("the processes that tokenise have ended")
            return encoded_of_frame(*process.answer(frame))
        finally:
            # A dead process goes back, too: whoever waits for one must learn of it.
            self._free.put(process)

    # --- the start of the others, in a thread beside what this process does

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
        except Exception as error:  # a user's tokenizer may raise anything when it is saved
            self._doubt(f"{type(error).__name__}: {error}")

    def _describe(self, folder: Path) -> None:
        """Write the tokenizer and the settings that the worker reads."""
        import transformers

        tokenizer = self.encoder.tokenizer
        inner = tokenizer.tokenizer
        kind = type(inner)
        changed = {"_encode_plus", "apply_chat_template"} & vars(inner).keys()
        if (
            getattr(transformers, kind.__name__, None) is not kind
            or not calls_rust_only(inner)
            or changed
        ):
            raise TypeError(
                f"{kind.__name__} is no fast tokenizer of transformers' own, as another process "
                "would read it"
            )
        inner.save_pretrained(folder)
        settings = {
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
        (folder / WORKER_SETTINGS).write_text(json.dumps(settings))

    def _welcome(self, process: _Process) -> None:
        """Make a process free to use, if it has read the same tokenizer."""
        try:
            header, _ = process.answer()
        except ChildProcessError as error:
            self._doubt(str(error).splitlines()[0])
            return
        if header["same"]:
            self._free.put(process)
        else:
            self._doubt("the tokenizer that save_pretrained writes is another")

    def _doubt(self, reason: str) -> None:
        """Log once why this process continues without the others."""
        with self._changing:
            if not (self._ended or self._doubted):
                self._doubted = True
                logger.warning("dataset_num_proc: %s; the store is built by one process", reason)


class _Program:
    """``chronicals.data.making.worker``, which divides into ``processes``.

    Args:
        folder: what the worker reads; its output is kept there, too.
        count: number of processes.
    """

    def __init__(self, folder: Path, count: int):
        self._log = folder / "said.log"
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            # Of each process: file descriptors of the pipes that it has, and of those that we have.
            pipes = []
            our_pipes = []
            for _ in range(count):
                question_in, question_out = os.pipe()
                theirs.callback(os.close, question_in)
                ours.callback(os.close, question_out)
                answer_in, answer_out = os.pipe()
                ours.callback(os.close, answer_in)
                theirs.callback(os.close, answer_out)
                pipes.append((question_in, answer_out))
                our_pipes.append((question_out, answer_in))
            one_thread = {
                "RAYON_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "MALLOC_ARENA_MAX": "3",
            }
            quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
            path = os.pathsep.join(path or os.getcwd() for path in sys.path)
            command = [sys.executable, "-P", "-m", "chronicals.data.making.worker", str(folder)]
            with self._log.open("wb") as log:
                self._program = subprocess.Popen(
                    [*command, *(f"{chunks}:{out}" for chunks, out in pipes)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **one_thread, **quiet, "PYTHONPATH": path},
                    start_new_session=True,
                    pass_fds=[*itertools.chain(*pipes)],
                )
            ours.pop_all()
        self.processes = [
            _Process(self, os.fdopen(questions, "wb"), os.fdopen(answers, "rb"))
            for questions, answers in our_pipes
        ]

    def last_words(self) -> str:
        """Return an error text for when one of the processes has ended."""
        status = self._program.wait()
        status = 128 - status if status > 128 else status
        output = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        ended = (
            f"a process that tokenises has ended with status {status}: "
            f"{(output or 'it said nothing').splitlines()[-1]}"
        )
        if status < 0:
            return (
                f"{ended}; a machine short of memory ends them so: set dataset_num_proc to "
                "fewer, 1 for none but this one"
            )
        return f"{ended}\n{output}"

    def end(self) -> None:
        """End all of its processes, whatever they do."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._program.pid, signal.SIGTERM)
        self._program.wait()
        for process in self.processes:
            process.answers.close()
            with contextlib.suppress(BrokenPipeError):  # it did not read all that was written
                process.questions.close()


@dataclass(frozen=True, eq=False)
class _Process:
    """A process of ``program``, and the pipes to it and from it."""

    program: _Program
    questions: IO[bytes]
    answers: IO[bytes]

    def answer(self, question: Frame | None = None) -> Frame:
        """Return the next frame that comes from it, after it got ``question``.

        Raises:
            ChildProcessError: it has ended.
        """
        try:
            if question is not None:
                write_frame(self.questions, *question)
            answer = read_frame(self.answers)
        except (BrokenPipeError, EOFError):
            answer = None
        if answer is None:
            raise ChildProcessError(self.program.last_words())
        return answer
