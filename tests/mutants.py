"""Planted faults: a module of ours in which one expression or statement is another."""

import importlib.util
import inspect
import itertools
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from planting import plant

_numbers = itertools.count()
_folder = tempfile.TemporaryDirectory(prefix="chronicals-")  # removed when the tests end


def mutant(module: types.ModuleType, old: str, new: str, within: str = "") -> types.ModuleType:
    """A copy of ``module`` with ``new`` for ``old``; its operators get names of their own.

    ``old`` must occur once in the module, or in its definition ``within``: see ``planting``.
    """
    return _copy(plant(inspect.getsource(module), {"in": within, "old": old, "new": new}))


@contextmanager
def memory_without_numbers() -> Iterator[None]:
    """Within: what is allocated and not written is NaN, not what happened to be there."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def importing(
    module: types.ModuleType, other: types.ModuleType, instead_of: types.ModuleType
) -> types.ModuleType:
    """A copy of ``module`` that imports from ``other``, a mutant, what it has from ``instead_of``."""
    text = inspect.getsource(module)
    line = f"from {instead_of.__name__} import"
    assert line in text, f"{module.__name__} has no {line!r}"
    return _copy(text.replace(line, f"from {other.__name__} import"))


def _copy(text: str) -> types.ModuleType:
    """A module of this text, whose operators have names of their own."""
    name = f"mutant{next(_numbers)}"
    path = Path(_folder.name) / f"{name}.py"  # Triton reads a kernel's text from its file
    path.write_text(re.sub("(['\"])chronicals::", rf"\1{name}::", text))
    spec = importlib.util.spec_from_file_location(name, path)
    copy = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
