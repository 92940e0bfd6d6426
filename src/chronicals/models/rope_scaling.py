"""Positions of documents that are longer than a model was made for: YaRN, or a refusal.

YaRN (Peng et al., 2023, section 3.4) divides the frequencies of a rotary embedding that turn less
than once over the original length by ``factor``, keeps those that turn many times, and scales the
scores. transformers computes it from ``rope_parameters`` of a model's configuration
(``transformers.modeling_rope_utils``).
"""

from __future__ import annotations

import logging
import math
from typing import Any

from chronicals.models.packability import check_positions, positions_missing
from chronicals.models.peft_kinds import within_adapters

logger = logging.getLogger(__name__)

YARN = "yarn"
OFF = "off"
PLAIN = ("default", YARN)
"""Types of rotary embedding whose frequencies YaRN starts from."""


def reach_positions(model: Any, longest: int, scaling: str | None) -> None:
    """Let ``model`` have positions for documents of ``longest`` tokens, or refuse them.

    With ``yarn`` its configuration and rotary embedding are changed in place, by a factor that is
    logged, if documents are longer than it was made for.

    Args:
        model: the model, with or without adapters.
        longest: tokens of the longest document.
        scaling: ``yarn``; ``off`` to train beyond the model's positions as they are, with a
            warning; None to refuse.

    Raises:
        ValueError: documents are too long, and no scaling was asked for, or cannot be had.
    """
    if scaling != YARN or not positions_missing(model, longest):
        missing = positions_missing(model, longest)
        check_positions(model, longest)  # a table that ends is an error whatever is asked for
        if missing and scaling is None:
            factor = yarn_factor(model, longest)
            raise ValueError(
                f"{missing}: set rope_scaling='yarn' (its factor would be {factor:g}), "
                "rope_scaling='off' to train beyond them as they are, or a shorter max_seq_length"
            )
        return
    _use_yarn(model, longest)
    check_positions(model, longest)


def yarn_factor(model: Any, longest: int) -> float:
    """Return the factor by which YaRN reaches ``longest`` positions, a whole number."""
    return float(math.ceil(longest / original_positions(model)))


def original_positions(model: Any) -> int:
    """Return the positions that the model's plain frequencies were trained with."""
    text = within_adapters(model).config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    return int(rope.get("original_max_position_embeddings") or text.max_position_embeddings)


def _use_yarn(model: Any, longest: int) -> None:
    """Change configuration and rotary embedding of a model.

    Raises:
        ValueError: its positions are no plain rotary embedding.
    """
    inner = within_adapters(model)
    text = inner.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    decoder = inner.get_decoder()
    rotary = getattr(decoder, "rotary_emb", None)
    kind = rope.get("rope_type")
    if rotary is None or kind not in PLAIN:
        found = f"rope_type {kind}" if kind else "no single rotary embedding"
        raise ValueError(
            f"rope_scaling='yarn': {type(inner).__name__} has {found}, and YaRN starts from plain "
            "frequencies; give its configuration rope_parameters that reach further, or set "
            "rope_scaling='off'"
        )
    original = original_positions(model)
    factor = yarn_factor(model, longest)
    text.rope_parameters = {
        **rope,
        "rope_type": YARN,
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    text.max_position_embeddings = int(factor * original)
    device = rotary.inv_freq.device
    decoder.rotary_emb = type(rotary)(config=text).to(device)
    logger.info(
        "rope_scaling: yarn with factor %g, from %s to %s positions; whoever serves an adapter of "
        "this run needs rope_parameters=%s",
        factor,
        f"{original:,}",
        f"{text.max_position_embeddings:,}",
        text.rope_parameters,
    )
