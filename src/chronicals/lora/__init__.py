"""Low-rank adapters, in PEFT's format on disk."""

from chronicals.lora.apply import adapts, adapts_parameters, apply_lora
from chronicals.lora.config import LoRAConfig
from chronicals.lora.layers import (
    AdapterLayer,
    LoRALinear,
    adapters,
    adapters_are_fresh,
    has_magnitudes,
    holding_norms,
    why_base_is_gone,
    without_adapters,
)
from chronicals.lora.loading import load_adapter
from chronicals.lora.lora_presets import LORA_PRESETS, lora_preset
from chronicals.lora.model_methods import merge_and_unload
from chronicals.lora.peft_format import name_base_by_absolute_path, save_adapter
from chronicals.lora.several import (
    adapter_names,
    add_adapter,
    add_weighted_adapter,
    delete_adapter,
    set_adapter,
)
from chronicals.lora.stacked_experts import report_frozen_experts, stacked_weights

__all__ = [
    "LORA_PRESETS",
    "AdapterLayer",
    "LoRAConfig",
    "LoRALinear",
    "adapter_names",
    "adapters",
    "adapters_are_fresh",
    "adapts",
    "adapts_parameters",
    "add_adapter",
    "add_weighted_adapter",
    "apply_lora",
    "delete_adapter",
    "has_magnitudes",
    "holding_norms",
    "load_adapter",
    "lora_preset",
    "merge_and_unload",
    "name_base_by_absolute_path",
    "report_frozen_experts",
    "save_adapter",
    "set_adapter",
    "stacked_weights",
    "why_base_is_gone",
    "without_adapters",
]


def __dir__() -> list[str]:
    return sorted(__all__)
