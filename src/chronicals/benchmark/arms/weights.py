"""Loading the row's weights and adapters, the same way in every arm that transformers loads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from chronicals.benchmark.floor import DecoderShape
from chronicals.benchmark.measurement import device
from chronicals.benchmark.work import Work, adapter_shape, start_of


def load(path: str, dtype: torch.dtype, **options: Any) -> Any:
    """A causal language model on the card, straight from the file where accelerate is there to do
    it; without a router loss, so that all arms have the cross-entropy as their loss.

    Raises:
        ValueError: the checkpoint lacks weights or holds others than the class has.
    """
    from transformers import AutoModelForCausalLM

    from chronicals.models import load_whole

    place = {"device_map": {"": 0}} if device().type == "cuda" and find_spec("accelerate") else {}
    model = load_whole(
        AutoModelForCausalLM, path, dtype=dtype, use_safetensors=True, **place, **options
    )
    return _settled(model if place else model.to(device()))


def load_in_4_bits(path: str, dtype: torch.dtype) -> Any:
    """The same with layers and experts in 4 bits as our run has them."""
    from chronicals.models import load_model

    return _settled(load_model(path, dtype, quantization="nf4").to(device()))


def load_for_peers(work: Work, dtype: torch.dtype, **options: Any) -> Any:
    """The row's model as a peer on transformers has it: over layers of bitsandbytes where the row
    is in 4 bits. Stacked experts, which that library leaves, have the values of ours in 16 bits.

    Raises:
        ImportError, ValueError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    from chronicals.models import load_by_bitsandbytes

    if not work.in_4_bits:
        return load(work.model, dtype, **options)
    model = _settled(
        load_by_bitsandbytes(AutoModelForCausalLM, work.model, dtype, device(), **options)
    )
    if has_experts(work):
        from chronicals.quantization import packed_experts

        _copy_values(model, packed_experts(load_in_4_bits(work.model, dtype)))
    return model


def base_of_peers(work: Work) -> str:
    """In words what ``load_for_peers`` gives where the row is in 4 bits."""
    return "base in bitsandbytes' NF4" + (", its experts in 16 bits" if has_experts(work) else "")


def has_experts(work: Work) -> bool:
    """Whether the row's model is a mixture."""
    from transformers import AutoConfig

    return DecoderShape.of(AutoConfig.from_pretrained(work.model)).routed


def load_dequantised(path: str, dtype: torch.dtype, **options: Any) -> Any:
    """A plain fp32 model of the weights that layers and experts in 4 bits stand for, which were
    quantised from ``dtype``; options are of ``from_pretrained``."""
    from chronicals.quantization import packed_modules

    model = load(path, torch.float32, **options)
    _copy_values(model, packed_modules(load_in_4_bits(path, dtype)))
    return model


def _copy_values(model: Any, packed: Iterable[tuple[str, Any]]) -> None:
    """Copy the values of another model's packed modules, given with their paths."""
    for path, module in packed:
        for name, values in module.dequantised():
            model.get_parameter(f"{path}.{name}").data.copy_(values)


def _settled(model: Any) -> Any:
    model.config.use_cache = False
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "output_router_logits"):
            config.output_router_logits, config.router_aux_loss_coef = (
                False,
                0.0,
            )  # TRL's trainer reads the second
    return model


PREFIX = "base_model.model."
"""Of names of a model in PEFT's."""


def with_peft(model: Any, work: Work, autocast_adapter_dtype: bool = False, **changes: Any) -> Any:
    """PEFT's LoRA as the row describes it, started from the row's adapters.

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
        name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        for name in start
        if ".lora_A." in name
    ]
    each = {path: shape.at(path) for path in paths}
    described = peft.LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        lora_dropout=0.0,
        use_rslora=shape.use_rslora,
        use_dora=shape.use_dora,
        target_modules=paths,
        bias="none",
        task_type="CAUSAL_LM",
        rank_pattern={
            re.escape(path): own.rank for path, own in each.items() if own.rank != shape.rank
        },
        alpha_pattern={
            re.escape(path): own.alpha for path, own in each.items() if own.alpha != shape.alpha
        },
    )
    model = peft.get_peft_model(model, described, autocast_adapter_dtype=autocast_adapter_dtype)
    start_from(model, start)
    return model


def start_from(model: Any, start: Mapping[str, torch.Tensor]) -> None:
    """Fill PEFT's adapters, or those of a library built on it, from values by their names in PEFT's
    files.

    Raises:
        ValueError: the model's adapters are not those.
    """
    own = {
        name.replace(".default", ""): p
        for name, p in model.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }
    if own.keys() != start.keys():
        raise ValueError(
            f"adapters differ from those of the row: {sorted(own.keys() ^ start.keys())[:2]}"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(start[name])
