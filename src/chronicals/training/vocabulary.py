"""Embedding rows for the tokenizer's tokens: a missing row is an error, or is added if asked for.

A model with more tokens than rows can be trained as long as no data has such a token, but no export
format accepts it. Only the padding token may lack a row, since its row is never read.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import Mesh
from chronicals.models import embedding_table
from chronicals.policies.facts import WEIGHTS
from chronicals.training.adapters import with_token_ids

logger = logging.getLogger(__name__)


def rows_needed(tokenizer: Any, rows: int, config: ChronicalsConfig) -> int:
    """Return the number of rows that an embedding of ``rows`` rows needs for a tokenizer.

    It is larger than ``rows`` only if ``config`` asks for more.

    Raises:
        ConfigurationError: tokens have no row, and none are to be added.
    """
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= rows}
    beyond.pop(tokenizer.pad_token, None)
    if not beyond:
        return rows
    token, last = max(beyond.items(), key=lambda item: item[1])
    if config.resize_embeddings:
        return max(last + 1, len(tokenizer))
    raise ConfigurationError(
        f"resize_embeddings=False: the tokenizer has {token!r} with id {last}, the embedding of "
        f"the model {rows} rows; what is "
        "trained so could not be exported. Set resize_embeddings=True to add rows for such tokens "
        "and train them, or take the "
        "model's own tokenizer"
    )


def fit_vocabulary(
    model: Any, tokenizer: Any, config: ChronicalsConfig, ranks: Mesh
) -> ChronicalsConfig:
    """Add the missing rows to the embedding and the head, if ``config`` asks for it.

    New rows are drawn around the mean of the existing ones, with their covariance (Hewitt, 2021),
    the same in every process.

    Returns:
        The configuration; with adapters it lists the new rows as trained tokens.

    Raises:
        ConfigurationError: tokens have no row, and none are to be added, or none can be.
    """
    rows = embedding_table(model).shape[0]
    needed = rows_needed(tokenizer, rows, config)
    if needed == rows:
        return config
    if config.sharding == WEIGHTS and ranks.count > 1:
        raise ConfigurationError(
            "resize_embeddings=True: weights are divided among processes (sharding='weights') and "
            "get no rows there; call "
            "model.resize_token_embeddings(len(tokenizer)), save the model, and train that"
        )
    if hasattr(model, "chronicals_lora") or hasattr(model, "peft_config"):
        raise ConfigurationError(
            "resize_embeddings=True: the model has adapters already, which belong to an embedding "
            "of "
            f"{rows} rows; call model.resize_token_embeddings(len(tokenizer)) before they are "
            "attached"
        )
    config = with_token_ids(config, tokenizer)
    device = embedding_table(model).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        model.resize_token_embeddings(needed, mean_resizing=True)
    logger.info(
        "resize_embeddings: embedding and head have %d rows now, %d of them new, drawn around the "
        "mean of the others; %s",
        needed,
        needed - rows,
        "they are trained beside the adapters"
        if config.use_lora
        else "they are trained with the others",
    )
    return with_trained_rows(model, config, range(rows, needed)) if config.use_lora else config


def with_trained_rows(model: Any, config: ChronicalsConfig, new: range) -> ChronicalsConfig:
    """Return the configuration with new rows as trained tokens of embedding and head.

    Layers that are trained whole, or have an adapter, are left out.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    paths = {id(module): path for path, module in model.named_modules()}
    ends = [paths[id(embedding)]]
    if head is not None and head.weight is not embedding.weight:
        ends.append(paths[id(head)])
    asked = config.lora_trainable_tokens
    given = asked if isinstance(asked, dict) else {ends[0]: list(asked or [])}
    otherwise = list(config.lora_modules_to_save or [])
    # A regular expression usually matches linear layers, and not embeddings.
    if isinstance(config.lora_target_modules, list):
        otherwise += config.lora_target_modules
    tokens = dict(given) if asked else {}
    for path in ends:
        if any(f".{path}".endswith(f".{name}") for name in otherwise):
            continue
        name = next((name for name in given if f".{path}".endswith(f".{name}")), path)
        tokens[name] = [
            *given.get(name, []),
            *(number for number in new if number not in given.get(name, [])),
        ]
    return config.fitted(lora_trainable_tokens=tokens or None)
