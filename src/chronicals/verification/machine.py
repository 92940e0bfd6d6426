"""What this machine has."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

import torch

from chronicals.attention import choose_backend
from chronicals.kernels.launch import HAS_TRITON

PACKAGES = (
    "chronicals",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "peft",
    "trl",
    "bitsandbytes",
    "flash-attn-4",
    "tensorboard",
    "wandb",
    "mlflow-skinny",
)


def inspect_machine() -> dict[str, str | int]:
    """Hardware, versions and backends, as they would be used."""
    facts: dict[str, str | int] = {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cores": os.cpu_count() or 1,
        "free disk": f"{shutil.disk_usage(Path.cwd()).free / 2**30:.0f} GiB",
    }
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        facts[f"card {index}"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, capability {card.major}.{card.minor}"
    if not torch.cuda.is_available():
        facts["card"] = "none; training runs on the CPU"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts["attention"] = f"{choose_backend(device, torch.bfloat16)} (bf16), {choose_backend(device, torch.float32)} (fp32)"
    facts["kernels"] = "Triton" if device.type == "cuda" and HAS_TRITON else "their references in plain torch"
    for name in PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts
