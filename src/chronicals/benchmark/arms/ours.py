"""Our arm: ``ChronicalsTrainer`` with the row's configuration.

It is ended after the last measured step.
"""

from __future__ import annotations

import shutil
import statistics
import time
from typing import Any

import torch

from chronicals.benchmark.arms.weights import adapter_shape, load, load_in_4_bits, start_of
from chronicals.benchmark.measurement import (
    PROFILED_STEPS,
    ArmPlan,
    Measurement,
    Profiler,
    reset_peak,
)
from chronicals.benchmark.pairs import PairWork
from chronicals.benchmark.plan import OUR_FIELDS
from chronicals.benchmark.work import SPARE_STEPS, Work
from chronicals.lora.peft_format import ADAPTER_PREFIX
from chronicals.models import load_tokenizer
from chronicals.models.loading import WEIGHT_DTYPES
from chronicals.training import Callback, ChronicalsTrainer, Interrupted
from chronicals.training.run.run_state import Run
from chronicals.training.step.metrics import StepMetrics

CROWDED_ARMS = 4
"""Our CUDA graphs are released between rounds if so many arms like ours do not fit on the card."""


class Collector(Callback):
    """Collector of the metrics of a round's steps.

    It hands them in, and ends the run when no other round is requested. After the first round a few
    more steps are traced if the plan has a trace.
    """

    def __init__(self, work: Work, plan: ArmPlan, settings: str, run_in_fp8: bool):
        self.work = work
        self.plan = plan
        self.settings = settings
        self.run_in_fp8 = run_in_fp8
        self.steps = list[StepMetrics]()
        self.trainer: ChronicalsTrainer | None = None
        self.profiler: Profiler | None = None

    def run_began(self, run: Run) -> None:
        """Note when the run began."""
        self.run = run
        self.load_seconds = time.perf_counter() - self.plan.began
        reset_peak()

    def step_done(self, metrics: StepMetrics) -> None:
        """Keep the step's metrics; after the last one of the round, hand them in."""
        self.steps.append(metrics)
        beyond = len(self.steps) - self.plan.in_all
        traced = PROFILED_STEPS if self.plan.trace and not self.plan.rounds else 0
        if beyond == 0 and traced:
            assert self.plan.trace is not None
            self.profiler = Profiler(self.plan.trace)
        if beyond == traced and not self.hand_in():
            assert self.trainer is not None
            self.trainer.stop(save=False)

    def hand_in(self) -> bool:
        """Hand in the round. Returns True if another one is requested."""
        steps = self.steps[: self.plan.in_all]
        coverage = self.run.coverage
        profile = None
        assert coverage is not None
        if self.profiler is not None:
            measured = steps[self.plan.discarded :]
            step_seconds = statistics.median(
                step.tokens / step.tokens_per_second for step in measured
            )
            profile = self.profiler.stop(PROFILED_STEPS, step_seconds)
            self.profiler = None
        peak = max(step.memory_gib for step in steps)
        if self.trainer is not None and torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory
            if CROWDED_ARMS * peak * 2**30 > memory:
                self.trainer.release_graphs()
        computed = [step.tokens for step in steps]
        tokens = self.work.real_tokens(steps[0].step - 1, computed)
        another_round = self.plan.hand_in(
            Measurement(
                settings=self.settings,
                tokens=tokens,
                computed=None if tokens == computed else computed,
                slots=[round(step.tokens / step.fill) for step in steps],
                seconds=[step.tokens / step.tokens_per_second for step in steps],
                losses=[step.loss for step in steps],
                grad_norms=[step.grad_norm for step in steps],
                warm_up=self.plan.discarded,
                peak_gib=peak,
                trained_share=coverage.share,
                moved_share=(coverage.moved + coverage.waiting) / coverage.asked,
                load_seconds=self.load_seconds,
                profile=profile,
                first=not self.plan.rounds,
                extra={"fp8": self.run_in_fp8},
            )
        )
        self.steps = []
        return another_round


def ours(work: Work, plan: ArmPlan) -> None:
    """Train through the trainer; the plan's changes are fields of the configuration."""
    run = f"run-{time.time_ns()}"
    config = work.config(run, **{"max_steps": plan.at_most + SPARE_STEPS, **plan.changes})
    load_model = load_in_4_bits if work.in_4_bits else load
    model = load_model(work.model, WEIGHT_DTYPES[config.mixed_precision])
    if config.use_lora:
        _attach(model, work, config)
    states = "8-bit" if config.use_8bit_optimizer else config.optimizer_state_dtype
    words = ["base in NF4"] if config.quantization else []
    words.append(f"{config.mixed_precision}, optimizer states {states}")
    if isinstance(work, PairWork) and work.reference_policy:
        words.append(work.reference_policy)
    words += [f"{name}={value}" for name, value in plan.changes.items()]
    collector = Collector(work, plan, ", ".join(words), config.use_fp8)
    trainer = ChronicalsTrainer(
        model, load_tokenizer(work.tokenizer), config, callbacks=[collector]
    )
    collector.trainer = trainer
    try:
        trainer.train(work.documents)
    except Interrupted:  # all requested rounds have been measured
        pass
    finally:
        shutil.rmtree(config.output_dir, ignore_errors=True)


def _attach(model: Any, work: Work, config: Any) -> None:
    """Add the adapters of this arm's configuration, with the values that every arm starts from.

    Adapters that not every arm has are left to the trainer.
    """
    from chronicals.lora import apply_lora
    from chronicals.lora.layers import linear_adapters

    row = work.config()
    if any(getattr(config, name) != getattr(row, name) for name in OUR_FIELDS):
        return
    apply_lora(model, adapter_shape(config))
    start = start_of(work, config)
    with torch.no_grad():
        for path, layer in linear_adapters(model):
            layer.lora_A.copy_(start[f"{ADAPTER_PREFIX}{path}.lora_A.weight"])
            layer.lora_B.copy_(start[f"{ADAPTER_PREFIX}{path}.lora_B.weight"])
