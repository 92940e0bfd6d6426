"""Which model something was made of: digests of its configuration and of its weights."""

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
"""Fields that say how a model is loaded, run or was saved, and not what it is; so do those that
begin with ``_``.
"""


def config_digest(config: Any) -> str:
    """sha256 of what a transformers configuration says of its model, hexadecimal."""
    return hashlib.sha256(to_json(_sorted(config.to_dict())).encode()).hexdigest()


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {str(name): _sorted(part) for name, part in value.items() if name not in OF_LOADING}
        return {name: kept[name] for name in sorted(kept) if not name.startswith("_")}
    return [_sorted(part) for part in value] if isinstance(value, list | tuple) else value


def checksum(model: Any) -> str:
    """sha256 of all parameters and buffers by name, hexadecimal."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()
