"""Estimate of the bytes that a run needs on each GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.lora import adapters, has_magnitudes
from chronicals.memory import RESERVE, Estimate, StepShape, WeightBytes, decoder_layers, estimate
from chronicals.optimizers import moment_bytes
from chronicals.policies.facts import GATHERED_TYPES, PRODUCT_TYPES, Facts
from chronicals.policies.policy import MemoryLoad, policies
from chronicals.quantization import Dense


def expected_memory(facts: Facts) -> tuple[bool, Estimate]:
    """Return whether gradients are summed and freed in the backward pass, and the estimate.

    They are if asked for, or if all gradients together would not fit.
    """
    config = facts.config
    shares_states = facts.ranks > 1 and config.sharding != "none" and not facts.divides_weights
    may_free = shares_states and facts.context == 1
    frees = may_free and "reduce_in_backward" in config.memory_policies
    memory = _estimated(facts, frees)
    wants_graphs = config.use_cuda_graphs and "use_cuda_graphs" in config.explicit
    if may_free and config.memory is None and not wants_graphs and not memory.fits:
        return True, _estimated(facts, True)
    return frees, memory


def asked_for(facts: Facts, frees: bool) -> set[str]:
    """Return the names of the policies that the configuration asks for or permits.

    Args:
        facts: of the run.
        frees: True if gradients are summed and freed in the backward pass; memory may require it
            even if nobody asks for it.
    """
    names = {policy.name for policy in policies() if policy.asked(facts.config)}
    names.discard("reduce_in_backward")
    return names | {"reduce_in_backward"} if frees else names


def _estimated(facts: Facts, frees: bool) -> Estimate:
    """Return the estimate of a run with all policies that it asks for."""
    names = asked_for(facts, frees)
    load = _plain_load(facts)
    for policy in sorted(policies(), key=lambda policy: policy.shares):
        if policy.name in names:
            load = policy.bytes(facts, load)
    stays = load.gradient if load.gradients_stay else 0
    weights = WeightBytes(load.frozen, load.weight + load.states + stays, load.gradient - stays)
    memory = estimate(facts.model, load.step, weights)
    return replace(
        memory,
        fixed=memory.fixed + load.fixed,
        gradients=memory.gradients + load.gradients,
        total=facts.total,
    )


def _plain_load(facts: Facts) -> MemoryLoad:
    """Return the bytes of a run without any policy."""
    config = facts.config
    element = PRODUCT_TYPES[config.mixed_precision].itemsize
    count = sum(p.numel() for p in facts.trained)
    several = config.gradient_accumulation_steps > 1 or facts.ranks > 1
    # FlashAttention 4 leaves room for an adapter's columns behind what it returns.
    copies = adapts_output(facts.model) and facts.backend != "flash-attn-4"
    step = StepShape(
        tokens=config.batch_size * config.max_seq_length,
        fused=facts.fuses_whole_layers,
        element=element,
        logit_rows=config.logits_chunk_size,
        magnitudes=has_magnitudes(facts.model),
        copies_attended=facts.fuses_whole_layers and copies,
    )
    return MemoryLoad(
        step=step,
        frozen=Dense.bytes_a_value(element),
        weight=2 if facts.splits_weights else 4,
        states=full_state_bytes(config, count) / max(count, 1),
        gradient=4 if several or not facts.splits_weights else 2,
        gradients_stay=config.gradient_accumulation_steps > 1,
    )


def adapts_output(model: Any) -> bool:
    """Return whether the output product of attention has adapters."""
    return any(path.endswith("o_proj") for path, _ in adapters(model))


def layers_that_stay(memory: Estimate, policy: str, again: int | None, size: int) -> int:
    """Return how many of the last layers may stay gathered between both passes in spare memory.

    Args:
        memory: expected of the run without them.
        policy: what every layer recomputes.
        again: number of layers that are recomputed whole, None for all; with any, none stays.
        size: bytes of the largest layer, gathered.
    """
    if not memory.total or again != 0 or policy not in memory.kept:
        return 0
    spare = int(RESERVE * memory.total) - memory.needed(policy)
    return max(0, min(memory.layers, spare // size))


def gathered_bytes(facts: Facts) -> int:
    """Return the bytes of the largest decoder layer, gathered to be trained."""
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(facts.model)]
    return max(sizes) * GATHERED_TYPES[facts.config.mixed_precision].itemsize


def full_state_bytes(config: ChronicalsConfig, count: int) -> int:
    """Return the bytes of the states of ``count`` trained values, without 8-bit moments."""
    each = 2 if config.optimizer_state_dtype == "bf16" else 4
    return 2 * count * each + master_bytes(config, count)


def master_bytes(config: ChronicalsConfig, count: int) -> int:
    """Return the bytes of the lower halves of fp32 masters, which bf16 weights have."""
    splits = config.mixed_precision == "bf16" and not config.use_lora
    return 2 * config.master_weights * splits * count


def state_bytes(config: ChronicalsConfig, model: Any, weights: Sequence[Tensor]) -> int:
    """Return the bytes of both moments and of the masters of these trained weights."""
    count = sum(p.numel() for p in weights)
    if config.use_8bit_optimizer:
        return master_bytes(config, count) + moment_bytes(model, weights)
    return full_state_bytes(config, count)
