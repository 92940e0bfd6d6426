"""Positions of documents that are longer than a model was made for: YaRN, Llama 3's, or a refusal.

YaRN (Peng et al., 2023, section 3.4) divides the frequencies of a rotary embedding that turn less
than once over the original length by ``factor``, keeps those that turn many times, and scales the
scores. transformers computes it from ``rope_parameters`` of a model's configuration
(``transformers.modeling_rope_utils``).

Models of Llama 3.1 have such frequencies already, by a formula of their own (``rope_type: llama3``,
Grattafiori et al., 2024, section 3.4.2): 8 times slower than those of the original 8,192 positions,
and trained with 131,072. These are computed for any position, so that 131,072 is a limit of the
training alone. For longer documents the same formula takes a larger factor, by which the slow
frequencies turn no further over the longest document than they did in training.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from chronicals.models.packability import check_positions, positions_missing
from chronicals.models.peft_kinds import within_adapters

logger = logging.getLogger(__name__)

YARN = "yarn"
LLAMA3 = "llama3"
OFF = "off"
STARTS_FROM = {YARN: ("default", YARN), LLAMA3: (LLAMA3,)}
"""Types of rotary embedding whose frequencies a scaling starts from."""


def reach_positions(model: Any, longest: int, scaling: str | None) -> None:
    """Let ``model`` have positions for documents of ``longest`` tokens, or refuse them.

    With ``yarn`` or ``llama3`` its configuration and rotary embedding are changed in place, by a
    factor that is logged, if documents are longer than it was made for.

    Args:
        model: the model, with or without adapters.
        longest: tokens of the longest document.
        scaling: ``yarn``, or ``llama3`` for models whose rotary embedding is of that type; ``off``
            to train beyond the model's positions as they are, with a warning; None to refuse.

    Raises:
        ValueError: documents are too long, and no scaling was asked for, or cannot be had.
    """
    missing = positions_missing(model, longest)
    if scaling in STARTS_FROM and missing:
        _stretch(model, longest, scaling)
        check_positions(model, longest)
        return
    check_positions(model, longest)  # a table that ends is an error whatever is asked for
    if missing and scaling is None:
        raise ValueError(
            f"{missing}: set {_stretching(model, longest)}rope_scaling='off' to train beyond them "
            "as they are, or a shorter max_seq_length"
        )


def scaling_factor(model: Any, longest: int) -> float:
    """Return the factor by which a model's frequencies reach ``longest`` positions.

    It is a whole number of times the length that the model's frequencies are those of: the original
    one of plain frequencies and of YaRN; of ``llama3`` the length it was trained with, from whose
    factor on it grows.
    """
    if _rope_type(model) != LLAMA3:
        return float(math.ceil(longest / original_positions(model)))
    text = within_adapters(model).config.get_text_config()
    factor = float(text.rope_parameters["factor"])
    return factor * math.ceil(longest / int(text.max_position_embeddings))


def original_positions(model: Any) -> int:
    """Return the positions that the model's plain frequencies were trained with."""
    text = within_adapters(model).config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    return int(rope.get("original_max_position_embeddings") or text.max_position_embeddings)


def _rope_type(model: Any) -> str | None:
    """Return the type of a model's rotary embedding; None if it has none, or several."""
    inner = within_adapters(model)
    rope = getattr(inner.config.get_text_config(), "rope_parameters", None) or {}
    single = getattr(inner.get_decoder(), "rotary_emb", None) is not None
    return rope.get("rope_type") if single else None


def _stretching(model: Any, longest: int) -> str:
    """Return in words the scaling that a model's rotary embedding can take; empty without one."""
    kind = _rope_type(model)
    for scaling, kinds in STARTS_FROM.items():
        if kind in kinds:
            factor = scaling_factor(model, longest)
            return f"rope_scaling={scaling!r} (its factor would be {factor:g}), "
    return ""


def _stretch(model: Any, longest: int, scaling: str) -> None:
    """Change configuration and rotary embedding of a model.

    Raises:
        ValueError: the scaling does not start from frequencies as the model's.
    """
    inner = within_adapters(model)
    text = inner.config.get_text_config()
    kind = _rope_type(model)
    if kind not in STARTS_FROM[scaling]:
        found = f"rope_type {kind}" if kind else "no single rotary embedding"
        starts = {YARN: "plain frequencies", LLAMA3: "those of rope_type llama3"}[scaling]
        raise ValueError(
            f"rope_scaling={scaling!r}: {type(inner).__name__} has {found}, and this scaling starts "
            f"from {starts}; set {_stretching(model, longest)}rope_scaling='off', or give its "
            "configuration rope_parameters that reach further"
        )
    rope = text.rope_parameters
    original = original_positions(model)
    before = int(text.max_position_embeddings) if kind == LLAMA3 else original
    factor = scaling_factor(model, longest)
    text.max_position_embeddings = math.ceil(longest / before) * before
    text.rope_parameters = {
        **rope,
        "rope_type": scaling,
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    decoder = inner.get_decoder()
    device = decoder.rotary_emb.inv_freq.device
    decoder.rotary_emb = type(decoder.rotary_emb)(config=text).to(device)
    logger.info(
        "rope_scaling: %s with factor %g, from %s to %s positions; whoever serves an adapter of "
        "this run needs rope_parameters=%s",
        scaling,
        factor,
        f"{before:,}",
        f"{text.max_position_embeddings:,}",
        text.rope_parameters,
    )
