"""Data of a run, from records to Batches: sources → template → tokens → store → packs → batches.

It knows no model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chronicals.data.making.building import build_store as build_store
    from chronicals.data.making.opening import open_divided as open_divided
    from chronicals.data.making.opening import open_held_out as open_held_out
    from chronicals.data.making.opening import open_store as open_store
    from chronicals.data.making.store import TokenStore as TokenStore
    from chronicals.data.packs.loader import BatchStream as BatchStream
    from chronicals.data.packs.loader import create_dataloader as create_dataloader
    from chronicals.data.packs.loader import filler_token as filler_token
    from chronicals.data.packs.packing import PackPlan as PackPlan
    from chronicals.data.packs.packing import SequencePacker as SequencePacker
    from chronicals.data.packs.packing import plan_packs as plan_packs
    from chronicals.data.reading.gate import DataError as DataError
    from chronicals.data.reading.gate import DataReport as DataReport
    from chronicals.data.reading.ledger import Ledger as Ledger
    from chronicals.data.reading.records import BadRow as BadRow
    from chronicals.data.reading.sources import DataSource as DataSource
    from chronicals.data.reading.sources import RowSource as RowSource
    from chronicals.data.reading.sources import read_records as read_records
    from chronicals.data.reading.sources import source_fingerprint as source_fingerprint
    from chronicals.data.tokens.chat_template import TemplateError as TemplateError
    from chronicals.data.tokens.template import Tokenizer as Tokenizer
    from chronicals.data.tokens.template import stop_token_ids as stop_token_ids

FLOORS = ("reading", "kinds", "tokens", "making", "packs")
"""Rooms of this package, from the lowest: each may import those before it."""

_HOME = {
    "BadRow": "reading.records",
    "BatchStream": "packs.loader",
    "DataError": "reading.gate",
    "DataReport": "reading.gate",
    "DataSource": "reading.sources",
    "Ledger": "reading.ledger",
    "PackPlan": "packs.packing",
    "SequencePacker": "packs.packing",
    "RowSource": "reading.sources",
    "TemplateError": "tokens.template",
    "TokenStore": "making.store",
    "Tokenizer": "tokens.template",
    "build_store": "making.building",
    "create_dataloader": "packs.loader",
    "filler_token": "packs.loader",
    "open_divided": "making.opening",
    "open_held_out": "making.opening",
    "open_store": "making.opening",
    "plan_packs": "packs.packing",
    "read_records": "reading.sources",
    "source_fingerprint": "reading.sources",
    "stop_token_ids": "tokens.template",
}
"""File of each name. It is imported when the name is first used, so that a process that only
tokenises starts without torch."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in FLOORS:
        return import_module(f"chronicals.data.{name}")
    if name not in _HOME:
        raise AttributeError(
            f"module 'chronicals.data' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    return getattr(import_module(f"chronicals.data.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
