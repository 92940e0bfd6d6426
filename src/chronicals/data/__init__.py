"""From records to Batches: sources → template → tokens → store → packs → batches. Knows no model."""

from chronicals.data.building import build_store, open_store
from chronicals.data.gate import DataError, DataReport
from chronicals.data.loader import BatchStream, create_dataloader
from chronicals.data.packing import PackPlan, SequencePacker, plan_packs
from chronicals.data.sources import read_records
from chronicals.data.store import TokenStore
from chronicals.data.template import TemplateError, Tokenizer, stop_token_ids

__all__ = [
    "BatchStream",
    "DataError",
    "DataReport",
    "PackPlan",
    "SequencePacker",
    "TemplateError",
    "TokenStore",
    "Tokenizer",
    "build_store",
    "create_dataloader",
    "open_store",
    "plan_packs",
    "read_records",
    "stop_token_ids",
]
