"""``quantization_config`` of a model's configuration, by which transformers and bitsandbytes load what it is saved as."""

from __future__ import annotations

from typing import Any

from torch import nn

from chronicals.quantization import Linear4bit, LinearGGUF
from chronicals.quantization.bitsandbytes_layer import is_of_bitsandbytes


def describe_packed(model: Any) -> None:
    """Let the configuration say which layers are in 4 bits: none is said where there are none, and what is said stays where
    there are some.

    To be called after layers became ``Linear4bit`` or plain, and before ``save_pretrained``.

    Raises:
        ValueError: layers are in blocks of GGUF, which safetensors have no form for.
    """
    if any(isinstance(layer, LinearGGUF) for layer in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has layers in blocks of GGUF, which no file but that it was loaded from holds; save its "
            "adapters, or what model.merge_and_unload() returns"
        )
    there = getattr(model.config, "quantization_config", None)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear4bit)]
    if layers and there is None:
        model.config.quantization_config = _described(model, layers)
    elif isinstance(there, dict) and there.get("load_in_4bit") and not layers and not _holds_theirs(model):
        del model.config.quantization_config
        vars(model).pop("is_quantized", None)


def _holds_theirs(model: Any) -> bool:
    return any(is_of_bitsandbytes(layer) for layer in model.modules())


def _described(model: Any, layers: list[Linear4bit]) -> dict[str, Any]:
    head = model.get_output_embeddings()
    kept = [path for path, layer in model.named_modules() if layer is head or _is_linear(layer)]
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": layers[0].code,
        "bnb_4bit_use_double_quant": layers[0].absmax2 is not None,
        "bnb_4bit_compute_dtype": str(layers[0].dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": kept,
    }


def _is_linear(layer: nn.Module) -> bool:
    """Whether transformers would take the layer to be in 4 bits."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
