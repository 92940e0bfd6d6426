"""The package of peers, which a checkout of the project has and an installed package has not."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import chronicals

PEERS_FOLDER = Path(chronicals.__file__).parents[2] / "benchmarks"
"""Folder of ``peers`` in a checkout."""


def find_peers() -> bool:
    """Make ``peers`` importable. Returns False if this is not a checkout."""
    if not (PEERS_FOLDER / "peers" / "__init__.py").exists():
        return False
    if str(PEERS_FOLDER) not in sys.path:
        sys.path.append(str(PEERS_FOLDER))
    return True


def clone_command() -> str:
    """Return the command that gets a checkout of this version."""
    address = "REPOSITORY"
    for url in importlib.metadata.metadata("chronicals").get_all("Project-URL") or []:
        label, _, link = url.partition(", ")
        if label.lower() in ("repository", "source"):
            address = link
    return f"git clone --branch v{chronicals.__version__} {address} chronicals"
