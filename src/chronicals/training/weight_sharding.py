"""Weights divided among the processes (``sharding: weights``): trained ones by FSDP, frozen ones
of adapters as bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import (
    Mesh,
    can_be_cut,
    frozen_linears,
    gathers_of,
    is_divided,
    last_micro_batch,
    shard_embedding,
    shard_frozen,
    shard_weights,
    weight_mesh,
    whole_parts,
)
from chronicals.memory import decoder_layers
from chronicals.models import has_4bit_experts
from chronicals.models.rows import STORED, StoredRows
from chronicals.objectives import Count
from chronicals.optimizers import moments_in_8_bits
from chronicals.patching.decoder_layer import names_of_products
from chronicals.quantization import LinearGGUF
from chronicals.training.context import skips_layers
from chronicals.training.precision import kept_in_fp32
from chronicals.training.rank_agreement import fingerprint, prove_alike
from chronicals.training.step import EagerStep

logger = logging.getLogger(__name__)

WEIGHTS = "weights"
"""What ``sharding`` is called where weights are divided."""

BLOCK = 256
"""Elements whose states in 8 bits share a scale."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float32, "fp32": torch.float32}
"""What trained weights are gathered in, by ``mixed_precision``; autocast makes fp16 of them."""

PRODUCTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtype of products and activations, and of frozen weights, by ``mixed_precision``."""


def trains_layers(model: Any) -> bool:
    """Whether weights of decoder layers other than adapters are trained, which FSDP divides
    then.
    """
    adapted = hasattr(model, "chronicals_lora") or hasattr(model, "peft_config")
    return not adapted and any(
        p.requires_grad for layer in decoder_layers(model) for p in layer.parameters()
    )


def check_divisible(model: Any, config: ChronicalsConfig, sharing: int) -> None:
    """Raises ConfigurationError where this model cannot be trained with its weights divided
    among so many.
    """
    if reason := why_not_divisible(model, config) or why_not_cut(model, config, sharing):
        raise ConfigurationError(f"sharding='weights': {reason}; or take sharding='optimizer'")


def why_not_divisible(model: Any, config: ChronicalsConfig) -> str | None:
    """Why this model cannot be trained with its weights divided, among however many; else None."""
    name = type(model).__name__
    asked = config.memory_policies
    if not decoder_layers(model):
        return f"{name} has no list of decoder layers"
    if skips_layers(model):
        return (
            f"{name} skips layers at random, each process others, while all gather the same: "
            "set its layerdrop to 0"
        )
    if has_4bit_experts(model):
        return f"{name} has its experts in 4 bits, which stay whole: leave quantization out"
    if config.use_fp8:
        return "use_fp8=True quantises weights that are whole"
    if "offload_frozen_weights" in asked:
        return "memory=['offload_frozen_weights'] moves weights that are whole"
    if "reduce_in_backward" in asked:
        return "it sums gradients by itself: leave memory=['reduce_in_backward'] out"
    return _why_not_by_fsdp(model, config) if trains_layers(model) else _why_not_as_bytes(model)


def _why_not_by_fsdp(model: Any, config: ChronicalsConfig) -> str | None:
    name = type(model).__name__
    if fp32 := sorted(kept_in_fp32(model, DTYPES[config.mixed_precision])):
        return (
            f"{name} keeps {', '.join(fp32)} in fp32, and FSDP gathers the weights of a layer "
            "in one dtype"
        )
    if "offload_activations" in config.memory_policies:
        return (
            "memory=['offload_activations'] tells activations from weights by where these lie, "
            "and gathered ones move"
        )
    if any(not p.is_floating_point() for p in model.parameters()):
        return f"weights of {name} are packed, and others of its layers are trained"
    if scalar := next((path for path, p in model.named_parameters() if not p.ndim), None):
        return f"{scalar} has no rows"
    return None


def _why_not_as_bytes(model: Any) -> str | None:
    kept = {
        m.format
        for layer in decoder_layers(model)
        for m in layer.modules()
        if isinstance(m, LinearGGUF)
    }
    return (
        f"weights in {', '.join(sorted(kept))} stay as they are in their file, whole"
        if kept
        else None
    )


def why_not_cut(model: Any, config: ChronicalsConfig, sharing: int) -> str | None:
    """Why rows of this model's weights cannot be divided among so many; else None."""
    if not trains_layers(model):
        if any(can_be_cut(linear, sharing) for _, linear in frozen_linears(decoder_layers(model))):
            return None
        return (
            "no frozen linear layer of its decoder layers has rows that can be divided by "
            f"{sharing}"
        )
    if config.use_8bit_optimizer and (cut := _cut_blocks(model, sharing)):
        return (
            f"rows of {cut} divided by {sharing} would cut blocks of 8-bit states; leave "
            "use_8bit_optimizer out"
        )
    return None


def check_whole(model: Any, config: ChronicalsConfig) -> None:
    """Raises ConfigurationError where a run before divided the model's weights, and this one is
    not to.
    """
    if len(list(whole_parts(model.parameters()))) < len(list(model.parameters())):
        raise ConfigurationError(
            f"sharding={config.sharding!r}: a run before divided the weights of this model among "
            "the processes; set "
            "sharding='weights', or load the model again"
        )


def _cut_blocks(model: Any, sharing: int) -> str | None:
    """The name of a weight whose shards would begin within a block of its 8-bit states."""
    narrow = {id(p) for p in moments_in_8_bits(model)}
    for name, p in model.named_parameters():
        if id(p) in narrow and -(-len(p) // sharing) * (p.numel() // len(p)) % BLOCK:
            return name
    return None


def divide_weights(model: Any, config: ChronicalsConfig, ranks: Mesh, sharing: int) -> None:
    """Divide the weights of a model with its kernels in place, before the optimizer is made.

    Args:
        sharing: neighbours that share one copy.
    """
    layers = decoder_layers(model)
    device = ranks.device
    if not trains_layers(model):
        gathers = gathers_of(model)
        if gathers is None:
            prove_alike(
                ranks, {"weights": fingerprint(model.parameters())}
            )  # each rank keeps rows of its own
            gathers = shard_frozen(layers, ranks, sharing, device, PRODUCTS[config.mixed_precision])
        if reason := shard_embedding(model, gathers.rank, gathers.count, device, gathers.group):
            logger.info("sharding: the embedding stays whole on every process: %s", reason)
        model.to(device)
        ranks.same_weights(whole_parts(model.parameters()))
        return
    if any(is_divided(p) for p in model.parameters()):  # by a run before
        return
    products = list(names_of_products(model))
    dtype = DTYPES[config.mixed_precision]
    stored: StoredRows | None = getattr(model, STORED, None)
    read = _in_memory(ranks, device) if stored is None else stored.read
    laid = shard_weights(model, layers, products, weight_mesh(ranks, sharing), dtype, read)
    if laid < len(products) and ranks.writer:
        logger.warning(
            "sharding: %d of %d products take their weights one by one, for their rows cannot be "
            "divided by %d",
            len(products) - laid,
            len(products),
            sharing,
        )


def _in_memory(ranks: Mesh, device: torch.device) -> Callable[[str, Tensor, range], Tensor]:
    """Rows of weights that every process has whole; those of the first one count."""

    def read(name: str, weight: Tensor, rows: range) -> Tensor:
        value = weight.detach().to(device)
        ranks.same_weights([value])
        return value

    return read


class GatheredStep(EagerStep):
    """An ``EagerStep`` whose copies of the weights add up their sums after the last micro-batch."""

    _left = 0

    def begin(self, hold: Callable[[], None], micro_batches: int = 1) -> None:
        self._left = micro_batches

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        self._left -= 1
        last_micro_batch(self.model.model, self._left == 0)
        return super().micro(batch, counts, first)


class FrozenGatheredStep(EagerStep):
    """An ``EagerStep`` over frozen weights that are gathered: every micro-step gathers the same,
    and all that it reads.
    """

    def __init__(self, *given: Any):
        super().__init__(*given)
        gathers = gathers_of(self.model.model)
        assert gathers is not None
        self.gathers = gathers

    def begin(self, hold: Callable[[], None], micro_batches: int = 1) -> None:
        self.gathers.forget()

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        with self.gathers.passing():
            return super().micro(batch, counts, first)
