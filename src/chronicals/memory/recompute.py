"""Recomputation of activations in the backward pass (Chen et al., 2016, section 4), as much of
it as memory needs.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer


def enable_gradient_checkpointing(
    model: Any, whole_layers: bool = False, first: int | None = None
) -> None:
    """Recompute decoder layers of a Hugging Face model in the backward pass.

    Args:
        whole_layers: its layers run fused, and skip in the recomputation what the backward pass
            does not read.
        first: recompute this many of the first layers; by default, and where the decoder has no
            list of layers, all.

    Raises:
        ValueError: the class does not support it.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        field = "use_gradient_checkpointing=True, or memory=['recompute_layers']"
        name = type(model).__name__
        raise ValueError(f"{field}: {name} cannot recompute its layers; leave it out")
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": draws_numbers(model),
    }  # reading a state takes time
    if whole_layers:
        options["context_fn"] = first_and_again
    if hasattr(model, "activation_checkpointing_enable"):  # as transformers calls it from 5.24 on
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if getattr(model, "_require_grads_hook", None) is not None:
        model.disable_input_require_grads()  # which re-entrance alone needs: a frozen embedding's gradient
    for layer in decoder_layers(model)[first:] if first is not None else ():
        for module in layer.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False  # type: ignore[assignment]


def disable_gradient_checkpointing(model: Any) -> None:
    """Keep the activations of all layers again."""
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Those that can be recomputed one by one; none where the decoder has no list of such, or
    several.
    """
    lists = [
        child
        for child in model.get_decoder().children()
        if isinstance(child, torch.nn.ModuleList) and len(child)
    ]
    found = [
        list(layers)
        for layers in lists
        if all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)
    ]
    return found[0] if len(found) == 1 else []


def recomputes(model: Any) -> bool:
    """Whether some of the model's layers are recomputed already."""
    return any(
        getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
    )


def enters_again(model: Any) -> bool:
    """Whether layers are recomputed by re-entrant checkpointing, in which tensors captured
    inside a layer get no gradient.
    """
    settings = [
        getattr(getattr(m, "_gradient_checkpointing_func", None), "keywords", {})
        for m in model.modules()
    ]
    return recomputes(model) and any(given.get("use_reentrant") for given in settings)


_now = threading.local()


def runs_again() -> bool:
    """Whether the code that runs now is a recomputation in the backward pass, which needs saved
    tensors but no final result.
    """
    return getattr(_now, "again", False)


def first_and_again() -> tuple[AbstractContextManager, AbstractContextManager]:
    """``context_fn`` for torch's checkpoint, which makes ``runs_again`` true in the
    recomputation.
    """
    return _Running(False), _Running(True)


class _Running:
    """Sets ``runs_again`` within; the one for the recomputation is entered for every backward
    pass.
    """

    def __init__(self, again: bool):
        self.again = again
        self.before: list[bool] = []

    def __enter__(self) -> None:
        self.before.append(runs_again())
        _now.again = self.again

    def __exit__(self, *_: object) -> None:
        _now.again = self.before.pop()


CHANCE = re.compile(r"drop|jitter|noise|^p$")
"""Names of attributes that hold the probability or scale of something random."""

DRAWS = re.compile(
    r"torch\.(rand|randn|bernoulli|multinomial)(_like)?\(|\.(exponential_|bernoulli_)\(|gumbel"
)
"""Source text that draws random numbers whatever the attributes say. Uniform noise has an
attribute that ``CHANCE`` finds.
"""


def draws_numbers(module: torch.nn.Module) -> bool:
    """Whether a forward pass in training may draw random numbers: an attribute says so, or the
    source of a part does.
    """
    for part in module.modules():
        settings = [
            *vars(part).items(),
            *getattr(getattr(part, "config", None), "__dict__", {}).items(),
        ]
        if any(
            isinstance(value, float) and value > 0 and CHANCE.search(name)
            for name, value in settings
        ):
            return True
    sources = {type(part).__module__ for part in module.modules()}
    return any(
        _source_draws(name) for name in sources if not name.startswith(("torch.", "chronicals."))
    )


@functools.cache
def _source_draws(name: str) -> bool:
    """Whether the source of a Python module draws random numbers; True where there is no source."""
    try:
        return bool(DRAWS.search(inspect.getsource(sys.modules[name])))
    except (OSError, TypeError):
        return True
