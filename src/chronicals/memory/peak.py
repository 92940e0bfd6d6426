"""Estimates the bytes that a training step holds on the GPU, by part, at its largest moment.

A step holds a constant part (weights, optimizer states, gradients) and, in addition, those of the
moment that it is at, in this order:

    loss        activations kept by all layers, hidden states and their gradient, the
                logits of a chunk
    head        the same without logits, and the head's gradient as autograd takes it: its
                fp32 sum, a copy in the head's dtype, and an fp32 one if gradients are fp32
    backward    activations kept by the earlier layers, and what one layer needs during
                its own backward pass
    end         gradients of all trained weights if the backward pass allocates them, and
                the backward pass of the first layer
    embedding   all gradients, and for a tied embedding two of the same weight

Autograd adds the gradient of a tied head to none that stands before it has the embedding's, too.
    update      on the CPU, all gradients and the reference's copies of the largest weight

A peak is the largest moment. Each moment is a sum of named parts, so that a plan can say what fills
a GPU (``Estimate.peak``).

The numbers of elements a token and layer below were read from the allocator's history of whole
steps on an H200 (``benchmarks/long_documents.py``). Letters: D model width, Q and K total width of
query and of key heads, F inner width of the MLP. Those of layers on the CPU are the tensors that
autograd saves there (``HostLayers``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.launch import next_power_of_2
from chronicals.kernels.linear_cross_entropy import cross_entropy_bytes
from chronicals.kernels.linear_head import HeadBytes, HeadShape
from chronicals.memory.offload import WINDOW_TENSORS
from chronicals.memory.tiled_layers import LayerTiles, TiledElements
from chronicals.model_shape import ModelShape

RESERVE = 0.9
"""Usable fraction of the GPU's memory; the rest is for fragmentation and workspaces."""

NOTHING = "nothing"
CHEAP = "norms and gated units"
LAYERS = "layers"
"""Recomputation policies, from the fastest to the leanest.

``CHEAP`` is for fused layers and recomputes no matrix product. By bytes and operations of an 8B
model it costs 0.5 ns for each 1,000 bytes it saves, ``LAYERS`` 4 ns.
"""


FROZEN_WEIGHTS = "frozen weights"
TRAINED_WEIGHTS = "trained weights"
PACKED_WEIGHTS = "packed weights"
DEQUANTISED = "dequantised weights of a layer"
STATES = "optimizer states and masters"
GRADIENTS = "gradients"
HEAD_GRADIENT = "gradient of the head and its fp32 sum"
ACTIVATIONS = "activations that layers keep"
HEAD_COPY = "head, copied from host memory"
HIDDEN_STATES = "hidden states at the loss, and their gradient"
LOGITS = "logits of a chunk"
WORKING = "one layer in its backward pass"
WORKSPACES = "workspaces of products"
PADDING = "padding of weights for adapters"
OTHERS = "gathered weights, and buffers of policies"
OFFLOADED = "offloaded activations"
RESULTS_AWAY = "results of attention"
UPDATE = "copies of the largest weight in its update"
"""Names of the parts of a moment."""


@dataclass(frozen=True)
class Moment:
    """A moment of a training step.

    Attributes:
        name: what runs then, in words.
        parts: bytes that the GPU holds then, by name; none is zero.
    """

    name: str
    parts: Mapping[str, int]

    @property
    def held(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def words(self) -> str:
        """Return the parts in words, the largest first, for a log."""
        largest_first = sorted(self.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in largest_first)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one weight.

    Attributes:
        frozen: a weight that is not trained. Embeddings and heads take the size of an activation
            element instead.
        trained: a trained weight with its optimizer states, and with its gradient if that is
            allocated during the forward pass.
        gradient: the gradient, if the backward pass allocates it while it frees activations.
        states: of ``trained``, the optimizer states.
        standing: of ``trained``, the gradient.
    """

    frozen: float
    trained: float
    gradient: float = 0.0
    states: float = 0.0
    standing: float = 0.0


@dataclass(frozen=True)
class AdapterColumns:
    """Columns behind each row of the inputs of a fused layer's products, for adapters.

    An adapter's ``x Aᵀ`` is written there (``lora.merged_linear``), and kept with the input.

    Attributes:
        queries: of the product that makes queries, keys and values.
        output: of attention's output product.
        gate: of the product that makes gate and up.
        down: of the down product.
    """

    queries: int = 0
    output: int = 0
    gate: int = 0
    down: int = 0


@dataclass(frozen=True)
class HostLayers:
    """Tensors that decoder layers keep on the CPU, where they run as their classes define them.

    Each product keeps its input if its weight is trained, which products of one input share, and
    for an adapter with dropout that input as it was dropped, and what was dropped. They keep
    nothing where all is frozen.

    Attributes:
        trains_norms: weights of norms are trained, so each keeps its normalised input.
        queries: tensors as wide as the input of the products of queries, keys and values.
        output: of attention's output product.
        gate: of the products of gate and up.
        down: of the down product.
        columns: sum of the ranks of a layer's adapters.
    """

    trains_norms: bool = True
    queries: int = 1
    output: int = 1
    gate: int = 1
    down: int = 1
    columns: int = 0


@dataclass(frozen=True)
class StepShape:
    """The properties of a step that its memory depends on.

    Attributes:
        tokens: tokens of one forward pass.
        fused: decoder layers run fused; an unfused layer keeps ``30 D + 5 F`` elements a token.
        element: bytes of an activation element.
        logit_rows: rows of logits that exist at a time.
        in_fp8: function of input and output width, True for trained products in FP8. Their inputs,
            made by norms and gated units, are kept in 8 bits.
        magnitudes: adapters have magnitudes (DoRA), whose gradients need the outputs of products. A
            fused layer keeps gate and up outputs anyway.
        copies_attended: attention's output projection has adapters, so its input is copied to make
            room for their columns.
        tile: rows of an MLP that are computed at a time; 0 for all.
        tile_sums: bytes of the gradient of one of an MLP's three weights, where those of tiles are
            summed; 0 if they are frozen.
        layer_tiles: how decoder layers run in tiles as a whole; None where they do not.
        offloads: saved tensors are offloaded to host memory.
        head_bytes: returns the bytes that the loss needs, by its kernel's file.
        columns: columns for adapters behind the inputs of products.
        gathers_keys: answers share prompts, so keys and values of a row's prompt and answer are
            gathered; they are counted once a token, and prompts that several answers share beyond
            that are not.
        repeats_keys: keys and values are repeated for every query head, as attention in fp32 on a
            card needs them.
        on_host: what layers keep on the CPU; None on a card.
    """

    tokens: int
    fused: bool
    element: int
    logit_rows: int
    in_fp8: Callable[[int, int], bool] | None = None
    magnitudes: bool = False
    copies_attended: bool = False
    tile: int = 0
    tile_sums: int = 0
    layer_tiles: LayerTiles | None = None
    offloads: bool = False
    head_bytes: Callable[[HeadShape], HeadBytes] = cross_entropy_bytes
    columns: AdapterColumns = AdapterColumns()
    gathers_keys: bool = False
    repeats_keys: bool = False
    on_host: HostLayers | None = None


@dataclass(frozen=True)
class TableBytes:
    """Bytes of the gradients of head and embedding, which come first and last.

    Attributes:
        summed: sums of the head's gradient while the loss computes it.
        returned: of the head's gradient as the loss returns it, with the copies that it is made of.
        head: of the head's gradient from then on, if gradients come in the backward pass.
        waiting: of a tied head's gradient from then on, if gradients stand, to which it is only
            added with the embedding's.
        embedding: of the embedding's, which is only made after the first layer; 0 if it is the
            head.
        again: of the embedding's gradient before it is added to others, with its copy in fp32 if
            gradients are fp32; beside ``embedding`` only what that is made of.
    """

    summed: int = 0
    returned: int = 0
    head: int = 0
    waiting: int = 0
    embedding: int = 0
    again: int = 0

    @classmethod
    def of(
        cls, table: Tensor, head: Tensor, of_head: HeadBytes, weights: WeightBytes, element: int
    ) -> TableBytes:
        """Return the bytes of a model's head and embedding.

        Args:
            table: weight of the embedding.
            head: weight of the head; may be the same.
            of_head: what the loss needs.
            weights: bytes of a weight.
            element: bytes of an element of a gradient as it is computed.
        """
        has_gradient = of_head.gradient > 0  # not where a score stands in the place of the head
        tied = table is head and has_gradient
        of_table = table.numel() * table.requires_grad
        trained_head = head.numel() * (head.requires_grad and has_gradient)
        summed = weights.gradient + weights.standing
        cast = summed if summed > element else 0
        again = of_table * (element + cast)
        if not tied and not weights.standing:  # the result is among the gradients
            again = of_table * element if cast else 0
        return cls(
            summed=of_head.gradient,
            returned=of_head.returned + int(trained_head * cast),
            head=int(trained_head * weights.gradient),
            waiting=int(trained_head * weights.standing) if tied else 0,
            embedding=0 if tied else int(of_table * weights.gradient),
            again=int(again),
        )


@dataclass(frozen=True)
class Estimate:
    """Expected memory of a training run, in bytes; mappings are by recomputation policy.

    Attributes:
        fixed: weights, optimizer states, and gradients that are allocated during the forward pass.
        layers: number of decoder layers.
        kept: activations of one layer.
        total: memory of the GPU; 0 without one.
        gradients: gradients that the backward pass allocates as it frees activations.
        loss: hidden states, their gradient and the logits of a chunk; not the head's gradient.
        working: the layer whose backward pass runs, with the activations it kept.
        window: with offload, saved tensors on the GPU; else empty.
        logits: of ``loss``, the logits of a chunk.
        head_copy: a head that is in host memory, and on the GPU during the loss alone; else 0.
        named: the bytes of ``fixed`` by part; what they leave is ``OTHERS``.
        tables: gradients of head and embedding.
        away: bytes in host memory by part, without the activations that are offloaded.
        update: bytes that an update needs beside the gradients; 0 on a card.
        pooled: True if CUDA graphs have a memory pool of their own beside these bytes.
        without_graphs: True if CUDA graphs were permitted, and these are the bytes without them.
        moved_inputs: of layers that run in tiles, number of those whose inputs are in host memory;
            None where inputs are not offloaded.
        result: of a layer that runs in tiles, bytes that attention gives for the backward pass.
        kept_results: number of layers whose results are in host memory; the others compute them
            again.
    """

    fixed: int
    layers: int
    kept: Mapping[str, int]
    total: int
    gradients: int = 0
    loss: int = 0
    working: Mapping[str, int] = field(default_factory=dict)
    window: Mapping[str, int] = field(default_factory=dict)
    logits: int = 0
    head_copy: int = 0
    named: Mapping[str, int] = field(default_factory=dict)
    away: Mapping[str, int] = field(default_factory=dict)
    tables: TableBytes = TableBytes()
    update: int = 0
    pooled: bool = False
    without_graphs: bool = False
    moved_inputs: int | None = None
    result: int = 0
    kept_results: int = 0

    def moving_inputs(self, most: int) -> Estimate:
        """Return the estimate with as few inputs of layers in host memory as fit the card needs.

        Each input costs a copy in both passes. Where not even ``most`` are enough, it is ``most``.

        Args:
            most: largest number of layers whose inputs may be in host memory.
        """
        for count in range(most):
            fewer = replace(self, moved_inputs=count)
            if fewer.needed(LAYERS) <= RESERVE * self.total:
                return fewer
        return replace(self, moved_inputs=most)

    def beside(self, name: str, size: int) -> Estimate:
        """Return the estimate with further bytes that exist all the time."""
        named = {**self.named, name: self.named.get(name, 0) + size}
        return replace(self, fixed=self.fixed + size, named=named)

    def renamed(self, name: str, other: str) -> Estimate:
        """Return the estimate with another name of a part that exists all the time."""
        named = {other if part == name else part: size for part, size in self.named.items()}
        return replace(self, named=named)

    def needed(self, cheap: str, again: int = 0) -> int:
        """Return the bytes needed under a recomputation plan.

        Args:
            cheap: policy of the layers after the first ``again``.
            again: number of first layers that are recomputed whole.
        """
        return self.peak(cheap, again).held

    def peak(self, cheap: str, again: int = 0) -> Moment:
        """Return the largest moment of a step; arguments as for ``needed``."""
        return max(self.moments(cheap, again), key=lambda moment: moment.held)

    def moments(self, cheap: str, again: int = 0) -> list[Moment]:
        """Return the moments of a step in their order; arguments as for ``needed``."""
        saved = again * self.kept[LAYERS] + (self.layers - again) * self.kept[cheap]
        whole_layers = cheap == LAYERS or again == self.layers
        last = LAYERS if whole_layers else cheap
        first = LAYERS if again or whole_layers else cheap
        before_last = saved - (0 if whole_layers else self.kept[cheap])
        # The backward pass goes from the last layer to the first. When it reaches the first layers,
        # the activations of the others are freed, and the gradients are allocated.
        before_first = again * self.kept[LAYERS] if again else 0
        if self.moved_inputs:
            # Of inputs that move the last one is on its way out; of those that come back the one in
            # use and the next are there (``memory.offload``).
            size = self.kept[LAYERS]
            stay = (self.layers - self.moved_inputs) * size
            saved = stay + size
            before_last = stay + (2 if whole_layers else 1) * size
            before_first = (2 if again or whole_layers else 1) * size
        elif self.window:
            # Of what is copied out a window is on the GPU. It stays there until the first tensor
            # that was copied back is used; of these a window and the tensor in use are there, and
            # what the layer kept is among them.
            window = self.window[cheap]
            back = window + window // WINDOW_TENSORS
            before_last = min(saved, window + back)
            before_first = min(saved, back)
            if not whole_layers:
                before_last -= min(before_last, self.kept[cheap])
            if not (again or whole_layers):
                before_first -= min(before_first, self.kept[cheap])
            saved = min(saved, window)
        tables = self.tables
        of_layers = self.gradients - tables.embedding
        moments = {
            "the loss": {
                ACTIVATIONS: saved,
                HIDDEN_STATES: self.loss - self.logits,
                LOGITS: self.logits,
                HEAD_COPY: self.head_copy,
                HEAD_GRADIENT: tables.summed,
            },
            "the gradient of the head": {
                ACTIVATIONS: saved,
                HIDDEN_STATES: self.loss - self.logits,
                HEAD_COPY: self.head_copy,
                HEAD_GRADIENT: tables.returned,
            },
            "the backward pass of the last layer": {
                ACTIVATIONS: before_last,
                WORKING: self._working(last),
                GRADIENTS: tables.head + tables.waiting,
            },
            "the backward pass of the first layer": {
                ACTIVATIONS: before_first,
                WORKING: self._working(first),
                GRADIENTS: of_layers + tables.waiting,
            },
            "the gradient of the embedding": {
                GRADIENTS: self.gradients + tables.waiting + tables.again
            },
        }
        if self.update:
            moments["the update"] = {GRADIENTS: self.gradients, UPDATE: self.update}
        return [self._moment(name, parts) for name, parts in moments.items()]

    def _moment(self, name: str, parts: Mapping[str, int]) -> Moment:
        """Return a moment with what exists all the time."""
        others = self.fixed - sum(self.named.values())
        held = dict(self.named)
        for part, size in {OTHERS: others, **parts}.items():
            held[part] = held.get(part, 0) + size
        return Moment(name, {part: size for part, size in held.items() if size})

    def pool(self, cheap: str, again: int = 0) -> int:
        """Return the bytes of the pool that all CUDA graphs share; arguments as for ``needed``.

        It has what a micro-step makes, and stays while a micro-step of a shape that no graph has
        makes the same outside of it. In a graph of a step's first micro-batch gradients are new, and
        copied to those that stand. 8B QLoRA reserved 77.9 GiB of an H100, where tensors were 42.4
        at most and 7.2 between steps (``benchmarks/results/several-cards-h100-2.json``).
        """
        if not self.pooled:
            return 0
        new = self.gradients + self.named.get(GRADIENTS, 0)
        first = replace(self, gradients=new, tables=replace(self.tables, waiting=0))
        return max(self.needed(cheap, again), first.needed(cheap, again)) - self.fixed

    def in_host_memory(self, cheap: str, again: int = 0) -> dict[str, int]:
        """Return the bytes in pinned host memory by part; arguments as for ``needed``.

        A buffer of an offloaded tensor has the next power of two of bytes
        (``ActivationOffload.take``); that of a layer's input is known here, of others only their
        sum. Inputs of layers that run in tiles are in one memory without gaps.
        """
        if self.moved_inputs:
            results = {RESULTS_AWAY: self.kept_results * self.result} if self.kept_results else {}
            return {**self.away, OFFLOADED: self.moved_inputs * self.kept[LAYERS], **results}
        if not self.window:
            return dict(self.away)
        whole = self.layers if cheap == LAYERS else again
        inputs = whole * next_power_of_2(self.kept[LAYERS])
        others = (self.layers - whole) * self.kept[cheap]
        return {**self.away, OFFLOADED: inputs + others}

    def _working(self, policy: str) -> int:
        """Return the bytes of the layer whose backward pass runs.

        A layer recomputed whole holds all that it would have kept.
        """
        return self.working.get(
            policy, self.kept[NOTHING] if policy == LAYERS else self.kept[policy]
        )

    def choice(self) -> tuple[str, int]:
        """Return a recomputation policy and the number of first layers that are recomputed whole.

        It is the fastest plan that fits, else the leanest.
        """
        if not self.total:
            return NOTHING, 0
        cheap = [policy for policy in (NOTHING, CHEAP) if policy in self.kept]
        plans = [(policy, 0) for policy in cheap]
        plans += [(cheap[-1], again) for again in range(1, self.layers + 1)]
        leanest = plans[0]
        least = self.needed(*leanest)
        for plan in plans:
            size = self.needed(*plan)
            if size <= RESERVE * self.total:
                return plan
            if size < least:
                leanest, least = plan, size
        return leanest

    @property
    def fits(self) -> bool:
        """True if a plan fits into ``RESERVE`` of the GPU's memory, or if there is no GPU."""
        return not self.total or self.needed(*self.choice()) <= RESERVE * self.total

    def words(self) -> str:
        """Return the expected memory and the recomputation plan in words, for the log."""
        if not self.total:
            return "not on a card"
        cheap, again = self.choice()
        sizes = f"estimated {self.needed(cheap, again) / 2**30:.1f} of {self.total / 2**30:.1f} GiB"
        layers = f"{again} of {self.layers} layers recomputed" if again else ""
        others = "" if again and cheap == NOTHING else f"{cheap} recomputed"
        return ", ".join(words for words in (sizes, layers, others) if words)


def card_memory(device: torch.device) -> int:
    """Return the bytes of GPU memory that this process may use; 0 without a GPU.

    torch's per-process memory fraction is applied.
    """
    if device.type != "cuda":
        return 0
    share = torch.cuda.get_per_process_memory_fraction(device)
    return int(share * torch.cuda.get_device_properties(device).total_memory)


def estimate(model: Any, step: StepShape, weights: WeightBytes) -> Estimate:
    """Estimate the memory of training ``model``, a Hugging Face model with its adapters.

    The model may be on any device.
    """
    parameters = list(model.parameters())
    device = parameters[0].device
    floats = [p for p in parameters if p.is_floating_point()]
    # The weights themselves, without adapters.
    inputs = model.get_input_embeddings()
    outputs = model.get_output_embeddings()
    head = getattr(outputs, "base_layer", outputs).weight
    table = getattr(inputs, "base_layer", inputs).weight
    tables = {id(table), id(head)}
    frozen = 0.0
    trained = 0
    for parameter in floats:
        if parameter.requires_grad:
            trained += parameter.numel()
        else:
            frozen += parameter.numel() * (
                step.element if id(parameter) in tables else weights.frozen
            )
    shape = ModelShape.of(model.config)
    own = weights.trained - weights.states - weights.standing
    packed, dequantised = _quantised(model, shape.layers, step.element)
    named = {
        FROZEN_WEIGHTS: frozen,
        TRAINED_WEIGHTS: trained * own,
        PACKED_WEIGHTS: packed,
        DEQUANTISED: dequantised,
        STATES: trained * weights.states,
        GRADIENTS: trained * weights.standing,
    }
    parts = {name: int(size) for name, size in named.items()}
    layer = _LayerElements.of(model.config, step)
    of_token = step.tokens * step.element
    of_head = step.head_bytes(
        HeadShape(
            tokens=step.tokens,
            rows=min(step.logit_rows, step.tokens),
            width=shape.width,
            vocabulary=len(head),
            element=step.element,
            trained=head.requires_grad,
        )
    )
    of_tile = step.tile * layer.of_tile * step.element
    of_down = step.tile * layer.of_down_in_tile * step.element
    # Gradients of the three weights wait for those of the last tile; then the down product's comes.
    tile = max(of_tile + 3 * step.tile_sums, of_down + 4 * step.tile_sums)
    whole = Estimate(
        fixed=sum(parts.values()),
        layers=shape.layers,
        kept={policy: of_token * count for policy, count in layer.kept.items()},
        total=card_memory(device),
        gradients=int(trained * weights.gradient),
        # The last norm keeps its input beside what the loss needs.
        loss=of_token * shape.width + of_head.states + of_head.logits,
        working={
            policy: max(of_token * layer.in_attention, of_token * count + tile)
            for policy, count in layer.in_mlp.items()
        },
        window={policy: of_token * count for policy, count in layer.window.items()}
        if step.offloads
        else {},
        logits=of_head.logits,
        named=parts,
        tables=TableBytes.of(table, head, of_head, weights, step.element),
    )
    return whole if step.layer_tiles is None else _in_tiles(whole, shape, step, step.layer_tiles)


def _in_tiles(whole: Estimate, shape: ModelShape, step: StepShape, tiles: LayerTiles) -> Estimate:
    """Return the estimate with layers that keep their input and run in tiles, whatever the policy.

    Args:
        whole: estimate of the run with layers in one piece.
        shape: of the model.
        step: of the run.
        tiles: how its layers run.
    """
    columns = step.columns
    of_rows = columns.queries + columns.output + columns.gate + columns.down
    elements = TiledElements.of(shape, step.tokens, tiles, step.element, of_rows, step.gathers_keys)
    kept = step.tokens * step.element * shape.width
    working = elements.bytes(step.tokens, tiles, step.element)
    return replace(
        whole,
        kept={NOTHING: kept, LAYERS: kept},
        working={NOTHING: kept + working, LAYERS: working},  # with the layer's own input
        window={},
        result=step.tokens * elements.of_result * step.element,
    )


def _experts_of_token(config: Any) -> int:
    """Return the number of experts that a token is routed to; 0 without experts."""
    if not ModelShape.of(config).experts:
        return 0
    return int(getattr(config.get_text_config(), "num_experts_per_tok", None) or 1)


def _routed_width(config: Any) -> int:
    """Return the width of the hidden activations of a token's experts together; 0 without them."""
    text = config.get_text_config()
    each = getattr(text, "moe_intermediate_size", None) or ModelShape.of(config).inner
    return int(each) * _experts_of_token(config)


@dataclass(frozen=True)
class _LayerElements:
    """Elements a token in one layer; mappings are by recomputation policy.

    The letters are those of the module's docstring.

    Attributes:
        kept: elements kept for the backward pass.
        in_attention: elements during attention's backward pass, with those that the layer still
            keeps.
        in_mlp: elements during the MLP's backward pass, without those of a tile.
        window: with offload, most elements on the way to host memory.
        of_tile: elements of each row in a tile of the MLP, at the gated unit's backward pass.
        of_down_in_tile: the same at the gradient of the down product's weight.
    """

    kept: dict[str, int]
    in_attention: int
    in_mlp: dict[str, int]
    window: dict[str, int]
    of_tile: int = 0
    of_down_in_tile: int = 0

    @classmethod
    def of(cls, config: Any, step: StepShape) -> _LayerElements:
        shape = ModelShape.of(config)
        width = shape.width
        inner = shape.inner
        heads = shape.heads or 1
        head_dim = shape.head_dim or width // heads
        queries = head_dim * heads
        keys = head_dim * (shape.kv_heads or heads)
        routed = _routed_width(config)
        in_mlp = 0 if step.tile else routed or inner
        # Queries, keys, values and attention's output, and a copy of the output with room for an
        # adapter's columns.
        attended = 2 * queries + 2 * keys + (queries if step.copies_attended else 0)
        attended += 2 * keys * step.gathers_keys + 2 * queries * step.repeats_keys
        # An fp32 value for each query head (FlashAttention) and for each row of both norms.
        of_rows = (heads + 2) * 4 // step.element
        # Outputs of matrix products, without gate and up, which are kept anyway.
        products = queries + 2 * keys + 2 * width
        if step.fused:
            kept = _kept_fused(step, width, attended + of_rows, routed, in_mlp)
        elif step.on_host is not None:
            kept = {
                NOTHING: _kept_on_host(step.on_host, width, queries, keys, in_mlp, step.element)
            }
            kept[NOTHING] += of_rows
        else:
            kept = {NOTHING: 30 * width + 5 * in_mlp}
        if step.fused and step.in_fp8 is not None:
            pairs = [(width, queries + 2 * keys)]
            if not step.tile:  # a tile is made again from its rows in 16 bits
                pairs += [(width, 2 * inner), (inner, width)]
            # Inputs kept in 8 bits instead of 16 count half.
            kept[NOTHING] -= (
                sum(inputs for inputs, outputs in pairs if step.in_fp8(inputs, outputs)) // 2
            )
        if step.magnitudes:
            returned = products if step.fused else 2 * (products + 2 * inner)
            if step.fused and step.tile:  # the down product returns within a tile
                returned -= width
            if step.on_host is not None:
                returned = products + 2 * inner
            kept = {policy: count + returned for policy, count in kept.items()}
        # Gradients of gate and up are scaled into another tensor where adapters have magnitudes.
        scaled = inner + 2 * step.columns.gate if step.fused and step.magnitudes else 0
        # Experts make the gradient of their input for each pair of token and expert.
        of_pairs = _experts_of_token(config) * width
        in_mlp_backward = _in_gated_unit(kept, width, in_mlp, of_pairs, scaled)
        if step.tile:
            in_mlp_backward = _beside_a_tile(kept, width)
        # FlashAttention's backward pass: its input and output, their gradients, an fp32 accumulator
        # of the queries' gradient, and gradients of keys and values for each query head.
        in_attention_backward = 2 * width + 8 * queries + 4 * keys
        kept[LAYERS] = width  # a recomputed layer keeps its input
        largest = max(2 * in_mlp, queries + 2 * keys, width)
        window = {
            policy: WINDOW_TENSORS * (width if policy == LAYERS else largest) for policy in kept
        }
        return cls(
            kept,
            in_attention_backward,
            in_mlp_backward,
            window,
            # Gate, up, the unit's gradient, and the gradients of gate and up with their columns.
            of_tile=5 * inner + step.columns.gate + scaled,
            # Gate, up, the unit and its gradient.
            of_down_in_tile=4 * inner,
        )


def _kept_fused(
    step: StepShape, width: int, attended: int, routed: int, inner: int
) -> dict[str, int]:
    """Return the elements a token that a fused layer keeps, by what is recomputed.

    Args:
        step: shape of the step.
        width: D of the module's docstring.
        attended: elements that attention keeps, and those of rows.
        routed: width of the hidden activations of a token's experts; 0 without them.
        inner: F, or ``routed``; 0 in tiles, which keep nothing but their rows.
    """
    columns = step.columns
    # Experts keep the inputs of their gated units, and make the units again.
    kept = {NOTHING: 4 * width + attended + (2 if routed else 3) * inner}
    # Columns stay with an input, and are made again with one that is.
    kept[NOTHING] += columns.queries + columns.output + columns.gate
    if not step.tile:
        kept[NOTHING] += columns.down
    if routed:  # layers with experts never run in one piece, which makes norms again
        return kept
    kept[CHEAP] = 2 * width + attended + 2 * inner + columns.output
    if step.tile:  # the normed rows stay, from which tiles are made again
        kept[CHEAP] += width + columns.gate
    return kept


def _in_gated_unit(
    kept: Mapping[str, int], width: int, inner: int, of_pairs: int, scaled: int
) -> dict[str, int]:
    """Return the elements a token in a gated unit's backward pass, by what is recomputed.

    These are gradients of gate, up, unit and input. The unit and the layer's output are freed by
    then; recomputed activations are allocated.

    Args:
        kept: elements that a layer keeps.
        width: D of the module's docstring.
        inner: F, or the width of the hidden activations of a token's experts.
        of_pairs: elements of the gradients of experts' inputs.
        scaled: elements of gradients that magnitudes scale.
    """
    beside = of_pairs + scaled
    held = {
        NOTHING: kept[NOTHING] + 2 * inner + beside,
        LAYERS: kept[NOTHING] + 2 * inner + beside + width,
    }
    if CHEAP in kept:
        held[CHEAP] = kept[CHEAP] + 3 * inner + beside + width
        # By the time that gradients are scaled the normed input was made again.
        held[CHEAP] += width if scaled else 0
    return held


def _beside_a_tile(kept: Mapping[str, int], width: int) -> dict[str, int]:
    """Return the elements a token in the MLP's backward pass without those of a tile.

    They are what a layer keeps, by what is recomputed, and gradients of its output and of the
    inputs of the tiles that were done; arguments as for ``_in_gated_unit``.
    """
    held = {policy: count + 2 * width for policy, count in kept.items()}
    return {**held, LAYERS: held[NOTHING]}


def _kept_on_host(
    layers: HostLayers, width: int, queries: int, keys: int, inner: int, element: int
) -> int:
    """Return the elements a token that a layer keeps on the CPU.

    The letters are D, Q, K and F of the module's docstring. A norm keeps its input in fp32. Attention
    keeps queries, keys, values and its output, which are copied together from the documents for
    what follows. A gated unit keeps gate, up and the activated gate.

    Args:
        layers: what products keep.
        width: D.
        queries: Q.
        keys: K.
        inner: F.
        element: bytes of an element.
    """
    norms = 2 * (4 // element + layers.trains_norms) * width
    attention = 2 * queries + 2 * keys
    products = (layers.queries + layers.gate) * width
    products += layers.output * queries + layers.down * inner
    return norms + attention + 3 * inner + products + layers.columns


def _quantised(model: Any, layers: int, size: int) -> tuple[int, int]:
    """Return the bytes of layers with packed weights, and of one decoder layer's dense weights.

    The layers are dequantised one after the other.

    Args:
        model: a model, some of whose weights may be packed.
        layers: number of decoder layers.
        size: bytes of a dense weight.
    """
    codes = 0
    beside = 0
    values = 0
    for module in model.modules():
        parameters = list(module.parameters(recurse=False))
        packed = [p for p in parameters if not p.is_floating_point()]
        if not packed:
            continue
        linear = hasattr(module, "out_features") and hasattr(module, "in_features")
        for parameter in packed:
            codes += parameter.nbytes
            # Outside of linear layers, such as in stacks of experts, a byte holds two weights.
            values += module.out_features * module.in_features if linear else 2 * parameter.nbytes
        beside += sum(buffer.nbytes for buffer in module.buffers(recurse=False))
        for parameter in parameters:
            state = getattr(parameter, "quant_state", None)  # of bitsandbytes
            for scales in (state, getattr(state, "state2", None)):
                if scales is not None:
                    beside += scales.absmax.nbytes + scales.code.nbytes
    return codes + beside, values // layers * size
