"""Rows of a configuration's data, where they are here, and the steps that the tool makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from chronicals.config import ConfigurationError, DataSource
from chronicals.config.values import exists_here
from chronicals.convert import factory_data
from chronicals.convert.reading import AXOLOTL, LLAMA_FACTORY, TRL, Theirs
from chronicals.data.reading.sources import read_records

CONVERSATIONS = ("messages", "conversations")
"""Columns of rows that are conversations."""

BATCH_OF_TRAINER = 8
"""Rows on a card where transformers' trainer is told nothing."""


def data_of(theirs: Theirs) -> Any:
    """Return the data of a configuration as the tool has it; LLaMA-Factory's by its own index."""
    value = theirs.get("datasets", "dataset", "dataset_name", "train_dataset")
    if theirs.tool == LLAMA_FACTORY and isinstance(value, str):
        return factory_data.entries(value, theirs)
    return value


def rows_of(entry: Any) -> int | None:
    """Return the number of rows of an entry of data; None if it is not here, or cannot be read."""
    path = entry.get("path") if isinstance(entry, dict) else entry
    if not isinstance(path, str) or not exists_here(path):
        return None
    try:
        return sum(1 for _ in read_records(DataSource(path)))
    except (ConfigurationError, ValueError, OSError):
        return None


def trained_rows(theirs: Theirs) -> int | None:
    """Return the rows that an epoch of theirs trains; None if not all of them are here."""
    data = data_of(theirs)
    counts = [rows_of(entry) for entry in (data if isinstance(data, list) else [data])]
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return None
    most = theirs.get("max_samples")
    rows = sum(count if most is None else min(count, most) for count in known)
    share = theirs.get("val_set_size", "val_size", default=0)
    return rows - (math.ceil(share * rows) if share < 1 else int(share))


def steps_of_epoch(theirs: Theirs) -> float | None:
    """Return the steps of an epoch of theirs.

    It is None if rows are packed, whose packs are not counted here, or are not all here. Axolotl
    counts the run as a whole, so that an epoch has a fraction of a step; transformers ends each
    epoch with a step of its own.
    """
    rows = None if packs_rows(theirs) else trained_rows(theirs)
    if rows is None:
        return None
    usual = 1 if theirs.tool == AXOLOTL else BATCH_OF_TRAINER
    batch = theirs.get("micro_batch_size", "per_device_train_batch_size", default=usual)
    passes = theirs.get("gradient_accumulation_steps", default=1)
    on_all = batch * (theirs.cards or 1)
    if theirs.tool == AXOLOTL:
        return rows / (on_all * passes)
    return math.ceil(math.ceil(rows / on_all) / passes)


def has_conversations(theirs: Theirs) -> bool | None:
    """Return whether the first row of the data is a conversation; None if no row is here."""
    data = data_of(theirs)
    entry = data[0] if isinstance(data, list) and data else data
    path = entry.get("path") if isinstance(entry, dict) else entry
    if not isinstance(path, str) or not exists_here(path):
        return None
    _, record = next(iter(read_records(DataSource(path))), (None, {}))
    return isinstance(record, Mapping) and not record.keys().isdisjoint(CONVERSATIONS)


def our_steps(theirs: Theirs, epochs: float) -> int:
    """Return the steps that ours makes of so many epochs, whose rows follow each other."""
    batch = theirs.get("per_device_train_batch_size", default=BATCH_OF_TRAINER)
    passes = theirs.get("gradient_accumulation_steps", default=1)
    a_step = batch * passes * (theirs.cards or 1)
    return math.ceil((trained_rows(theirs) or 0) * epochs / a_step)


def steps_that_differ(theirs: Theirs, epochs: float) -> int | None:
    """Return the steps of transformers' trainer where ours would make another number of them."""
    steps = None if theirs.tool == AXOLOTL else steps_of(theirs)
    whole = epochs == int(epochs)  # of a part of an epoch a weight takes whole rows
    return None if steps is None or (whole and steps == our_steps(theirs, epochs)) else steps


def packs_rows(theirs: Theirs) -> bool:
    """Return whether several rows share a pack in theirs."""
    whole = theirs.tool == LLAMA_FACTORY and theirs.objective == "pretraining"
    return bool(theirs.get("sample_packing", "packing", "neat_packing", default=whole))


def steps_of(theirs: Theirs) -> int | None:
    """Return the steps of their run; None if they are not known."""
    steps = theirs.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        return steps
    usual = 1 if theirs.tool == AXOLOTL else 3
    epochs = theirs.get("num_epochs", "num_train_epochs", default=usual)
    epoch = steps_of_epoch(theirs)
    if epoch is None or (theirs.tool == TRL and theirs.objective in ("grpo", "rloo")):
        return None
    return math.ceil(epochs * epoch)
