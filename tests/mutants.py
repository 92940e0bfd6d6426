"""Planted faults: a module of ours in which one expression or statement is another."""

import importlib.util
import inspect
import itertools
import re
import sys
import tempfile
import types
from pathlib import Path

from planting import plant

_numbers = itertools.count()
_folder = tempfile.TemporaryDirectory(prefix="chronicals-")  # removed when the tests end


def mutant(module: types.ModuleType, old: str, new: str, within: str = "") -> types.ModuleType:
    """A copy of ``module`` with ``new`` for ``old``; its operators get names of their own.

    ``old`` must occur once in the module, or in its definition ``within``: see ``planting``.
    """
    text = plant(inspect.getsource(module), {"in": within, "old": old, "new": new})
    name = f"mutant{next(_numbers)}"
    path = Path(_folder.name) / f"{name}.py"  # Triton reads a kernel's text from its file
    path.write_text(re.sub("(['\"])chronicals::", rf"\1{name}::", text))
    spec = importlib.util.spec_from_file_location(name, path)
    copy = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
