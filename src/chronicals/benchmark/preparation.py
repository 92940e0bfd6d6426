"""Files that all arms of a work share: built-in weights, tokens and initial adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from chronicals.benchmark.work import Work
from chronicals.config import ChronicalsConfig

if TYPE_CHECKING:
    from torch import Tensor

    from chronicals.lora import LoRAConfig

MATRIX_FIELDS = ("lora_rank", "lora_target_modules", "lora_rank_pattern", "lora_layers")
"""Fields that say which matrices the adapters have."""

ADAPTER_FILE = "adapter_model.safetensors"


def prepare(work: Work) -> None:
    """Write the files that the arms share. It runs in a process of its own."""
    import torch

    from chronicals.benchmark.shapes import build_model

    for name, place in work.models.items():
        if not (Path(place) / "tokenizer.json").exists():
            build_model(name, Path(place), "cuda" if torch.cuda.is_available() else "cpu")
    work.write_tokenizer()
    work.stream()
    if work.adapts:
        write_adapter(work)


def write_adapter(work: Work) -> None:
    """Write the values that the row's adapters start from."""
    from safetensors.torch import save_file

    folder = work.folder / "adapter"
    folder.mkdir(exist_ok=True)
    values = starting_values(work, work.config())
    save_file(values, folder / ADAPTER_FILE, metadata={"format": "pt"})


def starting_values(work: Work, config: ChronicalsConfig) -> dict[str, Tensor]:
    """Return A and B that every arm with the adapters of ``config`` starts from, by their names in
    PEFT's files.

    A is uniform as in a linear layer, rounded to bf16 so that every arm holds it exactly; B is
    zero. Row norms of DoRA are those of the base, which each arm computes itself.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from chronicals.lora import apply_lora
    from chronicals.lora.layers import linear_adapters
    from chronicals.lora.peft_format import ADAPTER_PREFIX

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(work.model))
    apply_lora(model, replace(adapter_shape(config), use_dora=False))
    generator = torch.Generator().manual_seed(0)
    values = {}
    for path, layer in linear_adapters(model):
        bound = layer.lora_A.shape[1] ** -0.5
        start = torch.rand(layer.lora_A.shape, generator=generator) * 2 * bound - bound
        values[f"{ADAPTER_PREFIX}{path}.lora_A.weight"] = start.bfloat16().float()
        values[f"{ADAPTER_PREFIX}{path}.lora_B.weight"] = torch.zeros(layer.lora_B.shape)
    return values


def start_of(work: Work, config: ChronicalsConfig) -> dict[str, Tensor]:
    """Return ``starting_values``, from the row's folder if the matrices of ``config`` are the
    row's.
    """
    from safetensors.torch import load_file

    row = work.config()
    if any(getattr(config, name) != getattr(row, name) for name in MATRIX_FIELDS):
        return starting_values(work, config)
    return load_file(work.folder / "adapter" / ADAPTER_FILE)


def adapter_shape(config: ChronicalsConfig) -> LoRAConfig:
    """Return the adapters of a configuration."""
    from chronicals.lora import LoRAConfig

    return LoRAConfig(
        config.lora_rank,
        config.lora_alpha,
        config.lora_dropout,
        config.lora_target_modules,
        config.use_rslora,
        config.lora_rank_pattern,
        config.lora_alpha_pattern,
        config.lora_layers,
        config.use_dora,
    )
