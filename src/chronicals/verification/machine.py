"""Hardware and versions of this machine, and which optional packages are missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

import torch
from packaging.requirements import Requirement

from chronicals.attention import choose_backend
from chronicals.kernels.launch import HAS_TRITON

_PACKAGES = (
    "chronicals",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "peft",
    "trl",
    "accelerate",
    "datasets",
    "bitsandbytes",
    "flash-attn-4",
    "tensorboard",
    "wandb",
    "mlflow-skinny",
    "optuna",
)

PURPOSES = {
    "data": "hub data sets, and folders that datasets saved",
    "flash": "FlashAttention-4, on H100 and later",
    "peft": "the reference of adapters in benchmark, and adapters beside PEFT's own",
    "tensorboard": "curves in TensorBoard",
    "wandb": "curves in Weights & Biases",
    "mlflow": "curves in MLflow",
    "export": "models as GGUF",
    "tune": "the search for settings",
    "ui": "the web page, chronicals ui",
    "math": "rewards of answers to mathematical questions",
}
"""Purpose of each extra of the package."""


def inspect_machine() -> dict[str, str | int]:
    """Return the hardware, the versions and the backends that would be used."""
    facts: dict[str, str | int] = {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cores": os.cpu_count() or 1,
        "free disk": f"{shutil.disk_usage(Path.cwd()).free / 2**30:.0f} GiB",
    }
    if torch.version.cuda:
        facts["CUDA"] = f"{torch.version.cuda}, as torch was built for"
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        facts[f"card {index}"] = (
            f"{card.name}, {card.total_memory / 2**30:.0f} GiB, capability "
            f"{card.major}.{card.minor}"
        )
    if not torch.cuda.is_available():
        facts["card"] = "none; training runs on the CPU"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts["attention"] = (
        f"{choose_backend(device, torch.bfloat16)} (bf16), "
        f"{choose_backend(device, torch.float32)} (fp32)"
    )
    facts["kernels"] = (
        "Triton" if device.type == "cuda" and HAS_TRITON else "their references in plain torch"
    )
    return facts | {name: version_of(name) or "not installed" for name in _PACKAGES}


def missing_extras() -> dict[str, str]:
    """Return the extras of which a package is missing or too old.

    Returns:
        By extra: what is wrong, what it is for, and the command that installs it.
    """
    lacking = {}
    for extra, purpose in PURPOSES.items():
        wrong = [words for words in map(_wrong, _requirements(extra)) if words is not None]
        if wrong:
            lacking[extra] = f"{', '.join(wrong)}: {purpose}; pip install 'chronicals[{extra}]'"
    return lacking


def untested_versions() -> list[str]:
    """Return messages for required packages whose version is outside the supported range."""
    return [words for words in map(_wrong, _requirements()) if words is not None]


def _requirements(extra: str = "") -> list[Requirement]:
    """Return the required packages on this machine, or those of an extra.

    The list is empty if chronicals is not an installed package.
    """
    try:
        listed = [Requirement(text) for text in importlib.metadata.requires("chronicals") or []]
    except importlib.metadata.PackageNotFoundError:
        return []
    here = [
        entry for entry in listed if not entry.marker or entry.marker.evaluate({"extra": extra})
    ]
    return [entry for entry in here if ("extra" in str(entry.marker)) == bool(extra)]


def _wrong(requirement: Requirement) -> str | None:
    """Return a message if the installed version of a package does not fit, else None."""
    version = version_of(requirement.name)
    if version is None:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} {version} is installed and {requirement.specifier} is needed"
    return None


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
