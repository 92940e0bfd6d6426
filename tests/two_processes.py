"""Two or more processes that train together, started as a job operator does, without torchrun."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

TRAINING = Path(__file__).parent / "training"
SOURCES = (path for path in sys.path if path.endswith("src"))
PATHS = os.pathsep.join(
    filter(None, [*map(str, (TRAINING, TRAINING.parent, *SOURCES)), os.environ.get("PYTHONPATH")])
)
"""Where programs of ``tests/training`` find what they import."""


def run(
    program: str, folder: Path, *arguments: str, seconds: float = 300, count: int = 2
) -> tuple[list[int], list[str]]:
    """Exit codes of all ranks, and what each wrote to its stderr.

    Args:
        program: its path; it is given ``folder`` and ``arguments``.
        folder: also for files of what they say, so that no pipe fills up.
        seconds: after which all are killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": PATHS,
    }
    said = [folder / f"rank{rank}.log" for rank in range(count)]
    started = [
        subprocess.Popen(
            [sys.executable, program, str(folder), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=words.open("w"),
            env={**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, words in enumerate(said)
    ]
    try:
        codes = [process.wait(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    return codes, [words.read_text() for words in said]


def saved(program: str, folder: Path, *arguments: str, count: int) -> list[Any]:
    """What each rank wrote with ``torch.save`` to ``RANK.pt`` in the folder; all must have ended
    well.
    """
    codes, words = run(program, folder, *arguments, count=count)
    assert codes == [0] * count, [said[-2500:] for said in words]
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]
