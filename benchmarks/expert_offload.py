"""Experts in host memory beside experts on the card: decoding, a prompt, training.

    python benchmarks/expert_offload.py OUT.json [--rows NAME ...] [--layers 8] [--each 200]
    python benchmarks/expert_offload.py OUT.json --tiny      # tiny sizes, also without a card

Qwen3-30B-A3B's shape with random weights, the bus measured in the same call. Each row runs in a
process of its own; what is in OUT.json is run again only if it is named.

- ``decode-10``, ``-30``, ``-50``: a token's time in bf16 where routes are forced so that this
  percentage of its experts is missing, over that of the same harness with all experts on the card.
- ``decode-10-predicted``, ``-predicted-75``, …: the same, where a prediction names 0.9 or 0.75 of
  the missing experts while the layer before runs, and wrong ones in the place of the others. Its
  recall is printed beside: that of all layers, of which nothing names the first one's experts.
- ``prompt``: a pass over 8,192 tokens.
- ``cpu-50``, ``kt-50``: as ``decode-50``, with a share of the misses computed by the CPU, by torch's
  products or by kt-kernel's, which needs its wheel and a CPU with AVX-512 for bf16.
- ``map-50``: as ``decode-50``, with transformers' ``device_map``: experts on the CPU.
- ``lora-4k``, ``-16k``, ``-64k``, ``qlora-…``: steps with frozen experts in 4 GiB, over resident ones.
- ``whole``: QLoRA of all 48 layers on 4,096 tokens, and its peak.

Bound of a row: the larger of its time with everything on the card and of its copied bytes over the
measured bus; ``share`` is the bound over the time. All rows but ``whole`` have ``--layers`` of the 48
layers: layers do the same work one after another, so a token's time is that of head and embedding
and a multiple of a layer's, from which ``tokens/s of 48 layers`` and the share of decoding are
computed. Budgets are scaled likewise. Rows are printed only with what shows that they computed the
same: greedy tokens and logits of decoding, losses, gradient norms and weights of training.

Not run here: llama.cpp's ``--n-cpu-moe``, which needs a build with CUDA, and kt-kernel's layer with
LoRA, which needs a processor with AMX.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from cards_models import step_of
from offload_decoding import decoded, mapped
from offload_sizes import (
    TINY_SIZES,
    Sizes,
    built,
    bus_rate,
    chosen_by,
    free,
    offloaded,
    seconds,
    where,
)
from recipes_on_card import GIB, forked, machine
from torch import Tensor

import chronicals
from chronicals.config import ChronicalsConfig
from chronicals.objectives import build_objective
from chronicals.training.session import prepared

RECALLS = (0.9, 0.75)
"""Shares of the missing experts that predictions name."""

SAME_STEPS = 3
"""Steps whose losses and gradient norms are compared."""


@torch.no_grad()
def prompted(sizes: Sizes) -> dict[str, Any]:
    """Return the row of a pass over a prompt, with the routes of the router."""
    bus = bus_rate(sizes.record)
    generator = torch.Generator().manual_seed(3)
    vocabulary = sizes.model["vocab_size"]
    ids = torch.randint(0, vocabulary, (1, sizes.prompt), generator=generator).to(where())
    times, lasts = {}, {}
    copied = 0
    for arm in ("resident", "offloaded"):
        model = built(sizes, sizes.layers).eval()
        if arm == "offloaded":
            model = offloaded(model, sizes)
        chronicals.patch_model(model)

        def run(model: Any = model) -> Tensor:
            return model(ids, use_cache=False, logits_to_keep=1).logits

        lasts[arm] = run().float().cpu()
        times[arm] = statistics.median(seconds(run) for _ in range(5))
        if arm == "offloaded":
            before = chosen_by(model)["bytes"]
            run()
            copied = chosen_by(model)["bytes"] - before
        free(model)
        del model, run
    return {
        "bus": bus,
        **times,
        "bytes": copied,
        "copies": copied / bus,
        "equal bits": torch.equal(*lasts.values()),
        "share": max(times["resident"], copied / bus) / times["offloaded"],
    }


def trained(packs: int, quantised: bool, sizes: Sizes) -> dict[str, Any]:
    """Return the row of training steps of so many documents, frozen experts streamed.

    Attention's backward pass sums in any order unless it is told otherwise, so whether both arms give
    the same bits is seen over steps of their own, with deterministic algorithms, without graphs and
    as graphs; those that are timed are graphs.
    """
    bus = bus_rate(sizes.record)
    memory = {"resident": None, "offloaded": sizes.expert_memory(sizes.experts[0], sizes.layers)}
    graphs = {"use_cuda_graphs": where() == "cuda"}
    arms = {
        arm: steps_of(packs, quantised, sizes, sizes.layers, experts, graphs)
        for arm, experts in memory.items()
    }
    few = replace(sizes, steps=SAME_STEPS, warm=1)
    eager = {"use_cuda_graphs": False}
    with deterministic():
        compared = {
            arm: steps_of(packs, quantised, few, sizes.layers, experts, eager)
            for arm, experts in memory.items()
        }
        for arm, experts in memory.items():
            as_graphs = steps_of(packs, quantised, few, sizes.layers, experts, graphs)
            compared[f"{arm} as graphs"] = as_graphs
    ours = arms["offloaded"]
    copies = ours["bytes"] / bus
    return {
        "bus": bus,
        "copies": copies,
        "arms": arms,
        "compared": {
            arm: {name: found[name] for name in ("losses", "norms", "weights")}
            for arm, found in compared.items()
        },
        "tokens": packs * sizes.width,
        "equal": all(
            compared[f"resident{how}"][name] == compared[f"offloaded{how}"][name]
            for name in ("norms", "weights")
            for how in ("", " as graphs")
        ),
        "share": max(arms["resident"]["seconds"], copies) / ours["seconds"],
        "of resident": arms["resident"]["seconds"] / ours["seconds"],
    }


@contextmanager
def deterministic() -> Iterator[None]:
    """Context manager in which attention's backward pass sums in one order."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it torch refuses cuBLAS's products
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def of_whole_model(sizes: Sizes) -> dict[str, Any]:
    """Return the row of QLoRA of all layers, and its peak."""
    packs = max(1, 4096 // sizes.width) if not sizes.tiny else 1
    bus = bus_rate(sizes.record)
    memory = sizes.expert_memory(sizes.experts[1], sizes.whole)
    lean = {"memory": ["recompute_layers", "offload_experts"], "logits_chunk_size": 512}
    ours = steps_of(packs, True, sizes, sizes.whole, memory, lean)
    return {
        "bus": bus,
        "copies": ours["bytes"] / bus,
        "arms": {"offloaded": ours},
        "tokens": packs * sizes.width,
        "peak GiB": ours["peak"] / GIB,
    }


def steps_of(
    packs: int,
    quantised: bool,
    sizes: Sizes,
    layers: int,
    experts: str | None,
    fields: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return losses, gradient norms, seconds and peak of training steps.

    Args:
        packs: documents of the one micro-batch of a step.
        quantised: the base is in NF4.
        sizes: sizes.
        layers: decoder layers.
        experts: memory of the experts' slots; None if all are on the card.
        fields: further fields of the configuration.
    """
    model = built(sizes, layers, quantised)
    model.config.use_cache = False
    streamed = dict(fields or {})
    if experts is not None:
        model = chronicals.offload(model, vram=experts)
        streamed = {"memory": ["offload_experts"], "expert_memory": experts, **streamed}
    if where() == "cpu":
        chronicals.patch_model(model)  # sessions do that on a card alone
    config = ChronicalsConfig(
        output_dir=tempfile.mkdtemp(),
        batch_size=packs,
        gradient_accumulation_steps=1,
        max_seq_length=sizes.width,
        use_lora=True,
        lora_rank=16,
        lora_dropout=0.0,
        mixed_precision="bf16",
        **streamed,
    )
    losses, norms, times = [], [], []
    copied = [0]
    with prepared(model, config, build_objective(config)) as session, session.stepping():
        session.model.train()
        free()
        for number in range(sizes.steps):
            step = step_of(number, 0, 1, 1, packs, sizes.width, sizes.model["vocab_size"])
            if number == sizes.warm and where() == "cuda":
                torch.cuda.reset_peak_memory_stats()
            scalars: dict[str, Any] = {}
            times.append(seconds(partial(train, session, step, scalars)))
            losses.append(float(scalars["loss"]))
            norms.append(float(scalars["grad_norm"]))
            if experts is not None:
                copied.append(chosen_by(model)["bytes"])
        peak = torch.cuda.max_memory_allocated() if where() == "cuda" else 0
        weights = [checksum(p) for p in model.parameters() if p.requires_grad]
    free(model)
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights,
        "seconds": statistics.median(times[sizes.warm :]),
        "all seconds": times,
        "bytes": (copied[-1] - copied[sizes.warm]) / (sizes.steps - sizes.warm)
        if experts is not None
        else 0,
        "peak": peak,
    }


def checksum(x: Tensor) -> int:
    """Return the sum of the bits of a tensor, in words of its elements' size."""
    words = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return int(x.detach().contiguous().view(words).long().sum())


def train(session: Any, step: Any, scalars: dict[str, Any]) -> None:
    """Take a step, and write what it returns to ``scalars``."""
    scalars.update(session.train_once(step))


def predicted_name(missing: float, recall: float) -> str:
    """Return the name of the row of decoding with a prediction."""
    of_recall = "" if recall == RECALLS[0] else f"-{round(100 * recall)}"
    return f"decode-{round(100 * missing)}-predicted{of_recall}"


def rows() -> dict[str, Callable[[Sizes], dict[str, Any]]]:
    """Return the function of each row by its name."""
    found: dict[str, Callable[[Sizes], dict[str, Any]]] = {
        f"decode-{round(100 * missing)}": partial(decoded, missing) for missing in (0.1, 0.3, 0.5)
    }
    for missing, recall in product((0.1, 0.3, 0.5), RECALLS):
        predicted = partial(decoded, missing, recall=recall)
        found[predicted_name(missing, recall)] = predicted
    found["prompt"] = prompted
    found["cpu-50"] = partial(decoded, 0.5, by_cpu="torch")
    found["kt-50"] = partial(decoded, 0.5, by_cpu="kt")
    found["map-50"] = partial(mapped, 0.5)
    for name, quantised in (("lora", False), ("qlora", True)):
        for thousands in (4, 16, 64):
            found[f"{name}-{thousands}k"] = partial(trained, thousands // 2, quantised)
    found["whole"] = of_whole_model
    return found


BARS = {
    **{f"decode-{missing}": ("share", 0.80) for missing in (10, 30, 50)},
    **{
        predicted_name(missing, recall): ("share", 0.80)
        for missing, recall in product((0.1, 0.3, 0.5), RECALLS)
    },
    "prompt": ("share", 0.85),
    "cpu-50": ("gain", 1.5),
    "kt-50": ("gain", 1.5),
    **{f"{name}-{size}k": ("share", 0.80) for name in ("lora", "qlora") for size in (4, 16, 64)},
}
"""What a row must reach."""


def line_of(name: str, row: dict[str, Any]) -> str:
    """Return a row for the terminal, with what shows that both arms computed the same."""
    if "error" in row and not isinstance(row["error"], float):
        return f"{name}: {str(row['error'])[:300]}"
    parts = []
    if name in BARS:
        field, bar = BARS[name]
        parts.append(f"{field} {row[field]:.2f} (bar {bar})")
    arms = row.get("arms", {})
    for arm, found in arms.items():
        if "losses" in found:
            parts.append(
                f"{arm} {row['tokens'] / found['seconds']:,.0f} tokens/s, loss "
                f"{found['losses'][-1]:.6f}, norm {found['norms'][-1]:.6f}"
            )
        else:
            parts.append(
                f"{arm} {found['tokens/s of 48 layers']:.1f} tokens/s of 48 layers, "
                f"{found['missing'] / found['chosen']:.1%} missing{recall_words(found)}"
                f"{share_words(found)}, "
                f"{same_words(found)}, with forced routes {same_words(found['forced'])}"
            )
    if "equal" in row:
        parts.append("norms and weights " + ("equal" if row["equal"] else "DIFFER"))
    if "peak GiB" in row:
        parts.append(f"peak {row['peak GiB']:.2f} GiB (bar 7)")
    if not arms:
        parts.append(f"{row.get('offloaded', row.get('seconds')):.4f} s, {same_words(row)}")
    return f"{name}: " + "; ".join(parts)


def share_words(found: dict[str, Any]) -> str:
    """Return the share of the missing experts that the CPU computed; nothing without one."""
    took = found.get("seconds of an expert")
    if took is None:
        return ""
    return (
        f", {found['by cpu'] / found['missing']:.0%} of them by the CPU ({1e3 * took['cpu']:.3f} ms "
        f"an expert, the bus {1e3 * took['bus']:.3f})"
    )


def recall_words(found: dict[str, Any]) -> str:
    """Return the recall of an arm's prediction, and what it had copied; nothing without one."""
    if found["recall"] is None:
        return ""
    share = found["prefetched"] / found["chosen"]
    return f", {share:.1%} prefetched, recall {found['recall']:.2f}"


def same_words(found: dict[str, Any]) -> str:
    """Return how far an arm's logits are from those with all experts on the card."""
    equal = found.get("equal tokens", True) and found.get("equal tokens of graphs", True)
    if found["equal bits"] and equal:
        return "logits bit-equal"
    tokens = "" if equal else ", other tokens"
    return f"logits off by {found.get('error', float('nan')):.1e}{tokens}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", nargs="*", choices=[*rows(), []], default=[], metavar="NAME")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--each", type=float, default=200, help="seconds of a row, at most")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    sizes = TINY_SIZES if given.tiny else Sizes(given.layers)
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    results["machine"] = forked(machine, 60)
    results["layers"] = sizes.layers
    chosen = {name: run for name, run in rows().items() if not given.rows or name in given.rows}
    for name, run in chosen.items():
        if name in results and not given.rows:
            continue
        results[name] = forked(partial(run, sizes), given.each)
        given.out.write_text(json.dumps(results, indent=1))
        print(line_of(name, results[name]), flush=True)


if __name__ == "__main__":
    main()
