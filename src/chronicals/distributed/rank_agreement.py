"""Checks that all ranks train the same model in the same way.

A rank that differs would add gradients of another model, without any error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed.mesh import Mesh
from chronicals.distributed.weight_shards import CODES, copies_of, local

MACHINE_FIELDS = frozenset(
    {"output_dir", "cache_dir", "dataset_num_proc", "trackers", "project", "run_name"}
)
"""Fields of the configuration that may differ from rank to rank."""

SUMMED_AT_A_TIME = 1 << 20
"""Elements that are summed at a time; torch takes 16 bytes for each, 8 of them for its position."""

INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by the bytes of an element."""


def prove_alike(ranks: Mesh, facts: Mapping[str, Any]) -> None:
    """Compare ``facts`` (plain JSON) of all ranks, which must all call this.

    Raises:
        ConfigurationError: they differ; on every rank.
    """
    if ranks.count == 1:
        return
    facts_by_rank = ranks.gather_values(dict(facts))
    first = facts_by_rank[0]
    for name in facts:
        for rank, other in enumerate(facts_by_rank):
            if other[name] != first[name]:
                raise ConfigurationError(
                    f"the {ranks.count} processes do not train the same: {name} is "
                    f"{first[name]!r} on rank 0 and "
                    f"{other[name]!r} on rank {rank}; start all with the same model, data and "
                    "configuration"
                )


def shared_settings(config: ChronicalsConfig) -> dict[str, Any]:
    """Return the fields that must be the same on every rank."""
    return {name: value for name, value in config.to_dict().items() if name not in MACHINE_FIELDS}


@dataclass(frozen=True)
class Fingerprint:
    """Digests of the bits of tensors in their order.

    Attributes:
        values: digest that does not depend on the positions of elements in a tensor, nor on the
            number of ranks that share it; an fp32 shard of a bf16 weight has the same bits apart
            from zeros.
        places: digest of the positions, too; to be compared for equal ``divided``.
        divided: number of ranks that share each tensor.
    """

    values: str
    places: str
    divided: int


def fingerprint_here(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the bits and positions of this rank's tensors. Waits for the device."""
    return fingerprint_over(tensors).places


def fingerprint_over(tensors: Iterable[Tensor], ranks: Mesh | None = None) -> Fingerprint:
    """Return the fingerprint of tensors that may be divided among ``ranks``; waits for the device.

    All of these ranks must call it.
    """
    tensors = list(tensors)
    ranks = ranks or Mesh()
    if not tensors:
        return Fingerprint(_digest(torch.zeros(0)), _digest(torch.zeros(0)), 1)
    # [tensors, 2]
    sums = torch.stack([_sums_of_bits(tensor) for tensor in tensors]).cpu()
    # Copies of each tensor among the ranks; 0 if every rank has all of it.
    copies = [copies_of(tensor, ranks.count) for tensor in tensors]
    sums_by_rank = torch.stack(ranks.gather(sums)) if ranks.count > 1 else sums[None]
    parts = []  # of one copy of each tensor
    for number, count in enumerate(copies):
        shards = ranks.count // count if count else 1
        parts.append(sums_by_rank[:shards, number, :])
    values = torch.stack([part[:, 0].sum() for part in parts])
    divided = max(len(part) for part in parts)
    return Fingerprint(_digest(values), _digest(torch.cat([part[:, 1] for part in parts])), divided)


def _digest(numbers: Tensor) -> str:
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16]


def _sums_of_bits(tensor: Tensor) -> Tensor:
    """Return int64 ``[2]``, of what this rank holds of a tensor: two sums, which wrap around.

    They are the sum of all bytes, and the sum of elements as integers times positions from 1.
    """
    here = local(tensor.detach())
    codes = getattr(tensor, CODES, None)
    flat = (here if codes is None else here[:codes]).reshape(-1)  # of packed ones without scales
    words = flat.view(
        torch.uint8 if flat.dtype == torch.bool else INTEGER_DTYPES[flat.element_size()]
    )
    # Both sums wrap around. A zero adds nothing to the first, wherever it is: an fp32 shard of a
    # bf16 weight has its bits and zeros.
    places = torch.arange(1, min(len(words), SUMMED_AT_A_TIME) + 1, device=flat.device)
    sums = [torch.zeros(2, dtype=torch.int64, device=flat.device)]
    for begin in range(0, len(words), SUMMED_AT_A_TIME):
        piece = words[begin : begin + SUMMED_AT_A_TIME]
        placed = (piece.long() * places[: len(piece)]).sum() + begin * piece.sum(dtype=torch.int64)
        sums.append(torch.stack([piece.view(torch.uint8).sum(dtype=torch.int64), placed]))
    return torch.stack(sums).sum(0)
