"""Recomputation of activations in the backward pass (Chen et al., 2016, section 4), as much of it as memory needs."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from chronicals.model_shape import ModelShape

RESERVE = 0.9
"""Fraction of the card's memory that an estimate may fill; the rest is fragmentation and workspaces."""

NOTHING, CHEAP, LAYERS = "nothing", "norms and gated units", "layers"
"""What is recomputed, from the fastest to the leanest. The second is for fused layers and recomputes no matrix product: by
bytes and operations of the 8B shape it costs 0.5 ns for each thousand bytes it saves, the third 4."""


@dataclass(frozen=True)
class Estimate:
    """Bytes that a training run is expected to hold.

    Attributes:
        fixed: weights, optimizer states, the logits of a chunk, and gradients that are there while activations are.
        layers: number of decoder layers.
        kept: activations of one layer, by what is recomputed.
        total: memory of the card; 0 without one.
        gradients: that the backward pass makes as it frees activations.
    """

    fixed: int
    layers: int
    kept: Mapping[str, int]
    total: int
    gradients: int = 0

    def needed(self, cheap: str, again: int = 0) -> int:
        """Bytes where the first ``again`` layers are recomputed whole, and of the others what ``cheap`` says.

        When the backward pass recomputes one of the first layers, the activations of the others are freed already. At its end
        the gradients and the first layer are there, and before it the activations of all.
        """
        others = (self.layers - again) * self.kept[cheap]
        last = self.gradients + self.kept[NOTHING] if again or self.gradients else 0
        return self.fixed + again * self.kept[LAYERS] + max(others, last)

    def choice(self) -> tuple[str, int]:
        """What is recomputed, and how many of the first layers are recomputed whole: the fastest that fits, else the
        leanest."""
        if not self.total:
            return NOTHING, 0
        cheap = [policy for policy in (NOTHING, CHEAP) if policy in self.kept]
        plans = [*((policy, 0) for policy in cheap), *((cheap[-1], again) for again in range(1, self.layers + 1))]
        leanest = min(plans, key=lambda plan: self.needed(*plan))
        return next((plan for plan in plans if self.needed(*plan) <= RESERVE * self.total), leanest)

    @property
    def fits(self) -> bool:
        """Whether there is a plan with which it fits; True without a card."""
        return not self.total or self.needed(*self.choice()) <= RESERVE * self.total

    def beside(self, size: int) -> Estimate:
        """With so many bytes more, which are there all the time."""
        return replace(self, fixed=self.fixed + size)

    def words(self) -> str:
        if not self.total:
            return "not on a card"
        cheap, again = self.choice()
        sizes = f"estimated {self.needed(cheap, again) / 2**30:.1f} of {self.total / 2**30:.1f} GiB"
        layers = f"{again} of {self.layers} layers recomputed" if again else ""
        others = "" if again and cheap == NOTHING else f"{cheap} recomputed"
        return ", ".join(words for words in (sizes, layers, others) if words)


def estimate(
    model: Any, tokens: int, fused: bool, size: int, frozen: float, trained: float, chunk: int,
    in_fp8: Callable[[int, int], bool] | None = None, magnitudes: bool = False, gradient: float = 0.0,
) -> Estimate:  # fmt: skip
    """Estimate the memory of training ``model``.

    Args:
        tokens: of one forward pass.
        fused: whether decoder layers run fused; else activations are those of an unfused layer of width D with an MLP of
            width F, ``30 D + 5 F`` elements a token and layer.
        size: bytes of an element of the activations.
        frozen, trained: bytes of a weight of either kind, with its optimizer states, and with its gradient where that is there
            while activations are; frozen embeddings and heads are of ``size``.
        chunk: rows of logits that exist at a time.
        in_fp8: of inputs and outputs, whether such trained products are in FP8, which keep what norms and units make in 8 bits.
        magnitudes: whether adapters have them (DoRA), whose gradients are made of what products return; a fused layer keeps the
            gates and ups anyway.
        gradient: bytes of that of a trained weight, where the backward pass makes it as it frees activations.
    """
    parameters = list(model.parameters())
    device = parameters[0].device
    tables = {id(_stored(model.get_input_embeddings())), id(_head_of(model))}
    floats = [p for p in parameters if p.is_floating_point()]
    fixed = int(sum(p.numel() * (trained if p.requires_grad else size if id(p) in tables else frozen) for p in floats))
    shape = ModelShape.of(model.config)
    fixed += _quantised(model, shape.layers, size)
    width, inner, heads = shape.width, shape.inner, shape.heads or 1
    head_dim = shape.head_dim or width // heads
    attended = head_dim * (2 * heads + 2 * (shape.kv_heads or heads))
    kept = {NOTHING: 4 * width + attended + 3 * inner if fused else 30 * width + 5 * inner}
    if fused:
        kept[CHEAP] = 2 * width + attended + 2 * inner
        if in_fp8 is not None:
            products = ((width, attended - head_dim * heads), (width, 2 * inner), (inner, width))
            kept[NOTHING] -= sum(inputs for inputs, outputs in products if in_fp8(inputs, outputs)) // 2
    if magnitudes:
        returned = attended - head_dim * heads + 2 * width
        kept = {policy: count + (returned if fused else 2 * (returned + 2 * inner)) for policy, count in kept.items()}
    kept[LAYERS] = width
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    head = _head_of(model)
    fixed += head.numel() * 4 * head.requires_grad + min(chunk, tokens) * len(head) * size
    gradients = int(sum(p.numel() for p in floats if p.requires_grad) * gradient)
    return Estimate(fixed, shape.layers, {name: tokens * size * count for name, count in kept.items()}, total, gradients)


def _quantised(model: Any, layers: int, size: int) -> int:
    """Bytes of layers whose weights are codes, with what lies beside these, and of the dense weights of one decoder layer,
    which all in turn are read as."""
    packed = [m for m in model.modules() if any(not p.is_floating_point() for p in m.parameters(recurse=False))]
    codes = sum(p.nbytes for m in packed for p in m.parameters(recurse=False) if not p.is_floating_point())
    beside = sum(buffer.nbytes for m in packed for buffer in m.buffers(recurse=False))
    beside += sum(_scales_of(p) for m in packed for p in m.parameters(recurse=False))
    values = sum(_values_in(m, p) for m in packed for p in m.parameters(recurse=False) if not p.is_floating_point())
    return codes + beside + values // layers * size


def _values_in(layer: Any, codes: Any) -> int:
    """Weights that codes stand for: those of a linear layer, else two in a byte."""
    linear = hasattr(layer, "out_features") and hasattr(layer, "in_features")
    return int(layer.out_features * layer.in_features if linear else 2 * codes.nbytes)


def _scales_of(weight: Any) -> int:
    """Bytes of the scales that a weight of bitsandbytes keeps in itself."""
    state = getattr(weight, "quant_state", None)
    states = [] if state is None else [state, *([state.state2] if getattr(state, "state2", None) is not None else [])]
    return sum(kept.absmax.nbytes + kept.code.nbytes for kept in states)


def _head_of(model: Any) -> torch.Tensor:
    return _stored(model.get_output_embeddings())


def _stored(layer: Any) -> torch.Tensor:
    """The weight of a layer beneath its adapter."""
    return getattr(layer, "base_layer", layer).weight


def enable_gradient_checkpointing(model: Any, whole_layers: bool = False, first: int | None = None) -> None:
    """Recompute decoder layers of a Hugging Face model in the backward pass.

    Args:
        whole_layers: its layers run fused, and skip in the recomputation what the backward pass does not read.
        first: recompute this many of the first layers; by default, and where the decoder has no list of layers, all.

    Raises:
        ValueError: the class does not support it.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        field, name = "use_gradient_checkpointing=True, or memory=['recompute_layers']", type(model).__name__
        raise ValueError(f"{field}: {name} cannot recompute its layers; leave it out")
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws_numbers(model)}  # reading a state takes time
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
    """Those that can be recomputed one by one; none where the decoder has no list of such, or several."""
    lists = [child for child in model.get_decoder().children() if isinstance(child, torch.nn.ModuleList) and len(child)]
    found = [list(layers) for layers in lists if all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)]
    return found[0] if len(found) == 1 else []


def recomputes(model: Any) -> bool:
    """Whether some of the model's layers are recomputed already."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def enters_again(model: Any) -> bool:
    """Whether layers are recomputed by re-entrant checkpointing, in which tensors captured inside a layer get no gradient."""
    settings = [getattr(getattr(m, "_gradient_checkpointing_func", None), "keywords", {}) for m in model.modules()]
    return recomputes(model) and any(given.get("use_reentrant") for given in settings)


_now = threading.local()


def runs_again() -> bool:
    """Whether the code that runs now is a recomputation in the backward pass, which needs saved tensors but no final result."""
    return getattr(_now, "again", False)


def first_and_again() -> tuple[AbstractContextManager, AbstractContextManager]:
    """``context_fn`` for torch's checkpoint, which makes ``runs_again`` true in the recomputation."""
    return _Running(False), _Running(True)


class _Running:
    """Sets ``runs_again`` within; the one for the recomputation is entered for every backward pass."""

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

DRAWS = re.compile(r"torch\.(rand|randn|bernoulli|multinomial)(_like)?\(|\.(exponential_|bernoulli_)\(|gumbel")
"""Source text that draws random numbers whatever the attributes say. Uniform noise has an attribute that ``CHANCE`` finds."""


def draws_numbers(module: torch.nn.Module) -> bool:
    """Whether a forward pass in training may draw random numbers: an attribute says so, or the source of a part does."""
    for part in module.modules():
        settings = [*vars(part).items(), *getattr(getattr(part, "config", None), "__dict__", {}).items()]
        if any(isinstance(value, float) and value > 0 and CHANCE.search(name) for name, value in settings):
            return True
    sources = {type(part).__module__ for part in module.modules()}
    return any(_source_draws(name) for name in sources if not name.startswith(("torch.", "chronicals.")))


@functools.cache
def _source_draws(name: str) -> bool:
    """Whether the source of a Python module draws random numbers; True where there is no source."""
    try:
        return bool(DRAWS.search(inspect.getsource(sys.modules[name])))
    except (OSError, TypeError):
        return True
