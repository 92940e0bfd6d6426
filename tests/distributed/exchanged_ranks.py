"""One of several processes that sum gradients of weights in shards: the program of
``test_fsdp_extensions.py``.

``python exchanged_ranks.py FOLDER SEED``: every rank writes its rows of the sums to ``RANK.pt``, by
exchange and by FSDP's own reduce-scatter in fp32.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from chronicals.distributed import Mesh
from chronicals.distributed.fsdp_extensions import ExchangedSums
from chronicals.distributed.weight_shards import weight_mesh

BACKWARD = 3
"""Passes whose gradients add up in the shards."""


def gradients(
    ranks: Mesh, sharing: int, dtype: torch.dtype, exchanged: bool, seed: int
) -> list[torch.Tensor]:
    """This rank's rows of each weight's gradient."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 37, bias=False), nn.LayerNorm(37), nn.Linear(37, 10))
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=dtype if exchanged else torch.float32
    )
    fully_shard(model, mesh=weight_mesh(ranks, sharing), mp_policy=policy)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    if exchanged:
        model.set_custom_reduce_scatter(ExchangedSums(sharing))
    drawing = torch.Generator().manual_seed(seed + ranks.rank + 1)
    for number in range(BACKWARD):
        model.set_requires_all_reduce(number == BACKWARD - 1)
        model(torch.randn(6, 24, generator=drawing).to(dtype)).float().square().sum().backward()
    return [p.grad._local_tensor for p in model.parameters()]


def main() -> None:
    folder = Path(sys.argv[1])
    seed = int(sys.argv[2])
    torch.set_num_threads(1)
    ranks = Mesh.current()
    found = {
        f"{sharing} of {ranks.count} share, {dtype}": [
            gradients(ranks, sharing, dtype, way, seed) for way in (True, False)
        ]
        for sharing in sorted({2, ranks.count})
        for dtype in (torch.bfloat16, torch.float16)
    }
    torch.save(found, folder / f"{ranks.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
