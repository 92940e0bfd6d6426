"""What a trained model becomes for others."""

from chronicals.export.export import FORMATS, Exported, ExportError, export
from chronicals.export.gguf_families import NotExpressible
from chronicals.export.merge import Merged, MergeError, merge
from chronicals.export.proof import Check, NotProved, Proof

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
