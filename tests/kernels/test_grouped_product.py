"""Grouped products against products expert by expert."""

import sys

import pytest
import torch
from test_expert_dispatch import drawn

from chronicals.kernels import grouped_launch, low_rank_term
from chronicals.kernels.expert_dispatch import Dispatch, dispatch_reference, dispatch_to_experts
from chronicals.kernels.grouped_launch import ProductLaunch
from chronicals.kernels.grouped_product import (
    grouped_product_reference,
    launch_product,
    product_launch,
)
from chronicals.kernels.low_rank_term import LowRankTerm, held_columns
from mutants import importing, mutant

module = sys.modules[
    "chronicals.kernels.grouped_product"
]  # the package has a function of that name

CASES = [
    (1, 1, 1, 16, 16),
    (37, 2, 4, 40, 24),
    (67, 3, 8, 130, 70),
    (150, 2, 3, 72, 300),
    (20, 4, 16, 64, 128),
]
"""Tokens, experts of a token, experts, inputs, outputs."""


def to_low_tiles(tokens, each, experts, device):
    """So that an expert has several tiles."""
    experts_Tk = drawn(tokens, each, experts, device)
    return Dispatch(*dispatch_reference(experts_Tk.reshape(-1), experts, 16), each, 16)


def compare(ours, plain, draw):
    """The interpreter's sums are numpy's, in another order than torch's."""
    inputs = draw()
    exact = plain(*(x.double() for x in inputs))
    got = ours(*inputs).double()
    assert got.shape == exact.shape
    eps = torch.finfo(inputs[0].dtype).eps
    plain_error = (plain(*inputs).double() - exact).norm()
    roundings = max(16 * torch.finfo(torch.float32).eps, eps) * exact.norm()
    assert (got - exact).norm() <= max(1.5 * plain_error, roundings)


def tensors(dtype, device, *shapes):
    return lambda: [torch.randn(*shape, device=device).to(dtype) for shape in shapes]


TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_times_their_expert(case, of_tokens, dtype, device):
    tokens, each, experts, inputs, outputs = case
    to = to_low_tiles(tokens, each, experts, device)
    rows = tokens if of_tokens else len(to.order_S)
    for shape in (
        (experts, outputs, inputs),
        (experts, inputs, outputs),
    ):  # stored as [out, in], and transposed

        def by(function, shape=shape):
            return lambda x, w, b: function(
                x, w if shape[1] == outputs and shape[2] == inputs else w.mT, to, of_tokens, b
            )

        draw = tensors(dtype, device, (rows, inputs), shape, (experts, outputs))
        compare(by(module.grouped_product), by(grouped_product_reference), draw)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("rank", [1, 8, 16, 40, 129, 300])
def test_what_an_adapter_adds(rank, dtype, device):
    tokens, each, experts, inputs, outputs = CASES[2]
    to = to_low_tiles(tokens, each, experts, device)

    def by(function):
        return lambda x, w, u, up: function(x, w, to, True, None, LowRankTerm(u, up))

    shapes = (
        (tokens, inputs),
        (experts, outputs, inputs),
        (len(to.order_S), rank),
        (experts, outputs, rank),
    )
    compare(
        by(module.grouped_product), by(grouped_product_reference), tensors(dtype, device, *shapes)
    )


def test_the_reference_is_a_sum_over_pairs():
    tokens, each, experts, inputs, outputs = CASES[1]
    experts_Tk = drawn(tokens, each, experts, "cpu")
    to = dispatch_to_experts(experts_Tk, experts)
    x = torch.randn(tokens, inputs).double()
    w = torch.randn(experts, outputs, inputs).double()
    expected = torch.einsum("tk,tjnk->tjn", x, w[experts_Tk]).flatten(0, 1)
    got = grouped_product_reference(x, w, to, of_tokens=True)[to.places_S.long()]
    torch.testing.assert_close(got, expected)


def test_no_tokens(device):
    to = dispatch_to_experts(torch.zeros(0, 2, dtype=torch.int64, device=device), 3)
    x = torch.zeros(0, 8, device=device)
    w = torch.randn(3, 5, 8, device=device)
    assert module.grouped_product(x, w, to, of_tokens=True).shape == (0, 5)


def test_strided_rows(device):
    to = to_low_tiles(37, 2, 4, device)
    wide = torch.randn(74, 50, device=device)
    w = torch.randn(4, 24, 40, device=device)
    x = wide[:, 8:48]
    torch.testing.assert_close(
        module.grouped_product(x, w, to), grouped_product_reference(x, w, to), rtol=1e-4, atol=1e-4
    )


def in_slots(w, device):
    """The matrices of ``w`` among others of NaN, strided, in another order; and where each is."""
    count = len(w)
    places = torch.randperm(count + 3)[:count]
    records = torch.full((count + 3, w[0].numel() + 24), torch.nan, dtype=w.dtype, device=device)
    slots = records[:, 8 : 8 + w[0].numel()].unflatten(1, w.shape[1:])
    slots[places] = w
    return slots, places.to(torch.int32).to(device)


@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_weights_in_slots_give_the_same_bits(dtype, of_tokens, device):
    to = to_low_tiles(37, 2, 5, device)
    rows = 37 if of_tokens else 74
    shapes = ((rows, 40), (5, 24, 40), (5, 24), (74, 8), (5, 24, 8))
    x, w, bias, u, up = (torch.randn(*shape, device=device).to(dtype) for shape in shapes)
    slots, places = in_slots(w, device)
    given = to, of_tokens, bias, LowRankTerm(u, up)
    for function in (module.grouped_product, grouped_product_reference):
        expected = function(x, w, *given)
        assert torch.equal(expected, function(x, slots, *given, slots=places))
    with pytest.raises(ValueError, match="slots are torch.int64"):
        module.grouped_product(x, slots, *given, slots=places.long())


def test_an_expert_without_rows_may_be_in_no_slot(device):
    experts_Tk = torch.tensor([[0, 2], [2, 0]], device=device)
    to = dispatch_to_experts(experts_Tk, 4)
    x, w = torch.randn(2, 16, device=device), torch.randn(2, 24, 16, device=device)
    places = torch.tensor([1, -1, 0, -1], dtype=torch.int32, device=device)
    got = module.grouped_product(x, w, to, True, slots=places)
    expected = torch.cat((x @ w[1].t(), x @ w[0].t()))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("of_tokens", [False, True])
def test_a_part_of_a_dispatch_is_the_rows_of_its_experts(of_tokens, device):
    to = to_low_tiles(67, 3, 8, device)
    bounds = to.bounds.tolist()
    x = torch.randn(67 if of_tokens else 201, 40, device=device)
    w = torch.randn(8, 24, 40, device=device)
    whole = module.grouped_product(x, w, to, of_tokens)
    for first, end in ((0, 3), (3, 4), (4, 8), (2, 2), (0, 8)):
        part = to.part(first, end, bounds)
        rows = x if of_tokens else x[bounds[first] : bounds[end]]
        got = module.grouped_product(rows, w[first:end], part, of_tokens)
        assert torch.equal(got, whole[bounds[first] : bounds[end]])


@pytest.mark.slow
@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_every_launch_gives_the_same(persistent, boxes, device):
    """Widths that fill no tile, in tiles of both kinds."""
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    to = to_low_tiles(70, 2, 4, device)
    x = torch.randn(140, 96, device=device).to(kind)
    w = torch.randn(4, 48, 96, device=device).to(kind)
    launch = ProductLaunch(32, 32, 4, 2, 2, persistent, boxes, 32)
    tolerance = (
        {"rtol": 2e-2, "atol": 2e-2} if kind == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    )
    for weight in (w, w.mT.contiguous().mT):
        got = launch_product(launch, x, weight, to, False)
        torch.testing.assert_close(got, grouped_product_reference(x, weight, to), **tolerance)


@pytest.mark.parametrize(("kib", "boxes"), [(99, False), (163, False), (227, True)])
def test_launches_fit_the_card(kib, boxes, let_return):
    let_return(grouped_launch, shared_memory=kib << 10)
    let_return(low_rank_term, shared_memory=kib << 10)
    let_return(module, has_boxes=boxes)
    launch = product_launch(128, 1536, torch.device("cuda", 0))
    assert launch.stages >= 2 and launch.boxes == boxes
    assert launch.stages * (128 + launch.columns) * launch.depth * 2 <= kib << 10


@pytest.mark.parametrize("rank", [1, 64, 129, 256, 257, 264, 300, 384, 600])
@pytest.mark.parametrize("kib", [64, 99, 163, 227])
def test_the_columns_of_an_adapter_fit_the_card(kib, rank, let_return):
    """As many as a tile holds, which are a power of 2."""
    let_return(grouped_launch, shared_memory=kib << 10)
    let_return(low_rank_term, shared_memory=kib << 10)
    let_return(module, has_boxes=kib == 227)
    for rows, width in ((128, 1536), (64, 1536), (128, 48)):
        card = torch.device("cuda", 0)
        launch = product_launch(rows, width, card, rank)
        held = held_columns(rank, card)
        assert held >= min(rank, 64 if kib == 64 else 256) and held.bit_count() == 1
        assert (rows + launch.columns) * held * (4 if kib == 64 else 2) <= kib << 10


def test_other_shapes_are_refused():
    to = dispatch_to_experts(torch.zeros(4, 2, dtype=torch.int64), 3)
    with pytest.raises(ValueError, match=r"expected \[8, K\] and \[3, N, K\]"):
        module.grouped_product(torch.randn(4, 8), torch.randn(3, 5, 8), to)


MUTATIONS = {
    "one weight for all": ("w_ptr + slot.to(tl.int64) * w_stride_e", "w_ptr + 0 * w_stride_e"),
    "slots are not read": ("tl.load(slots_ptr + expert) if HAS_SLOTS else expert", "expert"),
    "no factor": ("total *= factor", "pass"),
    "bias of the first expert": (
        "bias_ptr + expert.to(tl.int64) * bias_stride",
        "bias_ptr + 0 * bias_stride",
    ),
}


OF_BOXES = {
    "one weight for all, by the copy engine": (
        "w_box.load([slot, block * COLUMNS, step])",
        "w_box.load([0, block * COLUMNS, step])",
    ),
}
"""Faults in the tiles that Hopper's copy engine loads, where rows are multiples of 16 bytes."""


def assert_found(fault, depth, device, within=module):
    wrong = mutant(within, *fault)
    if within is not module:
        wrong = importing(module, wrong, within)
    to = to_low_tiles(37, 2, 4, device)
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    shapes = ((37, depth), (4, 24, depth), (74, 8), (4, 24, 8), (4, 24))
    x, w, u, up, bias = (torch.randn(*shape, device=device).to(kind) for shape in shapes)
    slots = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=device)
    results = [
        (
            of.grouped_product(x, w, to, True, bias, LowRankTerm(u, up)),
            of.grouped_product(x, w, to, True, factor=0.5, slots=slots),
        )
        for of in (module, wrong)
    ]
    assert any(not torch.allclose(one, other, rtol=1e-2, atol=1e-2) for one, other in zip(*results))


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_faults_are_found(name, device):
    assert_found(
        MUTATIONS[name], 36, device
    )  # rows of 72 bytes in bf16, which pointers load on every card


@pytest.mark.slow
def test_the_adapter_of_another_expert_is_found(device):
    fault = "up_ptr + expert.to(tl.int64) * up_stride_e", "up_ptr + 0 * up_stride_e"
    assert_found(fault, 36, device, low_rank_term)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OF_BOXES)
def test_planted_faults_of_boxes_are_found(name, device):
    if not module.has_boxes(device):
        pytest.skip("this card has no copy engine for tiles")
    assert_found(OF_BOXES[name], 40, device)
