"""Planning a row: the class of its work, its fields and its documents.

Beside it is the estimate of a benchmark's time on a CPU, which follows from the FLOPs of a step and
the measured rate of a matrix product.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chronicals.benchmark.pairs import PAIR_OBJECTIVES, PROMPT_SHARES, PairWork
from chronicals.benchmark.rounds import BEST_PEERS, Options
from chronicals.benchmark.shapes import BUILT_IN_DATA, SHAPES
from chronicals.benchmark.work import DECIDED_FIELDS, DISTILLATION, MODES, DistillationWork, Work
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.model_shape import ModelShape
from chronicals.objectives import OBJECTIVES
from chronicals.step_work import DecoderShape, Job, needed_flops

OUR_FIELDS = (
    "lora_init",
    "lora_modules_to_save",
    "lora_trainable_tokens",
    "lora_target_parameters",
)
"""Fields of adapters that only our arm has."""


def plan_work(
    folder: Path,
    model: str,
    data: str,
    mode: str,
    fields: dict[str, Any],
    steps: int | None,
    warm_up: int,
) -> Work:
    """Plan a row and write its documents.

    ``prepare_work`` writes the weights later, in a process of its own.

    Args:
        folder: shared by rows; the row gets a folder in it.
        model: a built-in shape or a model's folder or hub name.
        data: built-in data or a file.
        fields: configuration fields set by the user; they override those of the mode.
        mode: ``full``, ``lora`` or ``qlora``.
        steps: sampled steps of a round; None takes the shape's number, or 20.
        warm_up: steps before them that are not sampled.

    Raises:
        ConfigurationError: an unknown mode, fields that contradict it or that not every arm has, or
            built-in data for another objective or for a model whose vocabulary is not known.
    """
    work_class = work_class_of(fields)
    _check_fields(mode, fields, data, work_class)
    shape = SHAPES.get(model)
    chosen = {**work_class.usual_fields(shape, mode, fields), **fields}
    chosen = {name: value for name, value in chosen.items() if name not in DECIDED_FIELDS}
    chosen = work_class.placed(folder, chosen)
    objective = [chosen["objective"]] if work_class is not Work else []
    row = folder / "-".join([Path(model).name, mode, *objective, Path(data).stem])
    row = row.absolute()
    row.mkdir(parents=True, exist_ok=True)
    built_in = data in work_class.built_in
    documents = row / "documents.jsonl" if built_in else Path(os.path.expanduser(data)).absolute()
    work = work_class(
        folder=row,
        model=work_class.place_of(folder, model),
        name=model,
        mode=mode,
        data=data,
        documents=documents,
        fields=chosen,
        steps=steps or (shape.steps if shape else 20),
        warm_up=warm_up,
    )
    if isinstance(work, PairWork):
        _ = work.beta  # raises if the objective has settings that not every arm has
    if built_in:
        if shape:
            vocabulary = shape.sizes["vocab_size"]
        else:
            from transformers import AutoConfig

            try:
                vocabulary = ModelShape.of(AutoConfig.from_pretrained(model)).vocabulary
            except (OSError, ValueError) as error:
                shapes = ", ".join(SHAPES)
                raise ConfigurationError(
                    f"model={model!r}: neither a built-in shape ({shapes}) nor a model: {error}"
                ) from None
        work.write_documents(vocabulary)
    described = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(work).items()
    }
    (row / "work.json").write_text(json.dumps(described, indent=1))
    return work


def read_work(folder: Path) -> Work:
    """Read a work that was written to the row's folder."""
    fields = json.loads((folder / "work.json").read_text())
    for name in ("folder", "documents"):
        fields[name] = Path(fields[name])
    return work_class_of(fields["fields"])(**fields)


def work_class_of(fields: dict[str, Any]) -> type[Work]:
    """Return the class of the work whose configuration has these fields."""
    objective = fields.get("objective", "")
    if objective in PAIR_OBJECTIVES:
        return PairWork
    return DistillationWork if objective == DISTILLATION else Work


def _check_fields(mode: str, fields: dict[str, Any], data: str, work_class: type[Work]) -> None:
    """Check what the user gave.

    Raises:
        ConfigurationError: the mode is unknown, fields contradict or are ours alone, or built-in
            data are for another objective.
    """
    if mode not in MODES:
        raise ConfigurationError(f"mode={mode!r}: no such mode; there are {', '.join(MODES)}")
    objective = fields.get("objective")
    if objective in OBJECTIVES and OBJECTIVES[objective].draws_answers:
        raise ConfigurationError(
            f"objective={objective!r}: its steps are drawn in the run, and the arms take the same "
            "documents; leave it out, or measure generation (benchmarks/generation_rows.py)"
        )
    if fields.get("use_lora", mode != "full") != (mode != "full"):
        raise ConfigurationError(
            f"mode={mode!r} contradicts use_lora={fields['use_lora']}: give one of the two"
        )
    for name in ("quantization", "load_in_4bit"):
        if name in fields and bool(fields[name]) != (mode == "qlora"):
            raise ConfigurationError(
                f"mode={mode!r} contradicts {name}={fields[name]!r}: give one of the two"
            )
    defaults = ChronicalsConfig()
    for name in OUR_FIELDS:
        if name in fields and fields[name] != getattr(defaults, name):
            raise ConfigurationError(
                f"{name}={fields[name]!r}: not every arm has it; leave it out, or give it "
                "to ours alone as a variant"
            )
    if data in (*BUILT_IN_DATA, *PROMPT_SHARES) and data not in work_class.built_in:
        objectives = "another objective"
        if data in PROMPT_SHARES:
            objectives = " or ".join(f"objective={name!r}" for name in PAIR_OBJECTIVES)
        raise ConfigurationError(
            f"data={data!r}: is for {objectives}; there are {', '.join(work_class.built_in)}, or a "
            "file"
        )


# The product that is timed is large enough for all cores, and takes a moment.
PRODUCT_ROWS = 512
PRODUCT_WIDTH = 1024

SHARE_OF_PRODUCT = 0.5
"""Share of a product's rate that a whole step is assumed to reach."""

START_SECONDS = 15
"""Seconds assumed for the start of a process: imports, and reading the weights."""


@dataclass(frozen=True)
class CpuEstimate:
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


def estimate_on_cpu(work: Work, options: Options) -> CpuEstimate:
    """Return the estimated time of a benchmark on this CPU.

    A teacher or a reference policy is not included and takes additional time.
    """
    import transformers

    config = work.config()
    width = config.max_seq_length
    tokens = config.batch_size * config.gradient_accumulation_steps * width  # of full packs
    rank = config.lora_rank if config.use_lora else 0
    built_in = SHAPES.get(work.name)
    if built_in is None:
        model_config = transformers.AutoConfig.from_pretrained(work.model)
    else:  # its weights need not be written yet
        model_config = getattr(transformers, built_in.config_class)(**built_in.sizes)
    flops = tokens * needed_flops(Job(DecoderShape.of(model_config), tokens, width, rank=rank))
    step = flops / (SHARE_OF_PRODUCT * _product_rate())
    steps = work.warm_up + work.steps
    arm = min(START_SECONDS + step * steps, options.arm_timeout)
    reference = min(START_SECONDS + step * options.reference_steps, options.arm_timeout)
    ours = 1 + len(options.variants)
    peers = len(options.against)
    rounds = options.rounds * (ours + min(peers, BEST_PEERS))
    whole = START_SECONDS + reference + arm * (ours + peers + len(options.scouted) + rounds)
    if options.time_limit is not None:
        whole = min(whole, options.time_limit)
    return CpuEstimate(step, steps, whole, START_SECONDS + step * steps > options.arm_timeout)


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
