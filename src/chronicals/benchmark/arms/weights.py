"""Loading the row's weights and adapters, the same way in every arm that transformers loads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from chronicals.benchmark.measurement import device
from chronicals.benchmark.preparation import adapter_shape, start_of
from chronicals.benchmark.work import Work


def load(path: str, dtype: torch.dtype, **options: Any) -> Any:
    """Load a causal language model onto the device, straight from the file if accelerate is
    installed. It has no router loss, so that all arms have the cross-entropy as their loss.

    Raises:
        ValueError: the checkpoint lacks weights or has others than the class.
    """
    from transformers import AutoModelForCausalLM

    from chronicals.models import load_whole

    place = {"device_map": {"": 0}} if device().type == "cuda" and find_spec("accelerate") else {}
    model = load_whole(
        AutoModelForCausalLM, path, dtype=dtype, use_safetensors=True, **place, **options
    )
    return without_router_loss(model if place else model.to(device()))


def load_in_4_bits(path: str, dtype: torch.dtype) -> Any:
    """Load the model with layers and experts in 4 bits, as our run has them."""
    from chronicals.models import load_model

    return without_router_loss(load_model(path, dtype, quantization="nf4").to(device()))


def load_dequantised(path: str, dtype: torch.dtype, **options: Any) -> Any:
    """Load a plain fp32 model with the values of layers and experts in 4 bits.

    Args:
        dtype: of the weights that were quantised.
        options: of ``from_pretrained``.
    """
    from chronicals.quantization import packed_modules

    model = load(path, torch.float32, **options)
    copy_values(model, packed_modules(load_in_4_bits(path, dtype)))
    return model


def copy_values(model: Any, packed: Iterable[tuple[str, Any]]) -> None:
    """Copy the values of another model's packed modules, given with their paths."""
    for path, module in packed:
        for name, values in module.dequantised():
            model.get_parameter(f"{path}.{name}").data.copy_(values)


def without_router_loss(model: Any) -> Any:
    """Switch off a model's cache and its router loss. Returns the model."""
    model.config.use_cache = False
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False
            config.router_aux_loss_coef = 0.0  # TRL's trainer reads this one
    return model


PEFT_PREFIX = "base_model.model."
"""Prefix of a model's names in PEFT."""


def with_peft(model: Any, work: Work, autocast_adapter_dtype: bool = False, **changes: Any) -> Any:
    """Wrap a model in PEFT's LoRA as the row describes it, starting from the row's adapters.

    Args:
        autocast_adapter_dtype: keep adapters in fp32 over a bf16 model (PEFT's default); False is
            faster.
        changes: fields of the configuration that describe other adapters.
    """
    import peft

    config = work.config(**changes)
    shape = adapter_shape(config)
    start = start_of(work, config)
    paths = [
        name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight")
        for name in start
        if ".lora_A." in name
    ]
    shapes = {path: shape.at(path) for path in paths}
    lora = peft.LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        lora_dropout=0.0,
        use_rslora=shape.use_rslora,
        use_dora=shape.use_dora,
        target_modules=paths,
        bias="none",
        task_type="CAUSAL_LM",
        rank_pattern={
            re.escape(path): layer.rank
            for path, layer in shapes.items()
            if layer.rank != shape.rank
        },
        alpha_pattern={
            re.escape(path): layer.alpha
            for path, layer in shapes.items()
            if layer.alpha != shape.alpha
        },
    )
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=autocast_adapter_dtype)
    start_from(model, start)
    return model


def start_from(model: Any, start: Mapping[str, torch.Tensor]) -> None:
    """Copy values, by their names in PEFT's files, into the adapters of PEFT or of a library built
    on it.

    Raises:
        ValueError: the model's adapters are not those.
    """
    adapters = {
        name.replace(".default", ""): p
        for name, p in model.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }
    if adapters.keys() != start.keys():
        differing = sorted(adapters.keys() ^ start.keys())[:2]
        raise ValueError(f"adapters differ from those of the row: {differing}")
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(start[name])
