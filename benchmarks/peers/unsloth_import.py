"""Importing Unsloth, before torch, so that it finds an attention for packed documents.

Under LoRA it takes the first of FlashAttention 2, xformers and torch's ``varlen_attn`` (from torch
2.12 on) that it finds, otherwise one call for each document, which is five times slower. Its own
extra for torch 2.11 names xformers 0.0.35, whose wheel is linked to ``libcudart.so.12``. torch for
CUDA 13 does not have that library, the wheel ``nvidia-cuda-runtime-cu12`` does.
"""

from __future__ import annotations

import ctypes
import importlib
import json
from importlib.util import find_spec
from pathlib import Path

PACKING_ARMS = ("unsloth", "unsloth-recompute")
CUDA_12_RUNTIME = "cuda_runtime/lib/libcudart.so.12"


def import_unsloth(work: Path, name: str) -> None:
    """Import Unsloth for the arm ``name`` of the work in this folder."""
    row = json.loads((work / "work.json").read_text())
    if row["mode"] != "full" and row["data"] != "fixed" and name in PACKING_ARMS:
        load_cuda_12_runtime()
    importlib.import_module("unsloth")


def load_cuda_12_runtime() -> None:
    """Load the library from its wheel, if that is installed, so that xformers finds it."""
    spec = find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or []:
        library = Path(folder) / CUDA_12_RUNTIME
        if library.exists():
            ctypes.CDLL(str(library))
