"""What the benchmarks of mixtures of experts share: small mixtures, real text, and how a result
is written.
"""

import functools
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from chronicals import ChronicalsConfig
from chronicals.benchmark.record import current_commit, versions
from chronicals.data.tokens.tokenizer_training import questions_and_answers, train_tokenizer
from chronicals.moe import ChronicalsMoeConfig, ChronicalsMoeForCausalLM

VOCABULARY = 1024
K = 2
CACHE = Path(tempfile.gettempdir()) / "chronicals-moe-small"
"""Where runs share what was tokenised."""


@functools.cache
def rows() -> tuple[list[dict], list[dict]]:
    """Chat rows from the documentation of Python's standard library: to train on, and every
    tenth held out.
    """
    found = questions_and_answers()
    return [row for n, row in enumerate(found) if n % 10], found[::10]


def as_texts(some: list[dict]) -> list[dict]:
    return [{"text": " ".join(message["content"] for message in row["messages"])} for row in some]


def tokenizer_of(some: list[dict]) -> Any:
    return train_tokenizer((row["text"] for row in as_texts(some[:3000])), vocab_size=VOCABULARY)


def native(tokenizer: Any, seed: int, **changes: Any) -> ChronicalsMoeForCausalLM:
    """16 experts of which each token gets 2, 8 layers, a million parameters."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts": 16,
        "num_experts_per_tok": K,
        "moe_intermediate_size": 32,
        "num_shared_experts": 1,
        "lookahead_rank": 128,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(seed)
    return ChronicalsMoeForCausalLM(ChronicalsMoeConfig(**{**sizes, **changes}))


def qwen3_moe(tokenizer: Any, seed: int, **changes: Any) -> Any:
    """The same sizes in a class of transformers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 16,
        "num_experts_per_tok": K,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **changes}))


def configuration(folder: Path, **changes: Any) -> ChronicalsConfig:
    usual = {
        "learning_rate": 3e-3,
        "batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_seq_length": 256,
        "warmup_steps": 10,
        "mixed_precision": "fp32",
        "report_samples": 0,
        "trackers": [],
        "save_steps": None,
        "keep": "last",
        "output_dir": folder / "run",
        "cache_dir": CACHE,
    }
    return ChronicalsConfig(**{**usual, **changes})


def metrics(folder: Path) -> list[dict]:
    """Of each step of the run in ``folder``."""
    lines = (
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    )
    return [line for line in lines if "loss" in line]


def about(began: float, **settings: Any) -> dict[str, Any]:
    """Where and with what a result was made."""
    return {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "commit": current_commit(),
        "seconds": round(time.perf_counter() - began, 1),
        **settings,
    }


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def show(columns: list[str], lines: list[list[Any]]) -> None:
    table = Table(*columns)
    for line in lines:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in line))
    Console(width=140).print(table)


def spread(values: list[float]) -> dict[str, Any]:
    return {
        "mean": statistics.mean(values),
        "least": min(values),
        "most": max(values),
        "values": values,
    }
