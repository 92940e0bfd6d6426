"""Decides how a model takes Batches, by properties proved of its class, and logs the decision.

That a class's router loss is the one of ``router_loss.py`` is tested on a small random twin. The
results are cached by class and configuration.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from chronicals.batch import IGNORED, Batch
from chronicals.models.linear import UnknownHead, read_head
from chronicals.models.one_by_one import why_not_one_by_one
from chronicals.models.packability import prove_packability
from chronicals.models.peft_kinds import within_adapters
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

WITHOUT_TWIN = (
    "%s trains in padded rows, not in packs, with whole logits, not with a fused loss, and with "
    "its own attention, which is "
    "slower and takes more memory: nothing could be proved of the class, as %s"
)


def present(
    model: Any,
    fused_head: bool = True,
    flash: bool = True,
    pack_width: int | None = None,
    shared_prompts: bool = False,
) -> PresentedModel:
    """Decide how ``model`` takes Batches; each fallback to a slower way is logged once.

    Args:
        model: a Hugging Face model, with or without PEFT's wrapper.
        fused_head: False always uses the model's own logits.
        flash: False never uses a FlashAttention backend.
        pack_width: tokens of a pack if a Batch has several; None for Batches of one pack.
        shared_prompts: Batches have answers that share a prompt.

    Raises:
        ValueError: the model is not causal: it sees the tokens that it is to predict.
    """
    model = within_adapters(model)
    proof = prove_packability(model)
    if not proof.has_twin:
        logger.warning(WITHOUT_TWIN, type(model).__name__, proof.reason)
        return PresentedModel(
            model, False, False, proved_router_loss(model, False), flash, pack_width
        )
    if not proof.causal:
        raise ValueError(
            f"{type(model).__name__} sees the tokens that it is to predict: its states change "
            "with later ones; let it attend "
            "to earlier ones alone (is_decoder=True in BERT's family, "
            "use_bidirectional_attention=False in Gemma 3's)"
        )
    head_is_read = False
    if fused_head and proof.head_proved:
        try:
            head_is_read = read_head(model) is not None
        except UnknownHead as error:
            logger.warning("%s: the model's own logits are used, which takes more memory", error)
    elif fused_head:
        logger.warning(
            "the head of %s could not be proved: its own logits are used", type(model).__name__
        )
    reason = proof.reason or _attention_dropout(model.config.get_text_config())
    if not reason and proof.one_by_one:
        reason = why_not_one_by_one(model)
    if not reason and shared_prompts and not proof.sees_prompts:
        reason = "its answers do not attend to a prompt that they share"
    if reason:
        logger.warning("%s takes padded rows, not packs: %s", type(model).__name__, reason)
    packed = not reason
    one_by_one = packed and proof.one_by_one
    if one_by_one:
        logger.info(
            "%s takes packs, in which attention runs on one document after the other",
            type(model).__name__,
        )
    router_loss = proved_router_loss(model, packed, one_by_one)
    return PresentedModel(
        model, packed, head_is_read, router_loss, flash, pack_width, one_by_one=one_by_one
    )


def _attention_dropout(config: Any) -> str:
    """Describe the model's attention dropout, which our attention does not apply; empty if none."""
    shares = {
        name: share
        for name, share in vars(config).items()
        if name.startswith("att") and "drop" in name
    }
    dropped = [
        f"{name}={share}"
        for name, share in shares.items()
        if isinstance(share, float) and share > 0
    ]
    return (
        f"it has attention dropout ({', '.join(dropped)}; with 0 in its configuration it takes "
        "packs)"
        if dropped
        else ""
    )


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
        model: a causal language model.
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
    # A pack of two documents and padding, and the same documents as padded rows.
    generator = torch.Generator().manual_seed(3)
    size = twin.get_input_embeddings().weight.shape[0]
    ids = torch.randint(FIRST_TOKEN, size, (sum(_LENGTHS) + FILLER,), generator=generator)
    bounds = torch.tensor([0, *_LENGTHS, FILLER, 0]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(length) for length in (*_LENGTHS, FILLER)])
    targets = torch.full_like(ids, IGNORED)
    targets[: sum(_LENGTHS) - 1] = ids[1 : sum(_LENGTHS)]
    targets[_LENGTHS[0] - 1] = IGNORED
    batch = Batch(ids, targets, positions, bounds, max(_LENGTHS))
    rows = pad_sequence(list(ids[: sum(_LENGTHS)].split(_LENGTHS)), batch_first=True)
    mask = (torch.arange(rows.shape[1]) < torch.tensor(_LENGTHS)[:, None]).long()
    labels = rows.where(mask.bool(), torch.full_like(rows, IGNORED))
    inputs = {"input_ids": rows, "attention_mask": mask, "labels": labels, "use_cache": False}
    with torch.no_grad():
        with_it = twin(**inputs, **{SWITCH: True}).loss
        without = twin(**inputs, **{SWITCH: False}).loss
        added = with_it - without
        if not added.any():
            return ""
        presented = PresentedModel(twin, packed, head_is_read=False, one_by_one=one_by_one)
        with presented.attending_documents():
            router_logits = presented.router_logits(batch)
        if not router_logits:
            return "its decoder gives no router logits"
        ours = read_router_loss(twin).term(router_logits, batch, None).sum
    off = float((ours - added).abs() / added.abs())
    if off <= _TOLERANCE:
        return None
    return f"which is not the load-balancing loss known here (off by {off:.1e} on a twin)"
