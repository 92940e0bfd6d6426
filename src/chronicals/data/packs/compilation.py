"""Program that compiles all numba functions of a run's data, so that the run finds them compiled.

Compiling takes some ten seconds, once. ``chronicals.precompilation`` runs ``main`` as a process of
its own while the run imports its libraries.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chronicals.config import ChronicalsConfig
from chronicals.data.making.store import TokenStore
from chronicals.data.packs.loader import BatchStream
from chronicals.data.reading.gate import DataReport


def main() -> None:
    """Assemble one step of two documents, which compiles every function that a run calls."""
    numbers = np.arange(2)
    # A store's arrays lie in a file and are read-only; numba compiles such arrays apart.
    content = bytes(16)
    ids = np.frombuffer(content, np.int32)
    trained = np.frombuffer(content, np.uint8)
    lengths = np.full(2, 2)
    starts = 2 * numbers
    hashes = numbers.astype(np.uint64)
    store = TokenStore(
        Path(), lengths, lengths - 1, numbers, hashes, DataReport(), 0, ids, trained, starts, starts
    )
    next(BatchStream(store, ChronicalsConfig(max_seq_length=4)).steps(count=1))
