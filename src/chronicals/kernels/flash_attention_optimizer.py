"""Re-export ``patch_model`` under a module name that older scripts import."""

from chronicals.patching import PatchReport, patch_model, unpatch_model

__all__ = ["PatchReport", "patch_model", "unpatch_model"]
