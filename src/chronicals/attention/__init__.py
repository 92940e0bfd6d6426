"""Attention over packed documents."""

from chronicals.attention.backends import BACKENDS, FLASH, choose_backend
from chronicals.attention.backends.per_document import attention_reference
from chronicals.attention.context import attend_split, why_not_divided
from chronicals.attention.documents import document_attention, gather_keys
from chronicals.attention.paged import PAGED_BACKENDS, attend_pages

__all__ = [
    "BACKENDS",
    "FLASH",
    "PAGED_BACKENDS",
    "attend_pages",
    "attend_split",
    "attention_reference",
    "choose_backend",
    "document_attention",
    "gather_keys",
    "why_not_divided",
]


def __dir__() -> list[str]:
    return sorted(__all__)
