"""Every family in every kind of artefact: how far its own client's logits are from torch's with the
very weights of the file.

    python benchmarks/export_matrix.py OUTPUT.json [--only llama,qwen3]

Models are small and random (``tests/gguf_models.py``). The clients are transformers (with
compressed-tensors and bitsandbytes) and llama.cpp by llama-cpp-python, which are needed. What
quantising costs a model cannot be told from random weights; that a client computes the model that
is in the file can. Merged models are compared with the trained one.
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
from chronicals.data.tokens.tokenizer_training import train_tokenizer
from chronicals.export import ExportError, NotProved, export, llama_cpp
from chronicals.formats.gguf.reader import NotExpressible

sys.path[:0] = [
    str(Path(__file__).parent.parent / "tests"),
    str(Path(__file__).parent.parent / "tests" / "export"),
]
import gguf_models  # noqa: E402

KINDS = [
    "merged",
    "merged-fp16",
    "fp8",
    "int4",
    "nf4",
    "gguf-f32",
    "gguf-f16",
    "gguf-bf16",
    "gguf-q8_0",
    "gguf-q4_0",
    "gguf-q4_k_m",
]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16}
"""Rows of every projection are whole blocks of every type, and a head has as many elements as
there are factors of LongRoPE.
"""


def measured(name: str, kind: str) -> dict:
    """The error and its bound, of a model that is proved or not; or why the format is refused."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        torch.manual_seed(0)
        gguf_models.build(name, **WIDE).save_pretrained(folder)
        train_tokenizer(
            ["what a model of this size may say, and its answers"] * 50, 300
        ).save_pretrained(folder)
        try:
            (exported,) = export(folder, kind)
        except NotProved as error:
            return {"failed": str(error)}
        except (ExportError, NotExpressible) as error:
            return {"refused": str(error)}
        (check,) = [
            one
            for one in exported.proof.checks
            if one.name.startswith("logits") and one.bound is not None
        ]
        return {
            "error": check.value,
            "bound": check.bound,
            "compared": check.name,
            "client": check.client,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", help="names of models, with commas")
    args = parser.parse_args()
    if not llama_cpp.is_there():
        parser.error(f"logits are computed by {llama_cpp.PACKAGE}, which is not installed")
    names = args.only.split(",") if args.only else list(gguf_models.MODELS)
    result: dict = {
        "machine": platform.processor() or platform.machine(),
        "versions": versions(),
        "commit": current_commit(),
        "llama-cpp-python": version("llama-cpp-python"),
        "gguf": version("gguf"),
        "kinds": KINDS,
        "models": {},
    }
    for name in names:
        result["models"][name] = {kind: measured(name, kind) for kind in KINDS}
        print(
            name,
            {kind: next(iter(found.items())) for kind, found in result["models"][name].items()},
            flush=True,
        )
        args.output.write_text(json.dumps(result, indent=1))
    failed = [
        name
        for name, kinds in result["models"].items()
        if any("failed" in found for found in kinds.values())
    ]
    if failed:
        raise SystemExit(f"not proved: {', '.join(failed)}")


if __name__ == "__main__":
    main()
