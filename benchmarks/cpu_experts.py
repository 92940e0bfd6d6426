"""Seconds of an expert on this machine's CPU, as decode steps of ``mode="numerical"`` compute it.

    python benchmarks/cpu_experts.py OUT.json            # experts of Qwen3-30B-A3B in bf16
    python benchmarks/cpu_experts.py OUT.json --tiny

A token's row goes through 1, 2 and 4 experts at a time, which are others each time, so that they come
from memory. By torch's products as they are, and with oneDNN switched off, by which torch takes its
own product of a matrix and a vector; and by kt-kernel's where they run. Of each: milliseconds of an
expert (the median of calls, the host's part in it), and bytes a second. A bus of 54 GB/s takes 0.174
ms for an expert of 9.4 MB, so what is below 0.35 ms takes some of four missing experts off it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from offload_sizes import TINY_SIZES, Sizes

from chronicals.kernels.expert_glu import Gate
from chronicals.moe.offload.cpu_products import CpuProducts, TorchProducts
from chronicals.moe.offload.engine import ExpertEngine
from chronicals.moe.offload.kt_products import KtProducts, why_it_does_not_run, why_not
from chronicals.moe.offload.layers import LayerRecords
from chronicals.moe.offload.module import LayerSource
from chronicals.moe.offload.slab import HostSlab
from chronicals.quantization.expert_records import PlainRecords, RecordLayout

EXPERTS = 64
"""Experts in memory: 604 MB, more than a cache holds."""

AT_A_TIME = (1, 2, 4)
CALLS = 60


def engine_of(sizes: Sizes) -> ExpertEngine:
    """Return an engine of one layer of random experts."""
    width, inner = sizes.model["hidden_size"], sizes.model["moe_intermediate_size"]
    formats = {
        "gate_up_proj": PlainRecords((EXPERTS, 2 * inner, width), torch.bfloat16),
        "down_proj": PlainRecords((EXPERTS, width, inner), torch.bfloat16),
    }
    layout = RecordLayout.of(formats)
    slab = HostSlab(EXPERTS, layout.bytes)
    for number in range(EXPERTS):
        slab.record(number).view(torch.bfloat16).normal_(std=0.02)
        slab.written(number)
    return ExpertEngine([LayerRecords("0", formats, layout, 0, 8)], slab)


def seconds_of(products: CpuProducts, source: LayerSource, at_a_time: int) -> list[float]:
    """Return the seconds of an expert in each call."""
    width = source.sizes[1]
    x = torch.randn(1, width).bfloat16().expand(at_a_time, width)
    times = []
    for number in range(CALLS):
        first = number * at_a_time % EXPERTS
        experts = list(range(first, first + at_a_time))
        began = time.perf_counter()
        products.outputs(source, experts, x, [1] * at_a_time, Gate())
        times.append((time.perf_counter() - began) / at_a_time)
    return times


def without_onednn(call: Callable[[], Any]) -> Any:
    """Return what a call gives while torch computes without oneDNN."""
    with torch.backends.mkldnn.flags(enabled=False):
        return call()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    sizes = TINY_SIZES if given.tiny else Sizes(layers=1)
    engine = engine_of(sizes)
    source = LayerSource(engine, 0)
    by_torch = TorchProducts()
    arms: dict[str, Callable[[int], list[float]]] = {
        "torch": lambda many: seconds_of(by_torch, source, many),
        "torch without oneDNN": lambda many: without_onednn(
            lambda: seconds_of(by_torch, source, many)
        ),
    }
    reason = why_not(engine.layers) or why_it_does_not_run()
    if reason is None:
        by_kt = KtProducts(engine)
        arms["kt-kernel"] = lambda many: seconds_of(by_kt, source, many)
    else:
        print(f"kt-kernel: not run, {reason}")
    cpu = torch.backends.cpu.get_cpu_capability()
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": cpu,
        "record": sizes.record,
        "rows": {},
    }
    print(f"{found['threads']} threads, {cpu}, oneDNN {torch.backends.mkldnn.is_available()}")
    for name, arm in arms.items():
        for many in AT_A_TIME:
            times = arm(many)[CALLS // 4 :]
            typical = statistics.median(times)
            found["rows"][f"{name}, {many} at a time"] = {"seconds": typical, "all": times}
            print(
                f"{name + ',':22s} {many} at a time: {1e3 * typical:7.3f} ms an expert, "
                f"{sizes.record / typical / 1e9:6.1f} GB/s",
                flush=True,
            )
    given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
