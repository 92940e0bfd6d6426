"""Optimizers and learning-rate schedules."""

from chronicals.optimizers.adamw import (
    Adam8bit,
    FusedAdamW,
    keep_full_moments,
    moment_bytes,
    moments_in_8_bits,
)
from chronicals.optimizers.host_states import HostStates, buffer_bytes, states_in_host_memory
from chronicals.optimizers.learning_rates import (
    SCHEDULES,
    create_lora_plus_optimizer,
    learning_rate_factor,
    lora_plus_groups,
)

__all__ = [
    "SCHEDULES",
    "Adam8bit",
    "FusedAdamW",
    "HostStates",
    "buffer_bytes",
    "create_lora_plus_optimizer",
    "keep_full_moments",
    "learning_rate_factor",
    "lora_plus_groups",
    "moment_bytes",
    "moments_in_8_bits",
    "states_in_host_memory",
]


def __dir__() -> list[str]:
    return sorted(__all__)
