"""One of two processes whose micro-batches use other weights of a unit: the program of
``test_fsdp_extensions.py``.

``python uneven_ranks.py FOLDER SEED``: every rank writes to ``RANK.pt``, by dtype, how many ranks
had a gradient of each weight, and its rows of the sums; and what ``after_a_broken_step`` gives.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from chronicals.distributed import (
    Mesh,
    WeightShards,
    forget_broken_step,
    shard_weights,
)
from chronicals.distributed.weight_shards import local, weight_mesh
from chronicals.models.presentation import AS_FORWARD

WIDTHS = (6, 6, 10, 4)
"""Of the experts: the first two are used by one rank each, the third by both, the last by none."""
USED = ((0, 2), (1, 2))
PASSES = 2


class Experts(nn.Module):
    """Modules of their own, of which a pass uses some."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, width, bias=False) for width in WIDTHS])

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        return torch.stack(
            [self.experts[number](x).float().square().sum() for number in used]
        ).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Experts()
        self.scale = nn.Parameter(torch.full((2,), 1.5))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        return self.layer(x, used) * self.scale.float().sum()


def built(seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    return model


def inputs(seed: int, rank: int, dtype: torch.dtype) -> list[Tensor]:
    drawing = torch.Generator().manual_seed(seed + rank + 1)
    return [torch.randn(5, 8, generator=drawing).to(dtype) for _ in range(PASSES)]


def divided(ranks: Mesh, sharing: int, dtype: torch.dtype, seed: int) -> tuple[Model, WeightShards]:
    model = built(seed)
    values = dict(built(seed).named_parameters())
    shard_weights(
        model,
        [model.layer],
        [],
        weight_mesh(ranks, sharing),
        dtype,
        lambda name, *_: values[name].detach(),
    )
    return model, WeightShards(ranks, list(model.parameters()))


def summed(ranks: Mesh, dtype: torch.dtype, seed: int) -> tuple[list[float], list[Tensor]]:
    model, shards = divided(ranks, ranks.count, dtype, seed)
    weights = list(model.parameters())
    for x in inputs(seed, ranks.rank, dtype):
        getattr(model, AS_FORWARD)(lambda x=x: model(x, USED[ranks.rank])).backward()
    holders = shards.reduce(weights, [torch.zeros(())])
    return holders.tolist(), [shards.shares[weight].grad.clone() for weight in weights]


def after_a_broken_step(ranks: Mesh, seed: int) -> list[list[Tensor]]:
    """Sums among copies of a step after one that ended between its micro-batches, and of one
    after none.
    """
    found = []
    for broken in (True, False):
        model, shards = divided(ranks, 1, torch.float32, seed)
        first, second = inputs(seed, ranks.rank, torch.float32)
        for x, is_last in ((first, False), (second, True)) if broken else ((second, True),):
            model.set_requires_all_reduce(is_last)
            getattr(model, AS_FORWARD)(
                lambda model=model, x=x: model(x, USED[ranks.rank])
            ).backward()
            if not is_last:
                forget_broken_step(model)
                shards.drop_gradients()
        shards.reduce(list(model.parameters()), [torch.zeros(())])
        found.append([local(weight.grad) for weight in model.parameters()])
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    seed = int(sys.argv[2])
    torch.set_num_threads(1)
    ranks = Mesh.current()
    found = {dtype: summed(ranks, dtype, seed) for dtype in (torch.float32, torch.bfloat16)}
    torch.save((found, after_a_broken_step(ranks, seed)), folder / f"{ranks.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
