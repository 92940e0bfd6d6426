"""Tests on a small random twin that a class's router loss is the one of ``router_loss.py``.

Results are cached by class and configuration.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.models.presentation import PresentedModel
from chronicals.models.router_loss import (
    COEFFICIENTS,
    SWITCH,
    RouterLoss,
    asks_for_router_loss,
    read_router_loss,
)
from chronicals.models.twin import FIRST_TOKEN, build_twin, plain_surroundings, twin_config

logger = logging.getLogger(__name__)

_LENGTHS = (7, 12)
FILLER = 5
_TOLERANCE = 1e-4
"""Allowed relative error; the loss is a sum in fp32."""

_PROVED: dict[tuple[type, str, bool, bool], str | None] = {}


def proved_router_loss(model: Any, packed: bool, one_by_one: bool = False) -> RouterLoss | None:
    """Return the router loss to train, or None.

    None if the configuration asks for none, if the class adds none, or if it adds another loss,
    which is logged as a warning.

    Args:
        packed: the model takes packed documents.
        one_by_one: its attention runs on one document after the other.
    """
    if not asks_for_router_loss(model):
        return None
    try:
        config = twin_config(model.config)
        key = (type(model), config.to_json_string(use_diff=False), packed, one_by_one)
        if key not in _PROVED:
            with plain_surroundings():
                _PROVED[key] = _difference(build_twin(type(model), config), packed, one_by_one)
        reason = _PROVED[key]
    except Exception as error:  # a class may reject the small sizes with any error
        reason = f"a small twin could not be run ({type(error).__name__}: {error})"
    if reason is None:
        return read_router_loss(model)
    if reason:
        logger.warning(
            "router loss: %s asks for one (%s=True) that is left out, %s: the run trains without "
            "it",
            type(model).__name__,
            SWITCH,
            reason,
        )
    return None


def _difference(twin: Any, packed: bool, one_by_one: bool) -> str | None:
    """Describe how the class's loss differs from ours; None if equal, "" if the class adds none."""
    for name in COEFFICIENTS:
        for owner in (twin, twin.config.get_text_config()):
            if getattr(owner, name, None):
                setattr(owner, name, 1.0)
    batch = _two_documents(twin)
    with torch.no_grad():
        added = _added_by_the_class(twin, batch)
        if not added.any():
            return ""
        presented = PresentedModel(twin, packed, head_is_read=False, one_by_one=one_by_one)
        with presented.attending_documents():
            router_logits = presented.router_logits(batch)
        if not router_logits:
            return "its decoder gives no router logits"
        ours = read_router_loss(twin).term(router_logits, batch, None).sum
    off = float((ours - added).abs() / added.abs())
    return (
        None
        if off <= _TOLERANCE
        else f"which is not the load-balancing loss known here (off by {off:.1e} on a twin)"
    )


def _two_documents(twin: Any) -> Batch:
    """Return a pack of two documents and padding."""
    generator = torch.Generator().manual_seed(3)
    size = twin.get_input_embeddings().weight.shape[0]
    ids = torch.randint(FIRST_TOKEN, size, (sum(_LENGTHS) + FILLER,), generator=generator)
    bounds = torch.tensor([0, *_LENGTHS, FILLER, 0]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(length) for length in (*_LENGTHS, FILLER)])
    targets = torch.full_like(ids, IGNORED)
    targets[: sum(_LENGTHS) - 1] = ids[1 : sum(_LENGTHS)]
    targets[_LENGTHS[0] - 1] = IGNORED
    return Batch(ids, targets, positions, bounds, max(_LENGTHS))


def _added_by_the_class(twin: Any, batch: Batch) -> Tensor:
    """Return the class's own loss minus the cross-entropy, on padded rows."""
    ids = torch.nn.utils.rnn.pad_sequence(
        list(batch.input_ids[: sum(_LENGTHS)].split(_LENGTHS)), batch_first=True
    )
    mask = (torch.arange(ids.shape[1]) < torch.tensor(_LENGTHS)[:, None]).long()
    labels = ids.where(mask.bool(), torch.full_like(ids, IGNORED))
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    with_it, without = (twin(**inputs, **{SWITCH: asked}).loss for asked in (True, False))
    return with_it - without
