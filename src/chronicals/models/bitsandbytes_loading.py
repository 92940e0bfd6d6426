"""Loads a model in 4 bits by transformers and bitsandbytes, as a reference for ours.

Training needs neither package.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chronicals.models.checkpoint_checks import check_loaded_weights
from chronicals.models.four_bits import linear_layers

NEEDED = ("bitsandbytes", "accelerate")
"""Packages that transformers needs to load such a model."""


def missing_for_bitsandbytes() -> list[str]:
    """Return the needed packages that are not installed."""
    return [package for package in NEEDED if find_spec(package) is None]


def load_by_bitsandbytes(
    kind: Any,
    name: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    nested: bool = True,
    products: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Load a model with ``bitsandbytes.nn.Linear4bit`` layers, in training mode.

    A checkpoint in 4 bits is loaded as its configuration says. In any other one, the layers that
    ``quantise_layers`` takes are quantised to NF4 with blocks of 64 weights.

    Args:
        kind: class of the model.
        name: folder or hub name of its checkpoint.
        dtype: dtype of the weights before quantisation.
        device: device of all weights.
        nested: quantise the scales, too (double quantisation).
        products: dtype of the matrix products, by default ``dtype``.
        options: further arguments of ``from_pretrained``.

    Raises:
        ImportError: transformers lacks a package.
        ValueError: the checkpoint is in another packed format, or does not fit the class.
    """
    from transformers import AutoConfig, BitsAndBytesConfig

    config = AutoConfig.from_pretrained(name)
    products = products or dtype
    described = getattr(config, "quantization_config", None)
    if described is None:
        with torch.device("meta"):
            empty = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
        ours = linear_layers(empty)
        # quantise_layers leaves all other linear layers dense, and so must the reference.
        left = [
            path
            for path, layer in empty.named_modules()
            if path not in ours
            and (isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D")
        ]
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=nested,
            bnb_4bit_compute_dtype=products,
            llm_int8_skip_modules=left,
        )
    elif isinstance(described, dict) and described.get("load_in_4bit"):
        config.quantization_config = {
            **described,
            "bnb_4bit_compute_dtype": str(products).removeprefix("torch."),
        }
    else:
        raise ValueError(
            f"{name}: its weights are quantised already, and not in bitsandbytes' 4 bits"
        )
    model, report = kind.from_pretrained(
        name,
        config=config,
        dtype=dtype,
        device_map={"": device},
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
    )
    check_loaded_weights(model, report)
    # In evaluation mode bitsandbytes rearranges the codes on some CPUs.
    return model.train()
