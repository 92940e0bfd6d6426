"""Hugging Face models: loading, reading the output head, and running a Batch through a model."""

from chronicals import deferred_imports  # noqa: F401  transformers, without what other tasks need
from chronicals.model_shape import ModelShape
from chronicals.models.bitsandbytes_loading import load_by_bitsandbytes, missing_for_bitsandbytes
from chronicals.models.checkpoint_checks import is_reward_model
from chronicals.models.classifier import (
    SCORE,
    attach_score,
    form_without_weights,
    load_scored,
    saved_form,
    score_of,
)
from chronicals.models.four_bits import (
    QUANTISED_FROM,
    count_values,
    describe_packed,
    has_4bit_experts,
    has_4bit_layers,
    has_packed_layers,
    quantise_experts,
    quantise_layers,
)
from chronicals.models.linear import Head, UnknownHead, read_head
from chronicals.models.loading import (
    BASE_ROWS,
    embedding_table,
    input_device,
    kept_in_fp32,
    load_config,
    load_model,
    load_tokenizer,
    load_whole,
)
from chronicals.models.packability import (
    Packability,
    check_positions,
    last_position,
    positions_below,
    prove_packability,
    why_neighbours_matter,
)
from chronicals.models.peft_kinds import unfused_kind, within_adapters
from chronicals.models.presentation import PresentedModel, in_evaluation
from chronicals.models.presenting import present
from chronicals.models.rope_scaling import reach_positions
from chronicals.models.routed_experts import speaks_of_experts
from chronicals.models.router_loss import RouterLoss, asks_for_router_loss, times_trained
from chronicals.models.terms import AdditionalTerm, Computed, Term, Terms
from chronicals.models.towers import beside_text, is_within, read_processors, save_processors

__all__ = [
    "BASE_ROWS",
    "QUANTISED_FROM",
    "SCORE",
    "AdditionalTerm",
    "Computed",
    "Head",
    "ModelShape",
    "Packability",
    "PresentedModel",
    "RouterLoss",
    "Term",
    "Terms",
    "UnknownHead",
    "asks_for_router_loss",
    "attach_score",
    "beside_text",
    "check_positions",
    "count_values",
    "describe_packed",
    "embedding_table",
    "form_without_weights",
    "has_4bit_experts",
    "has_4bit_layers",
    "has_packed_layers",
    "in_evaluation",
    "input_device",
    "is_reward_model",
    "is_within",
    "kept_in_fp32",
    "last_position",
    "load_by_bitsandbytes",
    "load_config",
    "load_model",
    "load_scored",
    "load_tokenizer",
    "load_whole",
    "missing_for_bitsandbytes",
    "positions_below",
    "present",
    "prove_packability",
    "quantise_experts",
    "quantise_layers",
    "reach_positions",
    "read_head",
    "read_processors",
    "save_processors",
    "saved_form",
    "score_of",
    "speaks_of_experts",
    "times_trained",
    "unfused_kind",
    "why_neighbours_matter",
    "within_adapters",
]


def __dir__() -> list[str]:
    return sorted(__all__)
