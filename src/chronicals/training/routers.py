"""Losses of routers in a run: checked, added to what the model computes, and their anchor kept in the run's folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chronicals.config import ConfigurationError
from chronicals.data import TokenStore
from chronicals.models import PresentedModel
from chronicals.models.lookahead_heads import lookahead_heads
from chronicals.models.peft_kinds import within_adapters
from chronicals.moe.anchor import FILE, Anchor, first_tokens
from chronicals.moe.router_settings import RouterSettings
from chronicals.moe.router_terms import RouterTerms
from chronicals.moe.routers import check_routers, choose_heads, experts_per_token

if TYPE_CHECKING:
    from chronicals.training.session import Session

logger = logging.getLogger(__name__)


def prepare_routers(model: Any, settings: RouterSettings | None) -> list[str]:
    """Before adapters are attached and an optimizer is built: check the model, and let the heads train that have a loss.

    Returns:
        The names of these heads, which are trained whole beside adapters.

    Raises:
        ConfigurationError: its routers cannot be trained so; the message names the setting.
    """
    model = within_adapters(model)
    if settings is not None:
        try:
            check_routers(model, settings)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
    if idle := choose_heads(model, settings):
        logger.info("lookahead heads without a loss are not trained: %s", ", ".join(f"router.{name}" for name in idle))
    return [name for name in lookahead_heads(model) if name not in idle]


def add_router_terms(presented: PresentedModel, settings: RouterSettings | None) -> None:
    """Let the losses of ``settings`` but the anchor's be a part of any objective's."""
    if settings is not None:
        presented.additions = (RouterTerms(settings, experts_per_token(presented.model)),)


def keep_anchor(session: Session, store: TokenStore, output_dir: Path, resumed: Path | None) -> None:
    """Where the anchor has a weight: compute and write where the routers begin, or read what a run that goes on wrote.

    Call it before a checkpoint's weights are loaded.

    Args:
        resumed: the checkpoint that the run goes on from, in the folder of a run.

    Raises:
        ConfigurationError: a run goes on, and what it wrote is damaged.
    """
    settings, presented, device = session.objective.router, session.presented, session.precision.device
    if settings is None or not settings.anchor:
        return
    folders = [] if resumed is None else [output_dir, resumed.parent.parent]
    there = next((folder for folder in folders if (folder / FILE).exists()), None)
    if there is not None:
        try:
            anchor = Anchor.read(settings.anchor, presented, there, device)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
    else:
        if resumed is not None:
            logger.warning(
                "router.anchor: %s is not beside %s: the routers of the model as it was loaded are the anchor", FILE, resumed
            )
        batch = first_tokens(_documents(store), settings.anchor_tokens).to(device)
        with presented.attending_documents(), session.precision.autocast():
            anchor = Anchor.of(settings.anchor, presented, batch)
    session.ranks.writer_does(lambda: anchor.write(output_dir), OSError)
    presented.additions = (*presented.additions, anchor)


def _documents(store: TokenStore) -> Iterator[Tensor]:
    """Ids of each document, answers behind their prompts."""
    return (
        torch.from_numpy(store.whole_document(n)[0].astype("int64")) for n in range(len(store)) if not store.is_prompt(n)
    )
