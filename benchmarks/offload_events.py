"""What experts in host memory do on a card: bytes of slots, copies under products, looks of the host.

    python benchmarks/offload_events.py OUT.json            # needs a card for what a trace shows
    python benchmarks/offload_events.py OUT.json --tiny     # tiny sizes, also without a card

A few layers of Qwen3-30B-A3B's shape with random weights in bf16, half of the experts in slots, in
steady state: passes of single tokens, and of 64 x 1,024 tokens. Of each kind of pass:

- ``looks``: times that the host waits for the device in a layer with experts, beyond those of the
  same pass with all experts on the card; at most 1.
- ``allocations``: blocks that torch takes of the card's memory; none.
- ``down``: bytes that go from the card to the host in a pass; numbers of rows alone, no weights.
- ``covered``: share of the time of copies to the card in which kernels or other copies run, too; at
  least 0.7 where products take as long as copies.

And ``budget``: measured bytes of the slots over the memory that was asked for, at most 1 and at least
0.98. Without a card what only a trace shows is null.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from recipes_on_card import machine

import chronicals
from chronicals.benchmark.measurement import Profiler
from chronicals.benchmark.shapes import SHAPES
from chronicals.moe.offload.engine import ExpertEngine
from chronicals.patching.patch import patch_parts

TINY = {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}

LAYERS = 4
WARM = 4
"""Passes before those that are looked at."""

PASSES = 4
COVERED = 0.7
"""Least share of the time of copies that others cover."""

FULL = 0.98
"""Least share of a budget that slots take."""

TO_CARD = "Memcpy HtoD"
TO_HOST = "Memcpy DtoH"
KERNELS = ("kernel", "gpu_memset")


def covered(events: Iterable[dict[str, Any]]) -> float | None:
    """Return the share of the time of copies to the card in which something else runs, too.

    Args:
        events: of a Chrome trace; None is returned if no copy is among them.
    """
    edges = []
    for event in events:
        is_copy = event.get("cat") == "gpu_memcpy" and event["name"].startswith(TO_CARD)
        if is_copy or event.get("cat") in KERNELS:
            edges.append((event["ts"], 1, is_copy))
            edges.append((event["ts"] + event["dur"], -1, is_copy))
    running = {True: 0, False: 0}
    busy = shared = 0.0
    before = 0.0
    for at, change, is_copy in sorted(edges):
        if running[True]:
            busy += at - before
            if running[False] or running[True] > 1:
                shared += at - before
        running[is_copy] += change
        before = at
    return shared / busy if busy else None


def bytes_to_host(events: Iterable[dict[str, Any]]) -> int:
    """Return the bytes that copies from the card to the host carry, given a Chrome trace's events."""
    return sum(
        int(event.get("args", {}).get("bytes", 0))
        for event in events
        if event.get("cat") == "gpu_memcpy" and event["name"].startswith(TO_HOST)
    )


def waits_in(call: Callable[[], Any]) -> int | None:
    """Return how often the host waits for the card in a call; None without a card."""
    if not torch.cuda.is_available():
        call()
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in said)


def card_blocks() -> int:
    """Return how many blocks torch has taken of the card's memory so far; 0 without a card."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats()["segment.all.allocated"])


def card_bytes() -> int:
    """Return the bytes of tensors on the card; 0 without a card."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def measured_bytes(model: Any, budget: int, where: str) -> tuple[Any, int]:
    """Return the offloaded model, and by how much its slots made the card's memory grow.

    Without a card these are the bytes of the slots' tensor.
    """
    grown = []
    made = ExpertEngine.open

    def measuring(engine: ExpertEngine, *given: Any, **named: Any) -> None:
        before = card_bytes()
        made(engine, *given, **named)
        grown.append(card_bytes() - before or engine.allocated_bytes)

    ExpertEngine.open = measuring  # type: ignore[method-assign]
    try:
        streamed = chronicals.offload(model, vram=budget, device=where)
    finally:
        ExpertEngine.open = made  # type: ignore[method-assign]
    return streamed, grown[0]


@torch.no_grad()
def measured_passes(model: Any, ids: torch.Tensor, trace: Path, baseline: int | None) -> dict:
    """Return the figures of passes of one kind in steady state.

    Args:
        model: the offloaded model.
        ids: token ids ``[B, S]`` of a pass.
        trace: where the trace is written.
        baseline: how often the host waits in such a pass with all experts on the card.
    """

    def run() -> None:
        model(ids, logits_to_keep=1)

    for _ in range(WARM):
        run()
    blocks = card_blocks()
    waits = waits_in(run)
    for _ in range(PASSES):
        run()
    blocks = card_blocks() - blocks
    figures: dict[str, Any] = {"tokens": ids.numel(), "allocations": blocks}
    if waits is None or baseline is None:
        return {**figures, "looks": None, "down": None, "covered": None}
    profiler = Profiler(trace)
    for _ in range(PASSES):
        run()
    profiler.stop(PASSES, 1.0)
    events = json.loads(trace.read_text())["traceEvents"]
    return {
        **figures,
        "looks": (waits - baseline) / len(model.offload.engine.layers),
        "down": bytes_to_host(events) / PASSES,
        "covered": covered(events),
    }


def failures(found: dict[str, Any]) -> list[str]:
    """Return what is not as it should be."""
    wrong = []
    if not FULL <= found["budget"] <= 1:
        wrong.append(f"slots take {found['budget']:.3f} of their budget, not {FULL} to 1")
    for name, figures in found["passes"].items():
        if figures["allocations"]:
            wrong.append(f"{name}: {figures['allocations']} allocations in steady state")
        if figures["looks"] is not None and figures["looks"] > 1:
            wrong.append(f"{name}: the host waits {figures['looks']} times a layer")
        if figures["down"] is not None and figures["down"] >= found["record"]:
            wrong.append(f"{name}: {figures['down']:,.0f} bytes go to the host")
    many = found["passes"]["many"]["covered"]
    if many is not None and many < COVERED:
        wrong.append(f"many: copies are covered for {many:.2f} of their time, not {COVERED}")
    return wrong


def measured(tiny: bool, folder: Path) -> dict[str, Any]:
    """Return all figures; traces are written to ``folder``."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {**SHAPES["qwen3-30b-a3b"].sizes, **(TINY if tiny else {}), "num_hidden_layers": LAYERS}
    torch.manual_seed(0)
    with torch.device(where):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3MoeConfig(**sizes), dtype=torch.bfloat16
        ).eval()
    many = (2, 16) if tiny else (64, 1024)
    kinds = {
        name: torch.randint(0, sizes["vocab_size"], shape, device=where)
        for name, shape in (("one", (1, 1)), ("many", many))
    }
    patch_parts(model)
    with torch.no_grad():
        for ids in kinds.values():  # compiles
            model(ids, logits_to_keep=1)
        baselines = {
            name: waits_in(lambda ids=ids: model(ids, logits_to_keep=1))
            for name, ids in kinds.items()
        }
    record = 2 * 3 * sizes["hidden_size"] * sizes["moe_intermediate_size"]
    budget = LAYERS * sizes["num_experts"] * record // 2 + record // 3
    streamed, taken = measured_bytes(model, budget, where)
    passes = {
        name: measured_passes(streamed, ids, folder / f"{name}.trace.json", baselines[name])
        for name, ids in kinds.items()
    }
    report = streamed.offload.report()
    streamed.offload.close()
    return {
        "machine": machine(),
        "tiny": tiny,
        "record": record,
        "budget": taken / budget,
        "hit_rate": report.hit_rate,
        "passes": passes,
    }


def main() -> None:
    """Measure, write and print; exit 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, also without a card")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    found = measured(given.tiny, given.out.parent)
    wrong = failures(found)
    given.out.write_text(json.dumps({**found, "failures": wrong}, indent=1))
    print(json.dumps(found, indent=1))
    for words in wrong:
        print(f"failed: {words}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
