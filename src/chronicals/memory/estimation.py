"""Estimates the memory of training a model: the bytes of its weights, layers, head and embedding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.linear_head import HeadShape
from chronicals.memory.layer_elements import LAYERS, NOTHING, LayerElements, StepShape
from chronicals.memory.peak import (
    DEQUANTISED,
    FROZEN_WEIGHTS,
    GRADIENTS,
    PACKED_WEIGHTS,
    STATES,
    TRAINED_WEIGHTS,
    Estimate,
    TableBytes,
    WeightBytes,
)
from chronicals.memory.tiled_layers import LayerTiles, TiledElements
from chronicals.model_shape import ModelShape


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
    # Tables are those of the model itself, without adapters.
    inputs = model.get_input_embeddings()
    outputs = model.get_output_embeddings()
    head = getattr(outputs, "base_layer", outputs).weight
    table = getattr(inputs, "base_layer", inputs).weight
    shape = ModelShape.of(model.config)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parts = _standing_parts(model, (table, head), trained, step, weights)
    layer = LayerElements.of(model.config, step)
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
    window: dict[str, int] = {}
    if step.offloads:
        window = {policy: of_token * count for policy, count in layer.window.items()}
    whole = Estimate(
        fixed=sum(parts.values()),
        layers=shape.layers,
        kept={policy: of_token * count for policy, count in layer.kept.items()},
        total=card_memory(next(model.parameters()).device),
        gradients=int(trained * weights.gradient),
        # The last norm keeps its input beside what the loss needs.
        loss=of_token * shape.width + of_head.states + of_head.logits,
        working={
            policy: max(of_token * layer.in_attention, of_token * count + tile)
            for policy, count in layer.in_mlp.items()
        },
        window=window,
        logits=of_head.logits,
        named=parts,
        tables=TableBytes.of(table, head, of_head, weights, step.element),
    )
    return whole if step.layer_tiles is None else _in_tiles(whole, shape, step, step.layer_tiles)


def _standing_parts(
    model: Any,
    tables: Iterable[Tensor],
    trained: int,
    step: StepShape,
    weights: WeightBytes,
) -> dict[str, int]:
    """Return the bytes by part that a run holds all the time.

    Args:
        model: with its adapters.
        tables: weights of embedding and head, which are in the dtype of activations if frozen.
        trained: number of trained weights.
        step: of the run.
        weights: bytes of a weight.
    """
    in_tables = {id(table) for table in tables}
    frozen = 0.0
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.requires_grad:
            size = step.element if id(parameter) in in_tables else weights.frozen
            frozen += parameter.numel() * size
    packed, dequantised = _quantised(model, ModelShape.of(model.config).layers, step.element)
    parts = {
        FROZEN_WEIGHTS: frozen,
        TRAINED_WEIGHTS: trained * (weights.trained - weights.states - weights.standing),
        PACKED_WEIGHTS: packed,
        DEQUANTISED: dequantised,
        STATES: trained * weights.states,
        GRADIENTS: trained * weights.standing,
    }
    return {name: int(size) for name, size in parts.items()}


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
