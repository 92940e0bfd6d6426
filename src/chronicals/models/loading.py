"""Loading models and tokenizers; safetensors only, no remote code unless the user asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from chronicals.config.paths import lasting
from chronicals.models.completeness import check_whole
from chronicals.models.towers import read_processors

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float32, "fp32": torch.float32}
"""The dtype of the weights by ``mixed_precision``; for fp16 they are fp32, since fp16 would lose small updates."""

BASE_ROWS = "_chronicals_base_rows"
"""Attribute of a model: rows of the embedding in the checkpoint it was loaded from; None or absent if unknown."""

DAMAGED = "damaged or cut, or a Git LFS pointer instead of weights; download it again"
"""Said in errors about a safetensors file that cannot be read."""


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


def _load(auto_class: Any, what: str, name: str | Path, trust_remote_code: bool) -> Any:
    try:
        return auto_class.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model={str(name)!r}: {_where(name)}no {what} could be loaded: {error}") from error


def _where(name: str | Path) -> str:
    """The beginning of an error about a name that is no folder, and so was looked up on the hub."""
    return "" if Path(name).is_dir() else "there is no such folder here, and as a hub name: "


def load_model(name: str | Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """A causal language model, or one of images and text, from a folder or hub name, in host memory.

    Raises:
        ValueError: it cannot be loaded, or its checkpoint and its class do not fit, with the reason.
    """
    try:
        auto_class = _auto_class(name, trust_remote_code)
        model = load_whole(auto_class, name, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"model={str(name)!r}: {_where(name)}cannot be loaded: {error}") from error
    except SafetensorError as error:
        raise ValueError(f"model={str(name)!r}: a .safetensors file of it cannot be read ({error}): {DAMAGED}") from error
    model.config._name_or_path = lasting(name)
    read_processors(model)
    setattr(model, BASE_ROWS, getattr(model.config.get_text_config(), "vocab_size", None))
    return model


def load_whole(auto_class: Any, name: str | Path, **options: Any) -> Any:
    """``auto_class.from_pretrained(name, **options)``; checkpoint and model class must have the same weights.

    Raises:
        ValueError: they do not; the message names the weights.
    """
    try:
        model, report = auto_class.from_pretrained(name, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # what transformers raises for weights that it cannot convert
        raise ValueError(str(error)) from error
    check_whole(model, report)
    return model


def _auto_class(name: str | Path, trust_remote_code: bool) -> Any:
    """transformers' Auto class for the model: causal LM, or image-text-to-text if the configuration names such a class."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    of_text = type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "auto_map")
    with_images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if with_images is not None and (not of_text or with_images.__name__ in (config.architectures or ())):
        return transformers.AutoModelForImageTextToText
    if not of_text:
        raise ValueError(f"{type(config).__name__} is of a model that is no causal language model")
    return transformers.AutoModelForCausalLM


def input_device(model: Any) -> torch.device:
    """The device that token ids must be on."""
    return model.get_input_embeddings().weight.device
