"""What a run is expected to hold on each card, and how weights are shared where that does not
fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import Mesh, divided_among, on_each_machine, why_embedding_stays_whole
from chronicals.lora import adapters, has_magnitudes
from chronicals.memory import (
    CHEAP,
    LAYERS,
    NOTHING,
    RESERVE,
    Estimate,
    StepShape,
    WeightBytes,
    card_memory,
    decoder_layers,
    estimate,
    makes_tiles,
    recomputes,
)
from chronicals.memory.tiling import TILE
from chronicals.models import embedding_table, input_device
from chronicals.optimizers import buffer_bytes, moment_bytes, states_in_host_memory
from chronicals.quantization import FP8, Dense, FP8InHost
from chronicals.training.weight_sharding import (
    DTYPES,
    PRODUCTS,
    WEIGHTS,
    check_divisible,
    trains_layers,
    why_not_cut,
    why_not_divisible,
)


def expected_memory(
    config: ChronicalsConfig,
    model: Any,
    ranks: int,
    context: int,
    whole: bool,
    in_fp8: Callable[[int, int], bool] | None = None,
    total: int | None = None,
    pads_attended: bool = False,
) -> tuple[bool, Estimate]:
    """What each of so many processes holds, and whether it sums gradients in the backward pass to
    free them: as asked, or where all of them would not fit.

    Args:
        model: with adapters, if any; may be on the meta device.
        whole: whether decoder layers run fused.
        in_fp8: as for ``StepShape``.
        total: bytes of a card; by default those of the model's device.
        pads_attended: attention leaves room for an adapter's columns behind what it returns.
    """
    sharded = ranks > 1 and config.sharding != "none"
    tokens = config.batch_size * config.max_seq_length // context
    if sharded and config.sharding == WEIGHTS:
        among = sharing_of(config, model, ranks, total)
        held = _memory_of(model) if total is None else total
        check_divisible(model, config, among)
        return False, _with_weights_divided(config, model, tokens, whole, among, held)
    states = _states_on_device(config, model)
    if sharded:  # beside the states of a share, the share itself and the sums of its gradients
        states = (states + (2 if _splits(config) else 4) + 4) / ranks

    def estimated(frees: bool) -> Estimate:
        narrow, frozen, trained, gradient = _bytes(
            config, PRODUCTS[config.mixed_precision], ranks, states, frees
        )
        kept = gradient * _keeps_gradients(config, divided=False)
        step = step_shape(config, model, tokens, whole, narrow, in_fp8, pads_attended)
        found = estimate(model, step, WeightBytes(frozen, trained + kept, gradient - kept))
        return found if total is None else replace(found, total=total)

    frees = "reduce_in_backward" in config.memory_policies and sharded and context == 1
    needed = estimated(frees)
    wants_graphs = config.use_cuda_graphs and "use_cuda_graphs" in config.explicit
    if sharded and context == 1 and config.memory is None and not wants_graphs and not needed.fits:
        return True, estimated(True)
    return frees, needed


def _with_weights_divided(
    config: ChronicalsConfig, model: Any, tokens: int, whole: bool, among: int, total: int
) -> Estimate:
    """What each process holds where weights are divided among so many: shares, two layers that are
    gathered, and where layers are trained the gradients of one before and after they are summed,
    and all of the embedding and the head; where they are frozen, all of the head.

    Args:
        model: whose frozen layers may be divided already.
    """
    product = PRODUCTS[config.mixed_precision].itemsize
    frozen = float(product)
    states = _states_on_device(config, model)
    full = trains_layers(model)
    gathered = DTYPES[config.mixed_precision].itemsize
    if full:
        states -= 2 * config.master_weights * _splits(config)  # shards are whole fp32 weights
        trained = (4 + states) / among
        gradient = 4 / among
        frozen = gathered / among
    else:
        trained = 4 + (states + 8) / among
        gradient = 4.0
    kept = gradient * _keeps_gradients(config, divided=full)
    step = step_shape(config, model, tokens, whole, product)
    found = estimate(model, step, WeightBytes(frozen, trained + kept, gradient - kept))
    layers = decoder_layers(model)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    if full:
        others = sum(p.numel() for p in model.parameters()) - sum(sizes)
        extra = max(sizes) * (3 * gathered + 8) + others * gathered
        summed = others * (gathered + 4)
    else:
        extra = _beside_frozen_shares(model, product, among)
        summed = 0
    stays = summed * _keeps_gradients(config, divided=full)
    return replace(
        found,
        fixed=found.fixed + extra + stays,
        total=total,
        gradients=found.gradients + summed - stays,
    )


def step_shape(
    config: ChronicalsConfig,
    model: Any,
    tokens: int,
    fused: bool,
    element: int,
    in_fp8: Callable[[int, int], bool] | None = None,
    pads_attended: bool = False,
) -> StepShape:
    """Return how a step of so many tokens computes, by what is asked for; see ``StepShape`` and
    ``expected_memory``.
    """
    adapted = any(path.endswith("o_proj") for path, _ in adapters(model))
    return StepShape(
        tokens=tokens,
        fused=fused,
        element=element,
        logit_rows=config.logits_chunk_size,
        in_fp8=in_fp8,
        magnitudes=has_magnitudes(model),
        copies_attended=fused and adapted and not pads_attended,
        tile=TILE if "tiled_mlp" in config.memory_policies and makes_tiles(tokens) else 0,
        offloads="offload_activations" in config.memory_policies,
    )


def asked_recomputation(config: ChronicalsConfig) -> str | None:
    """Return what every layer recomputes where the configuration says so; None where the memory
    decides.
    """
    if "recompute_layers" in config.memory_policies:
        return LAYERS
    if "recompute_elementwise" in config.memory_policies:
        return CHEAP
    if config.memory is not None or not config.use_gradient_checkpointing:
        return NOTHING
    return None


def fixed_recomputation(config: ChronicalsConfig, model: Any) -> str | None:
    """Return what every layer recomputes whatever the memory; None where the memory decides."""
    asked = asked_recomputation(config)
    if asked is None and recomputes(model):
        return LAYERS
    if asked is None and not getattr(model, "supports_gradient_checkpointing", False):
        return NOTHING
    return asked


def layers_that_stay(needed: Estimate, policy: str, again: int | None, size: int) -> int:
    """How many of the last layers may stay gathered between both passes, in what is spare beside
    the recomputation chosen.

    Args:
        policy, again: what is recomputed of every layer, and how many layers are whole, None for
            all; with any, none stays.
        size: bytes of the largest layer, gathered.
    """
    if not needed.total or again != 0 or policy not in needed.kept:
        return 0
    spare = int(RESERVE * needed.total) - needed.needed(policy)
    return max(0, min(needed.layers, spare // size))


def gathered_bytes(config: ChronicalsConfig, model: Any) -> int:
    """Of the largest decoder layer, where layers are trained."""
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    return max(sizes) * DTYPES[config.mixed_precision].itemsize


def _beside_frozen_shares(model: Any, product: int, among: int) -> int:
    """What frozen weights take where they are divided among so many, less what they take as they
    are: shares, two layers that are gathered, and where products read whole weights in place, a
    dense layer that they read instead."""
    sizes = 0
    here = 0
    gathered = 0
    read = 0
    for layer in decoder_layers(model):
        held: dict[Any, int] = {
            module: size for module in layer.modules() if (size := frozen_bytes(module, product))
        }
        whole = sum(held.values())
        sizes = sizes + whole
        gathered = max(gathered, whole)
        here += sum(size // divided_among(module) for module, size in held.items())
        in_place = (m for m in held if divided_among(m) == 1 and m.weight.is_floating_point())
        read = max(read, sum(held[module] for module in in_place))
    extra = sizes // among - here + 2 * gathered + read
    if (
        why_embedding_stays_whole(model, among) is None
        and divided_among(model.get_input_embeddings()) == 1
    ):
        extra -= embedding_table(model).numel() * (among - 1) // among * product
    return extra


def _memory_of(model: Any) -> int:
    """Bytes of the card that a model runs on, though its weights may be elsewhere as yet; 0
    without one.
    """
    return card_memory(input_device(model))


def frozen_bytes(module: Any, product: int) -> int:
    """Of a frozen linear layer's weight, as it is held by all ranks that divide it."""
    if not hasattr(module, "out_features") or any(
        p.requires_grad for p in module.parameters(recurse=False)
    ):
        return 0
    held = sum(
        p.numel() * (product if p.is_floating_point() else 1)
        for p in module.parameters(recurse=False)
    )
    return held * divided_among(module) + sum(
        buffer.nbytes for buffer in module.buffers(recurse=False)
    )


def choose_sharding(
    config: ChronicalsConfig, model: Any, ranks: int, total: int, here: int | None = None
) -> str:
    """``sharding`` as asked; where nothing is asked, the weights are divided if they can be, and do
    not fit a card of so many bytes whole.

    Args:
        model: as it was loaded; adapters that the run attaches may be there or not.
        here: processes of a machine; by default as torchrun says.
    """
    if ranks == 1 or "sharding" in config.explicit or not total or not decoder_layers(model):
        return config.sharding
    kept = [(p, p.requires_grad) for p in model.parameters()]
    frozen = config.use_lora and not hasattr(model, "chronicals_lora")
    try:
        for p, trained in kept:
            p.requires_grad_(trained and not frozen)
        fits = expected_memory(config, model, ranks, config.context_parallel, True, None, total)[
            1
        ].fits
        return (
            config.sharding
            if fits or why_not_divided(config, model, ranks, total, here)
            else WEIGHTS
        )
    finally:
        for p, trained in kept:
            p.requires_grad_(trained)


def why_not_divided(
    config: ChronicalsConfig,
    model: Any,
    ranks: int,
    total: int | None = None,
    here: int | None = None,
) -> str | None:
    """Why the weights of a model cannot be divided among processes where nobody asks for it; None
    where they can.

    Args:
        total, here: as for ``sharing_of``.
    """
    for field in (
        ("use_cuda_graphs", "use_torch_compile") if trains_layers(model) else ("use_torch_compile",)
    ):
        if getattr(config, field) and field in config.explicit:
            return f"{field}=True cannot be honoured where weights are gathered for each layer"
    if config.sections.get("router", {}).get("anchor"):
        return "the anchor of routers replays tokens through whole weights"
    return why_not_divisible(model, config) or why_not_cut(
        model, config, sharing_of(config, model, ranks, total, here)
    )


def with_sharding(config: ChronicalsConfig, model: Any, ranks: Mesh) -> ChronicalsConfig:
    """The configuration with what ``choose_sharding`` says for the cards of all processes, which
    must all ask.
    """
    if ranks.count == 1 or "sharding" in config.explicit or not (total := smallest_card(ranks)):
        return config
    chosen = choose_sharding(config, model, ranks.count, total, on_each_machine(ranks))
    return config if chosen == config.sharding else config.fitted(sharding=chosen)


def smallest_card(ranks: Mesh) -> int:
    """Bytes of the smallest card of all processes, which must all ask; 0 without cards."""
    device = ranks.device
    if device.type != "cuda":
        return 0
    return min(ranks.gather_values(card_memory(device)))


def sharing_of(
    config: ChronicalsConfig,
    model: Any,
    ranks: int,
    total: int | None = None,
    here: int | None = None,
) -> int:
    """How many neighbours share one copy of the weights: as asked, or those of a machine where that
    fits their cards, else all.

    Args:
        total: bytes of a card; by default those of the model's device.
        here: processes of a machine; by default as torchrun says.
    """
    asked = config.sharding_ranks
    if asked is None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if here is None else here
        if not 1 < here < ranks or ranks % here:
            return ranks
        tokens = config.batch_size * config.max_seq_length // config.context_parallel
        fits = _with_weights_divided(
            config, model, tokens, True, here, _memory_of(model) if total is None else total
        ).fits
        return here if fits else ranks
    if asked < 2 or ranks % asked:
        raise ConfigurationError(
            f"sharding_ranks={asked}: {ranks} processes cannot share weights {asked} by {asked}; "
            f"take a divisor of {ranks} "
            "from 2 on, or leave it out"
        )
    return asked


def _states_on_device(config: ChronicalsConfig, model: Any) -> float:
    """Bytes of the optimizer states of a trained weight, in the mean: buffers instead of those
    in host memory.
    """
    moved = (
        states_in_host_memory(model) if "offload_optimizer_states" in config.memory_policies else []
    )
    away = {id(p) for p in moved}
    trained = [p for p in model.parameters() if p.requires_grad]
    here = state_bytes(config, model, [p for p in trained if id(p) not in away])
    return (here + buffer_bytes(state_bytes(config, model, moved))) / max(
        sum(p.numel() for p in trained), 1
    )


def state_bytes(config: ChronicalsConfig, model: Any, weights: Sequence[Tensor]) -> int:
    """Of both moments of these trained weights and, in bf16, the lower halves of their masters."""
    count = sum(p.numel() for p in weights)
    lows = 2 * config.master_weights * _splits(config) * count
    if config.use_8bit_optimizer:
        return lows + moment_bytes(model, weights)
    return lows + 2 * count * (2 if config.optimizer_state_dtype == "bf16" else 4)


def _splits(config: ChronicalsConfig) -> bool:
    """Whether trained weights are in bf16, which leaves a lower half of a master."""
    return config.mixed_precision == "bf16" and not config.use_lora


def _bytes(
    config: ChronicalsConfig, product_type: torch.dtype, ranks: int, states: float, frees: bool
) -> tuple[int, float, float, float]:
    """Of an activation, of a frozen weight, with what it is in FP8, of a trained one with
    ``states``, and of its gradient.

    Args:
        frees: gradients are summed over the ranks in the backward pass, and freed.
    """
    narrow = product_type.itemsize
    split = _splits(config)
    sums = config.gradient_accumulation_steps > 1 or ranks > 1 or not split or has_tiles(config)
    gradient = 0 if frees or "optimizer_in_backward" in config.memory_policies else 4 if sums else 2
    frozen = FP8InHost if leaves_the_card(config) else FP8 if config.use_fp8 else Dense
    return narrow, frozen.bytes_a_value(narrow), (2 if split else 4) + states, gradient


def _keeps_gradients(config: ChronicalsConfig, divided: bool) -> bool:
    """Whether gradients are there during a forward pass: those of the micro-batch before, or those
    that CUDA graphs write, which stay where they are; else activations make way for them.

    Args:
        divided: trained weights are divided among processes, so that there are no graphs.
    """
    return config.gradient_accumulation_steps > 1 or (config.use_cuda_graphs and not divided)


def has_tiles(config: ChronicalsConfig, context: int = 1) -> bool:
    return "tiled_mlp" in config.memory_policies and makes_tiles(
        config.batch_size * config.max_seq_length // context
    )


def leaves_the_card(config: ChronicalsConfig) -> bool:
    return "offload_frozen_weights" in config.memory_policies
