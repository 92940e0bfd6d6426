"""The process in which one reward function runs, as the trainer sees it.

It ends with the trainer, however that one ends (``bound_process.py``), and the trainer ends it when
it does not answer in time. Only plain values pass between the two, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any

from chronicals.bound_process import BoundProcess
from chronicals.data.reading.plain_values import plain

SECONDS_TO_START = 180.0
"""Within which a process must have imported its function: torch and transformers from a cold
network disk take a minute, and a module may read a model of its own."""

SHORTEST_WAIT = 1e-3
"""Seconds; a socket with a timeout of 0 would not wait at all."""

BYTES_KEPT = 4096
"""Of what a function has printed last; a message shows its last line."""


class RewardProcess:
    """A process that calls one function.

    Args:
        place: path of the function, or the name of a built-in reward.
        argument: of a built-in reward.
    """

    def __init__(self, place: str, argument: str | None):
        self._question = {"place": place, "argument": argument}
        self._process: BoundProcess | None = None
        self._ending = threading.Lock()
        self._closed = False
        self._said = b""

    def start(self) -> dict[str, Any]:
        """Start it, and return what the function needs and takes (``worker.py``).

        Raises:
            ChildProcessError: it ended, or did not answer in time.
        """
        if self._closed:
            raise ChildProcessError("the run has ended")
        ours, theirs = socket.socketpair()
        path = [entry or os.getcwd() for entry in sys.path]
        with theirs:
            self._process = BoundProcess(
                [sys.executable, "-P", "-m", "chronicals.rewards.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # A module beside the recipe is found, after all that the trainer finds.
                env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.getcwd()])},
            )
        self._socket = ours
        self._said = b""
        output = self._process.stdout
        assert output is not None
        self._listening = threading.Thread(target=self._listen, args=(output,), daemon=True)
        self._listening.start()
        return self._exchange(self._question, SECONDS_TO_START)

    def ask(self, rows: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to rows. A process that has ended is started anew first.

        Raises:
            ChildProcessError: it ended, or did not answer in time and was ended.
            TypeError: the rows hold what JSON has no form for; the message names it.
        """
        if self._process is None:
            refused = self.start().get("refused")
            if refused is not None:
                self.end()
                raise ChildProcessError(refused)
        return self._exchange(rows, seconds)

    def _exchange(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        line = _line(question)
        until = time.monotonic() + seconds
        answer = bytearray()
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(line)
            while not answer.endswith(b"\n"):
                self._socket.settimeout(max(until - time.monotonic(), SHORTEST_WAIT))
                part = self._socket.recv(1 << 20)
                if not part:
                    raise EOFError
                answer += part
        except TimeoutError:
            self.end()
            raise ChildProcessError(f"it gave no answer within {seconds:g} s") from None
        except (EOFError, OSError):
            raise ChildProcessError(self._last_words()) from None
        return json.loads(answer)

    def _last_words(self) -> str:
        """End it, and return how it has ended."""
        process = self._process
        if process is None:
            return "it was ended"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        status = process.poll()
        self.end()
        how = "it closed its connection" if status is None else f"it ended with status {status}"
        if status == -signal.SIGKILL:
            how += ", as a machine short of memory ends processes"
        lines = self._said.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), None)
        return how if last is None else f"{how}: {last}"

    def _listen(self, output: IO[bytes]) -> None:
        """Read what the function prints, which would garble the trainer's own output."""
        with output:
            while printed := os.read(output.fileno(), BYTES_KEPT):
                self._said = (self._said + printed)[-BYTES_KEPT:]

    def end(self) -> None:
        """End it and all processes that it has started, whatever they do."""
        with self._ending:
            process = self._process
            self._process = None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._listening.join(1.0)
        self._socket.close()

    def close(self) -> None:
        """End it for good: a thread that asks it further is refused."""
        self._closed = True
        self.end()


def _line(question: dict[str, Any]) -> bytes:
    """Return a line of JSON.

    Raises:
        TypeError: a value has no form there; the message names its column.
    """
    try:
        return json.dumps(question, default=_plain).encode() + b"\n"
    except TypeError:
        for name, column in question.items():
            for value in column:
                try:
                    json.dumps(value, default=_plain)
                except TypeError as error:
                    raise TypeError(f"the column {name!r} has {error}") from None
        raise


def _plain(value: Any) -> Any:
    """Return a value of numpy, pandas or arrow as JSON has it.

    Raises:
        TypeError: it has no form there.
    """
    made = plain(value)
    if made is value:
        raise TypeError(
            f"a value of {type(value).__name__}, which cannot be sent to another process; give the "
            "rewards a text or a number in its place"
        )
    return made
