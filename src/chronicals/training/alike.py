"""Proof that all ranks train the same: one rank that stands elsewhere would add gradients of another model, in silence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import Mesh, codes_here, copies_of

OF_A_MACHINE = frozenset({"output_dir", "cache_dir", "dataset_num_proc", "trackers", "project", "run_name"})
"""Fields of the configuration that may differ from rank to rank."""

AT_A_TIME = 1 << 22
"""Elements that are summed at a time: torch makes 8 bytes of each."""


def prove_alike(ranks: Mesh, facts: Mapping[str, Any]) -> None:
    """Compare ``facts`` (plain JSON) of all ranks, which must all ask.

    Raises:
        ConfigurationError: they differ; on every rank.
    """
    if ranks.count == 1:
        return
    told = ranks.gather_values(dict(facts))
    for name in facts:
        for rank, other in enumerate(told):
            if other[name] != told[0][name]:
                raise ConfigurationError(
                    f"the {ranks.count} processes do not train the same: {name} is {told[0][name]!r} on rank 0 and "
                    f"{other[name]!r} on rank {rank}; start all with the same model, data and configuration"
                )


def shared_settings(config: ChronicalsConfig) -> dict[str, Any]:
    """Fields that must be the same on every rank."""
    return {name: value for name, value in config.to_dict().items() if name not in OF_A_MACHINE}


def fingerprint(tensors: Iterable[Tensor], ranks: Mesh | None = None) -> str:
    """Of the bits of tensors in their order. Waits for the device.

    Args:
        ranks: that all ask, where weights are divided among them: what they have of one is added up, so that it does not matter
            among how many. An fp32 shard of a bf16 weight has the same bits but for zeros.
    """
    given = list(tensors)
    if not given:
        return hashlib.sha256().hexdigest()[:16]
    patterns = torch.stack([_sum_of_bits(codes_here(tensor)) for tensor in given]).cpu()
    if ranks is not None and ranks.count > 1:
        divided = torch.tensor([copies_of(tensor, ranks.count) for tensor in given])
        told = torch.stack(ranks.gather(patterns)).sum(0)
        patterns = torch.where(divided > 0, told // divided.clamp(min=1), patterns)
    return hashlib.sha256(patterns.numpy().tobytes()).hexdigest()[:16]


def _sum_of_bits(tensor: Tensor) -> Tensor:
    pieces = tensor.reshape(-1).view(torch.uint8).split(AT_A_TIME)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum()
