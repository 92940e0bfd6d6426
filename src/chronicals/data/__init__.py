"""From records to Batches: sources → template → tokens → store → packs → batches. Knows no model."""

from chronicals.data.building import build_store, open_held_out, open_store
from chronicals.data.gate import DataError, DataReport
from chronicals.data.loader import BatchStream, create_dataloader
from chronicals.data.packing import PackPlan, SequencePacker, plan_packs
from chronicals.data.sources import BadRow, DataSource, Source, read_records, source_fingerprint
from chronicals.data.store import TokenStore
from chronicals.data.template import TemplateError, Tokenizer, stop_token_ids

__all__ = [
    "BadRow",
    "BatchStream",
    "DataError",
    "DataReport",
    "DataSource",
    "PackPlan",
    "SequencePacker",
    "Source",
    "TemplateError",
    "TokenStore",
    "Tokenizer",
    "build_store",
    "create_dataloader",
    "open_held_out",
    "open_store",
    "plan_packs",
    "read_records",
    "source_fingerprint",
    "stop_token_ids",
]
