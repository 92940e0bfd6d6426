"""Gradients of divided weights of which each rank's micro-batches use others."""

import random
import sys
from pathlib import Path

import pytest
import torch

import two_processes

sys.path.insert(0, str(Path(__file__).parent))
import uneven_ranks

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the processes would each take a card"
)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """The seed, and what each rank wrote."""
    seed = random.randrange(2**31)
    return seed, two_processes.saved(
        uneven_ranks.__file__, tmp_path_factory.mktemp("ranks"), str(seed), count=2
    )


def test_a_step_after_a_broken_one_has_its_own_sums(of_ranks):
    for _, (after_another, alone) in of_ranks[1]:
        for got, expected in zip(after_another, alone, strict=True):
            assert torch.equal(got, expected)


def test_each_weight_has_its_own_sums(of_ranks):
    """Those of one process that takes both ranks' inputs; a weight that no rank uses has no
    gradient.
    """
    seed = of_ranks[0]
    found = [sums for sums, _ in of_ranks[1]]
    for dtype in found[0]:
        model = uneven_ranks.built(seed)
        for rank, used in enumerate(uneven_ranks.USED):
            for x in uneven_ranks.inputs(seed, rank, dtype):
                model(x.float(), used).backward()
        named = dict(model.named_parameters())
        holders = [
            sum(name.startswith(("scale", *of_rank(rank))) for rank in (0, 1)) for name in named
        ]
        assert [ranks[dtype][0] for ranks in found] == [holders, holders]
        for number, weight in enumerate(named.values()):
            sums = torch.cat([ranks[dtype][1][number] for ranks in found])
            expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
            assert (sums - expected).norm() <= CLOSE[dtype] * expected.norm()


def of_rank(rank):
    return tuple(f"layer.experts.{number}." for number in uneven_ranks.USED[rank])
