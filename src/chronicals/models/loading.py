"""Loading models and tokenizers; safetensors only, no remote code unless the user asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float32, "fp32": torch.float32}
"""Type the weights are kept in; fp16 products run over fp32 weights, whose small updates fp16 would lose."""

DAMAGED = "damaged or cut, or a Git LFS pointer instead of weights; download it again"
"""What is said of a safetensors file that is none."""


def load_tokenizer(name: str | Path, trust_remote_code: bool = False) -> Any:
    """A tokenizer from a folder or hub name.

    Raises:
        ValueError: there is none, with the reason.
    """
    from transformers import AutoTokenizer

    return _load(AutoTokenizer, "tokenizer", name, trust_remote_code)


def load_config(name: str | Path, trust_remote_code: bool = False) -> Any:
    """A model's configuration from a folder or hub name.

    Raises:
        ValueError: there is none, with the reason.
    """
    from transformers import AutoConfig

    return _load(AutoConfig, "configuration", name, trust_remote_code)


def _load(kind: Any, what: str, name: str | Path, trust_remote_code: bool) -> Any:
    try:
        return kind.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model={str(name)!r}: {_where(name)}no {what} could be loaded: {error}") from error


def lasting_name(name: str | Path) -> str:
    """A folder's absolute path, so that it is found from other folders too; a hub name as it is."""
    return str(Path(name).resolve()) if name and Path(name).is_dir() else str(name)


def _where(name: str | Path) -> str:
    """Said first of a name that was looked for on the hub."""
    return "" if Path(name).is_dir() else "there is no such folder here, and as a hub name: "


def load_model(name: str | Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """A causal language model from a folder or hub name, in host memory.

    Raises:
        ValueError: it cannot be loaded, with the reason.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"model={str(name)!r}: {_where(name)}cannot be loaded: {error}") from error
    except SafetensorError as error:
        raise ValueError(f"model={str(name)!r}: a .safetensors file of it cannot be read ({error}): {DAMAGED}") from error
    return model


def input_device(model: Any) -> torch.device:
    """The device that token ids must be on."""
    return model.get_input_embeddings().weight.device
