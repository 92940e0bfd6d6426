"""Profile of a step: the kernels of a trace by category, and the gaps between them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PROFILED_STEPS = 3

KERNEL_CATEGORIES: dict[str, str] = {
    "communication": r"nccl",
    "attention": r"flash|fmha|attention|attn|sdpa|softmax_warp|splitkv|mha_",
    "loss": r"cross_?entropy|log_?softmax|cunn_softmax|log_probability|logit_rows|_loss|loss_",
    "optimizer": r"adam|square_sums|multi_tensor|lpnorm|foreach|clip_?grad|optimizer",
    "products": r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk|_mm_|^mm_|triton_mm|wgmma|matmul"
    r"|cudnn.*conv|dot_kernel"
    r"|_passing_kernel|_summing_kernel"  # gradients of adapters
    r"|_product_kernel|_weight_gradient_kernel",  # experts
    "copies": r"memcpy|memset|copy_kernel|direct_copy|_copy_|catarray|fillfunctor|fill_",
    "elementwise": r"elementwise|triton|norm|swiglu|geglu|glu_|silu|rope|rotary|reduce|embedding"
    r"|index|gather|scatter|sort|vectorized|unrolled|dropout|cast|mul|add|_kernel",
}
"""Categories of kernels, each with a pattern for their names. The first that matches counts; a
kernel without one is ``other``."""


def category_of(name: str) -> str:
    """Return the category of a kernel (or copy) by its name."""
    for category, pattern in KERNEL_CATEGORIES.items():
        if re.search(pattern, name.lower()):
            return category
    return "other"


def breakdown(
    events: Iterable[Mapping[str, Any]], steps: int, step_seconds: float
) -> dict[str, Any]:
    """Return the time of a step by category.

    Args:
        events: of a Chrome trace, times in microseconds; those of ``cat`` kernel, gpu_memcpy and
            gpu_memset count.
        steps: steps in the trace.
        step_seconds: seconds of a step without tracing. Tracing slows the host down, not the
            kernels; the time of such a step in which no kernel runs is its launch gaps.

    Returns:
        ``milliseconds_a_step`` and ``share`` by category, ``gaps`` among them; ``kernels``: the
        longest, with ``kind`` (the category), calls and milliseconds a step. If kernels overlap,
        times are scaled down in proportion. Empty if the trace has no events of a card.
    """
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return {}
    busy = 0.0
    latest_end = float("-inf")
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in kernels):
        busy += max(end - max(start, latest_end), 0.0)
        latest_end = max(latest_end, end)
    by_category = dict.fromkeys([*KERNEL_CATEGORIES, "other"], 0.0)
    calls_of: Counter[str] = Counter()
    times_of = dict[str, float]()
    for event in kernels:
        name = event["name"]
        by_category[category_of(name)] += event["dur"]
        calls_of[name] += 1
        times_of[name] = times_of.get(name, 0.0) + event["dur"]
    overlap = busy / sum(by_category.values())
    times = {category: time * overlap / 1000 / steps for category, time in by_category.items()}
    times["gaps"] = max(step_seconds * 1000 - busy / 1000 / steps, 0.0)
    longest = sorted(times_of, key=lambda name: -times_of[name])[:40]
    return {
        "steps": steps,
        "milliseconds_a_step": times,
        "share": {category: time / sum(times.values()) for category, time in times.items()},
        "kernels": [
            {
                "name": name[:160],
                "kind": category_of(name),
                "calls_a_step": calls_of[name] / steps,
                "milliseconds_a_step": times_of[name] / 1000 / steps,
            }
            for name in longest
        ],
    }


class Profiler:
    """Traces until ``stop``, which writes the Chrome trace to ``path`` and returns the breakdown
    of the time.
    """

    def __init__(self, path: Path):
        import torch

        self.path = path
        on_card = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity
        self.trace = torch.profiler.profile(
            activities=[activity.CUDA] if on_card else [activity.CPU]
        )
        if on_card:
            torch.cuda.synchronize()
        self.trace.start()

    def stop(self, steps: int, step_seconds: float) -> dict[str, Any]:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.trace.stop()
        self.trace.export_chrome_trace(str(self.path))
        return breakdown(json.loads(self.path.read_text())["traceEvents"], steps, step_seconds)
