"""Estimate of a benchmark's time on a CPU.

It follows from the FLOPs of a step and the measured rate of a matrix product.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from chronicals.benchmark.floor import DecoderShape, Job, needed_flops
from chronicals.benchmark.rounds import BEST_PEERS, Options
from chronicals.benchmark.shapes import SHAPES
from chronicals.benchmark.work import Work

# The product that is timed is large enough for all cores, and takes a moment.
PRODUCT_ROWS = 512
PRODUCT_WIDTH = 1024

SHARE_OF_PRODUCT = 0.5
"""Share of a product's rate that a whole step is assumed to reach."""

START_SECONDS = 15
"""Seconds assumed for the start of a process: imports, and reading the weights."""


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of a benchmark.

    Attributes:
        step: seconds of a step of training.
        steps: steps of an arm in a round, with those that are not counted.
        whole: seconds of the whole benchmark within its limits.
        too_long: True if an arm is ended by ``arm_timeout`` before its steps are done, and has no
            figures.
    """

    step: float
    steps: int
    whole: float
    too_long: bool

    def __str__(self) -> str:
        text = (
            f"no card here: on this CPU a step takes about {_duration(self.step)}, an arm of "
            f"{self.steps} steps "
            f"{_duration(self.step * self.steps)}, and all of the benchmark up to "
            f"{_duration(self.whole)}"
        )
        if self.too_long:
            text += (
                "; arms are ended by --arm-timeout before that and have no figures: give fewer "
                "--steps, a smaller --warm-up, "
                "--model (tiny runs anywhere), --batch-size or --max-seq-length, or a longer "
                "--arm-timeout"
            )
        return text


def estimate(work: Work, options: Options) -> Estimate:
    """Return the estimated time of a benchmark on this CPU.

    A teacher or a reference policy is not included and takes additional time.
    """
    step = _flops_of_a_step(work) / (SHARE_OF_PRODUCT * _product_rate())
    steps = work.warm_up + work.steps
    arm = min(START_SECONDS + step * steps, options.arm_timeout)
    reference = min(START_SECONDS + step * options.reference_steps, options.arm_timeout)
    ours = 1 + len(options.variants)
    peers = len(options.against)
    rounds = options.rounds * (ours + min(peers, BEST_PEERS))
    whole = START_SECONDS + reference + arm * (ours + peers + len(options.scouted) + rounds)
    if options.time_limit is not None:
        whole = min(whole, options.time_limit)
    return Estimate(step, steps, whole, START_SECONDS + step * steps > options.arm_timeout)


def _flops_of_a_step(work: Work) -> float:
    """Return the FLOPs of a step with full packs."""
    import transformers

    config = work.config()
    width = config.max_seq_length
    tokens = config.batch_size * config.gradient_accumulation_steps * width
    rank = config.lora_rank if config.use_lora else 0
    built_in = SHAPES.get(work.name)
    if built_in is None:
        model_config = transformers.AutoConfig.from_pretrained(work.model)
    else:  # its weights need not be written yet
        model_config = getattr(transformers, built_in.config_class)(**built_in.sizes)
    return tokens * needed_flops(Job(DecoderShape.of(model_config), tokens, width, rank=rank))


def _product_rate() -> float:
    """Return the FLOP/s of an fp32 matrix product on this CPU, the best of three."""
    import torch

    x = torch.randn(PRODUCT_ROWS, PRODUCT_WIDTH)
    weight = torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        torch.mm(x, weight)
        seconds.append(time.perf_counter() - began)
    return 2 * PRODUCT_ROWS * PRODUCT_WIDTH * PRODUCT_WIDTH / min(seconds)


def _duration(seconds: float) -> str:
    """Return seconds in the largest unit that fits."""
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
