"""From records to Batches: sources → template → tokens → store → packs → batches. Knows no
model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chronicals.data.building import build_store as build_store
    from chronicals.data.building import open_divided as open_divided
    from chronicals.data.building import open_held_out as open_held_out
    from chronicals.data.building import open_store as open_store
    from chronicals.data.gate import DataError as DataError
    from chronicals.data.gate import DataReport as DataReport
    from chronicals.data.ledger import Ledger as Ledger
    from chronicals.data.loader import BatchStream as BatchStream
    from chronicals.data.loader import create_dataloader as create_dataloader
    from chronicals.data.loader import filler_token as filler_token
    from chronicals.data.packing import PackPlan as PackPlan
    from chronicals.data.packing import SequencePacker as SequencePacker
    from chronicals.data.packing import plan_packs as plan_packs
    from chronicals.data.records import BadRow as BadRow
    from chronicals.data.sources import DataSource as DataSource
    from chronicals.data.sources import Source as Source
    from chronicals.data.sources import read_records as read_records
    from chronicals.data.sources import source_fingerprint as source_fingerprint
    from chronicals.data.store import TokenStore as TokenStore
    from chronicals.data.template import TemplateError as TemplateError
    from chronicals.data.template import Tokenizer as Tokenizer
    from chronicals.data.template import stop_token_ids as stop_token_ids

_HOME = {
    "BadRow": "records",
    "BatchStream": "loader",
    "DataError": "gate",
    "DataReport": "gate",
    "DataSource": "sources",
    "Ledger": "ledger",
    "PackPlan": "packing",
    "SequencePacker": "packing",
    "Source": "sources",
    "TemplateError": "template",
    "TokenStore": "store",
    "Tokenizer": "template",
    "build_store": "building",
    "create_dataloader": "loader",
    "filler_token": "loader",
    "open_divided": "building",
    "open_held_out": "building",
    "open_store": "building",
    "plan_packs": "packing",
    "read_records": "sources",
    "source_fingerprint": "sources",
    "stop_token_ids": "template",
}
"""Which file of this room each name is from; none is read before it is asked for, so that a
process that only tokenises starts without torch."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME.values():
        return import_module(f"chronicals.data.{name}")
    if name not in _HOME:
        raise AttributeError(
            f"module 'chronicals.data' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    return getattr(import_module(f"chronicals.data.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
