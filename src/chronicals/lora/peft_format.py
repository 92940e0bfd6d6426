"""Adapters on disk as PEFT writes them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from chronicals.lora.apply import adapters, apply_lora, linear_shape, targeted_paths
from chronicals.lora.config import LoRAConfig
from chronicals.models.loading import DAMAGED

PREFIX = "base_model.model."
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
NEEDED = ("r", "lora_alpha", "target_modules")
"""Fields without which an adapter cannot be read."""


def save_adapter(model: Any, folder: str | Path, base_model: str | None = None) -> None:
    """Write the adapters of ``model`` so that PEFT (and vLLM) load them.

    Args:
        base_model: folder or hub name of the model they belong to.

    Raises:
        ValueError: there are none, or they are PEFT's, which writes its own.
    """
    paths = dict(adapters(model))
    if not paths:
        theirs = "; PEFT's are written by its own save_pretrained" if hasattr(model, "peft_config") else ""
        raise ValueError(f"{type(model).__name__} has no adapters of apply_lora or load_adapter{theirs}")
    config: LoRAConfig = model.chronicals_lora
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or model.config._name_or_path or None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        "target_modules": sorted(paths),
        "fan_in_fan_out": any(type(layer.base_layer).__name__ == "Conv1D" for layer in paths.values()),
        "bias": "none",
        "inference_mode": True,
    }
    tensors = {}
    for path, layer in paths.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = layer.lora_A.detach().contiguous()
        tensors[f"{PREFIX}{path}.lora_B.weight"] = layer.lora_B.detach().contiguous()
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / CONFIG_FILE).write_text(json.dumps(described, indent=2))
    save_file(tensors, Path(folder) / WEIGHTS_FILE, metadata={"format": "pt"})


def load_adapter(model: Any, folder: str | Path) -> Any:
    """Attach the adapters in ``folder``, ours or PEFT's, to a model that has none; or refill those it has.

    Raises:
        ValueError: the folder holds something else than plain LoRA, or its tensors do not fit the model, which is as it was.
    """
    folder = Path(folder)
    try:
        described = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: no readable {CONFIG_FILE}: {error}") from error
    _refuse_what_is_not_plain_lora(folder, described)
    absent = [field for field in NEEDED if described.get(field) is None]
    if absent:
        raise ValueError(
            f"{folder / CONFIG_FILE}: {', '.join(absent)} is missing; it was cut or changed, save the adapter again"
        )
    attached = dict(adapters(model))
    config = _config(model, described, attached)
    if attached and model.chronicals_lora.scale != config.scale:
        raise ValueError(f"{folder}: is scaled by {config.scale:g}, the model's adapters by {model.chronicals_lora.scale:g}")
    shapes = {path: (layer.lora_A.shape, layer.lora_B.shape) for path, layer in attached.items()}
    for path in [] if attached else targeted_paths(model, config.target_modules):
        wide, narrow = linear_shape(model.get_submodule(path)) or (0, 0)
        shapes[path] = torch.Size((config.rank, wide)), torch.Size((narrow, config.rank))
    matrices = _matrices(model, folder, shapes)
    if not attached:
        apply_lora(model, config)
    with torch.no_grad():
        for path, layer in adapters(model):
            for own, stored in zip((layer.lora_A, layer.lora_B), matrices[path], strict=True):
                own.copy_(stored)
    return model


def _config(model: Any, described: dict[str, Any], attached: Mapping[str, Any]) -> LoRAConfig:
    wanted, excluded = described["target_modules"], described.get("exclude_modules")
    return LoRAConfig(
        rank=described["r"],
        alpha=described["lora_alpha"],
        dropout=described.get("lora_dropout", 0.0),
        target_modules=targeted_paths(model, wanted, excluded) if excluded and not attached else wanted,
        use_rslora=described.get("use_rslora", False),
    )


def _matrices(model: Any, folder: Path, shapes: Mapping[str, tuple[torch.Size, torch.Size]]) -> dict[str, list[Tensor]]:
    """A and B by path, all of ``shapes`` and no others."""
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: cannot be read ({error}): {DAMAGED}") from error
    found: dict[str, list[Tensor]] = {path: [] for path in shapes}
    for path, expected in shapes.items():
        for name, shape in zip(("lora_A", "lora_B"), expected, strict=True):
            stored = tensors.pop(f"{PREFIX}{path}.{name}.weight", None)
            if stored is None or stored.shape != shape:
                raise ValueError(f"{folder}: {path}.{name} is missing or not {tuple(shape)}: of another model?")
            found[path].append(stored)
        layer = model.get_submodule(path)
        stored, own = tensors.pop(f"{PREFIX}{path}.base_layer.weight", None), getattr(layer, "base_layer", layer).weight
        if stored is not None and not torch.equal(stored.to(own), own):  # PEFT adds it where the head is adapted
            raise ValueError(f"{folder}: holds another weight for {path} than the model has: of another model?")
    if tensors:
        raise ValueError(f"{folder}: holds {len(tensors)} tensors that fit nothing, the first is {next(iter(tensors))}")
    return found


def _refuse_what_is_not_plain_lora(folder: Path, described: dict[str, Any]) -> None:
    if described.get("peft_type") != "LORA":
        raise ValueError(f"{folder}: peft_type={described.get('peft_type')!r}: only LORA adapters can be loaded")
    for field in (
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "layers_to_transform",
        "layer_replication",
        "target_parameters",
        "trainable_token_indices",
        "alora_invocation_tokens",
        "use_qalora",
        "use_bdlora",
        "velora_config",
        "monteclora_config",
        "arrow_config",
        "kasa_config",
        "megatron_config",
    ):
        if described.get(field):
            remedy = "merge the adapter into its base with PEFT's merge_and_unload and load that model"
            raise ValueError(f"{folder}: {field}={described[field]!r} is not supported in this version; {remedy}")
    start = described.get("init_lora_weights", True)
    if start not in (True, False, "gaussian", "orthogonal", "eva"):  # the others change the weights of the base
        raise ValueError(f"{folder}: init_lora_weights={start!r}: an adapter over changed base weights cannot be loaded")
    if described.get("bias", "none") != "none" or described.get("lora_bias"):
        raise ValueError(f"{folder}: adapters with a trained bias are not supported in this version")
