"""Measurements of an arm: its steps, the clock that all arms use, and the profile of a step."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

COMPARED = 5
"""First steps whose losses and gradient norms are compared with the reference."""

RESUMED = 3
"""Steps that are not sampled when a process continues after it waited."""

ROUND = "round"
"""The line that asks a waiting process for a round."""


@dataclass
class Measurement:
    """One round of an arm, step by step.

    Attributes:
        settings: how it ran, in words.
        tokens: real tokens of each step, without padding.
        slots: positions computed in each step, padding included.
        seconds: of each whole step, by the card's clock if there is a card.
        losses, grad_norms: of each step, norms before clipping; None if the arm does not report it.
        warm_up: first steps that are not sampled.
        peak_gib: highest device memory during the steps; 0 without a card.
        trained_share: trained parameters over all parameters of the model.
        moved_share: parameters in tensors that training changed, over all trained ones.
        load_seconds: from the start of the process to the first step.
        own_batches: content of the first steps, if the arm took other documents than the work's:
            their token ids, or for pairs a ``PairSteps`` as JSON.
        begins_alike: True if the very first step held the work's documents.
        profile: breakdown of the time of further steps, if requested.
        first: True if these are the process's first steps, which have a reference.
        held_gib: device memory that the process keeps while it waits for another round.
        computed: tokens of each step that are computed, if answers share prompts; None: all.
        rounded_losses, rounded_norms: for a reference, loss and gradient norm of each step by the
            same formula and weights in plain bf16; None: not computed.
        rounding_spreads: for a reference, the expected change of each step's loss by bf16: the root
            of the sum of the squared changes in each group of pairs, which are independent; None:
            not computed.
    """

    settings: str
    tokens: list[int]
    slots: list[int]
    seconds: list[float]
    losses: list[float | None]
    grad_norms: list[float | None]
    warm_up: int
    peak_gib: float
    trained_share: float
    moved_share: float
    load_seconds: float = 0.0
    own_batches: Any = None
    begins_alike: bool = False
    profile: dict[str, Any] | None = None
    first: bool = True
    held_gib: float = 0.0
    computed: list[int] | None = None
    rounded_losses: list[float] | None = None
    rounded_norms: list[float] | None = None
    rounding_spreads: list[float] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def rates(self) -> list[float]:
        """Real tokens per second of each step after the warm-up."""
        rates = [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds)]
        return rates[self.warm_up :]

    @classmethod
    def read(cls, path: Path) -> Measurement:
        """Return the measurement that another process wrote."""
        return cls(**json.loads(path.read_text()))


@dataclass
class ArmPlan:
    """The rounds that an arm's process runs.

    Attributes:
        steps: sampled steps of a round.
        warm_up: steps before the samples of the first round.
        trace: file for a trace of a few further steps after the first round.
        changes: fields of our configuration.
        documents: file with the documents of each step, for the reference.
        further: rounds that may be requested after the first.
        out: file of the first round; those of later rounds are in the same folder.
        began: start of the process.
        rounds: number of rounds written so far.
    """

    steps: int
    warm_up: int
    trace: Path | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    documents: Path | None = None
    further: int = 0
    out: Path | None = None
    began: float = field(default_factory=time.perf_counter)
    rounds: int = 0

    @property
    def discarded(self) -> int:
        """Steps of this round that are not sampled."""
        return self.warm_up if not self.rounds else RESUMED

    @property
    def in_all(self) -> int:
        """Steps of this round."""
        return self.discarded + self.steps

    @property
    def at_most(self) -> int:
        """Steps of all rounds."""
        return self.warm_up + self.steps + self.further * (RESUMED + self.steps)

    def hand_in(self, measured: Measurement) -> bool:
        """Write a round and wait for the next request.

        Returns:
            True if another round is requested.
        """
        reset_peak()
        if torch.cuda.is_available():
            measured.held_gib = torch.cuda.memory_reserved() / 2**30
        if self.out is not None:
            path = round_file(self.out, self.rounds)
            aside = path.with_suffix(".part")
            aside.write_text(json.dumps(asdict(measured)))
            aside.replace(path)  # the other process waits for the whole file
        self.rounds += 1
        return self.rounds <= self.further and sys.stdin.readline().strip() == ROUND


def round_file(out: Path, number: int) -> Path:
    """Return the file of round ``number`` (from 0) of a process."""
    return out.with_name(f"{out.stem}.{number}.json")


class Clock:
    """Marks between steps, by CUDA events on a card, without a synchronisation before ``seconds``.

    The ``DeviceMoment`` of our training does the same; peers' processes do not import it, because our
    training patches parts of transformers.
    """

    def __init__(self) -> None:
        self.on_card = torch.cuda.is_available()
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Note the moment, at which the work queued so far is done."""
        if not self.on_card:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between each mark and the next."""
        if self.on_card:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in zip(self.marks, self.marks[1:])]
        return [b - a for a, b in zip(self.marks, self.marks[1:])]


class Movement:
    """Finder of the trained tensors that changed, by sums of their bit patterns.

    Attributes:
        trained_share: trained parameters over all parameters of the model.
    """

    def __init__(self, model: torch.nn.Module):
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # A byte of a weight in 4 bits holds two parameters.
        parameters = sum(
            p.numel() * (2 if p.dtype == torch.uint8 else 1) for p in model.parameters()
        )
        self.trained_share = sum(p.numel() for p in self.trained.values()) / parameters
        self.before = self._sums()

    def _sums(self) -> dict[str, int]:
        integers = {2: torch.int16, 4: torch.int32}
        return {
            name: int(
                p.detach().reshape(-1).view(integers[p.element_size()]).sum(dtype=torch.int64)
            )
            for name, p in self.trained.items()
        }

    def moved_share(self) -> float:
        """Return the parameters in tensors that changed, over all trained ones."""
        after = self._sums()
        moved = sum(
            p.numel() for name, p in self.trained.items() if after[name] != self.before[name]
        )
        return moved / max(sum(p.numel() for p in self.trained.values()), 1)


def device() -> torch.device:
    """Return the card, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def peak_gib() -> float:
    """Return the highest device memory since ``reset_peak``; 0 without a card."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def reset_peak() -> None:
    """Free what no tensor has, and measure ``peak_gib`` anew."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


PROFILED_STEPS = 3
"""Further steps of the first round that are traced."""

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
    """Trace of steps until ``stop``.

    Args:
        path: where the Chrome trace is written.
    """

    def __init__(self, path: Path):
        self.path = path
        on_card = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity
        self.trace = torch.profiler.profile(
            activities=[activity.CUDA] if on_card else [activity.CPU]
        )
        if on_card:
            torch.cuda.synchronize()
        self.trace.start()

    def events(self) -> list[dict[str, Any]]:
        """End and write the trace, and return its events."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.trace.stop()
        self.trace.export_chrome_trace(str(self.path))
        events: list[dict[str, Any]] = json.loads(self.path.read_text())["traceEvents"]
        return events

    def stop(self, steps: int, step_seconds: float) -> dict[str, Any]:
        """End and write the trace, and return the ``breakdown`` of its time."""
        return breakdown(self.events(), steps, step_seconds)
