"""Elements a token that one decoder layer keeps, and holds in its own backward pass.

The numbers below were read from the allocator's history of whole steps on an H200
(``benchmarks/long_documents.py``). Letters: D model width, Q and K total width of query and of key
heads, F inner width of the MLP. Those of layers on the CPU are the tensors that autograd saves
there (``HostLayers``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chronicals.kernels.linear_cross_entropy import cross_entropy_bytes
from chronicals.kernels.linear_head import HeadBytes, HeadShape
from chronicals.memory.offload import WINDOW_TENSORS
from chronicals.memory.tiled_layers import LayerTiles
from chronicals.model_shape import ModelShape

NOTHING = "nothing"
CHEAP = "norms and gated units"
LAYERS = "layers"
"""Recomputation policies, from the fastest to the leanest.

``CHEAP`` is for fused layers and recomputes no matrix product. By bytes and operations of an 8B
model it costs 0.5 ns for each 1,000 bytes it saves, ``LAYERS`` 4 ns.
"""


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

    A product whose weight is trained keeps its input; products of the same input keep it once. A
    product that has an adapter with dropout keeps two more tensors of that width: the input after
    dropout, and dropout's factors. Where all is frozen, nothing is kept.

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
class LayerElements:
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
    def of(cls, config: Any, step: StepShape) -> LayerElements:
        """Return the elements of a layer of a model with this configuration of transformers."""
        widths = _Widths.of(config)
        width = widths.model
        inner = widths.inner
        queries = widths.queries
        keys = widths.keys
        in_mlp = 0 if step.tile else widths.routed or inner
        kept = _kept(step, widths, in_mlp)
        # Gradients of gate and up are scaled into another tensor where adapters have magnitudes.
        scaled = inner + 2 * step.columns.gate if step.fused and step.magnitudes else 0
        if step.tile:
            in_mlp_backward = _beside_a_tile(kept, width)
        else:
            # Experts make the gradient of their input for each pair of token and expert.
            of_pairs = widths.experts * width
            in_mlp_backward = _in_gated_unit(kept, width, in_mlp, of_pairs, scaled)
        kept[LAYERS] = width  # a recomputed layer keeps its input
        largest = max(2 * in_mlp, queries + 2 * keys, width)
        return cls(
            kept,
            # FlashAttention's backward pass: its input and output, their gradients, an fp32
            # accumulator of the queries' gradient, and gradients of keys and values for each query
            # head.
            in_attention=2 * width + 8 * queries + 4 * keys,
            in_mlp=in_mlp_backward,
            window={
                policy: WINDOW_TENSORS * (width if policy == LAYERS else largest) for policy in kept
            },
            # Gate, up, the unit's gradient, and the gradients of gate and up with their columns.
            of_tile=5 * inner + step.columns.gate + scaled,
            # Gate, up, the unit and its gradient.
            of_down_in_tile=4 * inner,
        )


@dataclass(frozen=True)
class _Widths:
    """Widths of a layer's tensors, which are the elements that each has a token.

    Attributes:
        model: D, of the hidden states.
        queries: Q, of all query heads.
        keys: K, of all key heads, and of all value heads.
        inner: F, of the MLP's hidden activations.
        heads: number of query heads.
        experts: number of experts that a token is routed to; 0 without experts.
        routed: width of the hidden activations of these experts together; 0 without them.
    """

    model: int
    queries: int
    keys: int
    inner: int
    heads: int
    experts: int
    routed: int

    @classmethod
    def of(cls, config: Any) -> _Widths:
        """Read the widths from a configuration of transformers."""
        shape = ModelShape.of(config)
        heads = shape.heads or 1
        head_dim = shape.head_dim or shape.width // heads
        text = config.get_text_config()
        experts = 0
        if shape.experts:
            experts = int(getattr(text, "num_experts_per_tok", None) or 1)
        of_expert = int(getattr(text, "moe_intermediate_size", None) or shape.inner)
        return cls(
            model=shape.width,
            queries=head_dim * heads,
            keys=head_dim * (shape.kv_heads or heads),
            inner=shape.inner,
            heads=heads,
            experts=experts,
            routed=of_expert * experts,
        )


def _kept(step: StepShape, widths: _Widths, inner: int) -> dict[str, int]:
    """Return the elements a token that a layer keeps, by what is recomputed.

    Args:
        step: shape of the step.
        widths: of the layer.
        inner: F, or the width of the hidden activations of a token's experts; 0 in tiles, which
            keep nothing but their rows.
    """
    # An fp32 value for each query head (FlashAttention) and for each row of both norms.
    of_rows = (widths.heads + 2) * 4 // step.element
    if step.fused:
        kept = _kept_fused(step, widths, _attended(step, widths) + of_rows, inner)
        kept[NOTHING] -= _saved_by_fp8(step, widths)
    elif step.on_host is not None:
        kept = {NOTHING: _kept_on_host(step.on_host, widths, inner, step.element) + of_rows}
    else:
        kept = {NOTHING: 30 * widths.model + 5 * inner}
    if step.magnitudes:
        outputs = _kept_for_magnitudes(step, widths)
        kept = {policy: count + outputs for policy, count in kept.items()}
    return kept


def _attended(step: StepShape, widths: _Widths) -> int:
    """Return the elements a token that attention keeps in a fused layer."""
    # Queries, keys, values and attention's output.
    elements = 2 * widths.queries + 2 * widths.keys
    if step.copies_attended:  # the output once more, with room for an adapter's columns
        elements += widths.queries
    if step.gathers_keys:
        elements += 2 * widths.keys
    if step.repeats_keys:
        elements += 2 * widths.queries
    return elements


def _kept_fused(step: StepShape, widths: _Widths, attended: int, inner: int) -> dict[str, int]:
    """Return the elements a token that a fused layer keeps, by what is recomputed.

    Args:
        step: shape of the step.
        widths: of the layer.
        attended: elements that attention keeps, and those of rows.
        inner: F, or the width of the hidden activations of a token's experts; 0 in tiles.
    """
    width = widths.model
    columns = step.columns
    # Experts keep the inputs of their gated units, and make the units again.
    kept = {NOTHING: 4 * width + attended + (2 if widths.routed else 3) * inner}
    # Columns stay with an input, and are made again with one that is.
    kept[NOTHING] += columns.queries + columns.output + columns.gate
    if not step.tile:
        kept[NOTHING] += columns.down
    if widths.routed:  # layers with experts never run in one piece, which makes norms again
        return kept
    kept[CHEAP] = 2 * width + attended + 2 * inner + columns.output
    if step.tile:  # the normed rows stay, from which tiles are made again
        kept[CHEAP] += width + columns.gate
    return kept


def _saved_by_fp8(step: StepShape, widths: _Widths) -> int:
    """Return the elements a token that a fused layer saves by inputs in 8 bits instead of 16."""
    if step.in_fp8 is None:
        return 0
    # Input and output width of each product.
    products = [(widths.model, widths.queries + 2 * widths.keys)]
    if not step.tile:  # a tile is made again from its rows in 16 bits
        products += [(widths.model, 2 * widths.inner), (widths.inner, widths.model)]
    return sum(inputs for inputs, outputs in products if step.in_fp8(inputs, outputs)) // 2


def _kept_for_magnitudes(step: StepShape, widths: _Widths) -> int:
    """Return the elements a token of outputs of products that gradients of magnitudes need."""
    # Without gate and up, which a fused layer keeps anyway.
    returned = widths.queries + 2 * widths.keys + 2 * widths.model
    if step.fused:
        if step.tile:  # the down product returns within a tile
            returned -= widths.model
        return returned
    returned += 2 * widths.inner
    return returned if step.on_host is not None else 2 * returned


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


def _kept_on_host(layers: HostLayers, widths: _Widths, inner: int, element: int) -> int:
    """Return the elements a token that a layer keeps on the CPU.

    A norm keeps its input in fp32. Attention keeps queries, keys, values and its output, which are
    copied together from the documents for what follows. A gated unit keeps gate, up and the
    activated gate.

    Args:
        layers: what products keep.
        widths: of the layer.
        inner: F, or the width of the hidden activations of a token's experts.
        element: bytes of an element.
    """
    norms = 2 * (4 // element + layers.trains_norms) * widths.model
    attention = 2 * widths.queries + 2 * widths.keys
    products = (layers.queries + layers.gate) * widths.model
    products += layers.output * widths.queries + layers.down * inner
    return norms + attention + 3 * inner + products + layers.columns
