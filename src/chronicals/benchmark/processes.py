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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import chronicals
from chronicals.benchmark.measurement import ROUND, Measurement, round_file
from chronicals.benchmark.work import Work
from chronicals.lifeline import BoundProcess

PEERS: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers",),
    "transformers-recompute": ("transformers",),
    "torch-compile": ("transformers",),
    "liger": ("liger_kernel",),
    "unsloth": ("unsloth",),
    "unsloth-recompute": ("unsloth",),
    "unsloth-padded": ("unsloth",),
    "unsloth-compiled": ("unsloth",),
    "trl": ("trl", "datasets"),
    "trl-recompute": ("trl", "datasets"),
}
"""Peers by name, and the packages each needs; adapters also need peft, a base in 4 bits also
bitsandbytes and accelerate.
"""

PAIR_PEERS = ("trl", "trl-recompute", "unsloth", "unsloth-recompute")
"""Those that train on pairs of answers."""

TAUGHT_PEERS = ("transformers", "liger")
"""Those that train beside a teacher."""

REFERENCE = "reference"

OURS = "ours"

POLL_SECONDS = 0.05
ENDING_SECONDS = 20.0
"""Seconds between two checks for a finished round; seconds for a process to end after it was
asked to.
"""


class ArmFailed(RuntimeError):
    """The arm's process ended with an error or exceeded its time; the message is the last error
    in its log.
    """


class ArmTimedOut(ArmFailed):
    """It exceeded its time."""


@dataclass(frozen=True)
class Arm:
    """An arm by name; ours may have changes to the configuration, which are then part of its
    name.
    """

    kind: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join([self.kind, *(f"{name}={value}" for name, value in self.changes.items())])

    @property
    def ours(self) -> bool:
        return self.kind == OURS


def missing(peer: str, mode: str) -> list[str]:
    """Packages that the peer, or the reference, needs and that are not installed."""
    needed = PEERS.get(peer, ()) + (() if mode == "full" else ("peft",))
    if mode == "qlora" and peer != REFERENCE:
        needed += ("bitsandbytes", "accelerate")
    return [package for package in needed if find_spec(package) is None]


class RunningArm:
    """The process of an arm. It imports what it needs and waits for a request; after a round it
    waits again, with its model, optimizer and compiled kernels in memory.

    Args:
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
        given: dict[str, Any] = {
            "--steps": steps,
            "--warm-up": work.warm_up if warm_up is None else warm_up,
            "--out": self.out,
            "--changes": json.dumps(self.arm.changes),
            "--further": further,
            **({"--trace": trace} if trace else {}),
            **({"--documents": documents} if documents else {}),
        }
        self.process = start_process(
            work, self.arm.kind, [str(x) for pair in given.items() for x in pair], stem
        )

    @property
    def waits(self) -> bool:
        """Whether it can be asked for another round."""
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
        ArmFailed: the work could not be prepared.
    """
    out = work.folder / "results" / "rates.json"
    run_process(work, "prepare", ["--out", str(out)], timeout, "prepare")
    return json.loads(out.read_text())


def run_process(work: Work, name: str, options: list[str], timeout: float, stem: str) -> None:
    """Run ``chronicals.benchmark.arm`` to its end.

    Raises:
        ArmFailed: it crashed or took too long.
    """
    process = start_process(work, name, options, stem)
    process.wait_for(lambda: not process.running, timeout)
    process.raise_if_failed()


def start_process(work: Work, name: str, options: list[str], stem: str) -> ArmProcess:
    """Start ``chronicals.benchmark.arm``; its output goes to ``logs/STEM.log`` in the work's
    folder.
    """
    for folder in ("results", "logs"):
        (work.folder / folder).mkdir(exist_ok=True)
    log = work.folder / "logs" / f"{stem}.log"
    command = [sys.executable, "-m", "chronicals.benchmark.arm", str(work.folder), name, *options]
    with log.open("w") as lines:
        process = BoundProcess(
            command,
            cwd=work.folder,
            env=environment(work, name),
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
        return self.process.poll() is None

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has crashed, which wait_for reports
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def wait_for(self, done: Callable[[], bool], timeout: float) -> None:
        """Wait until ``done``. If that fails, the process is killed.

        Raises:
            ArmFailed: the process ended before ``done``, or ``timeout`` seconds passed.
        """
        try:
            self._wait_for(done, time.monotonic() + timeout)
        except TimeoutError:
            self.kill()
            raise ArmTimedOut(f"took longer than {timeout:.0f} s") from None
        except BaseException:
            self.kill()
            raise

    def _wait_for(self, done: Callable[[], bool], until: float) -> None:
        while True:
            running = self.running  # read before done(), so that what it wrote last counts
            if done():
                return
            if not running:
                raise ArmFailed(self.last_words())
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(POLL_SECONDS)

    def raise_if_failed(self) -> None:
        """Raises ArmFailed where the process ended with an error."""
        if not self.running and self.process.returncode:
            raise ArmFailed(self.last_words())

    def last_words(self) -> str:
        return last_words(self.log.read_text(errors="replace"), self.process.returncode)

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
        if self.running:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def environment(work: Work, arm: str) -> dict[str, str]:
    """The caller's environment, with compilers' caches in the benchmark's folder, so that only
    the first run of an arm compiles. TRL's arms have memory in segments that grow, as Unsloth
    gives itself: their shapes differ from step to step. For the same reason they have Liger's
    rotation in Triton: in CuTe, which Liger takes for large batches where its compiler is
    installed, it is compiled for each new length."""
    caches = work.folder.parent / "caches"
    source = str(Path(chronicals.__file__).parent.parent)
    chosen = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(caches / "flash"),
        "TOKENIZERS_PARALLELISM": "false",
        "UNSLOTH_DISABLE_STATISTICS": "1",
    }
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    offline = {"HF_HUB_OFFLINE": "1"} if Path(work.model).exists() else {}
    of_trl = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "LIGER_KERNEL_IMPL_ROPE": "nvidia-triton",
    }
    return {
        **chosen,
        **offline,
        **(of_trl if arm.startswith("trl") else {}),
        **os.environ,
        "PYTHONPATH": path,
    }


def last_words(log: str, code: int) -> str:
    """The last error in a log with its indented lines; else the last line of the log."""
    error = r"^[\w.]*(?:Error|Exception|Interrupt|Failure|Failed)\b.*(?:\n +.*)*"
    errors = [found.group() for found in re.finditer(error, log, re.MULTILINE)]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return (errors or lines or [f"exit code {code}"])[-1][:1000]
