"""Functions compiled by numba, and where their machine code is kept between processes.

A cached function holds the code of everything that it calls and the values of the constants that it
reads, but numba checks the function's own file only. So the code lies in a folder named by a hash
of all the sources it may have been compiled from: after any change of them it is compiled again.
Where no folder can be written, nothing is kept.
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
from chronicals.data.packs import compilation
from chronicals.data.packs.compilation import sources

logger = logging.getLogger(__name__)

PREFIX = "chronicals-"
DAYS_KEPT = 7
"""Folders of other sources that are older are deleted when a new one is made."""


def compiled(function: Callable[..., Any] | None = None, *, nogil: bool = False) -> Any:
    """Decorator: compile the function on its first call for the types it is given.

    Args:
        nogil: release the GIL while it runs.
    """
    if function is None:
        return functools.partial(compiled, nogil=nogil)
    dispatcher = numba.njit(nogil=nogil)(function)
    if sources():
        try:
            dispatcher._cache = _Cache(function)
        except RuntimeError:  # of numba
            _warn("neither the package's folder nor the user's cache can be written")
    return dispatcher


LOOKS_AGAIN = 0.02
"""Seconds between two looks for machine code that another process is making."""


class _Folder:
    """A place of numba's for machine code, and in it a folder for these sources."""

    def __init__(self, place: Any):
        self._place = place
        self._path = os.path.join(place.get_cache_path(), PREFIX + sources())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    def get_cache_path(self) -> str:
        return self._path

    def ensure_cache_path(self) -> None:
        if not os.path.isdir(self._path):
            _delete_old(Path(self._path).parent)
            os.makedirs(self._path, exist_ok=True)


def _delete_old(place: Path) -> None:
    with suppress(OSError):  # another process deletes them, too
        for folder in place.glob(f"{PREFIX}*"):
            if folder.stat().st_mtime < time.time() - DAYS_KEPT * 86400:
                shutil.rmtree(folder, ignore_errors=True)


class _Implementation(CompileResultCacheImpl):
    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._locator: Any = _Folder(self.locator)


class _Cache(FunctionCache):
    _impl_class = _Implementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """None where there is no machine code, also none that is being made by another process."""
        try:
            while (
                found := super().load_overload(sig, target_context)
            ) is None and precompilation.running(compilation.__name__):
                time.sleep(LOOKS_AGAIN)
            return found
        except OSError as error:
            _warn(error.strerror or type(error).__name__)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn(error.strerror or type(error).__name__)


@functools.cache
def _warn(reason: str) -> None:
    logger.warning(
        "machine code is not kept, so every process compiles it anew (%s); set NUMBA_CACHE_DIR to "
        "a folder with room for it",
        reason,
    )
