"""Planted faults: a module of ours with one piece of its text replaced."""

import inspect
import types


def mutant(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    """A copy of ``module`` in which ``old``, which must occur once, reads ``new``."""
    text = inspect.getsource(module)
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {module.__name__}, not once"
    copy = types.ModuleType(f"{module.__name__}_mutant")
    exec(compile(text.replace(old, new), f"<mutant of {module.__file__}>", "exec"), copy.__dict__)
    return copy
