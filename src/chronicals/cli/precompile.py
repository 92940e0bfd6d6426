"""Compilation that ``train`` starts in other processes while it imports libraries and loads the
model.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from chronicals import precompilation
from chronicals.config import ChronicalsConfig
from chronicals.data.packs import machine_code
from chronicals.model_shape import ModelShape

FLASH_ATTENTION_PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "torch")
"""Packages whose versions decide what FlashAttention-4 compiles."""


def compile_data_functions() -> None:
    """Start a process that compiles the data functions with numba, if they are not compiled yet."""
    if machine_code.source_hash():
        precompilation.start_precompilation(machine_code.COMPILING_MODULE, [], machine_code.facts())


def compile_attention(model: str, config: ChronicalsConfig) -> None:
    """Start a process that compiles FlashAttention-4's kernels, if it is installed and the
    model's head sizes are known.
    """
    try:
        versions = [version(package) for package in FLASH_ATTENTION_PACKAGES]
    except PackageNotFoundError:
        return
    configuration = _configuration(model)
    shape = ModelShape.of(configuration)
    if not shape.head_dim:
        return
    text_config = configuration.get("text_config") or configuration
    softcap = text_config.get("attn_logit_softcapping") or 0
    heads = [str(number) for number in (shape.heads, shape.kv_heads, shape.head_dim, softcap)]
    if config.use_flash_attention and config.mixed_precision in ("bf16", "fp16"):
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[config.mixed_precision]
        precompilation.start_precompilation(
            "chronicals.attention.compilation",
            [dtype, str(config.max_seq_length), *heads],
            versions,
        )


def _configuration(model: str) -> dict[str, Any]:
    """Return the configuration of a model folder or of a hub model in the local cache; empty if
    there is none.
    """
    file: Path | None = Path(model) / "config.json"
    if not Path(model).is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return {}
        file = Path(cached) if isinstance(cached, str) else None
    try:
        return json.loads(file.read_text()) if file is not None else {}
    except (OSError, ValueError):  # loading the model will report it
        return {}
