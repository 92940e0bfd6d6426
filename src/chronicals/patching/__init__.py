"""Replacing parts of a Hugging Face model by kernels: norms, gated MLPs, rotary embedding, the loss."""

from chronicals.patching.patch import patch_model, patch_parts, unpatch_model
from chronicals.patching.report import Left, PatchReport, Replaced

__all__ = ["Left", "PatchReport", "Replaced", "patch_model", "patch_parts", "unpatch_model"]
