"""Weights and adapters of a row: the files that all arms share, and how they are loaded.

They are written once, and loaded the same way in every arm that transformers loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chronicals.benchmark.measurement import device
from chronicals.benchmark.work import Work
from chronicals.config import ChronicalsConfig

if TYPE_CHECKING:
    from chronicals.lora import LoRAConfig

MATRIX_FIELDS = ("lora_rank", "lora_target_modules", "lora_rank_pattern", "lora_layers")
"""Fields that say which matrices the adapters have."""

ADAPTER_FILE = "adapter_model.safetensors"


def load(path: str, dtype: torch.dtype, **options: Any) -> Any:
    """Load a causal language model onto the device, from the file if accelerate is installed.

    It has no router loss, so that all arms have the cross-entropy as their loss.

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
        path: folder of the model.
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
        model: the base.
        work: the row.
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
    """Copy values into the adapters of PEFT or of a library built on it.

    They are given by their names in PEFT's files.

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


def prepare_work(work: Work) -> None:
    """Write the files that the arms share. It runs in a process of its own."""
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


def starting_values(work: Work, config: ChronicalsConfig) -> dict[str, torch.Tensor]:
    """Return A and B that every arm with the adapters of ``config`` starts from.

    Names are those in PEFT's files.

    A is uniform as in a linear layer, rounded to bf16 so that every arm holds it exactly; B is
    zero. Row norms of DoRA are those of the base, which each arm computes itself.
    """
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


def start_of(work: Work, config: ChronicalsConfig) -> dict[str, torch.Tensor]:
    """Return ``starting_values``.

    They are read from the row's folder if the matrices of ``config`` are the row's.
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
