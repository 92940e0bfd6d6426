"""Planted faults: a module of ours with one piece of its text replaced."""

import importlib.util
import inspect
import itertools
import sys
import tempfile
import types
from pathlib import Path

_numbers = itertools.count()
_folder = tempfile.TemporaryDirectory(prefix="chronicals-")  # removed when the tests end


def mutant(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    """A copy of ``module`` in which ``old``, which must occur once, reads ``new``; its operators
    get names of their own.
    """
    text = inspect.getsource(module)
    assert text.count(old) == 1, (
        f"{old!r} occurs {text.count(old)} times in {module.__name__}, not once"
    )
    name = f"mutant{next(_numbers)}"
    path = Path(_folder.name) / f"{name}.py"  # Triton reads a kernel's text from its file
    path.write_text(text.replace(old, new).replace('"chronicals::', f'"{name}::'))
    spec = importlib.util.spec_from_file_location(name, path)
    copy = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
