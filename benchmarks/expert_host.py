"""The host's time between two graphs of a decode step with streamed experts, without a card.

    python benchmarks/expert_host.py OUT.json            # Qwen3-30B-A3B's numbers of experts
    python benchmarks/expert_host.py OUT.json --tiny     # a few layers and steps

Records are tiny and no product runs, so what is timed is the choice of slots, the requests for copies
and the numbers of slots that are written: what the host does between a look at the router's choice and
the launch of the next graph. Routes are those of ``expert_offload.py``, of which 0, 10, 30 and 50 % of
the experts are missing. Of each: microseconds a layer (the median of steps), and misses a layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from forced_routes import routes
from torch import Tensor

from chronicals.moe.offload.engine import ExpertEngine
from chronicals.moe.offload.eviction import LeastRecentlyUsed
from chronicals.moe.offload.layers import LayerRecords
from chronicals.moe.offload.module import HostLook
from chronicals.moe.offload.prediction import Repeating
from chronicals.moe.offload.slab import HostSlab
from chronicals.quantization.expert_records import PlainRecords, RecordLayout

EXPERTS = 128
EACH = 8
SLOTS = 32
"""Slots by the number of layers: a quarter of the experts."""

MISSING = (0.0, 0.1, 0.3, 0.5)


def engine_of(layers: int) -> ExpertEngine:
    """Return an engine of tiny records, which are zeros, with its slots."""
    formats = {"gate_up_proj": PlainRecords((EXPERTS, 16, 16), torch.bfloat16)}
    layout = RecordLayout.of(formats)
    slab = HostSlab(layers * EXPERTS, layout.bytes)
    for number in range(slab.count):
        slab.written(number)
    records = [
        LayerRecords(str(number), formats, layout, number * EXPERTS, EACH)
        for number in range(layers)
    ]
    engine = ExpertEngine(records, slab)
    engine.open(SLOTS * layers, torch.device("cpu"), LeastRecentlyUsed(), Repeating())
    engine.verify()
    return engine


def bounds_of(chosen: Sequence[int]) -> Tensor:
    """Return ``Dispatch.bounds`` of one token's experts."""
    rows = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    rows[[expert + 1 for expert in chosen]] = 1
    return rows.cumsum(0).int()


def host_time(missing: float, layers: int, steps: int) -> dict[str, Any]:
    """Return the row of a share of missing experts.

    Steps before those that are timed fill the slots.
    """
    engine = engine_of(layers)
    warm = 2 * SLOTS
    table = routes(layers, EXPERTS, EACH, missing, warm + steps).tolist()
    read = torch.empty(layers, EXPERTS + 1, dtype=torch.int32)
    looks = [HostLook(engine, layer, read[layer]) for layer in range(layers)]
    times = []
    for number, step in enumerate(table):
        if number == warm:
            before = [counts.misses for counts in engine.log.layers]
        for look, chosen in zip(looks, step):
            look.read[:] = bounds_of(chosen).numpy()
        began = time.perf_counter()
        for look in looks:
            look.bring()
        times.append((time.perf_counter() - began) / layers * 1e6)
        for look, chosen in zip(looks, step):
            held = look.slots[chosen].tolist()
            assert len(set(held)) == EACH and min(held) >= 0
    misses = sum(counts.misses for counts in engine.log.layers) - sum(before)
    engine.close()
    return {
        "us a layer": statistics.median(times[warm:]),
        "misses a layer": misses / layers / steps,
        "all us": times[warm:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    layers, steps = (2, 3) if given.tiny else (48, 60)
    results: dict[str, Any] = {"layers": layers, "torch": torch.__version__, "rows": {}}
    for missing in MISSING:
        row = host_time(missing, layers, steps)
        results["rows"][f"{missing:.0%}"] = row
        print(
            f"{missing:4.0%} missing: {row['us a layer']:6.1f} us a layer, "
            f"{row['misses a layer']:.2f} misses",
            flush=True,
        )
    given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
