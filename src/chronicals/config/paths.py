"""Names of files and folders that are kept, to be found again from another folder."""

from __future__ import annotations

import glob
import os
from pathlib import Path


def lasting(name: str | Path) -> str:
    """Return the absolute path if ``name`` is a path or pattern that exists here.

    Any other name, such as a hub name, is returned unchanged.
    """
    path = os.path.expanduser(name)
    here = bool(path) and (
        os.path.exists(path) or (glob.has_magic(path) and bool(glob.glob(path, recursive=True)))
    )
    return os.path.abspath(path) if here else str(name)
