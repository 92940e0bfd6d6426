"""What a run that does not fit can do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from chronicals.config import ChronicalsConfig
from chronicals.config.config import ALIASES
from chronicals.training.errors import TrainingError

FEW_LOGITS = 1024
"""Rows of logits at a time, for a quarter of the default's memory."""


@contextmanager
def saying_what_helps(
    config: ChronicalsConfig, device: torch.device, ranks: int = 1
) -> Iterator[None]:
    """Raises TrainingError where the card's memory runs out within: how much there is, who holds
    it, what takes less.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        ways = "; or ".join(ways_to_take_less(config, ranks))
        raise TrainingError(
            f"out of memory on {device}{_held(device)}. Less is taken by {ways}"
        ) from error


def ways_to_take_less(
    config: ChronicalsConfig, ranks: int = 1, shorter_rows: bool = True
) -> list[str]:
    """Return the remedies of ``what_helps`` in words.

    Args:
        shorter_rows: with the last of them, a shorter ``max_seq_length``.
    """
    remedies = what_helps(config, ranks)
    return [
        _words(fields, price)
        for fields, price in remedies
        if shorter_rows or "max_seq_length" not in fields
    ]


def what_helps(config: ChronicalsConfig, ranks: int = 1) -> Iterator[tuple[dict[str, Any], str]]:
    """Fields that make a run take less memory than ``config`` does, and their price: first those
    that take nothing but time.

    Args:
        ranks: how many processes train together.
    """
    policies = config.memory_policies
    in_backward = "optimizer_in_backward" in policies
    halved = {"batch_size": config.batch_size // 2}
    if config.batch_size > 1 and not in_backward:
        yield {**halved, "gradient_accumulation_steps": 2 * config.gradient_accumulation_steps}, ""
    if config.logits_chunk_size > FEW_LOGITS:
        yield {"logits_chunk_size": FEW_LOGITS}, ""
    leanest = policies - {"recompute_elementwise"} | {"recompute_layers", "offload_activations"}
    if ranks > 1 and config.sharding == "weights" and not config.use_lora:
        leanest -= {"offload_activations"}
    if ranks > 1 and config.sharding == "optimizer" and config.context_parallel == 1:
        leanest |= {"reduce_in_backward"}
    aliases = dict.fromkeys(sorted(ALIASES.keys() & config.explicit), True)
    if policies != leanest:
        yield {"memory": sorted(leanest), **aliases}, ""
    if ranks > 1 and config.sharding != "weights":
        yield {"sharding": "weights"}, ""
    if not config.use_lora and "offload_optimizer_states" not in policies:
        yield {"memory": sorted(leanest | {"offload_optimizer_states"}), **aliases}, ""
    if config.batch_size > 1 and in_backward:
        yield halved, "fewer tokens a step"
    if not config.use_lora:
        in_fp32 = config.optimizer_state_dtype == "fp32"
        if in_fp32 and not config.use_8bit_optimizer:
            yield {"optimizer_state_dtype": "bf16"}, "states are rounded stochastically"
        if not config.use_8bit_optimizer:
            other = {} if in_fp32 else {"optimizer_state_dtype": "fp32"}
            yield {"use_8bit_optimizer": True, **other}, "states are rounded to 8 bits"
        masters = {} if config.master_weights else {"master_weights": True}
        yield {"use_lora": True, **masters}, "adapters are trained, not the weights"
    elif config.quantization is None and not config.use_fp8:
        yield {"quantization": "nf4"}, "the base is rounded to 4 bits"
    if config.max_seq_length > 1:
        yield {"max_seq_length": config.max_seq_length // 2}, "what is longer is split or cut"


def _words(fields: dict[str, Any], price: str) -> str:
    named = " with ".join(f"{field}={value}" for field, value in fields.items())
    return f"{named} ({price})" if price else named


def _held(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    free, whole = torch.cuda.mem_get_info(device)
    ours = torch.cuda.max_memory_allocated(device)
    others = whole - free - torch.cuda.memory_reserved(device)
    return " ({:.1f} GiB; this run held up to {:.1f}, the driver and others hold {:.1f})".format(
        *(size / 2**30 for size in (whole, ours, others))
    )
