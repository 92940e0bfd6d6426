"""Products under dropout against the same mask laid down in memory, and that mask against
chance.
"""

import pytest
import torch

from chronicals.kernels import dropped_products as module
from chronicals.kernels.dropped_products import draw_seed, dropped_reference
from comparison import assert_as_exact_as_plain
from mutants import mutant

SHAPES = [
    (1, 16, 1),
    (67, 130, 8),
    (131, 40, 3),
    (64, 128, 16),
    (200, 257, 96),
    (70, 140, 192),
    (67, 40, 300),
    (40, 300, 24),
]
TYPES = [torch.float32, torch.bfloat16]
DROPOUTS = [2**-16, 0.05, 0.7]


def down(x, a, seed, p, of=module):
    out = x.new_empty(len(x), len(a) + 3)[:, : len(a)]
    of.dropped_down(x, a, seed, p, out)
    return out


def compare(ours, plain, *shapes, dtype, device):
    def draw():
        return [torch.randn(*shape, device=device).to(dtype) for shape in shapes]

    if (
        dtype == torch.float32 and device.type == "cpu"
    ):  # the interpreter's sums are numpy's, in another order than torch's
        drawn = [
            draw() for _ in range(4)
        ]  # the terms of one number may cancel each other by chance
        exact = torch.stack([plain(*(x.double() for x in inputs)) for inputs in drawn])
        got = torch.stack([ours(*inputs) for inputs in drawn])
        assert (got - exact).norm() <= 16 * torch.finfo(dtype).eps * exact.norm()
        return
    assert_as_exact_as_plain(ours, plain, draw)


class _Constant(torch.autograd.Function):
    """The kernels are not differentiable themselves; the comparison asks for gradients."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.shapes = inputs
        return function(*(x.detach() for x in inputs))

    @staticmethod
    def backward(ctx, _):
        return None, *(torch.zeros_like(x) for x in ctx.shapes)


def values(function):
    return lambda *inputs: _Constant.apply(function, *inputs)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("p", DROPOUTS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_three(shape, dtype, p, device):
    rows, width, rank = shape
    seed = draw_seed(torch.zeros(1, device=device))
    options = {"dtype": dtype, "device": device}

    def masked(x):
        return dropped_reference(x, seed.to(x.device), p)

    compare(
        values(lambda x, a: down(x, a, seed, p)),
        values(lambda x, a: masked(x) @ a.t()),
        (rows, width),
        (rank, width),
        **options,
    )
    compare(
        values(lambda g, x: module.dropped_gradient_of_down(g, x, seed, p).to(x.dtype)),
        values(lambda g, x: g.t() @ masked(x)),
        (rows, rank),
        (rows, width),
        **options,
    )
    compare(
        values(lambda dx, g, a: module.add_dropped_product_(dx.clone(), g, a, seed, p)),
        values(lambda dx, g, a: dx + masked(g @ a)),
        (rows, width),
        (rows, rank),
        (rank, width),
        **options,
    )


@pytest.mark.parametrize("rank", [3, 300])
def test_beside_u_are_zeros(rank, device):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x = torch.randn(37, 40, device=device).to(dtype)
    a = torch.randn(rank, 40, device=device).to(dtype)
    seed = draw_seed(x)
    margin = torch.full((37, rank + 12), float("nan"), device=device).to(dtype)
    module.dropped_down(x, a, seed, 0.3, margin[:, : rank + 9])
    assert (
        torch.equal(margin[:, :rank], down(x, a, seed, 0.3))
        and not margin[:, rank : rank + 9].any()
    )
    assert margin[:, rank + 9 :].isnan().all()


def test_strided_rows(device):
    """As they come from a merged product: x, g and u among other columns."""
    seed = draw_seed(torch.zeros(1, device=device))
    p = 0.4
    wide = torch.randn(37, 50, device=device)
    thin = torch.randn(37, 20, device=device)
    x = wide[:, :40]
    g = thin[:, 8:16]
    a = torch.randn(8, 40, device=device)
    kept = dropped_reference(x, seed, p)
    torch.testing.assert_close(down(x, a, seed, p), kept @ a.t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        module.dropped_gradient_of_down(g, x, seed, p), g.t() @ kept, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_the_mask_is_fair_and_without_pattern(p):
    """The share that stays, in all, by row and by column, and neighbours that stay together."""
    rows = 512
    width = 640
    kept = dropped_reference(torch.ones(rows, width), draw_seed(torch.zeros(1)), p) > 0
    stay = 1 - p
    for share, count in (
        (kept.float().mean(), rows * width),
        (kept.float().mean(0), rows),
        (kept.float().mean(1), width),
    ):
        assert ((share - stay).abs() <= 6 * (stay * p / count) ** 0.5).all()
    for pairs in (
        kept[:, 1:] & kept[:, :-1],
        kept[1:] & kept[:-1],
    ):  # which share elements: at most twice the variance
        assert (pairs.float().mean() - stay**2).abs() <= 6 * (
            2 * stay**2 * (1 - stay**2) / pairs.numel()
        ) ** 0.5


def test_seeds_make_masks_of_their_own():
    x = torch.ones(64, 64)
    one, other = (dropped_reference(x, torch.tensor([seed]), 0.5) > 0 for seed in (7, 8))
    assert abs((one == other).float().mean().item() - 0.5) < 0.05
    torch.manual_seed(3)
    first = draw_seed(x)
    torch.manual_seed(3)
    assert torch.equal(draw_seed(x), first) and not torch.equal(draw_seed(x), first)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            'tl.dot(x.to(KIND), tl.trans(a.to(KIND)), total, input_precision="ieee")',
            'tl.dot(x.to(KIND), tl.trans(a.to(KIND)), input_precision="ieee")',
        ),
        (
            'tl.dot(g.to(KIND), a.to(KIND), input_precision="ieee") * factor',
            'tl.dot(g.to(KIND), a.to(KIND), input_precision="ieee")',
        ),
        (
            "tl.store(at, total * factor, mask=(r < rank)[:, None] & (column < width)[None, :])",
            "tl.store(at, total, mask=(r < rank)[:, None] & (column < width)[None, :])",
        ),
        (
            (
                "total += tl.load(shares_ptr + (part * rows + row) * rank + r, mask=(row < rows) "
                "& (r < rank), other=0.0)"
            ),
            (
                "total = tl.load(shares_ptr + (part * rows + row) * rank + r, mask=(row < rows) "
                "& (r < rank), other=0.0)"
            ),
        ),
        ("begin = tl.program_id(1) * chunk", "begin = 0 * chunk"),
    ],
)
def test_planted_faults_are_found(old, new, device, let_return):
    wrong = mutant(module, old, new)
    seed = draw_seed(torch.zeros(1, device=device))
    p = 0.5
    for of in (module, wrong):  # two programs a block, of which one has two tiles
        let_return(of, multiprocessors=4, shared_memory=2**15)
    kind = (
        torch.bfloat16 if device.type == "cuda" else torch.float32
    )  # those that a kernel takes there
    x, g, a = (
        torch.randn(*shape, device=device).to(kind) for shape in ((40, 300), (40, 8), (8, 300))
    )
    results = [
        (
            down(x, a, seed, p, of),
            of.dropped_gradient_of_down(g, x, seed, p),
            of.add_dropped_product_(x.clone(), g, a, seed, p),
        )
        for of in (module, wrong)
    ]
    assert any(not torch.allclose(one, other) for one, other in zip(*results))
