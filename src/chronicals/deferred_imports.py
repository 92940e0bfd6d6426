"""Imports transformers without two packages that only other tasks use.

Where scikit-learn and SciPy are installed, transformers' generation imports
``sklearn.metrics.roc_curve`` (for assisted generation) and its losses
``scipy.optimize.linear_sum_assignment`` (for object detection): more than a second of every start.
Importing this module imports transformers with functions in their place that import the true ones
when they are called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from chronicals.versions import check_versions

DEFERRED = {"sklearn.metrics": "roc_curve", "scipy.optimize": "linear_sum_assignment"}
"""By module, the function that transformers imports from it."""


def _stand_in(module: str, function: str) -> ModuleType:
    """A module with ``function`` alone; any other name imports the true module, but those that
    Python itself looks for.
    """

    def true(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(module) is stand_in:
            del sys.modules[module]
        return getattr(import_module(module), name)

    def deferred(*args: Any, **options: Any) -> Any:
        return true(function)(*args, **options)

    stand_in = ModuleType(module)
    vars(stand_in).update({function: deferred, "__getattr__": true})
    return stand_in


@contextmanager
def deferring() -> Iterator[None]:
    """Within: importing the modules of ``DEFERRED`` that are not imported yet gives stand-ins,
    which are gone afterwards.
    """
    put = {
        module: _stand_in(module, function)
        for module, function in DEFERRED.items()
        if module not in sys.modules
    }
    sys.modules.update(put)
    try:
        yield
    finally:
        for module, stand_in in put.items():
            if sys.modules.get(module) is stand_in:
                del sys.modules[module]


check_versions()  # an older transformers lacks what is imported of it further on

with deferring():
    import transformers.generation.utils
    import transformers.modeling_utils  # noqa: F401
