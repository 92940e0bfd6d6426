"""Starting arms, each in a process of its own, and saying what became of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import chronicals
from chronicals.benchmark.measurement import Measurement
from chronicals.benchmark.work import Work

PEERS: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers",),
    "torch-compile": ("transformers",),
    "liger": ("liger_kernel",),
    "unsloth": ("unsloth",),
    "unsloth-recompute": ("unsloth",),
    "unsloth-padded": ("unsloth",),
    "trl": ("trl", "datasets"),
}
"""Peers by name, and the packages each needs; LoRA also needs peft."""

OURS = "ours"


class ArmFailed(RuntimeError):
    """The arm's process ended with an error or ran out of time; the message is its last words."""


@dataclass(frozen=True)
class Arm:
    """An arm by name; ours may have changes to the configuration, which are then part of its name."""

    kind: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join([self.kind, *(f"{name}={value}" for name, value in self.changes.items())])

    @property
    def ours(self) -> bool:
        return self.kind == OURS


def missing(peer: str, mode: str) -> list[str]:
    """Packages that the peer needs and that are not installed."""
    needed = PEERS[peer] + (("peft",) if mode == "lora" else ())
    return [package for package in needed if find_spec(package) is None]


def run_arm(
    work: Work,
    arm: Arm | str,
    steps: int,
    timeout: float,
    trace: Path | None = None,
    documents: Path | None = None,
    label: str = "",
    warm_up: int | None = None,
) -> Measurement:
    """Run one arm on the work and read what it measured.

    Args:
        timeout: seconds after which it is ended.
        label: tells the log file from those of other runs of the arm.
        warm_up: first steps told apart; the work's by default.

    Raises:
        ArmFailed: it crashed or took too long.
    """
    arm = Arm(arm) if isinstance(arm, str) else arm
    stem = re.sub(r"[^\w.=-]+", "-", arm.name) + (f"-{label}" if label else "")
    out = work.folder / "results" / f"{stem}.json"
    options = [
        "--steps",
        str(steps),
        "--warm-up",
        str(work.warm_up if warm_up is None else warm_up),
        "--out",
        str(out),
        "--changes",
        json.dumps(arm.changes),
    ]
    options += ["--trace", str(trace)] if trace else []
    options += ["--documents", str(documents)] if documents else []
    run_process(work, arm.kind, options, timeout, stem)
    return Measurement.read(out)


def run_preparation(work: Work, timeout: float) -> dict[str, Any]:
    """Write what the arms share and measure the rates that the floor is made of; ``error`` where those failed.

    Raises:
        ArmFailed: the work could not be prepared.
    """
    out = work.folder / "results" / "rates.json"
    run_process(work, "prepare", ["--out", str(out)], timeout, "prepare")
    return json.loads(out.read_text())


def run_process(work: Work, name: str, options: list[str], timeout: float, stem: str) -> None:
    """Run ``chronicals.benchmark.arm``; its output goes to ``logs/STEM.log`` in the work's folder.

    Raises:
        ArmFailed: it crashed or took too long.
    """
    for folder in ("results", "logs"):
        (work.folder / folder).mkdir(exist_ok=True)
    log = work.folder / "logs" / f"{stem}.log"
    command = [sys.executable, "-m", "chronicals.benchmark.arm", str(work.folder), name, *options]
    with log.open("w") as lines:
        process = subprocess.Popen(
            command, cwd=work.folder, env=environment(work), stdout=lines, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ArmFailed(f"took longer than {timeout:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        raise ArmFailed(last_words(log.read_text(errors="replace"), code))


def environment(work: Work) -> dict[str, str]:
    """The caller's, with compilers' caches beside the work, so that only the first run of an arm compiles."""
    caches, source = work.folder.parent / "caches", str(Path(chronicals.__file__).parent.parent)
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
    return {**chosen, **offline, **os.environ, "PYTHONPATH": path}


def last_words(log: str, code: int) -> str:
    """The last error that a log names, with the indented lines that belong to it; else its last line."""
    error = r"^[\w.]*(?:Error|Exception|Interrupt|Failure|Failed)\b.*(?:\n +.*)*"
    errors = [found.group() for found in re.finditer(error, log, re.MULTILINE)]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return (errors or lines or [f"exit code {code}"])[-1][:1000]
