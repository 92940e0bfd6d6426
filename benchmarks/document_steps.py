"""Training on one long document, whose steps are timed and traced: a part of ``long_documents.py``."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from step_profile import profile_of

GIGA = 10**9
GIB = 2**30

FIELDS: dict[str, Any] = {
    "use_lora": True,
    "lora_rank": 32,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "quantization": "nf4",
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "objective": "pretraining",
}


Note = Callable[[dict[str, Any]], None]
"""A function that writes figures of a row beside those that it has."""


ALLOCATOR_COUNTS = (
    "num_alloc_retries",
    "num_device_alloc",
    "num_device_free",
    "num_sync_all_streams",
)
"""Counts of ``torch.cuda.memory_stats``. Near its cap the allocator gives memory back and asks for it
again, while the card waits."""


def allocator_counts() -> dict[str, int]:
    """Return these counts since the process began, those that this torch has; empty without a card."""
    import torch

    found = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return {name: found[name] for name in ALLOCATOR_COUNTS if name in found}


@dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        length: tokens of the document.
        steps: number of steps that are timed.
        cap: bytes that the allocator may reserve from the first step on; 0 for all.
        settings: fields of the configuration.
        profiles: one more step is traced.
    """

    length: int
    steps: int
    cap: int
    settings: dict[str, Any]
    profiles: bool = False

    @property
    def all_steps(self) -> int:
        """Number of steps, with the one that is traced."""
        return self.steps + self.profiles


def train(model: Any, tokenizer: Any, training: Training, folder: Path, note: Note) -> None:
    """Train on one document, and note peak, seconds of a step, loss and gradient norm after each step.

    Args:
        model: with random weights in 16 bits.
        tokenizer: any.
        training: what is trained.
        folder: for the run's files.
        note: is given the figures.
    """
    import torch

    from chronicals import ChronicalsConfig, ChronicalsTrainer

    on_card = torch.cuda.is_available()
    length = training.length
    cap = training.cap
    fields = {**FIELDS, "use_gradient_checkpointing": True, **training.settings}
    config = ChronicalsConfig(
        **fields,
        max_seq_length=length,
        max_steps=training.all_steps,
        warmup_steps=0,
        trackers=[],
        report_samples=0,
        save_steps=None,
        output_dir=folder / "run",
        cache_dir=folder / "tokens",
        check_memory=False,
        **({"gpu_memory": cap / GIGA} if cap and on_card else {}),
    )
    document = [5 + (i * i + i // 7) % 290 for i in range(length)]
    steps = timed_steps(training, folder, note)
    if training.profiles:
        model.get_decoder().register_forward_pre_hook(steps.forward_begins)
    ChronicalsTrainer(model, tokenizer, config, callbacks=[steps]).train([{"input_ids": document}])


def timed_steps(training: Training, folder: Path, note: Note) -> Any:
    """Return a callback that caps the allocator, and notes the figures of each step."""
    import torch
    from long_documents import Expected, memory_log

    from chronicals.benchmark.measurement import Profiler
    from chronicals.training import Callback

    on_card = torch.cuda.is_available()

    class Steps(Callback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.seconds: list[float] = []
            self.counts: dict[str, int] = {}
            self.allocated: list[dict[str, int]] = []
            self.forwards = 0
            self.profiler: Profiler | None = None
            self.pinned = PinnedSeconds()
            self.expected = Expected()
            logging.getLogger("chronicals.memory").addHandler(self.pinned)
            logging.getLogger("chronicals.memory").setLevel(logging.INFO)
            memory_log.addFilter(self.expected)

        def run_began(self, run: Any) -> None:
            gc.collect()
            if on_card:
                torch.cuda.empty_cache()
                if training.cap:
                    total = torch.cuda.get_device_properties(0).total_memory
                    share = min(training.cap / total, 1.0)
                    torch.cuda.set_per_process_memory_fraction(share)
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            if self.expected.bytes is not None:
                note({"expected_gib": self.expected.bytes / GIB})
            self.counts = allocator_counts()
            self.times.append(time.monotonic())

        def forward_begins(self, *_: Any) -> None:
            """Begin the trace with the forward pass behind the steps that are timed."""
            if self.forwards == training.steps:
                self.profiler = Profiler(folder / "trace.json")
            self.forwards += 1

        def step_done(self, metrics: Any) -> None:
            self.times.append(time.monotonic())
            seconds = self.times[-1] - self.times[-2]
            print(f"step {metrics.step} after {seconds:.1f} s", flush=True)
            if metrics.step > training.steps:
                self.note_profile(metrics)
                return
            if metrics.step == 1:
                seconds -= self.pinned.seconds
            else:  # metrics come while the next step runs, so the run's own clock is taken
                seconds = training.length / metrics.tokens_per_second
            self.seconds.append(seconds)
            counts = allocator_counts()
            self.allocated.append({name: counts[name] - self.counts[name] for name in counts})
            self.counts = counts
            counted = self.seconds[1:] or self.seconds
            note(
                {
                    "loss": metrics.loss,
                    "gradient_norm": metrics.grad_norm,
                    "steps": len(self.seconds),
                    "pinned_seconds": self.pinned.seconds,
                    "seconds": min(counted),
                    "all_seconds": self.seconds,
                    "allocator": self.allocated,
                    "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_card else 0.0,
                    "reserved_gib": torch.cuda.max_memory_reserved() / GIB if on_card else 0.0,
                }
            )

        def note_profile(self, metrics: Any) -> None:
            """End the trace with the step, and note its seconds by part."""
            assert self.profiler is not None
            traced = {"traced_seconds": training.length / metrics.tokens_per_second}
            note({**traced, "profile": profile_of(self.profiler.events())})

    return Steps()


class PinnedSeconds(logging.Handler):
    """Sums the seconds that a run says it took to pin host memory, which its first step does."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if "pinned" in record.msg:
            assert isinstance(record.args, tuple)
            self.seconds += float(record.args[-1])  # type: ignore[arg-type]
