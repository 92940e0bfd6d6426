"""Low-rank adapters, in PEFT's format on disk."""

from chronicals.lora.apply import adapters, adapts, apply_lora
from chronicals.lora.config import LoRAConfig
from chronicals.lora.layers import LoRALinear
from chronicals.lora.peft_format import load_adapter, save_adapter
from chronicals.lora.saved import SavedModel

__all__ = ["LoRAConfig", "LoRALinear", "SavedModel", "adapters", "adapts", "apply_lora", "load_adapter", "save_adapter"]
