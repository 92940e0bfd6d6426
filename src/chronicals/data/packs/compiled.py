"""Decorator for functions that numba compiles, and the place of their machine code on disk.

numba's own cache holds the code of everything that a function calls and the values of the constants
that it reads, but checks the function's own file only. So the code lies in a folder that is named
by a hash of all sources it may have been compiled from: after any change it is compiled again. If
no folder can be written, nothing is kept.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache

from chronicals import precompilation
from chronicals.data.packs.machine_code import COMPILING_MODULE, source_hash
from chronicals.log_once import log_once

logger = logging.getLogger(__name__)

CODE_FOLDER_PREFIX = "chronicals-"
"""Beginning of the names of folders with machine code."""

DAYS_KEPT = 7
"""Folders of other sources that are older are deleted when a new one is made."""

_POLL_SECONDS = 0.02
"""Pause between two looks for machine code that another process is making."""


def compiled(function: Callable[..., Any] | None = None, *, nogil: bool = False) -> Any:
    """Decorate a function that numba compiles on its first call for the types it gets.

    Args:
        function: what is compiled; without it the decorator itself is returned.
        nogil: release the GIL while it runs.
    """
    if function is None:
        return functools.partial(compiled, nogil=nogil)
    dispatcher = numba.njit(nogil=nogil)(function)
    if source_hash():
        try:
            dispatcher._cache = _Cache(function)
        except RuntimeError:  # numba finds no folder that it can write
            _warn("neither the package's folder nor the user's cache can be written")
    return dispatcher


class _SourceFolder:
    """numba's cache locator, with a subfolder for the present sources."""

    def __init__(self, locator: Any):
        self._locator = locator
        self._path = os.path.join(locator.get_cache_path(), CODE_FOLDER_PREFIX + source_hash())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._locator, name)

    def get_cache_path(self) -> str:
        return self._path

    def ensure_cache_path(self) -> None:
        """Make the folder, and delete those of other sources that are old."""
        if os.path.isdir(self._path):
            return
        with suppress(OSError):  # another process may delete them at the same time
            for folder in Path(self._path).parent.glob(f"{CODE_FOLDER_PREFIX}*"):
                if folder.stat().st_mtime < time.time() - DAYS_KEPT * 86400:
                    shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(self._path, exist_ok=True)


class _Implementation(CompileResultCacheImpl):
    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._locator: Any = _SourceFolder(self.locator)


class _Cache(FunctionCache):
    _impl_class = _Implementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the machine code, waiting for the process that makes it; None if there is none."""
        try:
            code = super().load_overload(sig, target_context)
            while code is None and precompilation.running(COMPILING_MODULE):
                time.sleep(_POLL_SECONDS)
                code = super().load_overload(sig, target_context)
            return code
        except OSError as error:
            _warn(error.strerror or type(error).__name__)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn(error.strerror or type(error).__name__)


def _warn(reason: str) -> None:
    log_once(
        logger.warning,
        f"machine code is not kept, so every process compiles it anew ({reason}); set "
        "NUMBA_CACHE_DIR to a folder with room for it",
    )
