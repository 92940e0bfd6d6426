"""What ``train`` lets other processes compile while it imports and loads."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from chronicals import beforehand
from chronicals.config import ChronicalsConfig
from chronicals.data import compilation

FLASH_ATTENTION = "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "torch"


def compile_data_functions() -> None:
    """Those that numba compiles."""
    if compilation.sources():
        beforehand.start(compilation.__name__, [], compilation.facts())


def compile_attention(model: str, config: ChronicalsConfig) -> None:
    """FlashAttention-4's kernels, where it is installed and the model's configuration is at hand and plain."""
    try:
        versions = [version(package) for package in FLASH_ATTENTION]
    except PackageNotFoundError:
        return
    shape = _heads(_configuration(model))
    if shape and config.use_flash_attention and config.mixed_precision in ("bf16", "fp16"):
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[config.mixed_precision]
        beforehand.start("chronicals.attention.compilation", [dtype, str(config.max_seq_length), *shape], versions)


def _configuration(model: str) -> dict[str, Any]:
    """Of a folder, or of a model of the hub that was downloaded before; empty without one."""
    file: Path | None = Path(model) / "config.json"
    if not Path(model).is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return {}
        file = Path(found) if isinstance(found, str) else None
    try:
        return json.loads(file.read_text()) if file is not None else {}
    except (OSError, ValueError):  # whoever loads the model will say what is wrong
        return {}


def _heads(facts: dict[str, Any]) -> list[str]:
    """Heads of queries, of keys, width of a head and softcap; empty where the configuration does not say."""
    text = facts.get("text_config") or facts
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return []
    width, groups = text.get("head_dim") or hidden // heads, text.get("num_key_value_heads") or heads
    return [str(fact) for fact in (heads, groups, width, text.get("attn_logit_softcapping") or 0)]
