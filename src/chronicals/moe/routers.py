"""Find how the routers of a Hugging Face mixture weigh experts and which losses they can train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from chronicals.models import asks_for_router_loss
from chronicals.models.routed_experts import (
    HEADS,
    chosen_experts,
    count_of,
    lookahead_heads,
    outermost_path,
    reading_logits,
    routed_experts,
    router_logits_of,
    unrecorded_routers,
)
from chronicals.models.router_loss import SWITCH
from chronicals.models.twin import FIRST_TOKEN, build_twin, plain_surroundings, twin_config
from chronicals.moe.mixture_parts import mixture_layers
from chronicals.moe.router_losses import SCORES
from chronicals.moe.router_settings import RouterSettings
from chronicals.moe.router_terms import Routing
from chronicals.versions import remedy_for_routers

K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
"""Names of the number of experts per token in configurations."""

LENGTH = 24
"""Length in tokens of the document that the twin is run on."""

OF_SCORES = ("balance", "temporal", "locality", "anchor")
"""Losses that need the probabilities of experts."""

Proof = tuple[str | None, bool]
"""``scores`` and ``logits`` of a ``Routing``."""

_PROVED: dict[tuple[type, str], Proof | str] = {}


def experts_per_token(model: Any) -> int:
    """Return k, the number of experts per token.

    Raises:
        ValueError: the configuration has no such field.
    """
    config = model.config.get_text_config()
    found = next(
        (value for name in K if isinstance(value := getattr(config, name, None), int)), None
    )
    if found is None:
        name = type(model).__name__
        raise ValueError(
            f"the configuration of {name} does not say how many experts a token gets "
            f"({', '.join(K)})"
        )
    return found


def check_routers(model: Any, settings: RouterSettings) -> None:
    """Check that the losses in ``settings`` can be trained with ``model``.

    Raises:
        ValueError: one cannot; the message names the setting.
    """
    name = type(model).__name__
    try:
        routing = routing_of(model)
    except ValueError as error:
        raise ValueError(f"router: {error}; leave the section out") from None
    for loss, weight in settings.weights.items():
        if not routing.logits:
            raise ValueError(
                f"router.{loss}={weight}: {name} does not give the logits of its "
                f"routers{remedy_for_routers()}; leave it out "
                "(router.metrics shows the load of its experts)"
            )
        if loss in OF_SCORES and routing.scores is None:
            raise ValueError(
                f"router.{loss}={weight}: {name} weighs its experts by none of "
                f"{', '.join(SCORES)} of its routers' logits, so "
                "they have no probability that is known here; leave it out (router.z and "
                "router.metrics need none)"
            )
    if settings.balance and asks_for_router_loss(model):
        raise ValueError(
            f"router.balance={settings.balance}: {SWITCH}=True in the model's configuration "
            "already adds a load-balancing "
            "loss; leave one of them out"
        )
    heads = lookahead_heads(model)
    for head in HEADS:
        if getattr(settings, head) and head not in heads:
            raise ValueError(
                f"router.{head}={getattr(settings, head)}: {name} has no such heads; leave it "
                "out, or make heads for a frozen "
                "model (chronicals moe predict-train)"
            )


def routing_of(model: Any) -> Routing:
    """Return how ``model`` routes.

    A small random model of the same class (the twin) is run once for each class and configuration.
    Its expert weights are compared with those that each of ``SCORES`` gives for its router logits.
    The rule that chooses the experts need not be known, because their ids are recorded.

    Raises:
        ValueError: no known routed experts are found, or the twin cannot be run; the message names
            the class.
    """
    name = type(model).__name__
    try:
        config = twin_config(model.config)
        key = (type(model), config.to_json_string(use_diff=False))
        if key not in _PROVED:
            with plain_surroundings():
                _PROVED[key] = _prove(build_twin(type(model), config))
        proof = _PROVED[key]
    except Exception as error:  # any class of transformers may object in its own way
        raise ValueError(
            f"{name} could not be tried on a small copy ({type(error).__name__}: {error})"
        ) from error
    if isinstance(proof, str):
        raise ValueError(f"{name} {proof}")
    return Routing(
        experts_per_token(model), count_of(next(iter(routed_experts(model).values()))), *proof
    )


@torch.no_grad()
def _prove(twin: Any) -> Proof | str:
    """Return how the twin weighs experts, or a message that says why it cannot be determined."""
    experts = routed_experts(twin)
    if not experts:
        return "has no layer with routed experts that is known here"
    if len({count_of(module) for module in experts.values()}) > 1:
        return "has layers with different numbers of experts"
    for name, buffer in twin.named_buffers():
        if name.endswith("bias"):  # of a router that adds it before it chooses
            buffer.normal_()
    seen = list[tuple[Tensor, Tensor]]()

    def see(_: nn.Module, args: tuple, named: dict[str, Any]) -> None:
        seen.append(chosen_experts(args, named))

    hooks = [module.register_forward_pre_hook(see, with_kwargs=True) for module in experts.values()]
    ids = torch.randint(FIRST_TOKEN, twin.get_input_embeddings().weight.shape[0], (1, LENGTH))
    with reading_logits(unrecorded_routers(twin)) as read:
        out = twin.get_decoder()(input_ids=ids, use_cache=False, output_router_logits=True)
    for hook in hooks:
        hook.remove()
    if len(seen) != len(experts):
        return f"calls the experts of {len(seen)} layers and has those of {len(experts)}"
    if any(chosen.shape != (LENGTH, experts_per_token(twin)) for chosen, _ in seen):
        return "gives tokens another number of experts than its configuration says"
    logits = [scores.view(-1, scores.shape[-1]) for scores in router_logits_of(out, read)]
    if [len(scores) for scores in logits] != [LENGTH] * len(seen):
        return None, False
    same = (
        name
        for name in SCORES
        if all(_weighs_by(name, *layer) for layer in zip(logits, *zip(*seen)))
    )
    return next(same, None), True


def _weighs_by(name: str, logits: Tensor, experts: Tensor, weights: Tensor) -> bool:
    """Return whether the expert weights are proportional to these scores for each token.

    With one expert per token the comparison is over the layer: a token's own ratio is always 1.
    """
    theirs = weights.float()
    ours = SCORES[name](logits.float()).exp().gather(-1, experts)
    if theirs.shape[-1] > 1 or torch.allclose(theirs, theirs[:1]):
        theirs, ours = (x / x.sum(-1, keepdim=True) for x in (theirs, ours))
    else:
        theirs, ours = (x / x.sum() for x in (theirs, ours))
    return torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4)


def untrained_routers(model: Any) -> list[str]:
    """Return the ends of the router weights' paths, as ``mlp.gate.weight``, if no router is
    trained.

    If any router has a trained parameter, the list is empty.
    """
    paths = {id(module): outermost_path(path) for path, module in model.named_modules()}
    routers = [paths[id(layer.router)] for layer in mixture_layers(model)]
    if any(p.requires_grad for path in routers for p in model.get_submodule(path).parameters()):
        return []
    return sorted({".".join([*path.split(".")[-2:], "weight"]) for path in routers})


def choose_heads(model: Any, settings: RouterSettings | None) -> list[str]:
    """Set ``requires_grad`` of the lookahead heads: true only for those that ``settings`` train.

    Returns:
        The names of the heads that are not trained.
    """
    heads = lookahead_heads(model)
    trained = {name for name in heads if settings is not None and getattr(settings, name)}
    for name, module in heads.items():
        module.requires_grad_(name in trained)
    return [name for name in heads if name not in trained]
