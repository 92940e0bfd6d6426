"""Optimizers and learning-rate schedules."""

from chronicals.optimizers.adam_8bit import Adam8bit
from chronicals.optimizers.adamw import FusedAdamW
from chronicals.optimizers.lora_plus import create_lora_plus_optimizer
from chronicals.optimizers.schedules import SCHEDULES, learning_rate_factor

__all__ = [
    "SCHEDULES",
    "Adam8bit",
    "FusedAdamW",
    "create_lora_plus_optimizer",
    "learning_rate_factor",
]
