"""Pairs sorted by expert, against a stable sort; what tiles cover."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from chronicals.kernels import expert_dispatch as module
from chronicals.kernels.expert_dispatch import (
    Dispatch,
    dispatch_reference,
    dispatch_to_experts,
    watching_dispatches,
)
from mutants import mutant

CASES = [
    (1, 1, 1),
    (1, 8, 8),
    (67, 2, 8),
    (300, 8, 128),
    (131, 3, 200),
    (97, 4, 3),
    (64, 1, 5),
    (2000, 2, 4),
]


def drawn(tokens, each, experts, device):
    """Some experts are chosen often and some never."""
    scores = (
        torch.rand(tokens, experts, device=device)
        + (torch.rand(experts, device=device) * 3).floor()
    )
    return scores.topk(min(each, experts), 1).indices


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_equals_a_stable_sort(case, dtype, device):
    experts_Tk = drawn(*case, device).to(dtype)
    got = dispatch_to_experts(experts_Tk, case[2])
    order, places, bounds, tiles = dispatch_reference(experts_Tk.reshape(-1), case[2], got.rows)
    assert (
        torch.equal(got.order_S, order)
        and torch.equal(got.places_S, places)
        and torch.equal(got.bounds, bounds)
    )
    used = tiles[0] < case[2]
    assert torch.equal(got.tiles[0], tiles[0]) and torch.equal(got.tiles[1][used], tiles[1][used])


@pytest.mark.slow
def test_more_blocks_than_are_summed_at_once(device):
    experts_Tk = drawn(500, 2, 3, device).repeat(140, 1)
    assert experts_Tk.numel() > 1024 * module.BLOCK_PAIRS
    got = dispatch_to_experts(experts_Tk, 3)
    assert torch.equal(got.places_S, dispatch_reference(experts_Tk.reshape(-1), 3, got.rows)[1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_the_definition(case):
    experts_S = drawn(*case, "cpu").reshape(-1)
    order, places, bounds, tiles = dispatch_reference(experts_S, case[2], 16)
    assert order.tolist() == sorted(range(len(experts_S)), key=lambda s: (int(experts_S[s]), s))
    assert torch.equal(order[places.long()].long(), torch.arange(len(order)))
    covered = []
    for expert, first in tiles.t().tolist():
        if expert < case[2]:
            end = min(first + 16, int(bounds[expert + 1]))
            assert int(bounds[expert]) <= first < end
            covered += range(first, end)
    assert covered == list(range(len(order)))


def test_no_pairs(device):
    got = dispatch_to_experts(torch.zeros(0, 2, dtype=torch.int64, device=device), 3)
    assert got.bounds.tolist() == [0, 0, 0, 0] and got.tiles[0].tolist() == [3, 3, 3]
    assert got.received().shape == (0, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_experts_receive(case, device):
    experts_Tk = drawn(*case, device)
    got = dispatch_to_experts(experts_Tk, case[2])
    reference = Dispatch(
        *dispatch_reference(experts_Tk.reshape(-1), case[2], got.rows), got.each, got.rows
    )
    assert torch.equal(got.received(), experts_Tk) and torch.equal(reference.received(), experts_Tk)
    pairs = experts_Tk.numel()
    last = got.order_S[-1:]
    bounds = torch.where(got.bounds == pairs, pairs - 1, got.bounds)
    short = (
        got._replace(bounds=bounds).received().reshape(-1)
    )  # the rows of an expert end one too early
    assert (short != experts_Tk.reshape(-1)).nonzero().tolist() == [last.tolist()] and short[
        last
    ] == case[2]
    if pairs > 1:
        twice = got.order_S.clone()
        twice[-1] = twice[0]  # a pair is there twice, and so another one is not
        assert (
            got._replace(order_S=twice).received().reshape(-1) == case[2]
        ).nonzero().tolist() == [last.tolist()]


def test_what_experts_receive_is_found_on_the_device(device):
    """Tensors without values: whatever asks for one fails."""
    got = dispatch_to_experts(drawn(7, 2, 5, device), 5)
    with FakeTensorMode() as mode:
        assert Dispatch(*map(mode.from_tensor, got[:4]), got.each, got.rows).received().shape == (
            7,
            2,
        )


def test_dispatches_are_watched(device):
    seen = []
    experts_Tk = drawn(7, 2, 5, device)
    with watching_dispatches(seen.append):
        got = dispatch_to_experts(experts_Tk, 5)
    dispatch_to_experts(experts_Tk, 5)
    assert len(seen) == 1 and seen[0] is got


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"expected \[T, k\]"):
        dispatch_to_experts(torch.zeros(4), 2)


MUTATIONS = {
    "a pair before itself": (
        "number[None, :] < number[:, None]",
        "number[None, :] <= number[:, None]",
    ),
    "blocks before are left out": (
        "before + tl.cumsum(count, 0) - count",
        "tl.cumsum(count, 0) - count",
    ),
    "all tiles begin with the expert": (
        "tile - tl.sum(at * (last - height)[None, :], 1)",
        "0 * tile",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_faults_are_found(name, device):
    wrong = mutant(module, *MUTATIONS[name])
    experts_Tk = drawn(*CASES[-1], device)
    if "blocks" in name:
        experts_Tk = experts_Tk.repeat(80, 1)  # more blocks than are summed at once
    got = wrong.dispatch_to_experts(experts_Tk, CASES[-1][2])
    _, places, _, tiles = dispatch_reference(experts_Tk.reshape(-1), CASES[-1][2], got.rows)
    used = tiles[0] < CASES[-1][2]
    same = torch.equal(got.places_S, places) and torch.equal(got.tiles[1][used], tiles[1][used])
    assert not same
