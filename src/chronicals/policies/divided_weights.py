"""Weights divided among processes (``sharding: weights``).

Trained weights are divided by FSDP, the frozen base of adapters as bytes.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch import Tensor

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import (
    Mesh,
    can_be_cut,
    divided_among,
    fingerprint_here,
    frozen_linears,
    gathers_of,
    is_divided,
    prove_alike,
    shard_embedding,
    shard_frozen,
    shard_weights,
    weight_mesh,
    whole_parts,
    why_embedding_stays_whole,
)
from chronicals.memory import decoder_layers
from chronicals.models import embedding_table, has_4bit_experts, kept_in_fp32
from chronicals.models.rows import STORED_ROWS, StoredRows
from chronicals.optimizers import moments_in_8_bits
from chronicals.patching.decoder_layer import names_of_products
from chronicals.policies.exclusions import why_excluded
from chronicals.policies.facts import GATHERED_TYPES, PRODUCT_TYPES, Facts, trains_layers
from chronicals.policies.needed_memory import adapts_output, master_bytes
from chronicals.policies.policy import Decision, MemoryLoad, policies
from chronicals.policies.step_time import StepWork
from chronicals.quantization import packed_layers

logger = logging.getLogger(__name__)

_BLOCK = 256
"""Elements that share a scale of 8-bit states."""


def check_divisible(facts: Facts, among: int) -> None:
    """Check that weights can be divided among ``among`` processes.

    Raises:
        ConfigurationError: they cannot.
    """
    reason = why_not_divisible(facts) or why_not_cut(facts, among)
    if reason:
        raise ConfigurationError(f"sharding='weights': {reason}; or take sharding='optimizer'")


def why_not_divisible(facts: Facts) -> str | None:
    """Return why weights cannot be divided among any number of processes; None if they can."""
    model = facts.model
    name = type(model).__name__
    if not decoder_layers(model):
        return f"{name} has no list of decoder layers"
    if facts.skips_layers:
        return (
            f"{name} skips layers at random, each process others, while all gather the same: "
            "set its layerdrop to 0"
        )
    if has_4bit_experts(model):
        return f"{name} has its experts in 4 bits, which stay whole: leave quantization out"
    asked = {policy.name for policy in policies() if policy.asked(facts.config)}
    excluded = why_excluded("divided weights", asked, facts)
    if excluded:
        return excluded
    if not trains_layers(facts.model):
        # Frozen weights are divided in their stored format.
        reasons = set()
        for layer in decoder_layers(model):
            reasons |= {linear.packed.why_whole for _, linear in packed_layers(layer)}
        reasons.discard(None)
        if not reasons:
            return None
        return "; ".join(sorted(map(str, reasons)))
    in_fp32 = sorted(kept_in_fp32(model, GATHERED_TYPES[facts.config.mixed_precision]))
    if in_fp32:
        return (
            f"{name} keeps {', '.join(in_fp32)} in fp32, and FSDP gathers the weights of a layer "
            "in one dtype"
        )
    excluded = why_excluded("divided trained weights", asked, facts)
    if excluded:
        return excluded
    if any(not p.is_floating_point() for p in model.parameters()):
        return f"weights of {name} are packed, and others of its layers are trained"
    for path, parameter in model.named_parameters():
        if not parameter.ndim:
            return f"{path} has no rows"
    return None


def why_not_cut(facts: Facts, among: int) -> str | None:
    """Return why rows of the weights cannot be divided among ``among`` ranks; None if they can."""
    model = facts.model
    if not trains_layers(facts.model):
        if any(can_be_cut(linear, among) for _, linear in frozen_linears(decoder_layers(model))):
            return None
        return (
            f"no frozen linear layer of its decoder layers has rows that can be divided by {among}"
        )
    if not facts.config.use_8bit_optimizer:
        return None
    in_8_bits = {id(p) for p in moments_in_8_bits(model)}
    for name, weight in model.named_parameters():
        if id(weight) not in in_8_bits:
            continue
        columns = weight.numel() // len(weight)
        if -(-len(weight) // among) * columns % _BLOCK:
            return (
                f"rows of {name} divided by {among} would cut blocks of 8-bit states; leave "
                "use_8bit_optimizer out"
            )
    return None


def load_of_shares(facts: Facts, among: int, load: MemoryLoad) -> MemoryLoad:
    """Return ``load`` for divided weights: shares, two gathered layers, and what stays whole.

    For trained weights this includes the gradients of one layer before and after their sum, and
    those of the whole embedding and head. For frozen ones it includes the whole head.

    Args:
        facts: facts of a model whose frozen layers may be divided already.
        among: number of processes that share a copy.
        load: bytes of the run without sharding.
    """
    config = facts.config
    model = facts.model
    # The copy of attention's output is counted for every backend, needed or not.
    copies = facts.fuses_halves and adapts_output(model)
    load = replace(load, step=replace(load.step, copies_attended=copies))
    if not trains_layers(facts.model):
        extra = _beside_frozen_shares(model, load.step.element, among)
        states = (load.states + 8) / among
        return replace(load, weight=4, states=states, gradient=4.0, fixed=extra)
    gathered = GATHERED_TYPES[config.mixed_precision].itemsize
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    others = sum(p.numel() for p in model.parameters()) - sum(sizes)
    whole = max(sizes) * (3 * gathered + 8) + others * gathered
    summed = others * (gathered + 4)
    # No CUDA graphs run with divided weights, so gradients stay only to be accumulated.
    stays = config.gradient_accumulation_steps > 1
    return replace(
        load,
        frozen=gathered / among,
        weight=0,
        # A shard is a whole fp32 weight, which needs no lower half of a master.
        states=(4 + (load.states - master_bytes(config, 1))) / among,
        gradient=4 / among,
        gradients_stay=stays,
        fixed=whole + (summed if stays else 0),
        gradients=0 if stays else summed,
    )


def with_gathered_weights(facts: Facts, work: StepWork, decision: Decision) -> StepWork:
    """Return ``work`` with what divided weights send in each micro-batch.

    Layers are gathered for both passes, but those that stay once; the gradients of trained ones are
    summed in the backward pass, in the dtype in which weights are gathered.

    Args:
        facts: of the run.
        work: without it.
        decision: on sharding.
    """
    config = facts.config
    others = (decision.among - 1) / decision.among
    if trains_layers(facts.model):
        element = GATHERED_TYPES[config.mixed_precision].itemsize
        whole = others * element * work.trained
        summed = whole
    else:
        element = PRODUCT_TYPES[config.mixed_precision].itemsize
        sizes = [
            frozen_bytes(module, element)
            for layer in decoder_layers(facts.model)
            for module in layer.modules()
        ]
        whole = others * sum(sizes)
        summed = 0.0
    passes = 1 + sum(each.is_of_trained_model for each in work.forwards)
    twice = 1 - decision.stay / max(work.memory.layers, 1)
    sent = (passes + twice) * whole + summed
    return replace(work, sent=work.sent + work.micro_batches * sent)


def _beside_frozen_shares(model: Any, element: int, among: int) -> int:
    """Return the bytes of divided frozen weights, minus their bytes without division.

    These are the shares, two gathered layers and, for products that otherwise read the whole weight
    in place, a dense layer.
    """
    total = 0
    here = 0
    gathered = 0
    read = 0
    for layer in decoder_layers(model):
        sizes: dict[Any, int] = {m: frozen_bytes(m, element) for m in layer.modules()}
        whole = sum(sizes.values())
        total += whole
        gathered = max(gathered, whole)
        in_place = 0
        for module, size in sizes.items():
            if not size:
                continue
            here += size // divided_among(module)
            if divided_among(module) == 1 and module.weight.is_floating_point():
                in_place += size
        read = max(read, in_place)
    extra = total // among - here + 2 * gathered + read
    whole_table = divided_among(model.get_input_embeddings()) == 1
    if why_embedding_stays_whole(model, among) is None and whole_table:
        extra -= embedding_table(model).numel() * (among - 1) // among * element
    return extra


def frozen_bytes(module: Any, element: int) -> int:
    """Return the bytes of a frozen linear layer's weight, summed over the ranks that divide it.

    Args:
        module: any module; one without a frozen weight has none.
        element: bytes of a value that is not packed.
    """
    parameters = list(module.parameters(recurse=False))
    if not hasattr(module, "out_features") or any(p.requires_grad for p in parameters):
        return 0
    size = sum(p.numel() * (element if p.is_floating_point() else 1) for p in parameters)
    buffers = sum(buffer.nbytes for buffer in module.buffers(recurse=False))
    return size * divided_among(module) + buffers


def divide_weights(model: Any, config: ChronicalsConfig, ranks: Mesh, sharing: int) -> None:
    """Divide the weights of a model with its kernels, before the optimizer is created.

    Args:
        model: the model with its kernels.
        config: the configuration of the run.
        ranks: the ranks of the run.
        sharing: number of neighbouring ranks that share a copy.
    """
    layers = decoder_layers(model)
    device = ranks.device
    if not trains_layers(model):
        gathers = gathers_of(model)
        if gathers is None:
            # Each rank keeps only its own rows, so a difference would never be noticed.
            prove_alike(ranks, {"weights": fingerprint_here(model.parameters())})
            product = PRODUCT_TYPES[config.mixed_precision]
            gathers = shard_frozen(layers, ranks, sharing, device, product)
        reason = shard_embedding(model, gathers.rank, gathers.count, device, gathers.group)
        if reason:
            logger.info("sharding: the embedding stays whole on every process: %s", reason)
        model.to(device)
        ranks.same_weights(whole_parts(model.parameters()))
        return
    if any(is_divided(p) for p in model.parameters()):  # divided by an earlier run
        return
    products = list(names_of_products(model))
    dtype = GATHERED_TYPES[config.mixed_precision]
    stored: StoredRows | None = getattr(model, STORED_ROWS, None)

    def read_in_memory(name: str, weight: Tensor, rows: range) -> Tensor:
        """Return a weight that every process holds, with the values of rank 0."""
        value = weight.detach().to(device)
        ranks.same_weights([value])
        return value

    read = read_in_memory if stored is None else stored.read
    laid = shard_weights(model, layers, products, weight_mesh(ranks, sharing), dtype, read)
    if laid < len(products) and ranks.writer:
        logger.warning(
            "sharding: %d of %d products take their weights one by one, for their rows cannot be "
            "divided by %d",
            len(products) - laid,
            len(products),
            sharing,
        )
