"""The number of positions of a model.

A table of learned positions ends. Rotary embeddings continue, beyond the length of training.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from chronicals.models.peft_kinds import within_adapters
from chronicals.models.twin import FIRST_TOKEN, build_twin, plain_surroundings, twin_config

logger = logging.getLogger(__name__)

_FEW = 16
"""Positions of the twin."""


def check_positions(model: Any, longest: int) -> None:
    """Check that ``model`` has positions for a document of ``longest`` tokens.

    Logs a warning if the model has them but was not trained with so many.

    Raises:
        ValueError: it has fewer.
    """
    model = within_adapters(model)
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(stated, int) or not 0 < stated < longest:
        return
    found = (
        f"{type(model).__name__} is made for {stated:,} positions (max_position_embeddings), "
        f"documents have up to {longest:,}"
    )
    if last_position(model, longest):
        raise ValueError(f"{found}: set max_seq_length to at most {stated}")
    # Configurations differ in whether max_position_embeddings includes the scaling of rotary
    # positions; no warning is logged for lengths that only one of the two readings covers.
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    if longest > stated * max(float(part.get("factor") or 1.0) for part in parts):
        logger.warning(
            "%s: max_seq_length=%d keeps to them, or give its configuration a RoPE that reaches "
            "further",
            found,
            stated,
        )


def last_position(model: Any, longest: int) -> int | None:
    """Return the number of positions of ``model`` if it is a limit below ``longest``, else None.

    It is a limit if a small random twin fails beyond its last position. It counts as none if no
    twin can be built.
    """
    model = within_adapters(model)
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(stated, int) or not 0 < stated < longest:
        return None
    try:
        config = twin_config(model.config)
        config.get_text_config().max_position_embeddings = _FEW
        with plain_surroundings():
            decoder = build_twin(type(model), config).get_decoder()
            decoder(input_ids=torch.full((1, _FEW), FIRST_TOKEN), use_cache=False)
    except Exception:  # a class may reject the small sizes with any error
        return None
    try:
        with plain_surroundings():
            decoder(input_ids=torch.full((1, 2 * _FEW), FIRST_TOKEN), use_cache=False)
    except (IndexError, RuntimeError, ValueError):
        return stated
    return None
