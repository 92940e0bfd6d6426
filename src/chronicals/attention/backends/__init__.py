"""The backends by name."""

from chronicals.attention.backends import flash, flash_attn_4, flex_attention, per_document
from chronicals.attention.support import Backend

BACKENDS: dict[str, Backend] = {
    "flash-attn-4": flash_attn_4.BACKEND,
    "flash": flash.BACKEND,
    "flex": flex_attention.BACKEND,
    "per-document": per_document.BACKEND,
}

__all__ = ["BACKENDS"]
