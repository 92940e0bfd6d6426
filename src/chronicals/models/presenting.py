"""Decides how a model takes Batches, by properties proved of its class, and logs the decision."""

from __future__ import annotations

import logging
from typing import Any

from chronicals.models.head import UnknownHead, read_head
from chronicals.models.one_by_one import why_not_one_by_one
from chronicals.models.packability import prove_packability
from chronicals.models.peft_kinds import within_adapters
from chronicals.models.presentation import PresentedModel
from chronicals.models.router_proof import proved_router_loss

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
