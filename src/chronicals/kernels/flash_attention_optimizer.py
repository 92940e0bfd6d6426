"""``patch_model`` under the name of a module that older scripts import."""

from chronicals.patching import PatchReport, patch_model, unpatch_model

__all__ = ["PatchReport", "patch_model", "unpatch_model"]
