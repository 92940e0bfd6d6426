"""The weights that a model's class keeps in fp32."""

from __future__ import annotations

from typing import Any

import torch


def kept_in_fp32(model: Any, dtype: torch.dtype) -> set[str]:
    """Return name parts of the weights that transformers keeps in fp32 despite ``dtype``."""
    fields = {torch.bfloat16: ("_strict",), torch.float16: ("", "_strict")}.get(dtype, ())
    return {
        part
        for field in fields
        for part in getattr(model, f"_keep_in_fp32_modules{field}", None) or ()
    }
