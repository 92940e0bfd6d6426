"""The memory that a run needs on each GPU: an estimate, a check that it fits, and advice.

``refuse_what_cannot_fit`` is the check before the first step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from chronicals.attention import BACKENDS, FLASH
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.memory_entries import ALIASES, RECOMPUTE
from chronicals.kernels import adamw, adamw_8bit
from chronicals.kernels.host_memory import available_memory
from chronicals.lora import adapters, has_magnitudes
from chronicals.memory import (
    LAYERS,
    RESERVE,
    Estimate,
    StepShape,
    WeightBytes,
    decoder_layers,
    estimate,
)
from chronicals.memory.layer_elements import AdapterColumns, HostLayers
from chronicals.memory.peak import FROZEN_WEIGHTS, PACKED_WEIGHTS, PADDING, WORKSPACES
from chronicals.model_shape import ModelShape
from chronicals.models import input_device
from chronicals.objectives import OBJECTIVES
from chronicals.optimizers import moment_bytes
from chronicals.policies.facts import GATHERED_TYPES, Facts
from chronicals.policies.policy import MemoryLoad, Remedy, policies, policies_by_cost
from chronicals.quantization import Dense, columns_for, packed_modules, packed_words

logger = logging.getLogger(__name__)

FILLED = 0.95
"""Fraction of a GPU's memory that tensors can fill; the allocator loses some between blocks."""

LENGTH_STEP = 256
"""Tokens to which the longest length that fits is rounded down."""

GIB = 2**30

HOST_SHARE = 0.9
"""Share of the host's free memory that inputs of layers and results of attention may take; the system
needs the rest.
"""

WORKSPACE_BYTES = 32 << 20
"""Bytes of a workspace on Hopper: 4096 · 8 KiB (``parseChosenWorkspaceSize`` of torch's CUDABlas)."""

PRODUCT_OF = {
    "q_proj": "queries",
    "k_proj": "queries",
    "v_proj": "queries",
    "qkv_proj": "queries",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "gate",
    "gate_up_proj": "gate",
    "down_proj": "down",
}
"""Product of a fused layer that a linear layer belongs to, by the layer's name."""

DROPPED_TENSORS = 2
"""Tensors that dropout keeps of its input on the CPU: what it returns, and fp32 factors."""

MEASURED_WAYS = 3
"""Remedies whose bytes are named after a card is full; those that cost only time come first."""


def expected_memory(facts: Facts) -> tuple[bool, Estimate]:
    """Return whether gradients are summed and freed in the backward pass, and the estimate.

    They are if asked for, or if all gradients together would not fit. CUDA graphs that nobody asked
    for are left out where the gradients that stay for them do not fit, and others do.
    """
    config = facts.config
    shares_states = facts.ranks > 1 and config.sharding != "none" and not facts.divides_weights
    may_free = shares_states and facts.context == 1
    frees = may_free and "reduce_in_backward" in config.memory_policies
    memory = _estimated(facts, frees)
    wants_graphs = config.use_cuda_graphs and "use_cuda_graphs" in config.explicit
    if memory.fits or wants_graphs:
        return frees, memory
    if may_free and config.card_decides:
        return True, _estimated(facts, True)
    if config.use_cuda_graphs:
        eager = replace(facts, config=config.fitted(use_cuda_graphs=False))
        without = _estimated(eager, frees)
        if without.fits:
            return frees, replace(without, without_graphs=True)
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


def _step_shape(facts: Facts) -> StepShape:
    """Return the shape of a step of a run without policies."""
    config = facts.config
    # FlashAttention 4 leaves room for an adapter's columns behind what it returns.
    copies = adapts_output(facts.model) and facts.backend != "flash-attn-4"
    return StepShape(
        tokens=config.batch_size * config.max_seq_length,
        fused=facts.fuses_halves,
        element=facts.element,
        logit_rows=config.logits_chunk_size,
        magnitudes=has_magnitudes(facts.model),
        copies_attended=facts.fuses_halves and copies,
        head_bytes=OBJECTIVES[config.objective].head_bytes,
        repeats_keys=not facts.on_host and config.mixed_precision == "fp32",
        gathers_keys=facts.packed and OBJECTIVES[config.objective].shares_prompts(),
        columns=adapter_columns(facts.model) if facts.fuses_halves else AdapterColumns(),
        on_host=host_layers(facts.model) if facts.on_host else None,
    )


def _plain_load(facts: Facts) -> MemoryLoad:
    """Return what a run without policies holds, which policies change one after the other."""
    config = facts.config
    count = sum(p.numel() for p in facts.trained)
    accumulates = config.gradient_accumulation_steps > 1
    # Trained bf16 weights leave the lower half of an fp32 master to the optimizer's states.
    splits = config.mixed_precision == "bf16" and not config.use_lora
    return MemoryLoad(
        step=_step_shape(facts),
        frozen=Dense.bytes_a_value(facts.element),
        weight=2 if splits else 4,
        states=full_state_bytes(config, count) / max(count, 1),
        gradient=4 if accumulates or facts.ranks > 1 or not splits else 2,
        gradients_stay=accumulates,
    )


def _estimated(facts: Facts, frees: bool) -> Estimate:
    """Return the estimate of a run with all policies that it asks for."""
    load = _plain_load(facts)
    names = asked_for(facts, frees)
    for policy in sorted(policies(), key=lambda policy: policy.shares):
        if policy.name in names:
            load = policy.bytes(facts, load)
    stays = load.gradient if load.gradients_stay else 0
    weights = WeightBytes(
        load.frozen,
        load.weight + load.states + stays,
        load.gradient - stays,
        states=load.states,
        standing=stays,
    )
    memory = estimate(facts.model, load.step, weights)
    gradients = memory.gradients + load.gradients
    memory = replace(
        memory,
        fixed=memory.fixed + load.fixed,
        gradients=gradients,
        head_copy=load.head_copy,
        total=facts.total,
        away=load.host,
        pooled=load.pooled,
    )
    if load.moved:
        memory = memory.beside(FROZEN_WEIGHTS, -load.moved)
    if facts.fuses_halves:
        memory = memory.beside(PADDING, padding_bytes(facts, load.step))
    if facts.on_host:
        memory = replace(memory, update=host_update_bytes(facts))
    elif input_device(facts.model).type != "cpu":  # a plan's model is on the meta device
        memory = memory.beside(WORKSPACES, WORKSPACE_BYTES * load.workspaces)
    formats = sorted({module.format for _, module in packed_modules(facts.model)})
    if formats:
        memory = memory.renamed(PACKED_WEIGHTS, f"weights in {' and '.join(formats)}")
    for name, held in facts.frozen_models.items():
        memory = memory.beside(f"{name}, frozen", held.size)
    if load.step.layer_tiles is None:
        return memory
    if load.step.offloads:
        memory = memory.moving_inputs(layers_away(facts, memory, memory.kept[LAYERS]))
    if not keeps_results(facts, load.step):
        return memory
    memory = memory.keeping_results()
    # A plan does not know the host, and counts on no room for what only saves time.
    if not load.step.offloads or facts.planned:
        return memory
    count = memory.results_here + layers_away(facts, memory, memory.result)
    return replace(memory, kept_results=min(memory.layers, count))


def layers_away(facts: Facts, memory: Estimate, each: int) -> int:
    """Return the number of layers of which the host's free memory holds something more, at most all.

    A plan does not know the host of its cards: there all do.

    Args:
        facts: of the run.
        memory: estimate of a run whose layers run in tiles.
        each: bytes of a layer.
    """
    free = None if facts.planned else available_memory()
    if free is None:
        return memory.layers
    taken = memory.in_host_memory(LAYERS)
    room = int(HOST_SHARE * free / processes_here(facts)) - sum(taken.values())
    return min(memory.layers, max(room, 0) // max(each, 1))


def processes_here(facts: Facts) -> int:
    """Return the number of processes on this machine, which share its memory evenly.

    All of the run, where a launcher says nothing of it.
    """
    told = facts.here or int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return min(told or facts.ranks, facts.ranks)


def keeps_results(facts: Facts, step: StepShape) -> bool:
    """Return whether layers in tiles keep what attention gives, where there is memory for it.

    That is little beside what the backward pass computes again, if the backend saves nothing else:
    FlashAttention does so for heads of a width that is not padded, and keys that are not gathered.
    """
    if facts.backend not in FLASH or step.gathers_keys or facts.context > 1:
        return False
    support = BACKENDS[facts.backend].support("cuda")
    shape = ModelShape.of(facts.model.config)
    head_dim = shape.head_dim or shape.width // (shape.heads or 1)
    return support is not None and head_dim % support.multiple == 0


def cache_room(fillable: int, peak: int, held: int) -> int:
    """Return the bytes that keys and values may take while no step runs.

    It is what the peak of training leaves of the memory that a run may fill, or the memory that
    steps give back where that is more: there pages and activations take turns.

    Args:
        fillable: bytes of the card that the run may fill.
        peak: bytes at the largest moment of a step; 0 if there was none.
        held: bytes that are held now.
    """
    peak = max(peak, held)
    return max(int(FILLED * fillable) - peak, peak - held)


def adapter_columns(model: Any) -> AdapterColumns:
    """Return the columns that fused products keep for the adapters of a decoder layer."""
    ranks = dict.fromkeys(PRODUCT_OF.values(), 0)
    layers = decoder_layers(model)
    for path, adapter in adapters(layers[0]) if layers else ():
        product = PRODUCT_OF.get(path.rpartition(".")[2])
        if product is not None:
            ranks[product] += len(adapter.pair[0])
    return AdapterColumns(**{name: columns_for([rank]) for name, rank in ranks.items()})


def host_layers(model: Any) -> HostLayers:
    """Return what decoder layers keep on the CPU, as the first one does."""
    layers = decoder_layers(model)
    if not layers:
        return HostLayers()
    kept = dict.fromkeys(PRODUCT_OF.values(), 0)
    dropping = set()  # names of layers, of which a mixture has one for each expert
    trains_norms = False
    for path, module in layers[0].named_modules():
        name = path.rpartition(".")[2]
        is_trained = any(p.requires_grad for p in module.parameters())
        if "norm" in path:
            trains_norms = trains_norms or is_trained
        elif name in PRODUCT_OF and is_trained:
            if getattr(module, "dropout", 0.0):
                dropping.add(name)
            else:
                kept[PRODUCT_OF[name]] = 1
    for name in dropping:
        kept[PRODUCT_OF[name]] += DROPPED_TENSORS
    columns = sum(len(adapter.pair[0]) for _, adapter in adapters(layers[0]))
    return HostLayers(trains_norms=trains_norms, columns=columns, **kept)


def host_update_bytes(facts: Facts) -> int:
    """Return the bytes of fp32 copies of the largest trained weight, in plain torch's update."""
    config = facts.config
    copies = adamw.REFERENCE_COPIES
    if master_bytes(config, 1):
        copies = adamw.REFERENCE_COPIES_OF_MASTERS
    elif config.use_8bit_optimizer:
        copies = adamw_8bit.REFERENCE_COPIES
    return 4 * copies * max((p.numel() for p in facts.trained), default=0)


def padding_bytes(facts: Facts, step: StepShape) -> int:
    """Return the bytes of rows and columns for adapters around the fused weights (``Dense``).

    Around packed weights they are in the buffers of dequantised ones, of which there is one a
    shape, and around divided ones in those of gathered ones.
    """
    shape = ModelShape.of(facts.model.config)
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    sizes = {
        "queries": (queries + 2 * keys, shape.width),
        "output": (shape.width, queries),
        "gate": (2 * shape.inner, shape.width),
        "down": (shape.width, shape.inner),
    }
    values = 0
    for name, (outputs, width) in sizes.items():
        columns = getattr(step.columns, name)
        values += columns * (outputs + width + columns)
    copies = 1 if facts.divides_weights or packed_words(facts.model) else shape.layers
    return values * copies * step.element


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
    largest = 0
    for layer in decoder_layers(facts.model):
        largest = max(largest, sum(p.numel() for p in layer.parameters()))
    return largest * GATHERED_TYPES[facts.config.mixed_precision].itemsize


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


def refuse_what_cannot_fit(
    config: ChronicalsConfig,
    memory: Estimate,
    policy: str | None,
    estimated: Callable[[int], Estimate],
    ranks: int = 1,
) -> None:
    """Check that the run is expected to fit in its GPU's memory.

    Args:
        config: the configuration of the run.
        memory: estimate for the run as configured.
        policy: what every layer recomputes; None if the estimate chooses.
        estimated: returns the estimate of the run for a ``max_seq_length``.
        ranks: number of processes that train together.

    Raises:
        ConfigurationError: it is not; the message names remedies.
    """
    if not memory.total:
        return

    def held_by(estimate: Estimate) -> int:
        return estimate.needed(*(estimate.choice() if policy is None else (policy, 0)))

    held = held_by(memory)
    filled = FILLED * memory.total
    logger.info(
        "memory: at most %.1f GiB expected, of %.1f on the card", held / GIB, memory.total / GIB
    )
    if not config.check_memory or held <= filled:
        return
    length = longest_that_fits(
        config.max_seq_length, lambda length: held_by(estimated(length)) <= filled
    )
    shorter = f"the longest max_seq_length that fits as the run is set is {length:,}"
    if length == 0:
        shorter = (
            f"weights and states alone take {memory.fixed / GIB:.1f} GiB, so no shorter "
            "max_seq_length helps"
        )
    message = (
        f"max_seq_length={config.max_seq_length}: a step would hold about {held / GIB:.1f} GiB, "
        f"and of the card's {memory.total / GIB:.1f} GiB tensors fill at most "
        f"{filled / GIB:.1f}: {(held - filled) / GIB:.1f} GiB are short; {shorter}."
    )
    if memory.moved_inputs is not None and memory.moved_inputs < memory.layers:
        message += (
            f" Inputs of {memory.moved_inputs} of {memory.layers} layers are in host memory, "
            f"{memory.kept[LAYERS] / GIB:.2f} GiB each, which has no room for those of others."
        )
    ways = ways_to_take_less(config, ranks, shorter_rows=False)
    if ways:
        message += f" Less is taken by {'; or '.join(ways)}."
    raise ConfigurationError(f"{message} To start it all the same, set check_memory=False")


def longest_that_fits(asked: int, fits: Callable[[int], bool]) -> int:
    """Return the largest multiple of ``LENGTH_STEP`` below ``asked`` that ``fits``, else 0.

    Found by bisection.
    """
    below = 0
    above = -(-asked // LENGTH_STEP)
    while above - below > 1:
        middle = (below + above) // 2
        if fits(middle * LENGTH_STEP):
            below = middle
        else:
            above = middle
    return below * LENGTH_STEP


def ways_to_take_less(
    config: ChronicalsConfig,
    ranks: int = 1,
    shorter_rows: bool = True,
    saved: Callable[[Mapping[str, Any]], str | None] | None = None,
) -> list[str]:
    """Return the remedies of ``what_helps`` in words.

    Args:
        config: the configuration that does not fit.
        ranks: number of processes that train together.
        shorter_rows: include the last one, a shorter ``max_seq_length``.
        saved: returns in words what the fields of a remedy save, None if that is nothing; those of
            the first ``MEASURED_WAYS`` are named.
    """
    words: list[str] = []
    for fields, price in what_helps(config, ranks):
        if "max_seq_length" in fields and not shorter_rows:
            continue
        named = " with ".join(f"{field}={value}" for field, value in fields.items())
        beside = [price] if price else []
        size = "" if saved is None else saved(fields)
        if size is None:
            continue
        if size and len(words) < MEASURED_WAYS:
            beside.insert(0, size)
        words.append(f"{named} ({', '.join(beside)})" if beside else named)
    return words


def what_helps(config: ChronicalsConfig, ranks: int = 1) -> list[Remedy]:
    """Return the remedies of all policies, those that cost only time first.

    Args:
        config: the configuration that does not fit.
        ranks: number of processes that train together.
    """
    remedies: list[Remedy] = []
    for policy in policies_by_cost():
        remedies += policy.remedies(config, ranks)
    return sorted(remedies, key=lambda remedy: bool(remedy.price))


def leanest_memory(config: ChronicalsConfig, ranks: int) -> set[str]:
    """Return the entries of ``memory`` with all that save memory at the cost of time only."""
    entries: set[str] = set(config.memory_policies - RECOMPUTE)
    for policy in policies():
        if policy.only_time:
            entry = ALIASES.get(policy.name, policy.name)
            entries.discard(entry)
            if policy.spares(config, ranks):
                entries.add(entry)
    return entries


def agreeing_switches(config: ChronicalsConfig) -> dict[str, bool]:
    """Return the switches that were set and must agree with the leanest ``memory``."""
    return dict.fromkeys(sorted(ALIASES.keys() & config.explicit), True)
