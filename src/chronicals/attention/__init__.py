"""Attention over documents that lie end to end."""

from chronicals.attention.documents import BACKENDS, choose_backend, document_attention

__all__ = ["BACKENDS", "choose_backend", "document_attention"]
