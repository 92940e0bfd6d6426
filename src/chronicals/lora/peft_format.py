"""Adapters on disk as PEFT writes them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from chronicals.config.paths import lasting
from chronicals.lora.config import LoRAConfig
from chronicals.lora.embeddings import embeddings_to_store
from chronicals.lora.layers import adapters

logger = logging.getLogger(__name__)

PREFIX = "base_model.model."
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
CHANGED = "_chronicals_weights_changed"
"""Attribute of a model whose weights are no longer those of the folder or hub name that it was loaded from."""


def save_adapter(
    model: Any, folder: str | Path, base_model: str | None = None, state_dict: Mapping[str, Tensor] | None = None
) -> None:  # fmt: skip
    """Write the adapters of ``model`` so that PEFT loads them; with the embedding and head where it was resized.

    vLLM loads them too, but none with an embedding: that is merged for it, which the log says.

    Args:
        base_model: folder or hub name of the model they belong to; else the one that ``model`` was loaded from.
        state_dict: values to write instead of the model's own, by the names of ``model.state_dict()``.

    Raises:
        ValueError: there are none, or they are PEFT's, which writes its own.
    """
    paths = dict(adapters(model))
    if not paths:
        theirs = "; PEFT's are written by its own save_pretrained" if hasattr(model, "peft_config") else ""
        raise ValueError(f"{type(model).__name__} has no adapters of apply_lora or load_adapter{theirs}")
    base = lasting(base_model or ("" if getattr(model, CHANGED, False) else model.config._name_or_path)) or None
    if base is None:
        logger.warning("%s: no folder or hub name is known to hold the model's weights, so the adapter names no base", folder)
    config: LoRAConfig = model.chronicals_lora
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        "target_modules": sorted(paths),
        "fan_in_fan_out": any(type(layer.base_layer).__name__ == "Conv1D" for layer in paths.values()),
        "bias": "none",
        "inference_mode": True,
    }
    values = model.state_dict() if state_dict is None else state_dict
    matrices = {f"{path}.{name}": values[f"{path}.{name}"] for path in paths for name in ("lora_A", "lora_B")}
    tensors = {f"{PREFIX}{name}.weight": tensor.contiguous() for name, tensor in matrices.items()}
    if embeddings := embeddings_to_store(model, base):
        tensors |= {PREFIX + name: values[name].contiguous() for name in embeddings}
        message = "%s holds an embedding: PEFT loads it, vLLM does not; for vLLM save what merge_and_unload() gives"
        logger.warning(message, folder)
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / CONFIG_FILE).write_text(json.dumps(described, indent=2))
    save_file(tensors, Path(folder) / WEIGHTS_FILE, metadata={"format": "pt"})


def name_base_by_absolute_path(folder: Path) -> None:
    """In adapters that PEFT wrote to ``folder``, each named one in a folder of its own: it keeps the path as it was given."""
    for file in folder.rglob(CONFIG_FILE):
        described = json.loads(file.read_text())
        if base := described.get("base_model_name_or_path"):
            file.write_text(json.dumps({**described, "base_model_name_or_path": lasting(base)}, indent=2, sort_keys=True))
