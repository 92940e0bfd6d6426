"""Defaults that depend on data and objective: length of the run, batch size and learning rate."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data.packs.packing import PackPlan
from chronicals.distributed import Mesh
from chronicals.objectives import OBJECTIVES
from chronicals.training.run import checkpoint
from chronicals.training.step.training_step import rate_factor

logger = logging.getLogger(__name__)

STEPS_AN_EPOCH = 30
"""Optimizer steps an epoch should have; a default batch shrinks for them."""

PASSES = "gradient_accumulation_steps"

SHRUNK = (PASSES, "batch_size")
"""Fields that shrink, in this order: fewer forward passes in a step cost no speed."""

PROCESSES = "processes"
"""Key in a checkpoint's state: size of the data axis."""

_LENGTHS = ("max_steps", "num_epochs")
"""Fields for the length of a run; a resumed run keeps its own if neither is set."""


@dataclass(frozen=True)
class Length:
    """Length of a run.

    Attributes:
        packs, tokens: packs and tokens of one epoch.
        packs_a_step: packs of an optimizer step on all ranks together.
        steps_an_epoch: optimizer steps of one epoch; the last one may take fewer packs.
        steps: optimizer steps of the run.
        epochs: passes over the data in the whole run.
    """

    packs: int
    tokens: int
    packs_a_step: int
    steps_an_epoch: int
    steps: int
    epochs: float

    @classmethod
    def of(cls, config: ChronicalsConfig, plan: PackPlan, ranks: int = 1) -> Length:
        """Return the length of a run over ``plan`` on so many ranks."""
        packs_a_step = config.batch_size * config.gradient_accumulation_steps * ranks
        packs = len(plan) * (config.epochs or 1)
        steps_an_epoch = -(-len(plan) // packs_a_step)
        steps = config.max_steps or -(-packs // packs_a_step)
        epochs = config.epochs or steps * packs_a_step / len(plan)
        return cls(len(plan), plan.tokens, packs_a_step, steps_an_epoch, steps, epochs)

    def words(self, config: ChronicalsConfig) -> str:
        """Describe the length for the log."""
        batch = (
            f"batch_size {config.batch_size} x gradient_accumulation_steps "
            f"{config.gradient_accumulation_steps}"
        )
        who = (
            "processes"
            if config.context_parallel == 1
            else f"groups of {config.context_parallel} processes"
        )
        ranks = self.packs_a_step // (config.batch_size * config.gradient_accumulation_steps)
        return (
            f"training: {_counted(self.steps, 'step')}, {_counted(self.epochs, 'epoch')}, "
            f"{round(self.epochs * self.tokens):,} tokens; "
            f"an epoch is {_counted(self.packs, 'pack')} of up to {config.max_seq_length:,} "
            "tokens, a step takes "
            f"{self.packs_a_step} ({batch}{f' x {ranks} {who}' if ranks > 1 else ''})"
        )


def fit_learning_rate(config: ChronicalsConfig, ranks: Mesh, model: Any = None) -> ChronicalsConfig:
    """Return ``config`` with a learning rate, by default that of the objective.

    The default depends on whether adapters or all weights are trained, and is logged.

    Args:
        config: configuration of the run.
        ranks: all ranks; the first one logs.
        model: model that may have adapters already.
    """
    if "learning_rate" in config.explicit:
        return config
    adapters = (
        config.use_lora
        or hasattr(model, "chronicals_lora")
        or bool(getattr(model, "peft_config", None))
    )
    objective = OBJECTIVES[config.objective]
    rate = objective.adapter_learning_rate if adapters else objective.full_learning_rate
    if ranks.writer:
        trained = "adapters" if adapters else "full fine-tuning"
        logger.info(
            "learning rate: %g, the default of objective %s for %s", rate, config.objective, trained
        )
    return config.fitted(learning_rate=rate)


def check_warm_up(config: ChronicalsConfig, steps: int) -> None:
    """Refuse a warm-up in which a run of so many steps would never learn at its full rate.

    Raises:
        ConfigurationError: the warm-up is longer than the run, or its first step is the only one.
    """
    if "warmup_steps" in config.explicit and config.warmup_steps > steps:
        raise ConfigurationError(
            f"warmup_steps={config.warmup_steps} exceeds the {steps} steps of the run: the peak "
            "would never be reached"
        )
    if steps == 1 and rate_factor(config, 0, 1) == 0:
        raise ConfigurationError(
            "warmup_from_zero=True: the only step of the run has a learning rate of 0; "
            "train more steps, or leave warmup_from_zero out"
        )


def fit_batch(
    config: ChronicalsConfig, plan: PackPlan, ranks: Mesh, resumed: Path | None = None
) -> ChronicalsConfig:
    """Return ``config`` with a batch for which an epoch has about ``STEPS_AN_EPOCH`` steps.

    Only a default batch shrinks; one that was set stays, with a warning. If neither ``max_steps``
    nor ``num_epochs`` is set, a resumed run keeps its length. If no batch is set, it also keeps the
    number of packs in a step, even on another number of processes. Every rank gets the values of
    rank 0. The length of the run is logged.

    Args:
        config: configuration of the run.
        plan: packs of one epoch.
        ranks: all ranks of the run.
        resumed: checkpoint that the run resumes from.
    """
    before = _config_of_run(resumed) if resumed is not None else {}
    # As many forward passes as keep the packs of a step on other processes.
    passes, rest = divmod(before.get(PROCESSES, 0) * before.get(PASSES, 0), ranks.data_count)
    kept = before if rest or not passes else {**before, PASSES: passes}
    if config.fit == "auto":
        config = _divided_as_before(config, kept, ranks)
    length_before = (
        _length_of_run(before, ranks)
        if resumed is not None and not config.explicit & {*_LENGTHS}
        else {}
    )
    batch = {name: getattr(config, name) for name in SHRUNK}
    for name in SHRUNK:
        if name not in config.explicit:
            rest = (
                ranks.data_count
                * batch["batch_size"]
                * batch["gradient_accumulation_steps"]
                // batch[name]
            )
            enough = (
                size
                for size in range(batch[name], 0, -1)
                if -(-len(plan) // (size * rest)) >= STEPS_AN_EPOCH
            )
            batch[name] = kept.get(name) or next(enough, 1)
    agreed = ranks.gather(torch.tensor([batch[name] for name in SHRUNK]))[0].tolist()
    shrunk = {name: size for name, size in zip(SHRUNK, agreed) if size != getattr(config, name)}
    fitted = config.fitted(**length_before, **shrunk)
    length = Length.of(fitted, plan, ranks.data_count)
    if ranks.writer:
        sizes = [
            " x ".join(str(getattr(asked, name)) for name in reversed(SHRUNK))
            for asked in (config, fitted)
        ]
        if not before and sizes[0] != sizes[1]:
            logger.info(
                "little data: the default batch_size x gradient_accumulation_steps of %s shrinks "
                "to %s, so that an epoch is %s (%d before)",
                *sizes,
                _counted(length.steps_an_epoch, "step"),
                Length.of(config, plan, ranks.data_count).steps_an_epoch,
            )
        _warn_of_other_steps(before, fitted, ranks.data_count)
        _warn_of_few_steps(config, fitted, length)
        logger.info("%s", length.words(fitted))
    return fitted


def _divided_as_before(
    config: ChronicalsConfig, kept: Mapping[str, Any], ranks: Mesh
) -> ChronicalsConfig:
    """Return ``config`` with the smaller batch that the run went on with after an out-of-memory.

    It is returned as it is if a step then took another number of packs.

    Args:
        config: configuration of the run.
        kept: values of ``SHRUNK`` in the checkpoint, for so many processes; may be empty.
        ranks: all ranks of the run; the first one logs.
    """
    smaller = {name: kept[name] for name in SHRUNK if name in kept}
    packs = config.batch_size * config.gradient_accumulation_steps
    if not smaller or math.prod(smaller.values()) != packs:
        return config
    if smaller["batch_size"] >= config.batch_size:
        return config
    if ranks.writer:
        logger.info(
            "fit: the steps are divided as before, into gradient_accumulation_steps %d x "
            "batch_size %d (asked for: %d x %d)",
            *smaller.values(),
            *(getattr(config, name) for name in SHRUNK),
        )
    return config.fitted(**smaller)


def _warn_of_few_steps(asked: ChronicalsConfig, fitted: ChronicalsConfig, length: Length) -> None:
    """Warn if an epoch has few steps for the batch that was set.

    Also warn if the whole run has few steps and their number was not set.
    """
    kept = [name for name in SHRUNK if name in asked.explicit and getattr(fitted, name) > 1]
    merges = length.packs_a_step > length.packs
    if length.steps_an_epoch >= STEPS_AN_EPOCH or not (merges or fitted.max_steps is None):
        return
    epochs = length.epochs
    run = (
        f"{_counted(epochs, 'epoch')} {'is' if epochs == 1 else 'are'} "
        f"{_counted(length.steps, 'step')}"
    )
    if kept:
        values = " and ".join(f"{name}={getattr(fitted, name)}" for name in kept)
        why = (
            f"a step takes {length.packs_a_step} packs, more than the {length.packs} of an epoch: "
            if merges
            else ""
        )
        logger.warning("%s: %s%s; lower %s for more updates", values, why, run, " or ".join(kept))
    elif length.steps < STEPS_AN_EPOCH:
        logger.warning(
            "little data: %s; raise num_epochs or lower max_seq_length for more updates", run
        )


def _warn_of_other_steps(
    before: Mapping[str, Any], fitted: ChronicalsConfig, processes: int
) -> None:
    """Warn if a resumed run has another number of packs in a step than before.

    The number of processes is another one then.
    """
    then = before.get(PROCESSES, processes)
    of_a_pass = fitted.batch_size * processes
    packs = of_a_pass * fitted.gradient_accumulation_steps
    took = math.prod(before[name] for name in SHRUNK) * then if before else packs
    if then == processes or took == packs:
        return
    kept = (
        f"gradient_accumulation_steps={took // of_a_pass} keeps"
        if took % of_a_pass == 0
        else f"{then} processes keep"
    )
    logger.warning(
        "resuming on %d processes: a step takes %d packs (before: %d); %s as many",
        processes,
        packs,
        took,
        kept,
    )


def _length_of_run(before: Mapping[str, Any], ranks: Mesh) -> dict[str, int]:
    """Return which of ``_LENGTHS`` the run began with, as the first rank knows it.

    It is empty if the run had neither.
    """
    steps, epochs = ranks.gather(torch.tensor([before.get(name) or 0 for name in _LENGTHS]))[
        0
    ].tolist()
    name, value = (
        ("num_epochs", epochs) if epochs else ("max_steps", steps)
    )  # if the run has both, epochs were set and steps are the default
    if value and ranks.writer:
        logger.info(
            "neither max_steps nor num_epochs is set: %s=%d, as the run began with", name, value
        )
    return {name: value} if value else {}


def _config_of_run(folder: Path) -> Mapping[str, Any]:
    """Return ``SHRUNK``, ``_LENGTHS`` and ``PROCESSES`` of a checkpoint.

    It is empty if the checkpoint is on another machine.
    """
    try:
        state = checkpoint.load_state(folder)
        kept = state["config"]
        of_run = {
            **{name: kept[name] for name in SHRUNK},
            **{name: kept.get(name) for name in _LENGTHS},
        }
        return of_run | ({PROCESSES: state[PROCESSES]} if PROCESSES in state else {})
    except (OSError, json.JSONDecodeError, KeyError):
        return {}


def _counted(count: float, noun: str) -> str:
    number = f"{count:,.0f}" if count == int(count) or count >= 100 else f"{count:.3g}"
    return f"{number} {noun}{'' if count == 1 else 's'}"
