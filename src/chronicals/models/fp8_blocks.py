"""Dequantises checkpoints in FP8 with one scale a block (``weight_scale_inv``) while they are read.

DeepSeek V3's checkpoints are of this kind. By default transformers dequantises them only on
machines without an FP8 GPU. With one it uses layers of its own, which this package does not
support.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)

METHOD = "fp8"
"""``quant_method`` of such checkpoints."""

_BLOCK = (128, 128)
"""Rows and columns of a block if the configuration does not say."""


def dequantising(config: Any, model: Any) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` that dequantise linear layers and experts to 16 bit.

    Args:
        config: a configuration with a ``quantization_config`` of method ``fp8``.
        model: the model on the meta device.

    Raises:
        ValueError: a weight is not a whole number of blocks, so that transformers would infer
            another block size.
    """
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizers_utils import should_convert_module

    described = config.quantization_config
    described = described if isinstance(described, dict) else described.to_dict()
    kept = described.get("modules_to_not_convert") or described.get("ignored_layers") or []
    block = described.get("weight_block_size", _BLOCK)
    for path, module in model.named_modules() if block else ():
        if module is model.get_output_embeddings() or not should_convert_module(path, list(kept)):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            is_stack = parameter.ndim == 3
            if not is_stack and not (isinstance(module, nn.Linear) and parameter.ndim == 2):
                continue
            rows, columns = parameter.shape[-2:]
            if is_stack and name == "gate_up_proj":
                rows //= 2  # gate and up of an expert are two tensors in the files
            if any(size > of and size % of for size, of in zip((rows, columns), block)):
                raise ValueError(
                    f"{path}.{name} is {[rows, columns]} in FP8 with a scale of each {block[0]} x "
                    f"{block[1]}, which transformers dequantises only where such blocks fill a "
                    "weight; take a checkpoint in 16 bit"
                )
    logger.info(
        "its weights are in FP8 with scales of blocks; they are dequantised as they are read"
    )
    return {
        "quantization_config": FineGrainedFP8Config(
            dequantize=True, modules_to_not_convert=kept or None
        )
    }
