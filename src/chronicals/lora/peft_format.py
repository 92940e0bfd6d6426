"""Write adapters as PEFT does: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from chronicals.config.values import lasting
from chronicals.lora.config import LoRAConfig
from chronicals.lora.embeddings import embeddings_to_store, modules_to_save
from chronicals.lora.layers import AdapterLayer, adapters, in_file
from chronicals.lora.parameter_layer import LoRAParameter
from chronicals.lora.tokens import FILE_NAME, TrainedTokens, tokens_for_file, trained_tokens
from chronicals.models import SCORE, score_of
from chronicals.models.routed_experts import is_of_head

logger = logging.getLogger(__name__)

ADAPTER_PREFIX = "base_model.model."
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
SEQUENCE_CLASSIFICATION = "SEQ_CLS"
"""PEFT's name of the task of a sequence classifier."""

CHANGED = "_chronicals_weights_changed"
"""Attribute of a model whose weights have changed since it was loaded."""


def _peft_config(
    model: Any, config: LoRAConfig, layers: Mapping[str, Any], base: str | None, trained: bool
) -> dict[str, Any]:
    """Return PEFT's configuration.

    Adapters that started with a part of the weights have twice the rank over the original weights,
    at the same scale.

    Args:
        model: the model.
        config: shape of the adapters.
        layers: the adapters by path.
        base: folder or hub name of the base model.
        trained: whether rows of the embedding are trained, too.
    """
    whole_layers = sorted(
        path for path, layer in layers.items() if not isinstance(layer, LoRAParameter)
    )
    parameters = sorted(
        layer.named_at(path) for path, layer in layers.items() if isinstance(layer, LoRAParameter)
    )
    rank_factor = 1
    alpha_factor: float = 1
    if config.takes_from_weights:
        rank_factor = 2
        alpha_factor = 2**0.5 if config.use_rslora else 2
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if score_of(model) is None else SEQUENCE_CLASSIFICATION,
        "base_model_name_or_path": base,
        "r": rank_factor * config.rank,
        "lora_alpha": alpha_factor * config.alpha,
        "init_lora_weights": True,
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        "modules_to_save": list(config.modules_to_save) if config.modules_to_save else None,
        "trainable_token_indices": tokens_for_file(model) if trained else None,
        "rank_pattern": {key: rank_factor * rank for key, rank in config.rank_pattern.items()},
        "alpha_pattern": {key: alpha_factor * a for key, a in config.alpha_pattern.items()},
        "use_dora": config.use_dora,
        "target_modules": whole_layers,
        "target_parameters": parameters or None,
        "fan_in_fan_out": any(
            type(layer.base_layer).__name__ == "Conv1D" for layer in layers.values()
        ),
        "bias": "none",
        "inference_mode": True,
    }


def save_adapter(
    model: Any,
    folder: str | Path,
    base_model: str | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the adapters of ``model`` so that PEFT loads them.

    Modules that are trained whole are written, too, and embedding and head if they were resized.
    vLLM loads them, too, except with an embedding, which must be merged for it; the log says so.

    Args:
        model: a model with adapters.
        folder: where to write; it is created if needed.
        base_model: folder or hub name of the base; by default where ``model`` was loaded from.
        state_dict: values to write instead of the model's own, by the names of
            ``model.state_dict()``.

    Raises:
        ValueError: the model has no adapters, or PEFT's, which PEFT writes itself.
    """
    layers = dict(adapters(model))
    if not layers:
        has_theirs = hasattr(model, "peft_config")
        advice = "; PEFT's are written by its own save_pretrained" if has_theirs else ""
        raise ValueError(
            f"{type(model).__name__} has no adapters of apply_lora or load_adapter{advice}"
        )
    loaded_from = "" if getattr(model, CHANGED, False) else model.config._name_or_path
    base = lasting(base_model or loaded_from) or None
    if base is None:
        logger.warning(
            "%s: no folder or hub name is known to hold the model's weights, so the adapter names "
            "no base",
            folder,
        )
    config: LoRAConfig = model.chronicals_lora
    trained = dict(trained_tokens(model))
    if bool(trained) != (config.trainable_token_indices is not None):
        raise ValueError(
            "trainable_token_indices: the embedding was replaced since; resize it before adapters "
            "are attached"
        )
    described = _peft_config(model, config, layers, base, trained=bool(trained))
    values = model.state_dict() if state_dict is None else state_dict
    tensors: dict[str, Tensor] = {}
    for path, layer in layers.items():
        for name, tensor in _adapter_tensors(path, layer, values).items():
            tensors[f"{ADAPTER_PREFIX}{path}.{name}"] = tensor
    for path in trained:
        rows = values[f"{path}.lora_tokens"]
        tensors[f"{ADAPTER_PREFIX}{path}.{FILE_NAME}"] = rows.detach().contiguous()
    whole_names = {*embeddings_to_store(model, base)}
    for path, module in modules_to_save(model, config.modules_to_save).items():
        whole_names.update(f"{path}.{name}" for name, _ in module.named_parameters())
    for name in sorted(whole_names):
        in_module = name
        path, base_layer, last = name.partition(".base_layer.")
        if base_layer and isinstance(model.get_submodule(path), TrainedTokens):
            # PEFT has the weight of an embedding or head within the module of its trained tokens.
            in_module = f"{path}.token_adapter{base_layer}{last}"
        tensors[ADAPTER_PREFIX + in_module] = values[name].detach().contiguous()
    if any(name != f"{SCORE}.weight" and not is_of_head(name) for name in whole_names):
        message = (
            "%s holds an embedding: PEFT loads it, vLLM does not; for vLLM save what "
            "merge_and_unload() gives"
        )
        logger.warning(message, folder)
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / CONFIG_FILE).write_text(json.dumps(described, indent=2))
    save_file(tensors, Path(folder) / WEIGHTS_FILE, metadata={"format": "pt"})


def _adapter_tensors(
    path: str, layer: AdapterLayer, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of an adapter over the original weight, by their names in a file."""
    tensors = {in_file(name): values[f"{path}.{name}"].detach() for name in layer.trained}
    start_a, start_b = (values.get(f"{path}.lora_start_{side}") for side in "AB")
    if start_a is not None and start_b is not None:
        a = tensors["lora_A.weight"]
        b = tensors["lora_B.weight"]
        tensors = {
            "lora_A.weight": torch.cat((a, start_a.to(a))),
            "lora_B.weight": torch.cat((b, -start_b.to(b)), 1),
        }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def name_base_by_absolute_path(folder: Path, known: bool = True) -> None:
    """Write the absolute path of the base into the adapters that PEFT wrote below ``folder``.

    PEFT writes the path as it was given.

    Args:
        folder: folder with adapters, at any depth.
        known: whether the base still has the weights that the adapters were trained over; else no
            base is named.
    """
    for file in folder.rglob(CONFIG_FILE):
        described = json.loads(file.read_text())
        base = described.get("base_model_name_or_path")
        if not base:
            continue
        described["base_model_name_or_path"] = lasting(base) if known else None
        file.write_text(json.dumps(described, indent=2, sort_keys=True))
        if not known:
            logger.warning(
                "%s: the weights beneath were changed since they were loaded, so no base is named",
                file.parent,
            )
