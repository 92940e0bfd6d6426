"""What a trained model becomes for others."""

from chronicals.export.export import FORMATS, Exported, ExportError, export
from chronicals.export.merge import Merged, MergeError, merge
from chronicals.export.proof import Check, NotProved, Proof
from chronicals.models.gguf_families import NotExpressible

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
    "export",
    "merge",
]
