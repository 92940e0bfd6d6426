"""Merge adapters: an adapted layer becomes a plain one with the weight ``W + s · B A``, with scaled
rows if the adapter has magnitudes (``magnitude.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from chronicals.lora.adapter_layer import AdapterLayer
from chronicals.lora.layers import adapters
from chronicals.lora.magnitude import is_plain
from chronicals.lora.parameter_layer import LoRAParameter
from chronicals.lora.tokens import merge_tokens
from chronicals.quantization import packed_experts, packed_layers, packed_weight


@torch.no_grad()
def merge_adapters(model: Any) -> None:
    """Replace every adapted layer by its base layer with the merged weight, summed in fp32 and
    rounded once to its dtype.

    Layers and experts in 4 bits are dequantised, also those without an adapter. Rows of trained
    tokens go into the embedding. A head that is tied to the embedding gets a weight of its own if
    one of the two is adapted. All weights stay frozen, as in PEFT.

    Raises:
        ValueError: there are no adapters of ours, or a weight is quantised; the model is unchanged.
    """
    adapted = dict(adapters(model))
    if not adapted:
        raise ValueError(
            f"{type(model).__name__} has no adapters of apply_lora or load_adapter to merge"
        )
    quantised = [path for path, layer in adapted.items() if not _can_be_merged(layer)]
    if quantised:
        raise ValueError(
            f"the weights of {quantised[0]} are quantised and cannot take its adapter; save the "
            "adapter, load the base in 16 bit, attach it with chronicals.lora.load_adapter, and "
            "merge that"
        )
    for path, experts in list(packed_experts(model)):
        model.set_submodule(path, experts.plain())
    _untie_adapted_head(model)
    for path, layer in reversed(adapted.items()):  # of several around one layer the innermost first
        layer.merge()
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer.base_layer)
    merge_tokens(model)
    for path, linear in list(packed_layers(model)):
        model.set_submodule(path, linear.plain())


def _can_be_merged(adapted: AdapterLayer) -> bool:
    if isinstance(adapted, LoRAParameter):
        return adapted.is_packed or is_plain(adapted.parameter)
    packed = packed_weight(adapted.base_layer)
    return packed is not None or is_plain(adapted.base_layer.weight)


def _untie_adapted_head(model: Any) -> None:
    """Give the head a copy of a weight that it shares with the embedding, if one of them is
    adapted: merging would change the other, too.
    """
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    adapted = isinstance(head, AdapterLayer) or isinstance(embedding, AdapterLayer)
    plain: Any = head.base_layer if isinstance(head, AdapterLayer) else head
    if not adapted or plain is None or plain.weight is not embedding.weight:
        return
    plain.weight = nn.Parameter(plain.weight.clone(), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
