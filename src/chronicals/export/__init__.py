"""What a trained model becomes for others."""

from chronicals.export.merge import Merged, MergeError, merge

__all__ = ["MergeError", "Merged", "merge"]
