"""Writing a trained model for others: merged, as GGUF, in FP8 or 4 bits.

The package can be called: ``chronicals.export(folder, "gguf-q8_0")`` is
``chronicals.export.export(folder, "gguf-q8_0")``.
"""

import sys
from types import ModuleType
from typing import Any

from chronicals.export.export import FORMATS, Exported, ExportError, export
from chronicals.export.hub import Pushed, UploadError, push_saved
from chronicals.export.merge import Merged, MergeError, merge
from chronicals.export.proof import Check, NotProved, Proof
from chronicals.formats.gguf.reader import NotExpressible

__all__ = [
    "FORMATS",
    "Check",
    "ExportError",
    "Exported",
    "MergeError",
    "Merged",
    "NotExpressible",
    "NotProved",
    "Proof",
    "Pushed",
    "UploadError",
    "export",
    "merge",
    "push_saved",
]


def __dir__() -> list[str]:
    return sorted(__all__)


class _CallablePackage(ModuleType):
    """Both the package ``chronicals.export`` and the function that scripts call by that name."""

    def __call__(self, *args: Any, **options: Any) -> list[Exported]:
        return export(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
