"""Opening of tokenised data for a run: the store is built if needed, and judged by the gate."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from chronicals.config import ChronicalsConfig
from chronicals.data.kinds.rows import DOCUMENT_KINDS
from chronicals.data.making.building import build_store
from chronicals.data.making.documents import IS_SHARED, MISMATCHED_SIDE, SHARED_COLUMN, UNJUDGED
from chronicals.data.making.store import LABEL_COLUMN, SIDE_COLUMN, TokenStore
from chronicals.data.reading.gate import DataReport, check_shares
from chronicals.data.reading.ledger import Ledger
from chronicals.data.reading.sources import RowSource
from chronicals.data.tokens.template import Tokenizer

logger = logging.getLogger(__name__)


def open_store(
    source: RowSource,
    tokenizer: Any,
    config: ChronicalsConfig,
    name: str | None = None,
    builder: bool = True,
    embedding_rows: int | None = None,
    training: TokenStore | None = None,
    report_file: Path | None = None,
    kinds: Collection[str] = DOCUMENT_KINDS,
    scored: bool = False,
    answer_tokens: int = 0,
) -> TokenStore:
    """Return tokenised data that has passed the gate; its report is logged.

    Args:
        source: what ``read_records`` reads.
        tokenizer: a transformers tokenizer.
        config: widths, objective, what the gate lets pass, where stores are kept.
        name: what messages call the data (by default its path).
        builder: False waits until another process has written the store.
        embedding_rows: of the model, if there is one.
        training: what is trained on, if this is held-out data.
        report_file: where the report is written as JSON, also when the gate refuses the data.
        kinds: of rows that the objective takes.
        scored: True if nothing of it is trained; so it is, too, if ``training`` is given.
        answer_tokens: room behind a prompt for an answer that is drawn later.

    Raises:
        DataError: training on it would be wrong.
        ConfigurationError: ``gate`` names no rule.
    """
    name = name or (str(source) if isinstance(source, (str, Path)) else "dataset")
    store = _tokenised(source, tokenizer, config, builder, embedding_rows, kinds, answer_tokens)
    if training is not None:
        trained_too = np.isin(store.hashes, training.hashes)
        for row in np.unique(store.rows[trained_too]):
            store.report.note("held_out_in_training", int(row))
    ledger = store.report.ledger
    if scored or training is not None:
        ledger = replace(ledger, trained={}, held_out=ledger.trained)
    return _judged(name, store, ledger, config, report_file)


def open_divided(
    source: RowSource,
    tokenizer: Any,
    config: ChronicalsConfig,
    name: str | None = None,
    builder: bool = True,
    embedding_rows: int | None = None,
    report_file: Path | None = None,
    kinds: Collection[str] = DOCUMENT_KINDS,
    answer_tokens: int = 0,
) -> tuple[TokenStore, TokenStore]:
    """Return the data as ``open_store`` does, in two: to train on, and held out.

    The share ``validation_split`` is held out; ``open_held_out`` reports on it.

    Raises:
        DataError: training on it would be wrong, or the share leaves nothing to train on.
        ConfigurationError: ``gate`` names no rule.
    """
    assert config.validation_split
    name = name or (str(source) if isinstance(source, (str, Path)) else "dataset")
    store = _tokenised(source, tokenizer, config, builder, embedding_rows, kinds, answer_tokens)
    report = store.report
    if not len(store) or report.errors(config.gate):
        _judged(name, store, report.ledger, config, report_file)  # raises
    training, held_out = store.split(config.validation_split, config.held_out_seed)
    training = replace(training, report=_with_documents_of(training, report))
    # A text in pieces counts as trained if any of its pieces is.
    only_held_out = held_out.subset(np.flatnonzero(~np.isin(held_out.rows, training.rows)))
    ledger = Ledger(
        report.kinds,
        training.rows_by_kind,
        only_held_out.rows_by_kind,
        report.left_out,
        len(np.intersect1d(held_out.rows, training.rows)),
    )
    return _judged(name, training, ledger, config, report_file), held_out


def open_held_out(
    held_out: TokenStore, config: ChronicalsConfig, report_file: Path | None = None
) -> TokenStore:
    """Return the part of a store that is held out, with a report of its own.

    Args:
        held_out: the second store of ``open_divided``.
        config: the run's: the share that is held out, and what the gate lets pass.
        report_file: where the report is written as JSON.

    Raises:
        DataError: it holds nothing that is trained.
    """
    kinds = held_out.rows_by_kind
    whole = held_out.report
    report = DataReport(
        sum(kinds.values()), kinds=kinds, forms=dict(whole.forms), answers=whole.answers
    )
    return _judged(
        f"validation_split={config.validation_split}",
        replace(held_out, report=_with_documents_of(held_out, report)),
        Ledger(kinds, held_out=kinds),
        config,
        report_file,
    )


def _tokenised(
    source: RowSource,
    tokenizer: Any,
    config: ChronicalsConfig,
    builder: bool,
    embedding_rows: int | None,
    kinds: Collection[str],
    answer_tokens: int,
) -> TokenStore:
    """Return the store of ``source``, with ids that the model's embedding lacks in its report."""
    check_shares(config.gate)
    store = build_store(
        source,
        Tokenizer.configured(tokenizer, config, kinds),
        config.max_seq_length - answer_tokens,
        config.cache_dir,
        builder,
        config.overlong,
        config.seed,
        config.dataset_num_proc,
    )
    if embedding_rows is not None:
        if len(tokenizer) > embedding_rows:
            example = f"{len(tokenizer):,} tokens, {embedding_rows:,} rows of the embedding"
            lacking = len(tokenizer) - embedding_rows
            store.report.note("vocabulary_too_large", example=example, count=lacking)
        if store.max_id >= embedding_rows:
            largest = np.array([store.document(number)[0].max() for number in range(len(store))])
            example = f"token id {store.max_id} of {embedding_rows:,}"
            for row in np.unique(store.rows[largest >= embedding_rows]):
                store.report.note("id_out_of_range", int(row), example)
    return store


def _with_documents_of(store: TokenStore, report: DataReport) -> DataReport:
    """Return ``report`` with the numbers of documents and tokens of ``store``."""
    prompts = 0
    mismatched = 0
    if store.items is not None:
        prompts = int((store.columns[SHARED_COLUMN] == IS_SHARED).sum())
        judged = store.columns[LABEL_COLUMN] != UNJUDGED
        mismatched = int((judged & (store.columns[SIDE_COLUMN] == MISMATCHED_SIDE)).sum())
    return replace(
        report,
        documents=len(store),
        tokens=int(store.lengths.sum()),
        targets=int(store.targets.sum()),
        prompts=prompts,
        mismatched=mismatched,
    )


def _judged(
    name: str, store: TokenStore, ledger: Ledger, config: ChronicalsConfig, file: Path | None
) -> TokenStore:
    """Write and log the report, and return the store with its ledger.

    Raises:
        DataError: training on it would be wrong.
    """
    report = store.report
    if file is not None:
        fields = asdict(report)
        del fields["left_out"]  # the ledger has it
        content = {
            "data": name,
            **fields,
            "ledger": asdict(ledger),
            "findings": report.entries(config.gate),
        }
        # One process of several writes the report. It must not stop alone if it cannot.
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content, indent=1))
        except OSError as error:
            logger.error(
                "%s: the report on the data cannot be written there (%s)", file, error.strerror
            )
            with suppress(OSError):
                file.unlink()
    log_report(name, report, config.gate, ledger)
    report.check(name, config.gate)
    return replace(store, ledger=ledger)


def log_report(
    name: str, report: DataReport, shares: Mapping[str, float], ledger: Ledger | None = None
) -> None:
    """Log the summary of a report, then a table of its findings."""
    for level, line in report.table(shares, ledger):
        logger.log(logging.getLevelNamesMapping()[level.upper()], "%s: %s", name, line)
