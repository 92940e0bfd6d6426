"""Proof that all ranks train the same: one rank that stands elsewhere would add gradients of
another model, in silence.
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
from chronicals.distributed.weight_shards import codes_here, copies_of

OF_A_MACHINE = frozenset(
    {"output_dir", "cache_dir", "dataset_num_proc", "trackers", "project", "run_name"}
)
"""Fields of the configuration that may differ from rank to rank."""

AT_A_TIME = 1 << 20
"""Elements that are summed at a time: torch makes 8 bytes of each, and of their places."""

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as an element."""


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
                    f"the {ranks.count} processes do not train the same: {name} is "
                    f"{told[0][name]!r} on rank 0 and "
                    f"{other[name]!r} on rank {rank}; start all with the same model, data and "
                    "configuration"
                )


def shared_settings(config: ChronicalsConfig) -> dict[str, Any]:
    """Fields that must be the same on every rank."""
    return {name: value for name, value in config.to_dict().items() if name not in OF_A_MACHINE}


@dataclass(frozen=True)
class Fingerprint:
    """Digests of the bits of tensors in their order.

    Attributes:
        values: the same wherever elements lie within a tensor, and among however many ranks it is
            divided; an fp32 shard of a bf16 weight has the same bits but for zeros.
        places: of where each element lies, too; to be compared where ``divided`` is the same.
        divided: among how many ranks tensors are divided.
    """

    values: str
    places: str
    divided: int


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Return the digest of the bits and places of tensors, as this rank has them; waits for the
    device.
    """
    return fingerprint_over(tensors).places


def fingerprint_over(tensors: Iterable[Tensor], ranks: Mesh | None = None) -> Fingerprint:
    """Return the digests of tensors that may be divided among ``ranks``, which must all call it;
    waits for the device.
    """
    given = list(tensors)
    ranks = ranks or Mesh()
    if not given:
        return Fingerprint(_digest(torch.zeros(0)), _digest(torch.zeros(0)), 1)
    sums = torch.stack(
        [_sums_of_bits(codes_here(tensor)) for tensor in given]
    ).cpu()  # [tensors, 2]
    copies = [copies_of(tensor, ranks.count) for tensor in given]  # 0 where a rank has all of it
    told = torch.stack(ranks.gather(sums)) if ranks.count > 1 else sums[None]
    parts = [
        told[:, at, :][: ranks.count // among if among else 1] for at, among in enumerate(copies)
    ]  # one copy of each
    values = torch.stack([part[:, 0].sum() for part in parts])
    divided = max(len(part) for part in parts)
    return Fingerprint(_digest(values), _digest(torch.cat([part[:, 1] for part in parts])), divided)


def _digest(numbers: Tensor) -> str:
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16]


def _sums_of_bits(tensor: Tensor) -> Tensor:
    """int64 ``[2]``: the sum of all bytes, and of all elements as integers times their places,
    from 1; they wrap around.
    """
    flat = tensor.reshape(-1)
    words = flat.view(torch.uint8 if flat.dtype == torch.bool else WORDS[flat.element_size()])
    places = torch.arange(1, min(len(words), AT_A_TIME) + 1, device=flat.device)
    sums = [torch.zeros(2, dtype=torch.int64, device=flat.device)]
    for begin in range(0, len(words), AT_A_TIME):
        piece = words[begin : begin + AT_A_TIME]
        placed = (piece.long() * places[: len(piece)]).sum() + begin * piece.sum(dtype=torch.int64)
        sums.append(torch.stack([piece.view(torch.uint8).sum(dtype=torch.int64), placed]))
    return torch.stack(sums).sum(0)
