"""Entries of the field ``memory``: what saves memory, and which of them go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from chronicals.config.errors import ConfigurationError

if TYPE_CHECKING:
    from chronicals.config.config import ChronicalsConfig

MemoryPolicy = Literal[
    "auto",
    "recompute_elementwise",
    "recompute_layers",
    "offload_activations",
    "offload_embeddings",
    "offload_experts",
    "offload_frozen_weights",
    "offload_optimizer_states",
    "tiled_layers",
    "tiled_mlp",
    "optimizer_in_backward",
    "reduce_in_backward",
]

WHOLE_LAYERS = frozenset[MemoryPolicy]({"recompute_layers", "tiled_layers"})
"""Entries of ``memory`` with which every layer keeps its input alone."""

RECOMPUTE = frozenset[MemoryPolicy]({"recompute_elementwise", "recompute_layers"})
ALIASES: dict[str, MemoryPolicy] = {
    "use_gradient_checkpointing": "recompute_layers",
    "activation_offload": "offload_activations",
}
"""Switches that, set to true, are entries of ``memory``."""

EXPERT_PREDICTOR = "last"
"""Value of ``expert_predictor`` by default, which says nothing where experts are on the card."""


def check_memory(config: ChronicalsConfig) -> None:
    """Check that the entries of ``memory`` fit together, and fit other fields.

    Raises:
        ConfigurationError: they do not.
    """
    entries = config.memory or []
    offloads = "offload_experts" in entries
    if offloads and config.expert_memory is None:
        raise ConfigurationError(
            "memory=['offload_experts']: says not how much of the card experts may take; set "
            "expert_memory, such as 8GiB"
        )
    if config.expert_memory is not None and not offloads:
        raise ConfigurationError(
            f"expert_memory={config.expert_memory:g}: is for experts in host memory; set "
            "memory=['auto', 'offload_experts'], or leave it out"
        )
    if config.expert_predictor != EXPERT_PREDICTOR and not offloads:
        raise ConfigurationError(
            f"expert_predictor={config.expert_predictor!r}: is for experts in host memory; set "
            "memory=['auto', 'offload_experts'], or leave it out"
        )
    if config.memory is None:
        return
    if "optimizer_in_backward" in entries:
        _check_in_backward(config)
    if "offload_frozen_weights" in entries and not config.use_fp8:
        raise ConfigurationError(
            "memory=['offload_frozen_weights']: moves weights that FP8 stands in for; set "
            "use_fp8=True, or leave it out"
        )
    whole = sorted(WHOLE_LAYERS.intersection(entries))
    if "recompute_elementwise" in entries and whole:
        raise ConfigurationError(
            f"memory={entries}: {whole[0]} makes everything again; leave out the other"
        )
    for switch, entry in ALIASES.items():
        same = RECOMPUTE | WHOLE_LAYERS if entry in RECOMPUTE else {entry}
        is_entered = not same.isdisjoint(entries)
        if switch in config.explicit and getattr(config, switch) != is_entered:
            raise ConfigurationError(
                f"memory={entries} and {switch}={getattr(config, switch)}: they contradict; "
                "keep one"
            )


def _check_in_backward(config: ChronicalsConfig) -> None:
    """Refuse fields that need several gradients at once.

    With ``optimizer_in_backward`` each gradient is used and freed when it is computed, so nothing
    may need all of them, or the sum of several, before the update.
    """
    remedies: dict[str, str] = {}
    if config.max_grad_norm is not None:
        remedies["max_grad_norm"] = "inf"
    if config.gradient_accumulation_steps > 1:
        remedies["gradient_accumulation_steps"] = "1"
    if config.mixed_precision == "fp16":
        remedies["mixed_precision"] = "'bf16'"
    if not remedies:
        return
    wrong = " and ".join(f"{name}={getattr(config, name)!r}" for name in remedies)
    remedy = ", ".join(f"{name}={instead}" for name, instead in remedies.items())
    raise ConfigurationError(
        "memory=['optimizer_in_backward']: updates a weight before the other gradients "
        f"are there, which {wrong} cannot go with; set {remedy}, or leave out "
        "optimizer_in_backward"
    )
