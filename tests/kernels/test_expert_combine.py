"""The sum over the experts of a token."""

import pytest
import torch
from test_dropped_products import values

from chronicals.kernels import expert_combine as module
from chronicals.kernels.expert_combine import expert_combine_reference
from comparison import assert_as_exact_as_plain
from mutants import mutant

CASES = [(1, 1, 8), (13, 8, 33), (37, 3, 300), (5, 2, 5003)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sum_of_a_token(case, shared, dtype, device):
    tokens, each, width = case
    places = torch.randperm(tokens * each, device=device).int()

    def plain(z, *shares):
        rows = z[places.long().to(z.device)]
        return (rows * shares[0][:, None] if shares else rows).unflatten(0, (tokens, each)).sum(1)

    def draw():
        z = torch.randn(tokens * each, width, device=device)
        shares = torch.rand(tokens * each, device=device)
        return [x.to(dtype) for x in ([z, shares] if shared else [z])]

    def ours(z, *shares):
        return module.expert_combine(z, places.to(z.device), each, *shares)

    assert_as_exact_as_plain(values(ours), values(plain), draw)


def test_the_order_of_ranks_makes_the_sum(device):
    """So that a token's sum has the same bits wherever its experts' rows are."""
    z = torch.randn(40, 16, device=device)
    order = torch.randperm(40, device=device)
    first = module.expert_combine(z, torch.arange(40, device=device).int(), 8)
    other = module.expert_combine(z[order], order.argsort().int(), 8)
    assert torch.equal(first, other)


def test_no_tokens(device):
    places = torch.zeros(0, dtype=torch.int32, device=device)
    assert module.expert_combine(torch.zeros(0, 8, device=device), places, 4).shape == (0, 8)


MUTATIONS = {
    "rows in their own order": ("place * z_stride", "(token * EACH + rank) * z_stride"),
    "the share of the first": ("shares_ptr + token * EACH + rank", "shares_ptr + token * EACH"),
    "the last alone": ("total += z", "total = z"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_faults_are_found(name, device):
    wrong = mutant(module, *MUTATIONS[name])
    z = torch.randn(26, 40, device=device)
    shares = torch.rand(26, device=device)
    places = torch.randperm(26, device=device).int()
    expected = expert_combine_reference(z, places, 2, shares)
    assert not torch.allclose(wrong.expert_combine(z, places, 2, shares), expected, atol=1e-3)
