"""Settings whose values mean another thing here: computed, and said how.

Each rule takes the value and the whole configuration, and returns an answer, or None where the
tables answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from chronicals.config.foreign_values import ABSENT_OBJECTIVES
from chronicals.config.values import is_init
from chronicals.convert.answers import (
    FIELDS,
    Answer,
    from_tables,
    mapped,
    not_needed,
    not_there,
)
from chronicals.convert.data_rules import DATA_RULES
from chronicals.convert.lengths import (
    has_conversations,
    steps_of,
    steps_of_epoch,
    steps_that_differ,
    trained_rows,
)
from chronicals.convert.reading import AXOLOTL, LLAMA_FACTORY, TRL, Theirs
from chronicals.convert.rules import Rule, always, off_or

PAIRS = ("dpo", "ipo", "simpo", "cpo", "orpo", "reward")
"""Objectives whose rows are two answers to a prompt."""

ROLLOUTS = ("grpo", "rloo")
"""Objectives that draw answers."""

SCHEDULES = get_args(FIELDS["lr_scheduler"].annotation)

NEEDS_STEPS = "it is a share of {what}, whose steps depend on the data: chronicals train --check says how many there are"


def answered(name: str, value: Any, theirs: Theirs) -> Answer:
    """Return what becomes of a setting.

    Args:
        name: of the setting, without its block.
        value: its value.
        theirs: the configuration that it stands in.
    """
    if value is None:
        return not_needed("it is not set")
    rule = RULES.get(name)
    answer = rule(value, theirs) if rule is not None else None
    return answer or from_tables(name, value, theirs.objective)


def _model(value: Any, theirs: Theirs) -> Answer:
    return mapped(model=value)


def _objective(value: Any, theirs: Theirs) -> Answer:
    objective = theirs.objective
    named = str(value).lower()
    if objective in ABSENT_OBJECTIVES:
        return not_there(f"objective {objective!r}: {ABSENT_OBJECTIVES[objective]}")
    special = {
        "gdpo": {"reward_aggregation": "normalize_then_sum"},
        "gspo": {"grpo.level": "sequence"},
        "dr_grpo": {"grpo.loss": "dr_grpo", "grpo.scale": "none"},
    }
    fields = {"objective": objective, **special.get(named, {})}
    return Answer("mapped", fields, "" if named == objective else f"{named} is {objective} here")


def _epochs(value: Any, theirs: Theirs) -> Answer:
    if _max_steps_of(theirs) is not None:
        return not_needed("max_steps says how long the run is")
    epochs = float(value)
    steps = steps_that_differ(theirs, epochs)
    if steps is not None:
        return mapped(
            f"each of {epochs:g} epochs ends with a step of what is left: {steps} steps of "
            f"{trained_rows(theirs)} rows an epoch",
            max_steps=steps,
        )
    if epochs == int(epochs) and epochs > 0:
        return mapped(num_epochs=int(epochs))
    return mapped(
        f"{epochs:g} epochs are one over rows that are seen {epochs:g} times (weight of data)",
        num_epochs=1,
    )


def _max_steps_of(theirs: Theirs) -> int | None:
    steps = theirs.get("max_steps")
    return steps if isinstance(steps, int) and steps > 0 else None


def _batch_size(value: Any, theirs: Theirs) -> Answer | None:
    """Return the accumulation that Axolotl's ``batch_size``, of a whole step, stands for."""
    if theirs.tool != AXOLOTL:
        return None
    if theirs.get("gradient_accumulation_steps") is not None:
        return not_needed("micro_batch_size and gradient_accumulation_steps say it")
    micro = theirs.get("micro_batch_size", default=1)
    return mapped(
        f"a step of {value} in micro-batches of {micro}",
        gradient_accumulation_steps=max(value // micro, 1),
    )


def _micro_batch_size(value: Any, theirs: Theirs) -> Answer:
    if theirs.objective not in ROLLOUTS:
        return mapped(batch_size=value)
    answers = theirs.get("num_generations", default=8 if theirs.objective == "grpo" else 2)
    accumulation = theirs.get("gradient_accumulation_steps", default=1)
    cards = theirs.cards or 1
    step = value * accumulation * cards
    return Answer(
        "mapped",
        {"batch_size": 1, f"{theirs.objective}.prompts": max(step // answers, 1)},
        f"{value} answers x {accumulation} micro-batches x {cards} card(s) are "
        f"{max(step // answers, 1)} prompts of {answers} answers in a step",
    )


def _accumulation(value: Any, theirs: Theirs) -> Answer | None:
    if theirs.objective in ROLLOUTS:
        return not_needed("a step takes as many micro-batches as its answers need")
    return None


def _length(value: Any, theirs: Theirs) -> Answer:
    objective = theirs.objective
    if objective in PAIRS:
        return mapped(
            f"theirs bounds each answer with its prompt, ours both together: 2 x {value}",
            max_seq_length=2 * value,
        )
    if objective == "kto" or objective in ROLLOUTS:
        return mapped(max_seq_length=value)
    if theirs.get("excess_length_strategy", "truncation_mode"):
        return mapped(max_seq_length=value)
    if objective == "pretraining":
        return mapped(max_seq_length=value, overlong="split")
    usual = "drop" if theirs.tool == AXOLOTL else "cut"
    return mapped(max_seq_length=value, overlong=usual)


def _excess(value: Any, theirs: Theirs) -> Answer | None:
    return mapped(overlong="cut") if value == "truncate" else None


def _warmup_steps(value: Any, theirs: Theirs) -> Answer:
    if _rate_is_constant(theirs):
        return not_needed("their constant rate has no warm-up: warmup_steps: 0")
    if isinstance(value, float) and 0 < value < 1:
        return mapped(f"below 1 it is a share of the steps: {value:g}", warmup_ratio=value)
    if value == 1 and theirs.tool == AXOLOTL:
        return mapped("Axolotl makes one step two", warmup_steps=2)
    return mapped(warmup_steps=value)


def _warmup_ratio(value: Any, theirs: Theirs) -> Answer:
    if theirs.get("warmup_steps"):
        return not_needed("warmup_steps wins over it")
    if _rate_is_constant(theirs):
        return not_needed("their constant rate has no warm-up: warmup_steps: 0")
    steps = steps_of(theirs)
    rounded = math.floor if theirs.tool == AXOLOTL else math.ceil
    if steps is not None:
        number = rounded(round(value * steps, 6))
        if theirs.tool == AXOLOTL and number == 1:
            number = 2  # as its builder does
        return mapped(f"{value:g} of {steps} steps", warmup_steps=number)
    return mapped(
        "Axolotl rounds it down and ours up to whole steps" if theirs.tool == AXOLOTL else "",
        warmup_ratio=value,
    )


def _rate_is_constant(theirs: Theirs) -> bool:
    return theirs.get("lr_scheduler", "lr_scheduler_type") == "constant"


def _schedule(value: Any, theirs: Theirs) -> Answer | None:
    if value == "constant":
        return mapped("without warm-up, as theirs", lr_scheduler="constant", warmup_steps=0)
    if value == "constant_with_warmup":
        return mapped(lr_scheduler="constant")
    if value == "warmup_stable_decay":
        falls = (theirs.get("lr_scheduler_kwargs") or {}).get("decay_type", "cosine")
        remark = "" if falls == "linear" else f"theirs falls by {falls}, ours in a line"
        return mapped(remark, lr_scheduler="wsd")
    if value == "cosine" and theirs.get("cosine_min_lr_ratio") == 1:
        return mapped("a cosine that ends at its peak is constant", lr_scheduler="constant")
    if value == "cosine_with_min_lr":
        return mapped("min_lr_ratio says how far it falls", lr_scheduler="cosine")
    if value in SCHEDULES:
        return mapped(lr_scheduler=value)
    return Answer(
        "not there",
        {"lr_scheduler": "cosine"},
        f"{value!r} is not part of this version; there are cosine, linear, constant and wsd",
    )


def _schedule_settings(value: Any, theirs: Theirs) -> Answer | None:
    if not isinstance(value, Mapping) or not value:
        return not_needed("it is empty")
    fields: dict[str, Any] = {}
    rate = theirs.get("learning_rate")
    if "min_lr" in value and rate is None:
        return not_there("min_lr is compared with learning_rate, which is not set; set it there")
    if "min_lr" in value:
        fields["min_lr_ratio"] = value["min_lr"] / rate
    if "min_lr_rate" in value:
        fields["min_lr_ratio"] = value["min_lr_rate"]
    steps = _max_steps_of(theirs)
    if "num_decay_steps" in value and steps is not None:
        fields["wsd_decay_ratio"] = value["num_decay_steps"] / steps
    named = {
        "min_lr",
        "min_lr_rate",
        "decay_type",
        "num_decay_steps" if steps is not None else "min_lr",
    }
    rest = ", ".join(name for name in value if name not in named)
    if not fields:
        return not_there(f"{rest}: not part of this version, or a number of steps of the data")
    return mapped(f"without {rest}, which is not there" if rest else "", **fields)


def _least_rate(value: Any, theirs: Theirs) -> Answer | None:
    rate = theirs.get("learning_rate")
    if rate is None:
        return None
    ratio = float(value) / float(rate)
    return mapped(f"{value} of the peak {rate}", min_lr_ratio=ratio)


def _least_ratio(value: Any, theirs: Theirs) -> Answer:
    if float(value) == 1.0:
        return not_needed("a cosine that ends at its peak is lr_scheduler: constant")
    return mapped(min_lr_ratio=value)


def _per_epoch(theirs: Theirs, value: Any, field: str) -> Answer:
    if not value:
        return mapped(save_steps=None) if field == "save_steps" else not_needed("it is off")
    steps = steps_of_epoch(theirs)
    if steps is not None:
        each = max(round(steps / value), 1)
        return Answer("mapped", {field: each}, f"{value} in an epoch of {steps:g} steps")
    remedy = (
        "one is written at the end, and every 500 steps"
        if field == "save_steps"
        else "it is evaluated at the end"
    )
    words = NEEDS_STEPS.format(what="an epoch")
    return not_there(f"{words}; set {field} to 1/{value} of them. Without it {remedy}")


def _number_in_epoch(field: str) -> Rule:
    """Return the rule of a number of evaluations or checkpoints in an epoch."""

    def rule(value: Any, theirs: Theirs) -> Answer:
        if field == "eval_steps" and not _holds_out(theirs):
            return not_needed("nothing is held out")
        return _per_epoch(theirs, value, field)

    return rule


def _strategy(field: str) -> Rule:
    """Return the rule of a strategy of saving or evaluating."""

    def rule(value: Any, theirs: Theirs) -> Answer | None:
        if field == "eval_steps" and not _holds_out(theirs):
            return not_needed("nothing is held out")
        if field == "eval_steps" and theirs.tool == TRL and "dataset_test_split" not in theirs:
            rest = None if value == "steps" else _per_epoch(theirs, 1, field).reason
            data = [{"path": theirs.get("dataset_name"), "split": "test"}]
            return mapped(rest or "TRL evaluates on the split test", validation_data=data)
        return _per_epoch(theirs, 1, field) if value == "epoch" else None

    return rule


def _every(field: str) -> Rule:
    """Return the rule of steps between two evaluations or checkpoints."""

    def rule(value: Any, theirs: Theirs) -> Answer:
        if field == "eval_steps" and not _holds_out(theirs):
            return not_needed("nothing is held out")
        if 0 < value < 1:
            steps = steps_of(theirs)
            if steps is None:
                return not_there(f"{NEEDS_STEPS.format(what='the run')}; set {field}")
            each = math.ceil(value * steps)
            return Answer("mapped", {field: each}, f"{value:g} of {steps} steps")
        return Answer("mapped", {field: int(value)})

    return rule


def _holds_out(theirs: Theirs) -> bool:
    """Return whether their run evaluates on something."""
    return bool(
        theirs.get("val_set_size", "val_size", "test_datasets", "eval_dataset")
        or theirs.get("dataset_test_split")
        or (theirs.tool == TRL and theirs.get("eval_strategy", default="no") != "no")
    )


def _held_out(value: Any, theirs: Theirs) -> Answer:
    if not value:
        return not_needed("nothing is held out")
    if value >= 1:
        return not_there(
            f"{value} rows: a share is held out here; set validation_split to {value} over the "
            "number of rows"
        )
    return mapped(validation_split=value)


def _patience(value: Any, theirs: Theirs) -> Answer:
    if not value:
        return not_needed("it is off")
    if not _holds_out(theirs) or theirs.get("eval_steps") is None:
        return not_there("it needs eval_steps here; set both")
    return mapped(early_stopping_patience=value)


def _best(value: Any, theirs: Theirs) -> Answer:
    if not _holds_out(theirs):
        return not_needed("nothing is held out")
    return mapped(keep="best" if value else "last")


def _kind_of_training(value: Any, theirs: Theirs) -> Answer:
    if value in ("full", "lora"):
        return mapped(use_lora=value == "lora")
    reason = f"{value!r} is not part of this version; the recipe trains LoRA"
    return Answer("not there", {"use_lora": True}, reason)


def _targets(value: Any, theirs: Theirs) -> Answer | None:
    if theirs.get("lora_target_linear") is True:
        return not_needed("lora_target_linear adapts them among all linear layers")
    if isinstance(value, str) and value.startswith("all"):
        return None
    return mapped(lora_target_modules=value)


def _start(value: Any, theirs: Theirs) -> Answer | None:
    if isinstance(value, str) and is_init(value):
        return mapped(lora_init=value)
    return None


def _iterations_of_pissa(value: Any, theirs: Theirs) -> Answer:
    if not theirs.get("pissa_init"):
        return not_needed("pissa_init is off")
    return mapped(lora_init="pissa" if value == -1 else f"pissa_niter_{value}")


def _pissa(value: Any, theirs: Theirs) -> Answer:
    iterations = theirs.get("pissa_iter", default=16)
    return _iterations_of_pissa(iterations, theirs) if value else not_needed("it is off")


def _assistant_only(value: Any, theirs: Theirs) -> Answer:
    if value:
        return mapped(
            "TRL trains what the template writes behind an answer, too", train_after_stop=True
        )
    if has_conversations(theirs):
        return mapped("every token of a conversation is trained", train_on="all")
    return not_needed("of a prompt and a completion the completion is trained")


def _completion_only(value: Any, theirs: Theirs) -> Answer:
    if value:
        return not_needed("of a prompt and a completion the completion is trained")
    return mapped("prompts are trained, too", train_on="all")


def _dropout_off(value: Any, theirs: Theirs) -> Answer:
    if value and theirs.get("use_peft"):
        return mapped(lora_dropout=0.0)
    return not_needed("models are trained without dropout, but that of adapters")


def _dropout(value: Any, theirs: Theirs) -> Answer | None:
    if theirs.objective in ROLLOUTS:
        return not_needed("dropout is off where answers are drawn")
    trl_default = theirs.tool == TRL and theirs.objective in ("dpo", "ipo", "kto", "reward")
    if theirs.get("disable_dropout", default=trl_default):
        return mapped("disable_dropout turns it off", lora_dropout=0.0)
    return None


def _context(value: Any, theirs: Theirs) -> Answer:
    if value in (0, 1):
        return not_needed("it is off")
    return mapped(context_parallel=value)


def _rewards(value: Any, theirs: Theirs) -> Answer:
    names = value if isinstance(value, list) else [value]
    weights = theirs.get("reward_weights", default=[])
    weights = weights if isinstance(weights, list) else [weights]
    entries: list[str] = []
    for number, name in enumerate(names):
        ours = str(name)
        module, _, function = ours.rpartition(".")
        if module and "/" not in ours:
            ours = f"{module}:{function}"
        if number < len(weights):
            ours = f"{ours}={weights[number]:g}"
        entries.append(ours)
    return mapped("a function is module:function, its weight behind it", rewards=entries)


def _seed_of_data(value: Any, theirs: Theirs) -> Answer:
    if theirs.get("seed") is not None:
        return not_needed("seed draws the order, too")
    return mapped(seed=value)


def _truncated(value: Any, theirs: Theirs) -> Answer:
    if not value or theirs.objective not in ROLLOUTS:
        return not_needed("it is off")
    return Answer("mapped", {f"{theirs.objective}.truncated": "mask"})


def _scale(value: Any, theirs: Theirs) -> Answer:
    names = {"true": "group", "false": "none"}
    word = names.get(str(value).lower(), str(value).lower())
    return Answer("mapped", {f"{theirs.objective}.scale": word})


def _trackers(value: Any, theirs: Theirs) -> Answer | None:
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    ours = [name for name in names if name in ("tensorboard", "wandb", "mlflow")]
    others = [name for name in names if name not in (*ours, "none", "all")]
    if not others:
        return None
    remark = f"{', '.join(others)}: trackers here are tensorboard, wandb and mlflow"
    return mapped(remark, trackers=ours) if ours else not_there(remark)


def _bf16(value: Any, theirs: Theirs) -> Answer | None:
    if value is False and theirs.get("fp16", "float16") not in (None, False):
        return not_needed("fp16 says it")
    return None


def _packing(value: Any, theirs: Theirs) -> Answer:
    if theirs.objective in ROLLOUTS:
        return not_needed("answers to a prompt share it in packs")
    apart = theirs.tool == LLAMA_FACTORY and value and not theirs.get("neat_packing")
    return mapped(
        "theirs attend to their neighbours in a pack, ours do not" if apart else "",
        use_sequence_packing=bool(value),
    )


def _name_of_block(value: Any, theirs: Theirs) -> Answer | None:
    """Return the answer to ``name`` in LLaMA-Factory's blocks of adapters and bits."""
    if value == "lora":
        return mapped(use_lora=True)
    if value == "bnb":
        return not_needed("quantization_bit says how many bits")
    return not_there(f"{value!r} is not part of this version")


RULES: dict[str, Rule] = {
    "base_model": _model,
    "rl": _objective,
    "stage": _objective,
    "num_epochs": _epochs,
    "num_train_epochs": _epochs,
    "batch_size": _batch_size,
    "micro_batch_size": _micro_batch_size,
    "per_device_train_batch_size": _micro_batch_size,
    "gradient_accumulation_steps": _accumulation,
    "cutoff_len": _length,
    "max_length": _length,
    "max_seq_length": _length,
    "sequence_len": _length,
    "excess_length_strategy": _excess,
    "warmup_steps": _warmup_steps,
    "warmup_ratio": _warmup_ratio,
    "lr_scheduler": _schedule,
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs": _schedule_settings,
    "eta_min": _least_rate,
    "min_lr": _least_rate,
    "cosine_min_lr_ratio": _least_ratio,
    "cosine_constant_lr_ratio": off_or(None),
    "evals_per_epoch": _number_in_epoch("eval_steps"),
    "saves_per_epoch": _number_in_epoch("save_steps"),
    "eval_strategy": _strategy("eval_steps"),
    "evaluation_strategy": _strategy("eval_steps"),
    "save_strategy": _strategy("save_steps"),
    "eval_steps": _every("eval_steps"),
    "save_steps": _every("save_steps"),
    "val_set_size": _held_out,
    "val_size": _held_out,
    "early_stopping_patience": _patience,
    "load_best_model_at_end": _best,
    "trust_remote_code": off_or(
        not_needed(
            "a converted recipe never runs code that comes with a model; classes of transformers "
            "need none. Who trusts it gives --trust-remote-code to train"
        )
    ),
    "tf32": always(not_needed("mixed_precision says what products are in, and fp32 uses no TF32")),
    "resume_from_checkpoint": always(not_needed("--resume goes on with a run")),
    "auto_resume_from_checkpoints": always(not_needed("--resume goes on with a run")),
    "finetuning_type": _kind_of_training,
    "lora_target_modules": _targets,
    "lora_target": _targets,
    "target_modules": _targets,
    "lora_target_linear": off_or(
        mapped("all linear layers but the head are adapted by default", use_lora=True)
    ),
    "init_lora_weights": _start,
    "pissa_init": _pissa,
    "pissa_iter": _iterations_of_pissa,
    "load_in_8bit": off_or(
        not_there(
            "a base in 8 bits is not part of this version; it stays in 16, and quantization: nf4 "
            "takes 4"
        )
    ),
    "load_in_4bit": off_or(mapped(quantization="nf4")),
    "lora_dropout": _dropout,
    "assistant_only_loss": _assistant_only,
    "completion_only_loss": _completion_only,
    "disable_dropout": _dropout_off,
    "context_parallel_size": _context,
    "sequence_parallel_degree": _context,
    "cp_size": _context,
    "reward_funcs": _rewards,
    "reward_weights": always(not_needed("it stands behind each of rewards")),
    "data_seed": _seed_of_data,
    "mask_truncated_completions": _truncated,
    "scale_rewards": _scale,
    "loftq_config": always(
        mapped("one alternation, over 4 bits", lora_init="loftq", quantization="nf4")
    ),
    "report_to": _trackers,
    "bf16": _bf16,
    "packing": _packing,
    "sample_packing": _packing,
    "neat_packing": _packing,
    "activation_offloading": off_or(mapped(activation_offload=True)),
    "label_smoothing": off_or(None),
    "name": _name_of_block,
    **DATA_RULES,
}
"""Rules by the name of the setting."""
