"""Names of the objectives for help texts, read from their files: an import of these imports torch, which takes too long."""

from __future__ import annotations

import re
from pathlib import Path

import chronicals

REGISTERED = re.compile(r"^@register\((.*)\)$", re.MULTILINE)
NAME = re.compile(r'"(\w+)"')


def objective_names() -> list[str]:
    """What ``--objective`` takes, as the files of ``objectives`` register it."""
    files = sorted((Path(chronicals.__file__).parent / "objectives").glob("*.py"))
    return [name for file in files for found in REGISTERED.findall(file.read_text()) for name in NAME.findall(found)]
