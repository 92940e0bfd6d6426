"""What the routers of a Hugging Face mixture are: how many experts a token gets, and whether their losses can be trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.models import asks_for_router_loss
from chronicals.models.lookahead_heads import HEADS, lookahead_heads
from chronicals.models.router_loss import SWITCH
from chronicals.models.twin import FIRST_TOKEN, build_twin, plain_surroundings, twin_config
from chronicals.moe.mixture_parts import chosen_experts, is_experts
from chronicals.moe.router_settings import RouterSettings

K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
"""What configurations call the experts of a token."""

LENGTH = 24
"""Tokens of a twin's document."""

_PROVED: dict[tuple[type, str], str | None] = {}


def experts_per_token(model: Any) -> int:
    """k.

    Raises:
        ValueError: the configuration does not say.
    """
    config = model.config.get_text_config()
    found = next((value for name in K if isinstance(value := getattr(config, name, None), int)), None)
    if found is None:
        name = type(model).__name__
        raise ValueError(f"the configuration of {name} does not say how many experts a token gets ({', '.join(K)})")
    return found


def check_routers(model: Any, settings: RouterSettings) -> None:
    """Raises ValueError where these losses cannot be trained with the model; the message names the setting."""
    reason = why_not_softmax(model)
    if reason:
        raise ValueError(f"router: {type(model).__name__} {reason}; leave the section out")
    if settings.balance and asks_for_router_loss(model):
        raise ValueError(
            f"router.balance={settings.balance}: {SWITCH}=True in the model's configuration already adds a load-balancing "
            "loss; leave one of them out"
        )
    heads = lookahead_heads(model)
    for name in HEADS:
        if getattr(settings, name) and name not in heads:
            raise ValueError(
                f"router.{name}={getattr(settings, name)}: {type(model).__name__} has no such heads; leave it out, or make "
                "heads for a frozen model (chronicals moe predict-train)"
            )


def why_not_softmax(model: Any) -> str | None:
    """Why the router logits of the class are not those of a softmax whose k largest are chosen; None where they are.

    Proved on a small random twin, once for each class and configuration.
    """
    try:
        config = twin_config(model.config)
        key = (type(model), config.to_json_string(use_diff=False))
        if key not in _PROVED:
            with plain_surroundings():
                _PROVED[key] = _difference(build_twin(type(model), config))
        return _PROVED[key]
    except Exception as error:  # any class of transformers may object in its own way
        return f"could not be tried on a small copy ({type(error).__name__}: {error})"


@torch.no_grad()
def _difference(twin: Any) -> str | None:
    if not getattr(twin.config.get_text_config(), "num_hidden_layers", 0):
        return "has no layers"
    seen, hooks = list[tuple[Tensor, Tensor]](), list[Any]()
    for name, buffer in twin.named_buffers():
        if name.endswith("bias"):  # of a router that adds it before it chooses
            buffer.normal_()
    for module in twin.modules():
        if is_experts(module):
            hooks.append(module.register_forward_pre_hook(partial(_see, seen), with_kwargs=True))
    ids = torch.randint(FIRST_TOKEN, twin.get_input_embeddings().weight.shape[0], (1, LENGTH))
    out = twin.get_decoder()(input_ids=ids, use_cache=False, output_router_logits=True)
    for hook in hooks:
        hook.remove()
    logits = out.get("router_logits") or ()
    if not seen:
        return "has no layer with routed experts that is known here"
    if len(logits) != len(seen):
        return f"gives the logits of {len(logits)} routers and has {len(seen)}"
    for scores, (experts, weights) in zip(logits, seen):
        scores = scores.view(-1, scores.shape[-1]).float()
        if not torch.equal(scores.topk(experts.shape[-1]).indices.sort(-1).values, experts.sort(-1).values):
            return "chooses other experts than those with the largest router logits"
        theirs, ours = (x / x.sum(-1, keepdim=True) for x in (weights.float(), scores.softmax(-1).gather(-1, experts)))
        if not torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4):
            return "weighs its experts otherwise than by the softmax of the router logits"
    return None


def _see(seen: list[tuple[Tensor, Tensor]], _: nn.Module, args: tuple, named: dict[str, Any]) -> None:
    seen.append(chosen_experts(args, named))


def choose_heads(model: Any, settings: RouterSettings | None) -> list[str]:
    """Let the lookahead heads of ``model`` require a gradient where ``settings`` train them, and only there.

    Returns:
        The names of the heads that are not trained.
    """
    heads = lookahead_heads(model)
    trained = {name for name in heads if settings is not None and getattr(settings, name)}
    for name, module in heads.items():
        module.requires_grad_(name in trained)
    return [name for name in heads if name not in trained]
