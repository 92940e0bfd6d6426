"""Identity of the machine code that numba makes of this package's sources.

Importing this imports neither torch nor numba, so that a program can ask for the identity before
anything heavy is read.
"""

from __future__ import annotations

import functools
import hashlib
import os
from importlib.metadata import version
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]

COMPILED_SOURCES = "data/**/*.py", "config/*.py", "batch.py"
"""Patterns of every file of the package that ``chronicals.data`` imports."""

COMPILING_MODULE = "chronicals.data.packs.compilation"
"""Module whose ``main`` ``chronicals.precompilation`` runs as a process to compile all functions."""


@functools.cache
def source_hash() -> str:
    """Return a hash of the source files; empty if there are none, as in a zip archive."""
    files = [file for pattern in COMPILED_SOURCES for file in sorted(_PACKAGE.glob(pattern))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16] if files else ""


def facts() -> list[str]:
    """Return everything else that machine code and its place on disk depend on."""
    names = ("CACHE_DIR", "CPU_NAME", "DISABLE_JIT")
    settings = [os.environ.get(f"NUMBA_{name}", "") for name in names]
    return [source_hash(), str(_PACKAGE), version("numba"), version("numpy"), *settings]
