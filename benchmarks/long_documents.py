"""Peak memory of steps on one long document beside what the run expected, and what was live at the
peak.

    python benchmarks/long_documents.py OUTPUT.json [--lengths 16384,65536,131072] [--layers 8]
    [--policies default,lean]
        [--where] [--shape 8b|tiny] [--commit HASH]
    python benchmarks/long_documents.py OUTPUT.json --caps 12,24,80 [--arms ours,unsloth,unsloth-tiled]
        [--length N] [--step-seconds 150] [--budget 450] [--profile] [--attention BACKEND]

With ``--caps`` the allocator is capped at so many GB, and the longest document that fits is trained
on (``capped_documents``). Without:

QLoRA of rank 32 over layers of the Llama-3.1-8B shape with random weights in NF4, one document a
step. Each combination of a length and a set of memory policies is written to the file as soon as it
is measured; one that runs out of memory, or that the run refuses, is recorded with what it said.
``--where`` records the allocator's history and lists the largest tensors that were live at the peak
by the line that made them.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from capped_documents import ARMS, run_rows

from chronicals import ChronicalsConfig, ChronicalsTrainer
from chronicals.attention import BACKENDS
from chronicals.data.tokens.tokenizer_training import train_tokenizer
from chronicals.policies.needed_memory import logger as memory_log
from chronicals.training import Callback

GIB = 2**30

SHAPES = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}

POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "nothing": {"memory": []},
    "elementwise": {"memory": ["recompute_elementwise"]},
    "layers": {"memory": ["recompute_layers"]},
    "lean": {
        "memory": ["recompute_layers", "offload_activations", "tiled_mlp"],
        "logits_chunk_size": 512,
    },
}
"""Sets of fields that a row is measured with, by the name that stands in the file."""

LEAST_SHOWN = 64 << 20
"""Bytes under which a tensor that is live at the peak is not listed by itself."""


class Expected:
    """Collect the first lines of a run that say what it expected to hold."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, record: Any) -> bool:
        self.lines.append(record.getMessage())
        return True

    @property
    def bytes(self) -> float | None:
        found = re.search(r"at most ([\d.]+) GiB expected", " ".join(self.lines))
        return float(found.group(1)) * GIB if found else None


class PeakOfSteps(Callback):
    """Forget what was held while the model was made and quantised."""

    def run_began(self, run: Any) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def config_of(shape: str, layers: int, longest: int) -> Any:
    """Return the configuration of a shape, for documents of at most ``longest`` tokens."""
    return transformers.LlamaConfig(
        **SHAPES[shape],
        num_hidden_layers=layers,
        max_position_embeddings=longest,
        rope_theta=500000.0,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )


def build_model(shape: str, layers: int, longest: int) -> Any:
    """Return a model of a shape with random weights in bf16."""
    config = config_of(shape, layers, longest)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def document(tokenizer: Any, length: int) -> str:
    """Return a text of at least ``length`` tokens."""
    words = [
        f"{first}{second}" for first in ("ta", "ro", "mi") for second in ("ka", "len", "sud", "ort")
    ]
    drawn = random.Random(length)
    piece = " ".join(drawn.choice(words) for _ in range(4096))
    tokens = len(tokenizer(piece)["input_ids"])
    return " ".join([piece] * (length // tokens + 1))


def live_at_peak(snapshot: dict[str, Any], before: int) -> list[dict[str, Any]]:
    """Return the tensors that were live when most bytes were, largest first, those of one line and
    size together.

    Args:
        snapshot: of ``torch.cuda.memory._snapshot``.
        before: bytes that were held before the history began.
    """
    held = before
    most = 0
    live = {}
    at_peak = {}
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            held += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in live:
            held -= live.pop(event["addr"])["size"]
        elif event["action"] == "free_completed":
            held -= event["size"]
        if held > most:
            most = held
            at_peak = dict(live)
    groups: Counter[tuple[str, int]] = Counter()
    for event in at_peak.values():
        if event["size"] >= LEAST_SHOWN:
            groups[_line(event["frames"]), event["size"]] += 1
    rows = [
        {"line": line, "gib": size / GIB, "count": count} for (line, size), count in groups.items()
    ]
    small = sum(e["size"] for e in at_peak.values() if e["size"] < LEAST_SHOWN)
    rows.append({"line": "smaller tensors of the step", "gib": small / GIB, "count": 1})
    rows.append({"line": "before the step", "gib": before / GIB, "count": 1})
    return sorted(rows, key=lambda row: -row["gib"] * row["count"])


def _line(frames: list[dict[str, Any]]) -> str:
    """Return the innermost three lines of ours that led to an allocation."""
    ours = [f for f in frames if "chronicals" in f["filename"]] or frames[:1]
    return " < ".join(f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in ours[:3])


def measure(
    model: Any, tokenizer: Any, length: int, fields: dict[str, Any], folder: Path, where: bool
) -> dict[str, Any]:
    """Train two steps and return peak, estimate, loss, gradient norm and seconds of the second
    step.
    """
    rows = [{"text": document(tokenizer, length)}]
    config = ChronicalsConfig(
        use_lora=True,
        lora_rank=32,
        lora_alpha=32,
        lora_dropout=0.0,
        quantization="nf4",
        batch_size=1,
        gradient_accumulation_steps=1,
        max_seq_length=length,
        max_steps=2,
        warmup_steps=0,
        trackers=[],
        report_samples=0,
        save_steps=None,
        output_dir=folder / "run",
        cache_dir=folder / "tokens",
        overlong="cut",
        gate={"cut_stop": 1.0},
        **fields,
    )
    expected = Expected()
    memory_log.addFilter(expected)
    found: dict[str, Any] = {"length": length, "layers": len(model.model.layers), "fields": fields}
    before = torch.cuda.memory_allocated()
    if where:
        torch.cuda.memory._record_memory_history(
            max_entries=400_000, context="alloc", stacks="python"
        )
    started = time.monotonic()
    try:
        result = ChronicalsTrainer(model, tokenizer, config, callbacks=[PeakOfSteps()]).train(rows)
        found |= {"loss": result.loss, "steps": result.steps}
    except Exception as error:  # recorded, and the next row is measured
        found["error"] = f"{type(error).__name__}: {error}"[:600]
        found["trace"] = traceback.format_exc()[-1500:]
    found["seconds"] = time.monotonic() - started
    found["held_gib"] = torch.cuda.max_memory_allocated() / GIB
    found["before_gib"] = before / GIB
    if where:
        found["live"] = live_at_peak(torch.cuda.memory._snapshot(), before)[:40]
        torch.cuda.memory._record_memory_history(enabled=None)
    memory_log.removeFilter(expected)
    if expected.bytes is not None:
        found["expected_gib"] = expected.bytes / GIB
    metrics = folder / "run" / "metrics.jsonl"
    if metrics.exists():
        found["metrics"] = [json.loads(line) for line in metrics.read_text().splitlines()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--lengths", default="16384,65536,131072")
    parser.add_argument("--layers", type=int, help="8; with --caps 32")
    parser.add_argument("--policies", default="default,lean")
    parser.add_argument("--where", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--commit", default="")
    parser.add_argument("--caps", default="", help="GB that the allocator may use, a row each")
    parser.add_argument("--arms", default="ours", help="of the rows with a cap")
    parser.add_argument("--length", type=int, default=0, help="tokens, not the longest")
    parser.add_argument("--step-seconds", type=float, default=150.0)
    parser.add_argument("--budget", type=float, default=450.0, help="seconds of all rows")
    parser.add_argument("--profile", action="store_true", help="trace one more step of each row")
    parser.add_argument(
        "--attention",
        choices=["", *BACKENDS],
        default="",
        help="backend of our rows with a cap; what a run takes by default",
    )
    given = parser.parse_args()
    unknown = set(given.arms.split(",")) - set(ARMS)
    if unknown:
        parser.error(f"--arms {', '.join(sorted(unknown))}: choose of {', '.join(ARMS)}")
    if not given.caps and (given.profile or given.attention):
        parser.error("--profile and --attention are for rows with --caps")
    given.layers = given.layers or (32 if given.caps else 8)
    if given.caps:
        run_rows(given)
    else:
        run_lengths(given)


def run_lengths(given: argparse.Namespace) -> None:
    """Measure each length with each set of policies, on all of the card."""
    lengths = [int(length) for length in given.lengths.split(",")]
    tokenizer = train_tokenizer(
        ["the quick brown fox takes the long way home"] * 20, vocab_size=300
    )
    done: dict[str, Any] = {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": given.commit,
        "rows": [],
    }
    for length in lengths:
        for name in given.policies.split(","):
            model = build_model(given.shape, given.layers, max(lengths))
            with tempfile.TemporaryDirectory() as folder:
                row = measure(model, tokenizer, length, POLICIES[name], Path(folder), given.where)
            done["rows"].append({"policies": name, **row})
            given.output.write_text(json.dumps(done, indent=1))
            held = row["held_gib"]
            expected = row.get("expected_gib")
            off = f", off by {expected / held - 1:+.1%}" if expected and held else ""
            print(
                f"{length:>7} {name:<12} held {held:6.2f} GiB, expected {expected}{off} "
                f"{row.get('error', '')}",
                flush=True,
            )
            del model
            gc.collect()


if __name__ == "__main__":
    main()
