"""Where the time of a step goes: kernels of a trace by what they do, and the gaps between them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PROFILED_STEPS = 3

KINDS: dict[str, str] = {
    "communication": r"nccl",
    "attention": r"flash|fmha|attention|attn|sdpa|softmax_warp|splitkv|mha_",
    "loss": r"cross_?entropy|log_?softmax|cunn_softmax|log_probability|logit_rows|_loss|loss_",
    "optimizer": r"adam|square_sums|multi_tensor|lpnorm|foreach|clip_?grad|optimizer",
    "products": r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk|_mm_|^mm_|triton_mm|wgmma|matmul|cudnn.*conv|dot_kernel"
    r"|_passing_kernel|_summing_kernel",  # of adapters' gradients
    "copies": r"memcpy|memset|copy_kernel|direct_copy|_copy_|catarray|fillfunctor|fill_",
    "elementwise": r"elementwise|triton|norm|swiglu|geglu|glu_|silu|rope|rotary|reduce|embedding|index|gather|scatter|sort|"
    r"vectorized|unrolled|dropout|cast|mul|add|_kernel",
}
"""What a kernel's name says it does; the first that is found counts. A name that says nothing is ``other``."""


def kind_of(name: str) -> str:
    """The kind of work of a kernel (or copy) by its name."""
    lowered = name.lower()
    return next((kind for kind, words in KINDS.items() if re.search(words, lowered)), "other")


def breakdown(events: Iterable[Mapping[str, Any]], steps: int, step_seconds: float) -> dict[str, Any]:
    """Time of a step by kind.

    Args:
        events: of a Chrome trace; those of category kernel, gpu_memcpy and gpu_memset count, microseconds.
        steps: how many the trace holds.
        step_seconds: what a step takes when it is not traced. Tracing slows the host down, not the kernels: what a step
            takes beyond the time in which some kernel runs is its launch gaps.

    Returns:
        ``milliseconds_a_step`` and ``share`` by kind, ``gaps`` among them; ``kernels``: the longest, with kind, calls and
        milliseconds a step. Kernels that run at once share the time between them in proportion. Empty without a card's
        events.
    """
    ran = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not ran:
        return {}
    busy, reached = 0.0, float("-inf")
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in ran):
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    by_kind, by_name = dict.fromkeys([*KINDS, "other"], 0.0), dict[str, list[float]]()
    for event in ran:
        by_kind[kind_of(event["name"])] += event["dur"]
        entry = by_name.setdefault(event["name"], [0, 0.0])
        entry[0], entry[1] = entry[0] + 1, entry[1] + event["dur"]
    overlap = busy / sum(by_kind.values())
    times = {kind: time * overlap / 1000 / steps for kind, time in by_kind.items()}
    times["gaps"] = max(step_seconds * 1000 - busy / 1000 / steps, 0.0)
    longest = sorted(by_name.items(), key=lambda item: -item[1][1])[:40]
    return {
        "steps": steps,
        "milliseconds_a_step": times,
        "share": {kind: time / sum(times.values()) for kind, time in times.items()},
        "kernels": [
            {
                "name": name[:160],
                "kind": kind_of(name),
                "calls_a_step": calls / steps,
                "milliseconds_a_step": time / 1000 / steps,
            }
            for name, (calls, time) in longest
        ],
    }


class Profiler:
    """Traces from now on until ``stop``, which writes the Chrome trace to ``path`` and says where the time went."""

    def __init__(self, path: Path):
        import torch

        self.path = path
        on_card = torch.cuda.is_available()
        kind = torch.profiler.ProfilerActivity
        self.trace = torch.profiler.profile(activities=[kind.CUDA] if on_card else [kind.CPU])
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
