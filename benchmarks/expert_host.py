"""The host's time between two graphs of a decode step with streamed experts, without a card.

    python benchmarks/expert_host.py OUT.json            # Qwen3-30B-A3B's numbers of experts
    python benchmarks/expert_host.py OUT.json --tiny     # a few layers and steps

Records are tiny and no product runs, so what is timed is the choice of slots, the requests for copies
and the numbers of slots that are written. Routes are those of ``expert_offload.py``, of which 0, 10, 30
and 50 % of the experts are missing, without a prediction and with one that names 0.9 of them. Of each:
microseconds a layer (the median of steps) before the launch of the next graph, for which the device
waits, and behind it, beside its products; misses and prefetched records a layer, and the recall.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from forced_routes import ForcedPrediction, routes
from torch import Tensor

from chronicals.moe.offload import copies
from chronicals.moe.offload.engine import ExpertEngine
from chronicals.moe.offload.eviction import LeastRecentlyUsed
from chronicals.moe.offload.layers import LayerRecords
from chronicals.moe.offload.looks import HostLook
from chronicals.moe.offload.prediction import Predictor, Repeating
from chronicals.moe.offload.report import report_of
from chronicals.moe.offload.slab import HostSlab
from chronicals.quantization.expert_records import PlainRecords, RecordLayout

EXPERTS = 128
EACH = 8
SLOTS = 32
"""Slots by the number of layers: a quarter of the experts."""

MISSING = (0.0, 0.1, 0.3, 0.5)
RECALL = 0.9
PIECES = 5
"""Pieces of a prefetched record, as of one of 9.4 MB, Qwen3-30B-A3B's in bf16."""


def engine_of(layers: int, predictor: Predictor) -> ExpertEngine:
    """Return an engine of tiny records, which are zeros, with its slots."""
    formats = {"gate_up_proj": PlainRecords((EXPERTS, 16, 16), torch.bfloat16)}
    layout = RecordLayout.of(formats)
    copies.PREFETCH_PIECE_BYTES = -(-layout.bytes // PIECES)
    copies.PREFETCH_GROUP_BYTES = layout.bytes
    slab = HostSlab(layers * EXPERTS, layout.bytes)
    for number in range(slab.count):
        slab.written(number)
    records = [
        LayerRecords(str(number), formats, layout, number * EXPERTS, EACH)
        for number in range(layers)
    ]
    engine = ExpertEngine(records, slab)
    engine.open(SLOTS * layers, torch.device("cpu"), LeastRecentlyUsed(), predictor)
    engine.verify()
    return engine


def bounds_of(chosen: Sequence[int]) -> Tensor:
    """Return ``Dispatch.bounds`` of one token's experts."""
    rows = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    rows[[expert + 1 for expert in chosen]] = 1
    return rows.cumsum(0).int()


def host_time(missing: float, predicted: bool, layers: int, steps: int) -> dict[str, Any]:
    """Return the row of a share of missing experts.

    Steps before those that are timed fill the slots.
    """
    warm = 2 * SLOTS
    table = routes(layers, EXPERTS, EACH, missing, warm + steps)
    predictor = ForcedPrediction(table, EXPERTS, RECALL) if predicted else Repeating()
    engine = engine_of(layers, predictor)
    read = torch.empty(layers, EXPERTS + 1, dtype=torch.int32)
    looks = [HostLook(engine, layer, read[layer]) for layer in range(layers)]
    times = []
    before = report_of(engine, "exact")
    for number, step in enumerate(table.tolist()):
        if number == warm:
            before = report_of(engine, "exact")
        for look, chosen in zip(looks, step):
            look.read[:] = bounds_of(chosen).numpy()
        times.append(timed(looks))
        for look, chosen in zip(looks, step):
            look.send()  # the graph's first work
            held = look.slots[chosen].tolist()
            assert len(set(held)) == EACH and min(held) >= 0
    after = report_of(engine, "exact")
    engine.close()
    in_front, behind = zip(*times[warm:])
    misses, came, used = (
        sum(getattr(of, name) for of in after.layers)
        - sum(getattr(of, name) for of in before.layers)
        for name in ("misses", "prefetched", "used")
    )
    return {
        "us a layer": statistics.median(in_front),
        "us a layer behind the launch": statistics.median(behind),
        "misses a layer": misses / layers / steps,
        "prefetched a layer": came / layers / steps,
        "recall": used / (used + misses) if predicted and used + misses else None,
        "all us": in_front,
    }


def timed(looks: Sequence[HostLook]) -> tuple[float, float]:
    """Return microseconds a layer of a step, before the launches of graphs and behind them."""
    in_front = behind = 0.0
    for look in looks:
        began = time.perf_counter()
        look.bring()
        launched = time.perf_counter()
        look.note()
        in_front += launched - began
        behind += time.perf_counter() - launched
    return in_front / len(looks) * 1e6, behind / len(looks) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    layers, steps = (2, 3) if given.tiny else (48, 60)
    results: dict[str, Any] = {"layers": layers, "torch": torch.__version__, "rows": {}}
    for missing, predicted in product(MISSING, (False, True)):
        row = host_time(missing, predicted, layers, steps)
        name = f"{missing:.0%}{' predicted' if predicted else ''}"
        results["rows"][name] = row
        recall = "" if row["recall"] is None else f", recall {row['recall']:.2f}"
        print(
            f"{name + ':':15s} {row['us a layer']:6.1f} us a layer, "
            f"{row['us a layer behind the launch']:6.1f} behind the launch, "
            f"{row['misses a layer']:.2f} misses, {row['prefetched a layer']:.2f} prefetched{recall}",
            flush=True,
        )
    given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
