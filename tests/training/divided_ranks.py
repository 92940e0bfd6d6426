"""One of several processes that divide a model's weights among them: the program of
``test_divided_weights.py``.

``python divided_ranks.py FOLDER CASE …``: what each case returns is in ``CASE.pt``, from the first
rank. A case is a trajectory of all ranks together and of the first one alone, in sessions over
layers that run fused.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import runs
import tiny
from chronicals.batch import IGNORED, Batch
from chronicals.config import ConfigurationError
from chronicals.data.packs.steps import Step
from chronicals.distributed import LinearInShards, Mesh
from chronicals.distributed.alike import fingerprint_over
from chronicals.models import embedding_table, quantise_layers
from chronicals.objectives import build_objective
from chronicals.patching import decoder_layer, patch_parts, recompute_norms_and_units
from chronicals.training.session import prepared

EPSILON = 1e-5
"""Of AdamW: a gradient of almost zero takes a step of almost zero, whatever its sign, which the
order of sums may change.
"""

STEPS = 4
LENGTHS = (7, 1, 12, 4)
OTHERS = (6, 7, 3, 8)
LORA = {
    "learning_rate": 1e-3,
    "use_lora": True,
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "lora_target_modules": "all-linear",
}
RECOMPUTED = {"memory": ["recompute_layers"]}
ROWS_OF_SCALES = {"hidden_size": 256, "intermediate_size": 512}
"""Of a model whose weights in NF4 can be divided by two at whole blocks of scales, and not all
by four.
"""

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "full, one micro-batch": ({}, {}),
    "full tied": ({"tie_word_embeddings": True}, {}),
    "full, biases": ({"attention_bias": True}, {}),
    "full recomputed": ({}, RECOMPUTED),
    "full, norms and units recomputed": ({}, {}),
    "full clipped": ({}, {"max_grad_norm": 0.01}),
    "full, rows that do not divide": ({"intermediate_size": 97, "vocab_size": 301}, {}),
    "full in 8 bits": ({"hidden_size": 256}, {"use_8bit_optimizer": True}),
    "full, states in host memory": (
        {"hidden_size": 256, "intermediate_size": 1024},
        {"memory": ["offload_optimizer_states"]},
    ),
    "full in bf16": ({}, {"mixed_precision": "bf16"}),
    "full in bf16, in copies": ({}, {"mixed_precision": "bf16", "sharding_ranks": 2}),
    "full in copies": ({}, {"sharding_ranks": 2}),
    "full tied in copies recomputed": (
        {"tie_word_embeddings": True},
        {"sharding_ranks": 2, **RECOMPUTED},
    ),
    "LoRA": ({}, LORA),
    "LoRA tied": ({"tie_word_embeddings": True}, LORA),
    "LoRA on the embedding": ({}, {**LORA, "lora_target_modules": ["q_proj", "embed_tokens"]}),
    "LoRA and trained tokens": ({}, {**LORA, "lora_trainable_tokens": [3, 5, 8]}),
    "LoRA in padded rows": ({}, LORA),
    "LoRA recomputed": ({}, {**LORA, **RECOMPUTED}),
    "LoRA in copies": ({}, {**LORA, "sharding_ranks": 2}),
    "NF4": (ROWS_OF_SCALES, LORA),
    "NF4 recomputed": (ROWS_OF_SCALES, {**LORA, **RECOMPUTED}),
    "NF4, norms and units recomputed": (ROWS_OF_SCALES, LORA),
    "NF4 in copies": (ROWS_OF_SCALES, {**LORA, "sharding_ranks": 2}),
    "DoRA over NF4": (ROWS_OF_SCALES, {**LORA, "use_dora": True}),
}
"""Sizes of the model, and fields of the configuration."""

IN_BF16 = [case for case in CASES if "bf16" in case]

DIFFER = "LoRA over other weights"
"""A case whose ranks have different models, which they refuse."""

CASES[DIFFER] = {}, LORA


def batch_of(number: int, vocabulary: int) -> Batch:
    """Packed documents, drawn by their number; every other batch has other lengths."""
    lengths = OTHERS if number % 2 else LENGTHS
    ids = torch.randint(
        0, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(number)
    )
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    targets = ids.roll(-1)
    targets[bounds[1:] - 1] = IGNORED
    return Batch(
        ids,
        targets,
        torch.cat([torch.arange(length) for length in lengths]),
        bounds.to(torch.int32),
        max(LENGTHS),
        trained=int((targets != IGNORED).sum()),
    )


def step_of(number: int, ranks: Mesh, together: int, vocabulary: int) -> Step:
    """This rank's micro-batches of a step that has ``together``, however many ranks there are."""
    batches = [batch_of(number * together + n, vocabulary) for n in range(together)]
    targets = sum(batch.trained for batch in batches)
    return Step(
        batches[ranks.rank :: ranks.count],
        {"targets": targets, "tokens": sum(map(len, batches))},
        None,
        None,
    )


def built(case: str, ranks: Mesh) -> Any:
    sizes, _ = CASES[case]
    model = tiny.llama(ranks.rank if case == DIFFER else 0, **sizes)
    if "NF4" in case:
        quantise_layers(model)
    assert patch_parts(model, whole_layers=True).counts()
    return model


def train(case: str, ranks: Mesh, together: int, folder: Path) -> dict[str, Any]:
    """Losses, norms and the trained weights after some steps; how many layers ran fused, and
    what a rank holds.
    """
    model = built(case, ranks)
    (sizes, fields) = CASES[case]
    own = (
        {**fields, "sharding": "weights"}
        if ranks.count > 1
        else {k: v for k, v in fields.items() if k != "sharding_ranks"}
    )
    own = {
        "learning_rate": 1e-2,
        "adam_epsilon": EPSILON,
        "gradient_accumulation_steps": together // ranks.count,
        **own,
    }
    config = runs.config(folder, objective="pretraining", **own)
    before = decoder_layer.runs.total()
    seen = []
    counted = patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single)
    with counted as exchanges, prepared(model, config, build_objective(config), ranks) as session:
        if "padded" in case:
            session.presented.packed = False
        if "units recomputed" in case:  # which is chosen on cards alone
            recompute_norms_and_units(model)
        with session.stepping():
            session.model.train()
            for number in range(STEPS):
                scalars = session.train_once(
                    step_of(number, ranks, together, sizes.get("vocab_size", 300))
                )
                seen.append([float(scalars["loss"]), float(scalars["grad_norm"])])
    weights = {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}
    held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    return {
        "seen": torch.tensor(seen, dtype=torch.float64),
        "weights": weights,
        "fused": decoder_layer.runs.total() - before,
        "parts": sum(isinstance(module, LinearInShards) for module in model.modules()),
        "held": held,
        "columns": embedding_table(model).shape[1],
        "exchanges": exchanges.call_count,
        "frozen": fingerprint_over(
            (p for p in model.parameters() if not p.requires_grad), ranks
        ).values,
    }


def refusal(ranks: Mesh, folder: Path) -> str:
    try:
        train(DIFFER, ranks, ranks.count, folder)
    except ConfigurationError as error:
        return str(error)
    return ""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def main() -> None:
    folder, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = Mesh.current()
    for case in cases:
        if case == DIFFER:
            torch.save({"refused": refusal(ranks, Path(folder))}, Path(folder) / f"{case}.pt")
            continue
        accumulation = 1 if "micro-batch" in case else 2
        together = train(case, ranks, accumulation * ranks.count, Path(folder))
        if ranks.writer:
            alone = train(case, Mesh(), accumulation * ranks.count, Path(folder))
            torch.save({"together": together, "alone": alone}, Path(folder) / f"{case}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
