"""Router losses of a run: checks, their addition to the objective's loss, and the anchor's file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chronicals.config import ConfigurationError
from chronicals.data import TokenStore
from chronicals.models import PresentedModel
from chronicals.models.peft_kinds import within_adapters
from chronicals.models.routed_experts import (
    called_for_experts,
    lookahead_heads,
    outermost_path,
)
from chronicals.models.router_loss import SWITCH
from chronicals.moe.router_settings import RouterSettings
from chronicals.moe.router_terms import FILE, Anchor, RouterTerms, first_tokens
from chronicals.moe.routers import check_routers, mixture_layers, routing_of
from chronicals.policies.facts import DIVIDE_WEIGHTS

if TYPE_CHECKING:
    from chronicals.training.session import Session

logger = logging.getLogger(__name__)


def prepare_routers(model: Any, settings: RouterSettings | None) -> list[str]:
    """Check the model, and unfreeze the lookahead heads that have a loss.

    Call it before adapters are attached and the optimizer is built.

    Returns:
        The names of these heads, which are trained whole besides adapters.

    Raises:
        ConfigurationError: the model's routers cannot be trained so; the message names the setting.
    """
    model = within_adapters(model)
    if settings is not None:
        try:
            check_routers(model, settings)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
    heads = lookahead_heads(model)
    trained = {name for name in heads if settings is not None and getattr(settings, name)}
    for name, module in heads.items():
        module.requires_grad_(name in trained)
    idle = [name for name in heads if name not in trained]
    if idle:
        logger.info(
            "lookahead heads without a loss are not trained: %s",
            ", ".join(f"router.{name}" for name in idle),
        )
    return [name for name in heads if name in trained]


def add_router_terms(presented: PresentedModel, settings: RouterSettings | None) -> None:
    """Add the losses of ``settings``, except the anchor's, to the loss of any objective.

    Metrics of the routers are shown if asked for, or if the class has a router loss of its own.
    Call it after adapters are attached and before weights are divided.

    Raises:
        ConfigurationError: as for ``prepare_routers``.
    """
    model = presented.model
    if settings is None and presented.router_loss is None:
        return
    try:
        routing = routing_of(model)
    except ValueError as error:
        if settings is not None:
            raise ConfigurationError(f"router: {error}; leave the section out") from None
        logger.warning("router metrics: what the routers do is not shown: %s", error)
        return
    settings = settings or RouterSettings(metrics=True)
    presented.experts = called_for_experts(model)
    presented.additions = (RouterTerms(settings, routing),)
    named = [
        f"router.{name}={weight}" for name, weight in settings.weights.items() if name in OF_ROUTERS
    ]
    named += [f"{SWITCH}=True"] if presented.router_loss is not None else []
    if not named:
        return
    paths = {id(module): outermost_path(path) for path, module in model.named_modules()}
    routers = [paths[id(layer.router)] for layer in mixture_layers(model)]
    if any(p.requires_grad for path in routers for p in model.get_submodule(path).parameters()):
        return
    # the ends of their paths, as mlp.gate.weight
    ends = {".".join([*path.split(".")[-2:], "weight"]) for path in routers}
    weights = ",".join(sorted(ends))
    if any("lora_" in name for name, _ in model.named_parameters()):
        remedy = f"add {weights} to lora_target_parameters"
    else:
        remedy = f"let {weights} require a gradient"
    logger.warning(
        "%s: no router is trained (%s frozen, without adapters), so this loss only changes what "
        "comes to them from trained weights below; %s to train them, or leave the loss out",
        ", ".join(named),
        weights,
        remedy,
    )


OF_ROUTERS = ("balance", "z", "temporal", "locality")
"""Losses whose purpose is to train routers. The anchor also limits the effect of adapters below."""


def stored_documents(store: TokenStore) -> Iterator[Tensor]:
    """Yield the documents of a store, int64 ``[n]`` each, an answer after its prompt."""
    for number in range(len(store)):
        if not store.is_prompt(number):
            yield torch.from_numpy(store.whole_document(number)[0].astype("int64"))


def keep_anchor(
    session: Session, documents: Iterable[Tensor], output_dir: Path, resumed: Path | None
) -> None:
    """Read the anchor of a resumed run, or compute and write that of a new one.

    The anchor is the routers' outputs at the start of the run.

    Does nothing if the anchor has no weight. Call it before a checkpoint's weights are loaded.

    Args:
        session: prepared session.
        documents: int64 ``[n]`` each, what the model is trained on; as many as the anchor replays
            are taken, and none where the anchor has no weight or is read.
        output_dir: folder of the run.
        resumed: checkpoint that the run resumes from, in the folder of a run.

    Raises:
        ConfigurationError: weights are divided, or the file of the resumed run is damaged.
    """
    settings = session.objective.router
    presented = session.presented
    device = session.precision.device
    if settings is None or not settings.anchor:
        return
    if session.decisions["sharding"].how == DIVIDE_WEIGHTS:
        raise ConfigurationError(
            f"router.anchor={settings.anchor}: replayed tokens need whole weights, and sharding: "
            "weights divides them; take "
            "sharding: optimizer, or leave the anchor out"
        )
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
                "router.anchor: %s is not beside %s: the routers of the model as it was loaded "
                "are the anchor",
                FILE,
                resumed,
            )
        batch = first_tokens(documents, settings.anchor_tokens).to(device)
        with presented.attending_documents(), session.precision.autocast():
            anchor = Anchor.of(settings.anchor, presented, batch)
    (terms,) = (addition for addition in presented.additions if isinstance(addition, RouterTerms))
    assert terms.routing.scores is not None  # check_routers ensures it for an anchor
    anchor = replace(anchor, scores=terms.routing.scores)
    session.ranks.writer_does(lambda: anchor.write(output_dir), OSError)
    presented.additions = (*presented.additions, anchor)
