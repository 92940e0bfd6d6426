"""Settings whose values are computed with: each must be a number, or its rule says nothing true."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from chronicals.config import ConfigurationError
from chronicals.convert.reading import Setting, Theirs

DIVISORS = frozenset(
    (
        "gradient_accumulation_steps",
        "learning_rate",
        "micro_batch_size",
        "num_generations",
        "per_device_train_batch_size",
    )
)
"""Settings that others are divided by."""

NUMBERS = DIVISORS | {
    "batch_size",
    "cosine_min_lr_ratio",
    "cutoff_len",
    "eta_min",
    "eval_steps",
    "evals_per_epoch",
    "lora_r",
    "lora_rank",
    "max_length",
    "max_samples",
    "max_seq_length",
    "max_steps",
    "min_lr",
    "num_epochs",
    "num_train_epochs",
    "reward_weights",
    "save_steps",
    "saves_per_epoch",
    "sequence_len",
    "val_set_size",
    "val_size",
    "warmup_ratio",
    "warmup_steps",
}
"""Settings that are computed with."""

OF_SCHEDULE = ("min_lr", "min_lr_rate", "num_decay_steps")
"""Entries of ``lr_scheduler_kwargs`` that are computed with."""


def check_numbers(theirs: Theirs) -> None:
    """Check that settings which are computed with are finite numbers, and divisors above 0.

    Raises:
        ConfigurationError: some are not; a line for each, with its place.
    """
    wrong = [text for setting in theirs.settings for text in _wrong(setting)]
    if wrong:
        raise ConfigurationError("\n".join(wrong))


def _wrong(setting: Setting) -> Iterator[str]:
    """Yield what is wrong with the value of a setting."""
    for value in _computed_with(setting):
        if not _is_finite(value):
            yield f"{setting.place}: {setting.name}: {value!r}: must be a number; write it as 3 or 0.5"
        elif setting.key in DIVISORS and value <= 0:
            yield f"{setting.place}: {setting.name}: {value!r}: must be greater than 0"


def _computed_with(setting: Setting) -> list[Any]:
    """Return the values of a setting that must be numbers."""
    value = setting.value
    if setting.key == "lr_scheduler_kwargs" and isinstance(value, Mapping):
        return [value[name] for name in OF_SCHEDULE if value.get(name) is not None]
    if setting.key not in NUMBERS or value is None:
        return []
    return value if setting.key == "reward_weights" and isinstance(value, list) else [value]


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
