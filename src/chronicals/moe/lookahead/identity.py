"""Digests of a model's configuration and weights, to recognise the model a trace was made of."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from chronicals.standard_json import to_json

OF_LOADING = {
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "use_cache",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "attn_implementation",
    "experts_implementation",
}
"""Configuration fields that say how a model is loaded, run or saved; the digest excludes them.

It also excludes fields that begin with ``_``.
"""


def config_digest(config: Any) -> str:
    """Return the hexadecimal sha256 of the fields of a transformers configuration."""
    return hashlib.sha256(to_json(_sorted(config.to_dict())).encode()).hexdigest()


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {str(name): _sorted(part) for name, part in value.items() if name not in OF_LOADING}
        return {name: kept[name] for name in sorted(kept) if not name.startswith("_")}
    return [_sorted(part) for part in value] if isinstance(value, list | tuple) else value


def checksum(model: Any) -> str:
    """Return the hexadecimal sha256 of all parameters and buffers with their names."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()
