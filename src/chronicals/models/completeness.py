"""Checks that a checkpoint has exactly the weights of a model class.

Weights that the class leaves out by design are allowed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from chronicals.model_shape import ModelShape

logger = logging.getLogger(__name__)

COMPUTED = re.compile(r"(^|\.)(position_ids|inv_freq|masked_bias|attn\.bias|attention\.bias)$")
"""Names of buffers that some classes compute and some checkpoints store."""

NEXT_TOKENS = re.compile(r"(^|\.)(mtp|nextn)")
"""Names of layers for speculative decoding, which causal language models leave out."""

_FEW = 4
"""Maximum number of names in an error."""


def check_whole(model: Any, report: Mapping[str, Any]) -> None:
    """Check the loading report of ``from_pretrained``; log the weights that the class leaves out.

    Args:
        report: the second result of ``from_pretrained(…, output_loading_info=True)``.

    Raises:
        ValueError: weights are missing, have another shape, or would be dropped; the message names
            them.
    """
    missing = [name for name in report["missing_keys"] if not COMPUTED.search(name)]
    unexpected = [name for name in report["unexpected_keys"] if not COMPUTED.search(name)]
    dropped = [name for name in unexpected if not _is_left_by_design(model, name)]
    reasons = []
    if missing:
        reasons.append(f"{_told(missing)}: not in the checkpoint, and would be drawn at random")
    if report["mismatched_keys"]:
        shapes = [
            f"{name} ({list(there)} there, {list(here)} here)"
            for name, there, here in report["mismatched_keys"]
        ]
        reasons.append(f"{_told(shapes)}: of another shape than config.json says")
    if dropped:
        reasons.append(
            f"{_told(dropped)}: in the checkpoint, and {type(model).__name__} has no place for it"
        )
    if reasons:
        raise ValueError(
            f"{'; '.join(reasons)}. Its config.json or the names in it are of another model: "
            "download it again"
        )
    if unexpected:
        logger.warning(
            "%s leaves out what the checkpoint has beside it: %s",
            type(model).__name__,
            _told(unexpected),
        )


def _told(names: Collection[str]) -> str:
    few = sorted(names)[:_FEW]
    return ", ".join(few) + (f" and {len(names) - _FEW} others" if len(names) > _FEW else "")


def _is_left_by_design(model: Any, name: str) -> bool:
    """Return True if a weight belongs to a part other than the language model.

    Such parts are a classifier, a vision tower, or layers for speculative decoding.
    """
    text = model.config.get_text_config()
    layer = re.search(r"\.layers\.(\d+)\.", name)
    further = getattr(text, "num_nextn_predict_layers", None) or 0
    if NEXT_TOKENS.search(name) or (
        layer and 0 <= int(layer[1]) - ModelShape.of(model.config).layers < further
    ):
        return True
    is_of_this_class = type(model).__name__ in (model.config.architectures or ())
    return not is_of_this_class and _is_beside(model, name)


def _is_beside(model: Any, name: str) -> bool:
    """Return True if the closest existing module of a weight is the model itself or its body.

    The weight then belongs to a part that the class lacks.
    """
    paths = {path: module for path, module in model.named_modules()}
    path = name.rpartition(".")[0]
    while path not in paths:
        path = path.rpartition(".")[0]
    return paths[path] in (model, model.base_model, model.get_decoder())
