"""The command by which a server takes an artefact."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from chronicals.export.source import Source
from chronicals.lora.peft_format import CONFIG_FILE

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for ``--max-lora-rank``."""


def command(kind: str, path: Path, source: Source, projector: Path | None = None) -> str | None:
    """Return the shell command; None if no server takes the artefact as it is.

    Args:
        kind: format of the artefact.
        projector: the mmproj file beside a language part in GGUF.
    """
    artefact = shlex.quote(str(path))
    if kind == "gguf-adapter":
        return f"llama-server -m BASE.gguf --lora {artefact}"
    if kind.startswith("gguf"):
        images = "" if projector is None else f" --mmproj {shlex.quote(str(projector))}"
        return f"llama-server -m {artefact}{images}"
    if kind.startswith("mmproj"):
        return f"llama-server -m LANGUAGE.gguf --mmproj {artefact}"
    if kind == "adapter":
        return _adapter_command(path, source)
    return None if kind in ("nf4", "merged-fp32") else f"vllm serve {artefact}"


def rank_for_vllm(path: Path) -> int | None:
    """Return the largest rank that vLLM is told for an adapter.

    None if it takes no such adapter: DoRA, trained biases, modules that are saved whole.
    """
    described = json.loads((path / CONFIG_FILE).read_text())
    rank = max([described["r"], *(described.get("rank_pattern") or {}).values()])
    unsupported = ("use_dora", "modules_to_save", "lora_bias")
    if rank > VLLM_RANKS[-1] or any(described.get(field) for field in unsupported):
        return None
    return next(size for size in VLLM_RANKS if size >= rank)


def _adapter_command(path: Path, source: Source) -> str | None:
    rank = rank_for_vllm(path)
    if rank is None:
        return None
    name = shlex.quote(path.name)
    return (
        f"vllm serve {shlex.quote(str(source.saved.base))} --enable-lora --max-lora-rank {rank} "
        f"--lora-modules {name}={shlex.quote(str(path))}"
    )
