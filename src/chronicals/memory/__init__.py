"""Ways to hold fewer activations on the GPU: recomputation, offload to host memory, tiles."""

from chronicals import deferred_imports  # noqa: F401  transformers, without what other tasks need
from chronicals.memory.estimation import card_memory, estimate
from chronicals.memory.layer_elements import CHEAP, LAYERS, NOTHING, StepShape
from chronicals.memory.offload import ActivationOffload, InputOffload
from chronicals.memory.peak import OTHERS, RESERVE, Estimate, Moment, WeightBytes
from chronicals.memory.recompute import (
    checkpoints_end_with_errors,
    decoder_layers,
    disable_gradient_checkpointing,
    draws_numbers,
    enable_gradient_checkpointing,
    enters_again,
    heads_at_a_time,
    makes_tiles,
    recomputation,
    recomputes,
    rows_of_tile,
    runs_again,
    tiled,
    tiles_of,
)
from chronicals.memory.segments import let_segments_grow

__all__ = [
    "CHEAP",
    "LAYERS",
    "NOTHING",
    "OTHERS",
    "RESERVE",
    "ActivationOffload",
    "Estimate",
    "InputOffload",
    "Moment",
    "StepShape",
    "WeightBytes",
    "card_memory",
    "checkpoints_end_with_errors",
    "decoder_layers",
    "disable_gradient_checkpointing",
    "draws_numbers",
    "enable_gradient_checkpointing",
    "enters_again",
    "estimate",
    "heads_at_a_time",
    "let_segments_grow",
    "makes_tiles",
    "recomputation",
    "recomputes",
    "rows_of_tile",
    "runs_again",
    "tiled",
    "tiles_of",
]


def __dir__() -> list[str]:
    return sorted(__all__)
