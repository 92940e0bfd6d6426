"""``quantization_config`` of a model's configuration, by which transformers and bitsandbytes
load what it is saved as.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from chronicals.quantization import Experts4bit, Linear4bit, LinearGGUF
from chronicals.quantization.bitsandbytes_layer import is_of_bitsandbytes


def describe_packed(model: Any) -> None:
    """Let the configuration say which layers are in 4 bits: none is said where there are none, and
    what is said stays where there are some.

    To be called after layers became ``Linear4bit`` or plain, and before ``save_pretrained``.

    Raises:
        ValueError: layers are in blocks of GGUF, or experts in 4 bits, which no files of
            transformers have a form for.
    """
    experts = next(
        (path for path, module in model.named_modules() if isinstance(module, Experts4bit)), None
    )
    if experts is not None:
        raise ValueError(
            f"{experts}: its experts are in 4 bits, which neither transformers nor bitsandbytes "
            "reads from files; save its "
            "adapters, or what model.merge_and_unload() returns"
        )
    if any(isinstance(layer, LinearGGUF) for layer in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has layers in blocks of GGUF, which no file but that it was "
            "loaded from holds; save its "
            "adapters, or what model.merge_and_unload() returns"
        )
    there = getattr(model.config, "quantization_config", None)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear4bit)]
    if layers and there is None:
        first = layers[0]
        packed = {path for path, layer in model.named_modules() if isinstance(layer, Linear4bit)}
        model.config.quantization_config = packed_description(
            model, packed, first.dtype, first.code, first.absmax2 is not None
        )
    elif (
        isinstance(there, dict)
        and there.get("load_in_4bit")
        and not layers
        and not _holds_theirs(model)
    ):
        del model.config.quantization_config
        vars(model).pop("is_quantized", None)


def _holds_theirs(model: Any) -> bool:
    return any(is_of_bitsandbytes(layer) for layer in model.modules())


def packed_description(
    model: Any, packed: Collection[str], dtype: torch.dtype, code: str = "nf4", nested: bool = True
) -> dict[str, Any]:
    """``quantization_config`` of a model of which some linear layers are stored in 4 bits.

    Args:
        model: may be on the meta device, and the layers plain.
        packed: paths of the layers.
        dtype: of what they are dequantised to.
        code: "nf4" or "fp4".
        nested: whether their scales are quantised themselves.
    """
    head = model.get_output_embeddings()
    others = {path: layer for path, layer in model.named_modules() if path not in packed}
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": code,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": [
            path for path, layer in others.items() if layer is head or _is_linear(layer)
        ],
    }


def _is_linear(layer: nn.Module) -> bool:
    """Whether transformers would take the layer to be in 4 bits."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
