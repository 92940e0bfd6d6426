"""``chronicals verify`` on each family: full fine-tuning and LoRA, random weights, 5 steps beside
plain fp32.

    python benchmarks/verify_families.py OUTPUT.json [--small] [--families llama,qwen2] [--commit
    HASH]

Models are four layers of a 0.5B's width with a vocabulary of 32,768; ``--small`` takes tiny ones,
for a machine without a card. A row a family and kind: the worst module's deviation as a share of
what is allowed, the seconds, the verdict.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import families  # noqa: E402  the tests' own table
from chronicals.benchmark.shapes import byte_tokenizer, random_documents  # noqa: E402
from chronicals.config import ChronicalsConfig  # noqa: E402
from chronicals.verification import verify  # noqa: E402

WIDE = {
    "hidden_size": 896,
    "intermediate_size": 2432,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 32_768,
    "max_position_embeddings": 4096,
}
SMALL = {"vocab_size": 320, "max_position_embeddings": 512}
OWN = {
    "qwen3": {"head_dim": 64},
    "gemma": {"head_dim": 64},
    "gemma2": {"head_dim": 64, "sliding_window": 512},
    "gemma3": {"head_dim": 64, "sliding_window": 512},
    "olmo3": {"sliding_window": 512},
    "mistral": {"sliding_window": 512},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
}
"""What a family's own sizes are beside the width."""

FUSED = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "mistral",
    "phi3",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
]
KINDS = {"full": {}, "lora": {"use_lora": True, "lora_rank": 16, "lora_alpha": 16}}


def model_of(family: str, small: bool, dtype: torch.dtype) -> torch.nn.Module:
    config = families.configuration(family, **(SMALL if small else {**WIDE, **OWN.get(family, {})}))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def row_of(family: str, kind: str, small: bool) -> dict:
    width = 256 if small else 1024
    with tempfile.TemporaryDirectory() as folder:
        config = ChronicalsConfig(
            max_seq_length=width,
            batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=5,
            warmup_steps=0,
            learning_rate=1e-4,
            output_dir=Path(folder) / "run",
            cache_dir=Path(folder) / "tokens",
            **KINDS[kind],
        )
        vocabulary = (SMALL if small else WIDE)["vocab_size"]
        documents = [
            {"input_ids": ids} for ids in random_documents("ragged", 25 * width, width, vocabulary)
        ]
        began = time.perf_counter()
        found = verify(model_of(family, small, torch.bfloat16), byte_tokenizer(), config, documents)
    worst = {
        part: max(getattr(found, part), key=lambda row: row.ratio)
        for part in ("gradients", "updates")
    }
    return {
        "passed": found.passed,
        "failures": found.failures,
        "notes": found.notes,
        "seconds": time.perf_counter() - began,
        "worst": {part: {"module": row.module, "share": row.ratio} for part, row in worst.items()},
        "losses": [row.to_dict() for row in found.losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--families", default=",".join(FUSED))
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    rows: dict[str, dict] = {}
    for family in options.families.split(","):
        for kind in KINDS:
            rows[f"{family} {kind}"] = row = row_of(family, kind, options.small)
            shares = ", ".join(
                f"{part} {worst['share']:.2f} ({worst['module']})"
                for part, worst in row["worst"].items()
            )
            print(
                f"{family:10}{kind:6}{'passed' if row['passed'] else 'FAILED':8}{row['seconds']:6.1f} s  {shares}",
                flush=True,
            )
            about = {
                "card": card,
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            }
            options.output.write_text(
                json.dumps({**about, "commit": options.commit, "rows": rows}, indent=1)
            )
            gc.collect()


if __name__ == "__main__":
    main()
