"""The command by which a server takes an artefact."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from chronicals.export.source import Source
from chronicals.lora.peft_format import CONFIG_FILE

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for ``--max-lora-rank``."""


def command(kind: str, path: Path, source: Source, eyes: Path | None = None) -> str | None:
    """For a shell; None where no server takes the artefact as it is.

    Args:
        eyes: the mmproj file beside a language part in GGUF.
    """
    given = shlex.quote(str(path))
    if kind == "gguf-adapter":
        return f"llama-server -m BASE.gguf --lora {given}"
    if kind.startswith("gguf"):
        return f"llama-server -m {given}" + (
            f" --mmproj {shlex.quote(str(eyes))}" if eyes is not None else ""
        )
    if kind.startswith("mmproj"):
        return f"llama-server -m LANGUAGE.gguf --mmproj {given}"
    if kind == "adapter":
        return _with_adapter(path, source)
    return None if kind in ("nf4", "merged-fp32") else f"vllm serve {given}"


def rank_for_vllm(path: Path) -> int | None:
    """What vLLM is told of an adapter's ranks; None where it takes no such adapter, as DoRA and
    modules that are saved whole."""
    described = json.loads((path / CONFIG_FILE).read_text())
    rank = max([described["r"], *(described.get("rank_pattern") or {}).values()])
    if (
        described.get("use_dora")
        or described.get("modules_to_save")
        or described.get("lora_bias")
        or rank > RANKS[-1]
    ):
        return None
    return next(size for size in RANKS if size >= rank)


def _with_adapter(path: Path, source: Source) -> str | None:
    most = rank_for_vllm(path)
    if most is None:
        return None
    name = shlex.quote(path.name)
    return (
        f"vllm serve {shlex.quote(str(source.saved.base))} --enable-lora --max-lora-rank {most} "
        f"--lora-modules {name}={shlex.quote(str(path))}"
    )
