"""Every family in several types of GGUF: how far llama.cpp's logits are from torch's with the very weights of the file.

    python benchmarks/export_matrix.py OUTPUT.json [--only llama,qwen3]

Models are small and random (``tests/gguf_models.py``); the package llama-cpp-python is needed. What quantising costs a
model cannot be told from random weights; that llama.cpp computes the model that is in the file can.
"""

import argparse
import json
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from chronicals.benchmark.record import current_commit, versions
from chronicals.data.tokenizer_training import train_tokenizer
from chronicals.export import NotProved, export, llama_cpp
from chronicals.export.gguf import COMPARED

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent / "tests" / "export")]
import gguf_models  # noqa: E402

KINDS = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m"]
WIDE = {"hidden_size": 256, "intermediate_size": 512}
OF_ONE = {"phi3, longrope": {"num_attention_heads": 16}}
"""As many elements of a head as there are factors."""


def measured(name: str, kind: str) -> dict:
    """The error and its bound, of a model that is proved or not."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        torch.manual_seed(0)
        gguf_models.build(name, **WIDE, **OF_ONE.get(name, {})).save_pretrained(folder)
        train_tokenizer(["what a model of this size may say, and its answers"] * 50, 300).save_pretrained(folder)
        try:
            (exported,) = export(folder, f"gguf-{kind}")
        except NotProved as error:
            return {"failed": str(error)}
        (check,) = [check for check in exported.proof.checks if check.name == COMPARED]
        return {"error": check.value, "bound": check.bound, "types": exported.proof.about["types"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", help="names of models, with commas")
    args = parser.parse_args()
    llama_cpp.require("logits are computed")
    names = args.only.split(",") if args.only else list(gguf_models.MODELS)
    result: dict = {
        "machine": platform.processor() or platform.machine(), "versions": versions(), "commit": current_commit(),
        "llama-cpp-python": version("llama-cpp-python"), "gguf": version("gguf"), "kinds": KINDS, "models": {},
    }  # fmt: skip
    for name in names:
        result["models"][name] = {kind: measured(name, kind) for kind in KINDS}
        print(name, {kind: found.get("error", "FAILED") for kind, found in result["models"][name].items()}, flush=True)
        args.output.write_text(json.dumps(result, indent=1))
    failed = [name for name, kinds in result["models"].items() if any("failed" in found for found in kinds.values())]
    if failed:
        raise SystemExit(f"not proved: {', '.join(failed)}")


if __name__ == "__main__":
    main()
