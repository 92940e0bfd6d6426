"""Where the time of a step goes: the kernels of a trace by category, and the gaps between them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PROFILED_STEPS = 3

CATEGORIES: dict[str, str] = {
    "communication": r"nccl",
    "attention": r"flash|fmha|attention|attn|sdpa|softmax_warp|splitkv|mha_",
    "loss": r"cross_?entropy|log_?softmax|cunn_softmax|log_probability|logit_rows|_loss|loss_",
    "optimizer": r"adam|square_sums|multi_tensor|lpnorm|foreach|clip_?grad|optimizer",
    "products": r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk|_mm_|^mm_|triton_mm|wgmma|matmul|cudnn.*conv|dot_kernel"
    r"|_passing_kernel|_summing_kernel"  # of adapters' gradients
    r"|_product_kernel|_weight_gradient_kernel",  # of experts
    "copies": r"memcpy|memset|copy_kernel|direct_copy|_copy_|catarray|fillfunctor|fill_",
    "elementwise": r"elementwise|triton|norm|swiglu|geglu|glu_|silu|rope|rotary|reduce|embedding|index|gather|scatter|sort|"
    r"vectorized|unrolled|dropout|cast|mul|add|_kernel",
}
"""Categories of kernels, each with a pattern for their names; the first that matches counts,
else ``other``.
"""


def category_of(name: str) -> str:
    """The category of a kernel (or copy) by its name."""
    lowered = name.lower()
    return next(
        (category for category, pattern in CATEGORIES.items() if re.search(pattern, lowered)),
        "other",
    )


def breakdown(
    events: Iterable[Mapping[str, Any]], steps: int, step_seconds: float
) -> dict[str, Any]:
    """Time of a step by category.

    Args:
        events: of a Chrome trace, times in microseconds; those of ``cat`` kernel, gpu_memcpy and
            gpu_memset count.
        steps: steps in the trace.
        step_seconds: seconds of a step without tracing. Tracing slows the host down, not the
            kernels; the time of such a step in which no kernel runs is its launch gaps.

    Returns:
        ``milliseconds_a_step`` and ``share`` by category, ``gaps`` among them; ``kernels``: the
        longest, with ``kind`` (the category), calls and milliseconds a step. Where kernels overlap,
        times are scaled down in proportion. Empty if the trace has no events of a card.
    """
    ran = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not ran:
        return {}
    busy = 0.0
    reached = float("-inf")
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in ran):
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    by_category = dict.fromkeys([*CATEGORIES, "other"], 0.0)
    by_name = dict[str, list[float]]()
    for event in ran:
        by_category[category_of(event["name"])] += event["dur"]
        entry = by_name.setdefault(event["name"], [0, 0.0])
        entry[0], entry[1] = entry[0] + 1, entry[1] + event["dur"]
    overlap = busy / sum(by_category.values())
    times = {category: time * overlap / 1000 / steps for category, time in by_category.items()}
    times["gaps"] = max(step_seconds * 1000 - busy / 1000 / steps, 0.0)
    longest = sorted(by_name.items(), key=lambda item: -item[1][1])[:40]
    return {
        "steps": steps,
        "milliseconds_a_step": times,
        "share": {category: time / sum(times.values()) for category, time in times.items()},
        "kernels": [
            {
                "name": name[:160],
                "kind": category_of(name),
                "calls_a_step": calls / steps,
                "milliseconds_a_step": time / 1000 / steps,
            }
            for name, (calls, time) in longest
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
