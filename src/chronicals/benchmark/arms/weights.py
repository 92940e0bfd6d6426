"""Loading the row's weights and adapters, the same way in every arm that transformers loads."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from chronicals.benchmark.floor import PROJECTIONS
from chronicals.benchmark.measurement import device
from chronicals.benchmark.work import Work


def load(path: str, dtype: torch.dtype, **options: Any) -> Any:
    """A causal language model on the card, straight from the file where accelerate is there to do it; without a router loss, so
    that all arms have the cross-entropy as their loss.

    Raises:
        ValueError: the checkpoint lacks weights or holds others than the class has.
    """
    from transformers import AutoModelForCausalLM

    from chronicals.models import load_whole

    place = {"device_map": {"": 0}} if device().type == "cuda" and find_spec("accelerate") else {}
    model = load_whole(AutoModelForCausalLM, path, dtype=dtype, use_safetensors=True, **place, **options)
    model.config.use_cache = False
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
    return model if place else model.to(device())


def with_peft(model: Any, work: Work, autocast_adapter_dtype: bool = False) -> Any:
    """PEFT's LoRA as the row describes it, started from the row's adapters.

    Args:
        autocast_adapter_dtype: keep adapters in fp32 over a bf16 model (PEFT's default); False is faster.
    """
    import peft

    config = work.config()
    described = peft.LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0.0, use_rslora=config.use_rslora,
        target_modules=config.lora_target_modules or list(PROJECTIONS), bias="none", task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(model, described, autocast_adapter_dtype=autocast_adapter_dtype)
    start_from(model, work.folder / "adapter")
    return model


def start_from(model: Any, folder: Path) -> None:
    """Fill PEFT's adapters, or those of a library built on it, from a file in PEFT's format.

    Raises:
        ValueError: the model's adapters are not those of the file.
    """
    from safetensors.torch import load_file

    stored = load_file(folder / "adapter_model.safetensors")
    own = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
    if own.keys() != stored.keys():
        raise ValueError(f"adapters differ from those of the row: {sorted(own.keys() ^ stored.keys())[:2]}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(stored[name])
