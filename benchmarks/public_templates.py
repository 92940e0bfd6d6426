"""Writes tests/data/public_templates.json: what public chat templates write for the tests'
conversations.

``python benchmarks/public_templates.py --clone axolotl-ai-cloud/axolotl=DIR --clone
chujiezheng/chat_templates=DIR``; the texts of trl are read from the installed package. Seconds on a
CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from data.public_conversations import CONVERSATIONS, rendered  # noqa: E402

AXOLOTL = "axolotl-ai-cloud/axolotl"
CHAT_TEMPLATES = "chujiezheng/chat_templates"
TRL = "huggingface/trl"

COMMITS = {
    AXOLOTL: "067b021c8b87a9e5e380b9173c704cf7340e30f5",
    CHAT_TEMPLATES: "11c495621569969f264ee70b5c8bb49ba7a1a410",
}

FOLDERS = {
    AXOLOTL: "src/axolotl/utils/chat_templates/templates",
    CHAT_TEMPLATES: "chat_templates",
    TRL: "trl/chat_templates",
}

SOURCES = {
    "chatml": (AXOLOTL, "chatml"),
    "alpaca": (AXOLOTL, "alpaca"),
    "vicuna": (CHAT_TEMPLATES, "vicuna"),
    "llama2": (CHAT_TEMPLATES, "llama-2-chat"),
    "llama3": (TRL, "llama3"),
    "llama3.1": (TRL, "llama3_1"),
    "llama3.2": (TRL, "llama3_2"),
    "llama4": (AXOLOTL, "llama4"),
    "mistral-v3": (AXOLOTL, "mistral_v2v3"),
    "mistral-v3-tekken": (AXOLOTL, "mistral_v3_tekken"),
    "mistral-v7-tekken": (AXOLOTL, "mistral_v7_tekken"),
    "mistral-v1": (AXOLOTL, "mistral_v1"),
    "gemma": (TRL, "gemma"),
    "gemma2": (TRL, "gemma"),
    "gemma3": (TRL, "gemma3"),
    "gemma3n": (AXOLOTL, "gemma3n"),
    "phi3": (TRL, "phi3"),
    "phi3.5": (TRL, "phi3_5"),
    "phi3-small": (CHAT_TEMPLATES, "phi-3-small"),
    "cohere": (TRL, "cohere"),
    "command-r": (AXOLOTL, "cohere"),
    "aya": (AXOLOTL, "aya"),
    "deepseek-v2": (AXOLOTL, "deepseek_v2"),
    "deepseek-v3": (AXOLOTL, "deepseek_v3"),
    "exaone4": (AXOLOTL, "exaone4"),
    "falcon-h1": (AXOLOTL, "falcon_h1"),
    "lfm2": (TRL, "lfm2_v2"),
    "exaone": (AXOLOTL, "exaone"),
    "gpt-oss": (TRL, "gptoss"),
    "granite": (CHAT_TEMPLATES, "granite-3.0-instruct"),
    "openchat": (CHAT_TEMPLATES, "openchat-3.5"),
    "saiga": (CHAT_TEMPLATES, "saiga"),
    "nemotron-h": (AXOLOTL, "nemotron_h"),
    "qwen2.5": (TRL, "qwen2_5"),
    "qwen3": (TRL, "qwen3"),
    "qwen3-instruct": (TRL, "qwen3_instruct_2507"),
    "qwen3-vl": (TRL, "qwen3_vl"),
    "qwen2.5-vl": (TRL, "qwen2_5_vl"),
}
"""For each name the repository and the file, without its ending, that it writes the same as. The
README of trl says that Gemma and Gemma 2 have one text."""


def origin(name: str) -> dict[str, str]:
    """The place where the public text of a name can be read."""
    repository, file = SOURCES[name]
    place = {
        "repository": f"https://github.com/{repository}",
        "path": f"{FOLDERS[repository]}/{file}.jinja",
    }
    if repository == TRL:
        return {**place, "package": f"trl {importlib.metadata.version('trl')}"}
    return {**place, "commit": COMMITS[repository]}


def public_text(name: str, clones: dict[str, str]) -> bytes:
    """The public text of a name, as its file has it."""
    repository, file = SOURCES[name]
    if repository == TRL:
        package = importlib.util.find_spec("trl")
        assert package is not None and package.submodule_search_locations
        return (
            Path(package.submodule_search_locations[0]) / "chat_templates" / f"{file}.jinja"
        ).read_bytes()
    shown = f"{COMMITS[repository]}:{FOLDERS[repository]}/{file}.jinja"
    return subprocess.run(
        ["git", "-C", clones[repository], "show", shown], check=True, capture_output=True
    ).stdout


def as_used(name: str, text: str) -> str:
    """The text as its repository says to use it: chujiezheng/chat_templates is indented to be
    read.
    """
    indented = SOURCES[name][0] == CHAT_TEMPLATES
    return text.replace("    ", "").replace("\n", "") if indented else text


def entry(name: str, clones: dict[str, str]) -> dict:
    """The origin of a name's public text, its digest, and what it writes."""
    content = public_text(name, clones)
    text = as_used(name, content.decode())
    written = {kind: rendered(text, kind) for kind in CONVERSATIONS}
    return {**origin(name), "sha256": hashlib.sha256(content).hexdigest(), "written": written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    help = "a clone that has the commit named here"
    parser.add_argument("--clone", action="append", default=[], metavar="REPOSITORY=DIR", help=help)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "tests" / "data" / "public_templates.json"
    )
    arguments = parser.parse_args()
    clones = dict(clone.split("=", 1) for clone in arguments.clone)
    entries = {name: entry(name, clones) for name in SOURCES}
    arguments.out.write_text(
        json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
