"""One of two processes that train every objective over every kind of weights together, and half of
the runs again alone.

The program of ``test_rank_matrix.py``: ``python rank_matrix.py FOLDER`` with the pairs in
``FOLDER/pairs.json``. What became of each stands in ``FOLDER/OBJECTIVE over WEIGHTS.together.json``
and ``….alone.json``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import torch
import torch.distributed as dist
import transformers

import families
import generic_bitsandbytes  # noqa: F401
import mixtures
import preferences
import rollouts
import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.distributed import Mesh
from chronicals.models import load_model, quantise_layers
from chronicals.training import ChronicalsTrainer
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.run.report import STEP_METRIC_NAMES
from chronicals.training.step import optimizer

OBJECTIVES = tuple(preferences.IN_TREE)
"""Every registered objective; ``preferences.rows_of`` makes its rows."""

LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0}
ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTERS = {"balance": 0.01, "z": 1e-3, "temporal": 0.01, "locality": 0.01}
ANCHORED = {**ROUTERS, "anchor": 0.1}
AHEAD = {"layer_ahead": 0.1, "token_ahead": 0.1}
SHARED = {"pack_parts": 2}
"""Of packs of two parts, which two processes share; one process takes both."""

WIDTHS = {True: 64, False: 192}
"""Of such packs, for objectives of tokens, whose documents are split, and for others, whose
documents fit in a part.
"""

WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all weights": ("plain", {}),
    "all weights, states in 8 bits": ("plain", {"use_8bit_optimizer": True}),
    "all weights, states in host memory": ("wide", {"memory": ["offload_optimizer_states"]}),
    "LoRA": ("plain", LORA),
    "DoRA": ("plain", {**LORA, "use_dora": True}),
    "LoRA and embedding": ("plain", {**LORA, "lora_modules_to_save": ["embed_tokens"]}),
    "LoRA and a token": (
        "plain",
        {**LORA, "lora_trainable_tokens": tiny.tokenizer()("the")["input_ids"]},
    ),
    "LoRA over NF4": ("nf4", LORA),
    "DoRA over NF4": ("nf4", {**LORA, "use_dora": True}),
    "LoRA over GGUF": ("gguf", LORA),
    "all weights, divided": ("plain", {"sharding": "weights"}),
    "LoRA over divided weights": ("plain", {**LORA, "sharding": "weights"}),
    "LoRA over divided NF4": ("divisible nf4", {**LORA, "sharding": "weights"}),
    "DoRA over divided NF4": ("divisible nf4", {**LORA, "use_dora": True, "sharding": "weights"}),
    "LoRA over divided GGUF": ("gguf", {**LORA, "sharding": "weights"}),
    "LoRA over divided bitsandbytes": ("bitsandbytes", {**LORA, "sharding": "weights"}),
    "LoRA, one rate for A and B": ("plain", {**LORA, "use_lora_plus": False}),
    "LoRA in fp16": ("plain", {**LORA, "mixed_precision": "fp16", "learning_rate": 3e-4}),
    "PiSSA": ("plain", {**LORA, "lora_init": "pissa"}),
    "OLoRA": ("plain", {**LORA, "lora_init": "olora"}),
    "LoftQ": ("plain", {**LORA, "lora_init": "loftq", "quantization": "nf4"}),
    "adapters of PEFT": ("peft", {}),
    "LoRA over bitsandbytes": ("bitsandbytes", LORA),
    "all weights of a mixture": ("mixture", {}),
    "LoRA over a mixture": ("mixture", LORA),
    "LoRA on experts": ("mixture", {**LORA, "lora_target_parameters": ON_EXPERTS}),
    "LoRA over a mixture in NF4": ("mixture", {**LORA, "quantization": "nf4"}),
    "LoRA on experts in NF4": (
        "mixture",
        {**LORA, "quantization": "nf4", "lora_target_parameters": ON_EXPERTS},
    ),
    "all weights of a mixture, divided": ("mixture", {"sharding": "weights"}),
    "LoRA over a divided mixture": ("mixture", {**LORA, "sharding": "weights"}),
    "LoRA over a divided mixture in NF4": (
        "mixture",
        {**LORA, "quantization": "nf4", "sharding": "weights"},
    ),
    "all weights of a mixture and losses of routers": ("mixture", {"router": ANCHORED}),
    "all weights of a mixture and losses of routers, divided": (
        "mixture",
        {"router": ROUTERS, "sharding": "weights"},
    ),
    "all weights of a mixture and an anchor, divided": (
        "mixture",
        {"router": ANCHORED, "sharding": "weights"},
    ),
    "all weights of a native mixture, losses of routers and heads ahead": (
        "native",
        {"router": {**ANCHORED, **AHEAD}},
    ),
    "LoRA over a native mixture": ("native", LORA),
    "all weights, packs shared": ("plain", SHARED),
    "LoRA, packs shared": ("plain", {**LORA, **SHARED}),
    "LoRA over divided weights, packs shared": ("plain", {**LORA, **SHARED, "sharding": "weights"}),
}
"""The base, and fields of the configuration. In fp16 a weight that is read may be rounded to the
other side of what it was, by half a thousandth of what it has learnt: it learns little."""

REFUSED = {
    "all weights of a mixture and an anchor, divided": "router.anchor=0.1: replayed tokens need "
    "whole weights",
    "LoRA over divided GGUF": "sharding='weights': weights in Q8_0",
    "LoRA over divided bitsandbytes": "sharding='weights': no frozen linear layer of its decoder "
    "layers has rows that can be",
    "LoRA over a divided mixture in NF4": "sharding='weights': Qwen3MoeForCausalLM has its "
    "experts in 4 bits",
}
"""What two processes refuse, which one process takes for weights that it has whole."""

ROWS = 30
USUAL = {
    "batch_size": 1,
    "max_seq_length": 96,
    "max_steps": 3,
    "validation_split": 0.2,
    "eval_steps": 3,
    "save_steps": None,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
    "trackers": [],
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-5,
}
"""With an epsilon under which a gradient of almost zero takes a step of almost zero, whatever
its sign: the order of sums may change that."""

MICRO_BATCHES = 4
"""Of a step, by one process or by two."""


def base(kind: str, folder: Path) -> Any:
    if kind == "plain":
        return tiny.llama()
    if kind == "wide":  # small weights keep their states where they are
        return tiny.llama(intermediate_size=1024)
    if kind == "mixture":
        return families.mixture("qwen3_moe", vocab_size=300, max_position_embeddings=512)
    if kind == "native":
        return mixtures.mixture(random=False, vocab_size=300)
    if kind == "peft":
        torch.manual_seed(0)
        shape = peft.LoraConfig(
            r=4, lora_alpha=16, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"
        )
        return peft.get_peft_model(tiny.llama(), shape)
    if kind == "bitsandbytes":
        four = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        place = {"device_map": {"": "cpu"}, "dtype": torch.float32}
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder / "source", quantization_config=four, **place
        )
    if kind == "nf4":
        return load_model(folder / "source", torch.float32, quantization="nf4")
    if kind == "divisible nf4":  # in rows of whole blocks of scales, for two processes
        model = tiny.llama(hidden_size=256, intermediate_size=512)
        quantise_layers(model)
        return model
    return load_model(next((folder / "base").glob("*.gguf")), torch.float32)


DRAWN = tuple(name for name, cls in preferences.IN_TREE.items() if cls.draws_answers)
"""Objectives over answers that the model draws, which need whole weights and whole packs."""

DRAWS = {"answers": 4, "prompts": 3, "max_new_tokens": 8}
UNLIKE = ("seconds/", "gap")
"""Beginnings of metrics that differ between runs: times, and rounding alone."""


def refusal(objective: str, weights: str) -> str | None:
    """Words in which two processes refuse a pair; None for one that they train."""
    fields = WEIGHTS[weights][1]
    if objective in DRAWN and "pack_parts" in fields:
        return "pack_parts=2: "
    if objective in DRAWN and "sharding" in fields:
        return "sharding='weights': "
    return REFUSED.get(weights)


def train(objective: str, weights: str, folder: Path, place: Path, ranks: Mesh) -> dict[str, Any]:
    """Losses, norms, the held-out loss and what the objective shows of each step and of held-out
    rows; the words of a refusal, and whether a step was made before it."""
    kind, fields = WEIGHTS[weights]
    shares = ranks.count if "pack_parts" in fields else 1
    micro_batches = MICRO_BATCHES * shares // ranks.count
    fields = {
        **USUAL,
        **fields,
        "gradient_accumulation_steps": micro_batches,
        "context_parallel": shares,
    }
    rewards = None
    if objective in DRAWN:
        del fields["gradient_accumulation_steps"]
        fields[objective] = DRAWS
        rewards = rollouts.Rewards()
    if "pack_parts" in fields:
        fields["max_seq_length"] = WIDTHS[objective not in preferences.OF_ANSWERS]
    if objective == "distill":
        fields["distill"] = {"teacher": str(folder / "teacher"), "teacher_precision": "fp32"}
    place = place / f"rank{ranks.rank}"
    usual = rollouts.config if objective in DRAWN else runs.config
    section = {"section": fields.pop(objective)} if objective in DRAWN else {}
    given = {**fields, "cache_dir": folder / "tokens", **section}
    try:
        config = usual(place, objective=objective, **given)
        with patch.object(Mesh, "current", return_value=ranks):
            trainer = ChronicalsTrainer(
                base(kind, folder), tiny.tokenizer(), config, rewards=rewards
            )
        result = trainer.train(preferences.rows_of(objective, ROWS))
    except ConfigurationError as refusal:
        return {"refused": str(refusal), "begun": (place / "run" / "metrics.jsonl").exists()}
    lines = [line for line in read_metrics(place / "run" / "metrics.jsonl") if "loss" in line]
    metrics = [
        {
            name: line[name]
            for name in line.keys() - STEP_METRIC_NAMES - {"time"}
            if not (objective in DRAWN and name.startswith(UNLIKE))
        }
        for line in lines
    ]
    return {
        "steps": runs.trajectory(place) if ranks.writer else [],
        "held out": result.evaluation.loss,
        "metrics": [*metrics, dict(result.evaluation.others)],
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    optimizer.START_SCALE = (
        2.0**6
    )  # in fp16 no gradient overflows, or a run of so few steps might have none
    ranks = Mesh.current()
    for objective, weights in json.loads((folder / "pairs.json").read_text()):
        name = f"{objective} over {weights}"
        # Alone on the first process: on another one transformers takes a run for a part of one, and
        # saves no configuration.
        turns = [("together", ranks, ranks.writer), ("alone", Mesh(), ranks.writer)]
        for turn, mesh, tells in turns:
            if mesh.count == 1 and not tells:
                continue
            try:
                seen = train(objective, weights, folder, folder / name / turn, mesh)
            except Exception:
                seen = {"failed": traceback.format_exc()}
            if tells:
                (folder / f"{name}.{turn}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
