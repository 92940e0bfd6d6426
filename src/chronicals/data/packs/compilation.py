"""What numba compiles for a run's data: by which sources its machine code is told apart, and all of
it at once.

Compiling takes some ten seconds, once. ``chronicals.precompilation`` runs ``main`` as a process of its
own, so this module imports what is heavy in functions.
"""

from __future__ import annotations

import functools
import hashlib
import os
from importlib.metadata import version
from pathlib import Path

PACKAGE = Path(__file__).parents[2]

SOURCES = "data/**/*.py", "config/*.py", "batch.py"
"""Every file of ours that this room imports."""


@functools.cache
def sources() -> str:
    """A hash of the source files; empty where there are none, as in a zip archive."""
    files = [file for pattern in SOURCES for file in sorted(PACKAGE.glob(pattern))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16] if files else ""


def facts() -> list[str]:
    """What else machine code depends on, and where it is kept."""
    kept = (
        os.environ.get(f"NUMBA_{name}", "") for name in ("CACHE_DIR", "CPU_NAME", "DISABLE_JIT")
    )
    return [sources(), str(PACKAGE), version("numba"), version("numpy"), *kept]


def main() -> None:
    """Assemble one step of two documents: that calls, and so compiles, what any run calls."""
    import numpy as np

    from chronicals.config import ChronicalsConfig
    from chronicals.data.making.store import TokenStore
    from chronicals.data.packs.loader import BatchStream
    from chronicals.data.reading.gate import DataReport

    numbers, content = (
        np.arange(2),
        bytes(16),
    )  # arrays over a file cannot be written, and numba tells them apart
    ids = np.frombuffer(content, np.int32)
    trained = np.frombuffer(content, np.uint8)
    lengths = np.full(2, 2)
    starts = 2 * numbers
    hashes = numbers.astype(np.uint64)
    store = TokenStore(
        Path(), lengths, lengths - 1, numbers, hashes, DataReport(), 0, ids, trained, starts, starts
    )
    next(BatchStream(store, ChronicalsConfig(max_seq_length=4)).steps(count=1))
