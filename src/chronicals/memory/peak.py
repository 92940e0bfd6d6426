"""Bytes that a training step is expected to hold on a card, by the moments at which most of it is
live.

A step holds what is there all the time (weights, states, gradients) and, beside that, the largest
of three moments:

    loss        what all layers keep for the backward pass, hidden states with their gradient, the logits of a chunk
    backward    what the layers before keep, and what one layer needs while its own backward pass runs
    end         gradients of all trained weights where the backward pass makes them, and the first layer's own backward pass

The elements of a token and layer below were read from the allocator's history of whole steps on an
H200 (``benchmarks/long_documents.py``). D width, Q and K widths of all query heads and of all key
heads, F inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from chronicals.memory.offload import AT_A_TIME
from chronicals.model_shape import ModelShape

RESERVE = 0.9
"""Fraction of the card's memory that an estimate may fill; the rest is fragmentation and
workspaces.
"""

NOTHING = "nothing"
CHEAP = "norms and gated units"
LAYERS = "layers"
"""What is recomputed, from the fastest to the leanest. The second is for fused layers and
recomputes no matrix product: by bytes and operations of the 8B shape it costs 0.5 ns for each
thousand bytes it saves, the third 4."""


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a weight.

    Attributes:
        frozen: of one that is not trained; embeddings and heads have those of an activation's
            element instead.
        trained: with its optimizer states, and with its gradient where that is there while
            activations are.
        gradient: of the gradient, where the backward pass makes it as it frees activations.
    """

    frozen: float
    trained: float
    gradient: float = 0.0


@dataclass(frozen=True)
class StepShape:
    """How a step computes, as far as its memory depends on it.

    Attributes:
        tokens: of one forward pass.
        fused: decoder layers run fused; else activations are those of an unfused layer, ``30 D + 5
            F`` elements.
        element: bytes of an element of the activations.
        logit_rows: rows of logits that exist at a time.
        in_fp8: of inputs and outputs, whether such trained products are in FP8, which keep what
            norms and units make in 8 bits.
        magnitudes: adapters have them (DoRA), whose gradients are made of what products return; a
            fused layer keeps the gates and ups anyway.
        copies_attended: the output product of attention has adapters, whose columns its input has
            no room for.
        tile: rows of an MLP that are computed at a time; 0 where all are.
        offloads: what autograd saves waits in host memory.
    """

    tokens: int
    fused: bool
    element: int
    logit_rows: int
    in_fp8: Callable[[int, int], bool] | None = None
    magnitudes: bool = False
    copies_attended: bool = False
    tile: int = 0
    offloads: bool = False


@dataclass(frozen=True)
class Estimate:
    """Bytes that a training run is expected to hold.

    Attributes:
        fixed: weights, optimizer states, and gradients that are there while activations are.
        layers: number of decoder layers.
        kept: activations of one layer, by what is recomputed.
        total: memory of the card; 0 without one.
        gradients: that the backward pass makes as it frees activations.
        loss: hidden states, their gradient and the logits of a chunk.
        working: of the layer whose backward pass runs, with what it kept, by what is recomputed.
        window: of saved tensors on the card, by what is recomputed, where the others wait in host
            memory; else empty.
    """

    fixed: int
    layers: int
    kept: Mapping[str, int]
    total: int
    gradients: int = 0
    loss: int = 0
    working: Mapping[str, int] = field(default_factory=dict)
    window: Mapping[str, int] = field(default_factory=dict)

    def needed(self, cheap: str, again: int = 0) -> int:
        """Bytes where the first ``again`` layers are recomputed whole, and of the others what
        ``cheap`` says.

        When the backward pass recomputes one of the first layers, the activations of the others are
        freed already. At its end the gradients and the first layer are there, and before it the
        activations of all.
        """
        saved = again * self.kept[LAYERS] + (self.layers - again) * self.kept[cheap]
        whole_layers = cheap == LAYERS or again == self.layers
        last = LAYERS if whole_layers else cheap
        first = LAYERS if again or whole_layers else cheap
        if self.window:
            waiting = min(saved, self.window[cheap])
            return (
                self.fixed
                + waiting
                + max(self.loss, self._working(last), self._working(first) + self.gradients)
            )
        before_last = saved - (0 if whole_layers else self.kept[cheap])
        before_first = again * self.kept[LAYERS] if again else 0
        moments = [saved + self.loss, before_last + self._working(last)]
        if again or self.gradients:
            moments.append(before_first + self._working(first) + self.gradients)
        return self.fixed + max(moments)

    def _working(self, policy: str) -> int:
        """Bytes of the layer whose backward pass runs; one that was recomputed whole has all
        that it would have kept.
        """
        return self.working.get(
            policy, self.kept[NOTHING] if policy == LAYERS else self.kept[policy]
        )

    def choice(self) -> tuple[str, int]:
        """What is recomputed, and how many of the first layers are recomputed whole: the fastest
        that fits, else the leanest."""
        if not self.total:
            return NOTHING, 0
        cheap = [policy for policy in (NOTHING, CHEAP) if policy in self.kept]
        plans = [(policy, 0) for policy in cheap]
        plans += [(cheap[-1], again) for again in range(1, self.layers + 1)]
        leanest = min(plans, key=lambda plan: self.needed(*plan))
        return next((plan for plan in plans if self.needed(*plan) <= RESERVE * self.total), leanest)

    @property
    def fits(self) -> bool:
        """Whether there is a plan with which it fits; True without a card."""
        return not self.total or self.needed(*self.choice()) <= RESERVE * self.total

    def beside(self, size: int) -> Estimate:
        """Return the estimate with so many bytes more, which are there all the time."""
        return replace(self, fixed=self.fixed + size)

    def words(self) -> str:
        """Return what is expected and what is recomputed for it, for a line of the log."""
        if not self.total:
            return "not on a card"
        cheap, again = self.choice()
        sizes = f"estimated {self.needed(cheap, again) / 2**30:.1f} of {self.total / 2**30:.1f} GiB"
        layers = f"{again} of {self.layers} layers recomputed" if again else ""
        others = "" if again and cheap == NOTHING else f"{cheap} recomputed"
        return ", ".join(words for words in (sizes, layers, others) if words)


def card_memory(device: torch.device) -> int:
    """Return the bytes of a card that this process may take: all, or the share that torch was
    given; 0 without a card.
    """
    if device.type != "cuda":
        return 0
    share = torch.cuda.get_per_process_memory_fraction(device)
    return int(share * torch.cuda.get_device_properties(device).total_memory)


def estimate(model: Any, step: StepShape, weights: WeightBytes) -> Estimate:
    """Estimate the memory of training ``model``, a Hugging Face model with its adapters, on any
    device.
    """
    parameters = list(model.parameters())
    device = parameters[0].device
    floats = [p for p in parameters if p.is_floating_point()]
    head = _head_of(model)
    tables = {id(_stored(model.get_input_embeddings())), id(head)}
    fixed = 0.0
    for parameter in floats:
        frozen = step.element if id(parameter) in tables else weights.frozen
        fixed += parameter.numel() * (weights.trained if parameter.requires_grad else frozen)
    shape = ModelShape.of(model.config)
    fixed += _quantised(model, shape.layers, step.element)
    fixed += (
        4 * head.numel() * head.requires_grad
    )  # the gradient of the logits' product is summed in fp32
    layer = _LayerElements.of(shape, step)
    of_token = step.tokens * step.element
    chunk = min(step.logit_rows, step.tokens) * len(head) * step.element
    gradients = sum(p.numel() for p in floats if p.requires_grad) * weights.gradient
    tile = step.tile * layer.of_tile * step.element
    return Estimate(
        fixed=int(fixed),
        layers=shape.layers,
        kept={policy: of_token * count for policy, count in layer.kept.items()},
        total=card_memory(device),
        gradients=int(gradients),
        # The normed states, the gradient that the chunks make of them, and both once more on their
        # way through the norm.
        loss=of_token * 4 * shape.width + chunk,
        working={
            policy: max(of_token * layer.in_attention, of_token * count + tile)
            for policy, count in layer.in_mlp.items()
        },
        window={policy: of_token * count for policy, count in layer.window.items()}
        if step.offloads
        else {},
    )


@dataclass(frozen=True)
class _LayerElements:
    """Elements of a token in one layer, by what is recomputed; see the module's docstring for the
    letters.

    Attributes:
        kept: for the backward pass.
        in_attention: while attention's backward pass runs, with what is left of what the layer
            kept.
        in_mlp: the same of the MLP, less what of its rows a tile has.
        window: of the tensors on their way to and from host memory, at most.
        of_tile: of a row of an MLP's tile.
    """

    kept: dict[str, int]
    in_attention: int
    in_mlp: dict[str, int]
    window: dict[str, int]
    of_tile: int

    @classmethod
    def of(cls, shape: ModelShape, step: StepShape) -> _LayerElements:
        width = shape.width
        inner = shape.inner
        heads = shape.heads or 1
        head_dim = shape.head_dim or width // heads
        queries = head_dim * heads
        keys = head_dim * (shape.kv_heads or heads)
        in_mlp = 0 if step.tile else inner
        # Queries, keys and values, what attention returns, and its copy with room for an adapter's
        # columns.
        attended = 2 * queries + 2 * keys + (queries if step.copies_attended else 0)
        products = (
            queries + 2 * keys + 2 * width
        )  # what products return but gates and ups, which are kept anyway
        if step.fused:
            kept = {
                NOTHING: 4 * width + attended + 3 * in_mlp,
                CHEAP: 2 * width + attended + 2 * in_mlp,
            }
        else:
            kept = {NOTHING: 30 * width + 5 * in_mlp}
        if step.fused and step.in_fp8 is not None:
            pairs = ((width, queries + 2 * keys), (width, 2 * inner), (inner, width))
            kept[NOTHING] -= (
                sum(inputs for inputs, outputs in pairs if step.in_fp8(inputs, outputs)) // 2
            )
        if step.magnitudes:
            returned = products if step.fused else 2 * (products + 2 * inner)
            kept = {policy: count + returned for policy, count in kept.items()}
        # The gated unit's backward pass: gradients of gate, up and unit, and that of the input; the
        # unit itself and the layer's output are freed by then, and what was recomputed is there.
        in_mlp_backward = {
            NOTHING: kept[NOTHING] + 2 * in_mlp,
            LAYERS: kept[NOTHING] + 2 * in_mlp + width,
        }
        if CHEAP in kept:
            in_mlp_backward[CHEAP] = kept[CHEAP] + 3 * in_mlp + width
        # FlashAttention's backward pass: its input and output, gradients of both, an fp32 sum of
        # the queries' gradient, and gradients of keys and values for each query head.
        in_attention_backward = 2 * width + 8 * queries + 4 * keys
        kept[LAYERS] = width
        # Two windows, of copies that leave and of copies that come, and the tensor that is in use.
        largest = max(2 * in_mlp, queries + 2 * keys, width)
        window = {
            policy: (2 * AT_A_TIME + 1) * (width if policy == LAYERS else largest)
            for policy in kept
        }
        return cls(
            kept, in_attention_backward, in_mlp_backward, window, of_tile=6 * inner + 3 * width
        )


def _quantised(model: Any, layers: int, size: int) -> int:
    """Bytes of layers whose weights are codes, with what lies beside these, and of the dense
    weights of one decoder layer, which all in turn are read as."""
    packed = [
        m
        for m in model.modules()
        if any(not p.is_floating_point() for p in m.parameters(recurse=False))
    ]
    codes = sum(
        p.nbytes for m in packed for p in m.parameters(recurse=False) if not p.is_floating_point()
    )
    beside = sum(buffer.nbytes for m in packed for buffer in m.buffers(recurse=False))
    beside += sum(_scales_of(p) for m in packed for p in m.parameters(recurse=False))
    values = sum(
        _values_in(m, p)
        for m in packed
        for p in m.parameters(recurse=False)
        if not p.is_floating_point()
    )
    return codes + beside + values // layers * size


def _values_in(layer: Any, codes: Any) -> int:
    """Weights that codes stand for: those of a linear layer, else two in a byte."""
    linear = hasattr(layer, "out_features") and hasattr(layer, "in_features")
    return int(layer.out_features * layer.in_features if linear else 2 * codes.nbytes)


def _scales_of(weight: Any) -> int:
    """Bytes of the scales that a weight of bitsandbytes keeps in itself."""
    state = getattr(weight, "quant_state", None)
    states = (
        []
        if state is None
        else [state, *([state.state2] if getattr(state, "state2", None) is not None else [])]
    )
    return sum(kept.absmax.nbytes + kept.code.nbytes for kept in states)


def _head_of(model: Any) -> torch.Tensor:
    return _stored(model.get_output_embeddings())


def _stored(layer: Any) -> torch.Tensor:
    """The weight of a layer beneath its adapter."""
    return getattr(layer, "base_layer", layer).weight
