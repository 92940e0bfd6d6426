"""Arms as processes: starting one, asking it for rounds, ending it. None outlives this process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chronicals
from chronicals.benchmark.measurement import ROUND, Measurement, round_file
from chronicals.benchmark.work import Work
from chronicals.bound_process import BoundProcess

REFERENCE_ARM = "reference"
OUR_ARM = "ours"

_POLL_SECONDS = 0.05
"""Seconds between two checks for a finished round."""

ENDING_SECONDS = 20.0
"""Seconds for a process to end after it was asked to."""


class ArmFailed(RuntimeError):
    """The arm's process ended with an error or exceeded its time.

    The message is the last error in its log.
    """


class ArmTimedOut(ArmFailed):
    """The arm's process exceeded its time."""


@dataclass(frozen=True)
class Arm:
    """A way of training, and how its process is started.

    Attributes:
        kind: the arm's name in ``module``.
        changes: fields of our configuration; they are part of the arm's name.
        module: module run by ``python -m`` with the options of ``chronicals.benchmark.arm``.
        import_path: an additional folder on the process's import path.
        environment: additional variables; those of the caller take precedence.
    """

    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    module: str = "chronicals.benchmark.arm"
    import_path: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kind, and the fields that are changed."""
        return " ".join([self.kind, *(f"{name}={value}" for name, value in self.changes.items())])


class RunningArm:
    """The process of an arm.

    It imports what it needs and waits for a request; after a round it waits again, with its model,
    optimizer and compiled kernels in memory.

    Args:
        work: what is trained.
        arm: the arm, or its kind.
        steps: sampled steps of a round.
        trace: file for a trace of a few further steps.
        label: part of the names of this process's files, different for each run of the arm.
        further: rounds that may be requested after the first.
        documents: file with the documents of each step, for the reference.
        warm_up: first steps that are not sampled; the work's by default.
    """

    def __init__(
        self,
        work: Work,
        arm: Arm | str,
        steps: int,
        trace: Path | None = None,
        documents: Path | None = None,
        label: str = "",
        warm_up: int | None = None,
        further: int = 0,
    ):
        self.arm = Arm(arm) if isinstance(arm, str) else arm
        stem = re.sub(r"[^\w.=-]+", "-", self.arm.name) + (f"-{label}" if label else "")
        self.out = work.folder / "results" / f"{stem}.json"
        self.further = further
        self.rounds = 0
        for old in self.out.parent.glob(f"{self.out.stem}.*.json"):
            old.unlink()
        options: dict[str, Any] = {
            "--steps": steps,
            "--warm-up": work.warm_up if warm_up is None else warm_up,
            "--out": self.out,
            "--changes": json.dumps(self.arm.changes),
            "--further": further,
        }
        if trace:
            options["--trace"] = trace
        if documents:
            options["--documents"] = documents
        words = [str(word) for option in options.items() for word in option]
        self.process = start_process(work, self.arm, words, stem)

    @property
    def waits(self) -> bool:
        """True if it can be asked for another round."""
        return 0 < self.rounds <= self.further and self.process.running

    def measure(self, timeout: float) -> Measurement:
        """Run the next round and wait for its result.

        Raises:
            ArmFailed: it crashed or took longer than ``timeout`` seconds.
        """
        self.process.say(ROUND)
        path = round_file(self.out, self.rounds)
        self.process.wait_for(path.exists, timeout)
        self.rounds += 1
        if self.rounds > self.further:
            self.end()
        return Measurement.read(path)

    def end(self) -> None:
        """End the process: by closing its input after its first round, else by a signal."""
        if self.rounds:
            self.process.end()
        else:
            self.process.kill()


def run_preparation(work: Work, timeout: float) -> dict[str, Any]:
    """Write what the arms share and measure the rates of the reference step.

    Returns:
        what ``measure_rates`` returns, or ``error`` if that failed.

    Raises:
        ArmFailed: the process crashed or took too long.
    """
    out = work.folder / "results" / "rates.json"
    process = start_process(work, Arm("prepare"), ["--out", str(out)], "prepare")
    process.wait_for(lambda: not process.running, timeout)
    code = process.process.returncode
    if code:
        raise ArmFailed(last_words(process.log.read_text(errors="replace"), code))
    return json.loads(out.read_text())


def start_process(work: Work, arm: Arm, options: list[str], stem: str) -> ArmProcess:
    """Start an arm's process; its output goes to ``logs/STEM.log`` in the work's folder.

    Its environment is the caller's with the arm's variables, and compilers' caches in the
    benchmark's folder, so that only the first run of an arm compiles.
    """
    for folder in ("results", "logs"):
        (work.folder / folder).mkdir(exist_ok=True)
    log = work.folder / "logs" / f"{stem}.log"
    command = [sys.executable, "-m", arm.module, str(work.folder), arm.kind, *options]
    caches = work.folder.parent / "caches"
    defaults = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(caches / "flash"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(work.model).exists():
        defaults["HF_HUB_OFFLINE"] = "1"
    source = str(Path(chronicals.__file__).parent.parent)
    folders = [source, arm.import_path, os.environ.get("PYTHONPATH")]
    import_path = os.pathsep.join(filter(None, folders))
    variables = {**defaults, **arm.environment, **os.environ, "PYTHONPATH": import_path}
    with log.open("w") as lines:
        process = BoundProcess(
            command,
            cwd=work.folder,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=lines,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return ArmProcess(process, log)


@dataclass
class ArmProcess:
    """A started process, its output in ``log``."""

    process: subprocess.Popen[str]
    log: Path

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self.process.poll() is None

    def say(self, line: str) -> None:
        """Write a line to the process's input."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has crashed, which wait_for reports
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def wait_for(self, done: Callable[[], bool], timeout: float) -> None:
        """Wait until ``done``. If that fails, the process is killed.

        Raises:
            ArmFailed: the process ended before ``done``, or ``timeout`` seconds passed.
        """
        end = time.monotonic() + timeout
        try:
            while True:
                running = self.running  # read before done(), so that what it wrote last counts
                if done():
                    return
                if not running:
                    log = self.log.read_text(errors="replace")
                    raise ArmFailed(last_words(log, self.process.returncode))
                if time.monotonic() > end:
                    raise ArmTimedOut(f"took longer than {timeout:.0f} s")
                time.sleep(_POLL_SECONDS)
        except BaseException:  # Ctrl-C too: an arm must not go on computing
            self.kill()
            raise

    def end(self) -> None:
        """Close the process's input, upon which it ends; kill it if it does not."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process and its children by a signal."""
        if self.running:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def last_words(log: str, code: int) -> str:
    """Return the last error in a log with its indented lines, or the last line of the log."""
    error = r"^[\w.]*(?:Error|Exception|Interrupt|Failure|Failed)\b.*(?:\n +.*)*"
    errors = [match.group() for match in re.finditer(error, log, re.MULTILINE)]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return (errors or lines or [f"exit code {code}"])[-1][:1000]
