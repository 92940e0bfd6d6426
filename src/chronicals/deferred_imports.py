"""Import transformers without two packages that only other tasks use.

If scikit-learn and SciPy are installed, transformers' generation imports
``sklearn.metrics.roc_curve`` (for assisted generation) and its losses import
``scipy.optimize.linear_sum_assignment`` (for object detection). This takes more than a second of
every start. Importing this module imports transformers with stand-ins, which import the real
functions when they are called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from chronicals.versions import check_versions

DEFERRED_FUNCTIONS = {"sklearn.metrics": "roc_curve", "scipy.optimize": "linear_sum_assignment"}
"""The function that transformers imports from each module."""


def _stand_in(module: str, function: str) -> ModuleType:
    """Return a stand-in module with a deferred ``function``.

    Any other attribute, except those that Python itself looks up, imports the real module.
    """

    def real(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(module) is stand_in:
            del sys.modules[module]
        return getattr(import_module(module), name)

    def deferred(*args: Any, **options: Any) -> Any:
        return real(function)(*args, **options)

    stand_in = ModuleType(module)
    vars(stand_in).update({function: deferred, "__getattr__": real})
    return stand_in


@contextmanager
def deferring() -> Iterator[None]:
    """Replace the modules of ``DEFERRED_FUNCTIONS`` by stand-ins in the context.

    Modules that are already imported stay.
    """
    stand_ins = {
        module: _stand_in(module, function)
        for module, function in DEFERRED_FUNCTIONS.items()
        if module not in sys.modules
    }
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for module, stand_in in stand_ins.items():
            if sys.modules.get(module) is stand_in:
                del sys.modules[module]


check_versions()  # before imports that an older transformers does not have

with deferring():
    import transformers.generation.utils
    import transformers.modeling_utils  # noqa: F401
