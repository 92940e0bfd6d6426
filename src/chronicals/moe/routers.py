"""Find the routers of a Hugging Face mixture, how they weigh experts, and which losses they train.

Attention, router and experts of a layer are found by structure, not by class. The experts are the
module with stacked weights (``down_proj`` ``[E, ., .]``), possibly in 4 bits. The router is a
module next to the experts (or next to the adapters around them) with a weight ``[E, D]``. The
attention is the first module with "Attention" in its class name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.memory import decoder_layers
from chronicals.models import asks_for_router_loss
from chronicals.models.routed_experts import (
    HEADS,
    ROUTER_LOGITS,
    chosen_experts,
    count_of,
    is_experts,
    lookahead_heads,
    outermost_path,
    reading_logits,
    routed_experts,
    router_within,
    unrecorded_routers,
)
from chronicals.models.router_loss import SWITCH
from chronicals.models.twin import FIRST_TOKEN, build_twin, plain_surroundings, twin_config
from chronicals.moe.router_losses import SCORES
from chronicals.moe.router_settings import RouterSettings
from chronicals.moe.router_terms import Routing
from chronicals.versions import remedy_for_routers

CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""Attribute names of the score correction, in a router or next to it."""


@dataclass(frozen=True)
class MixtureLayer:
    """A layer with routed experts.

    Attributes:
        number: index among all decoder layers.
        attention, experts, router: its modules.
        gate: router weight, ``[E, D]``.
        bias: router bias ``[E]`` that is added to the logits, or None.
        num_experts: E.
        correction: ``[E]``, added to scores when experts are chosen but not to their weights; None
            if the model has none.
    """

    number: int
    attention: nn.Module
    experts: nn.Module
    router: nn.Module
    gate: Tensor
    bias: Tensor | None
    num_experts: int
    correction: Tensor | None = None


def mixture_layers(model: Any) -> list[MixtureLayer]:
    """Return the layers of ``model`` with routed experts, in order.

    Raises:
        ValueError: the model has none, or a layer's router or attention is not found.
    """
    name = type(model).__name__
    width = model.get_input_embeddings().weight.shape[1]
    found = []
    for number, layer in enumerate(decoder_layers(model)):
        path, experts = next(
            ((path, module) for path, module in layer.named_modules() if is_experts(module)),
            ("", None),
        )
        if experts is None:
            continue
        count = count_of(experts)
        block = outermost_path(path).rpartition(".")[0]
        around = layer.get_submodule(block)
        _, router = router_within(around, count, width) or ("", None)
        attention = next(
            (module for module in layer.modules() if "Attention" in type(module).__name__), None
        )
        if router is None or attention is None:
            raise ValueError(
                f"layer {number} of {name}: its {'router' if router is None else 'attention'} is "
                "not found"
            )
        weights = (*around.named_parameters(), *around.named_buffers())
        corrections = [
            weight
            for place, weight in weights
            if place.rpartition(".")[2] in CORRECTIONS and weight.numel() == count
        ]
        correction = corrections[0].detach().flatten() if corrections else None
        gate = router.get_parameter("weight")
        bias = getattr(router, "bias", None)
        found.append(
            MixtureLayer(number, attention, experts, router, gate, bias, count, correction)
        )
    if not found:
        raise ValueError(
            f"{name} has no layer with routed experts; give a mixture-of-experts model"
        )
    return found


K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
"""Names of the number of experts per token in configurations."""

LENGTH = 24
"""Length in tokens of the document that the twin is run on."""

OF_SCORES = ("balance", "temporal", "locality", "anchor")
"""Losses that need the probabilities of experts."""

WeighingProof = tuple[str | None, bool]
"""``scores`` and ``logits`` of a ``Routing``."""

_PROVED: dict[tuple[type, str], WeighingProof | str] = {}


def experts_per_token(model: Any) -> int:
    """Return k, the number of experts per token.

    Raises:
        ValueError: the configuration has no such field.
    """
    config = model.config.get_text_config()
    values = (getattr(config, name, None) for name in K)
    found = next((value for value in values if isinstance(value, int)), None)
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
def _prove(twin: Any) -> WeighingProof | str:
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
    logits = [scores.view(-1, scores.shape[-1]) for scores in out.get(ROUTER_LOGITS) or read]
    if [len(scores) for scores in logits] != [LENGTH] * len(seen):
        return None, False
    for name, log_scores in SCORES.items():
        for scores, (chosen, weights) in zip(logits, seen):
            theirs = weights.float()
            ours = log_scores(scores.float()).exp().gather(-1, chosen)
            if theirs.shape[-1] > 1 or torch.allclose(theirs, theirs[:1]):
                theirs = theirs / theirs.sum(-1, keepdim=True)
                ours = ours / ours.sum(-1, keepdim=True)
            else:  # with one expert a token's own ratio is always 1, so over the layer
                theirs = theirs / theirs.sum()
                ours = ours / ours.sum()
            if not torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4):
                break
        else:  # proportional to these scores in every layer
            return name, True
    return None, True
