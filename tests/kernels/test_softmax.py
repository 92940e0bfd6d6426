"""fused_softmax against its formula and against torch's softmax."""

import sys

import pytest
import torch
from torch import Tensor

from chronicals.kernels import fused_softmax
from chronicals.kernels.launch import MAX_ROW_WIDTH
from chronicals.kernels.softmax import softmax_reference
from comparison import assert_as_exact_as_plain
from mutants import mutant

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (13, 64), (7, 1), (13, 37), (5,), (2, 5, 101), (3, 257), (67, 48)]
WIDE = (3, MAX_ROW_WIDTH + 8191)


def exact(x: Tensor) -> Tensor:
    """With −inf as nothing at all."""
    e = torch.exp(x - x.detach().amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def plain(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def compare(draw, ours=fused_softmax) -> None:
    assert_as_exact_as_plain(ours, plain, draw, exact=exact)


def inputs(shape, dtype, device, scale=2.0, shift=0.0):
    return lambda: ((torch.randn(*shape, device=device) * scale + shift).to(dtype),)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ours", [fused_softmax, softmax_reference])
def test_equals_the_formula(ours, shape, dtype, device):
    compare(inputs(shape, dtype, device), ours)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [MAX_ROW_WIDTH, MAX_ROW_WIDTH + 1, WIDE[1]])
def test_wide_rows(width, dtype, device):
    """The widest that a program holds, and those that are read twice. A few entries count, as in
    a model's.
    """
    compare(inputs((16, width), dtype, device, scale=4.0))


@pytest.mark.parametrize("shape", [(5, 37), WIDE], ids=str)
def test_the_largest_may_stand_anywhere(shape, device):
    """Ascending and descending rows: each block of a wide one brings a higher maximum, or none."""
    ramp = torch.linspace(-40, 40, shape[1], device=device)
    compare(lambda: (torch.stack((ramp, ramp.flip(0), 7 * ramp)),))


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_large_entries_do_not_overflow(shift, device):
    compare(inputs((13, 64), torch.float32, device, shift=shift))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(13, 37), WIDE], ids=str)
def test_minus_infinity_gives_zero(shape, dtype, device):
    """Also where it fills the first block of a wide row."""

    def draw():
        (x,) = inputs(shape, dtype, device)()
        x[:, 1::2] = float("-inf")
        x[1, : MAX_ROW_WIDTH if shape == WIDE else 30] = float("-inf")
        x[-1, 1:] = float("-inf")
        return (x,)

    compare(draw)
    (x,) = draw()
    assert not fused_softmax(x)[x == float("-inf")].any()


@pytest.mark.parametrize("shape", [(3, 37), WIDE], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_an_answer_are_nan(shape, bad, device):
    """As in torch: all −inf, or a NaN or +inf among the entries. Other rows do not notice."""
    (x,) = inputs(shape, torch.float32, device)()
    x[0] = float("-inf")
    x[1, -3] = bad
    x.requires_grad_()
    for function in (fused_softmax, plain):
        out = function(x)
        (gradient,) = torch.autograd.grad(out, x, torch.randn_like(out))
        for tensor in (out, gradient):
            assert tensor[:2].isnan().all()
            assert tensor[2].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize(
    "layout", ["every second column", "transposed", "expanded", "first columns"]
)
def test_non_contiguous(layout, dtype, device):
    def draw():
        def random(*shape):
            return torch.randn(*shape, device=device).to(dtype)

        x = {
            "every second column": lambda: random(13, 74)[:, ::2],
            "transposed": lambda: random(37, 13).t(),
            "expanded": lambda: random(1, 37).expand(13, 37),
            "first columns": lambda: random(13, 50)[:, :37],
        }[layout]()
        assert not x.is_contiguous()
        return (x,)

    compare(draw)


def test_the_gradient_may_be_expanded(device):
    """As that of a sum is: its rows have stride 0."""
    x = torch.randn(13, 37, device=device, requires_grad=True)
    weights = torch.randn(37, device=device)
    (got,) = torch.autograd.grad(fused_softmax(x), x, weights.expand(13, 37))
    (expected,) = torch.autograd.grad(plain(x), x, weights.expand(13, 37))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(37,), (2, MAX_ROW_WIDTH + 1)], ids=str)
def test_rows_sum_to_one_and_gradients_to_zero(shape, device):
    x = torch.randn(*shape, device=device, requires_grad=True)
    out = fused_softmax(x)
    (gradient,) = torch.autograd.grad(out, x, torch.randn_like(out))
    torch.testing.assert_close(out.sum(-1), torch.ones_like(out.sum(-1)), rtol=1e-5, atol=0)
    assert gradient.sum(-1).abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)], ids=str)
def test_nothing(shape, device):
    x = torch.zeros(shape, device=device, requires_grad=True)
    out = fused_softmax(x)
    out.sum().backward()
    assert out.shape == x.grad.shape == shape


@pytest.mark.parametrize(
    "x",
    [torch.tensor(1.0), torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)],
    ids=str,
)
def test_what_has_no_softmax_is_refused(x):
    with pytest.raises(ValueError, match=r"expected \[..., D\] of a floating-point type"):
        fused_softmax(x)


def test_fp64_takes_the_reference(device):
    x = torch.randn(3, 5, dtype=torch.float64, device=device)
    torch.testing.assert_close(fused_softmax(x), exact(x), rtol=1e-14, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(13, 37), WIDE], ids=str)
def test_compiled(shape, device):
    """In one graph, and as exact."""
    compiled = torch.compile(fused_softmax, backend="aot_eager", fullgraph=True)
    compare(inputs(shape, torch.float32, device), compiled)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(300, 96), WIDE], ids=str)
def test_twice_gives_the_same_bits(shape, device):
    def results():
        out = fused_softmax(x)
        return out, *torch.autograd.grad(out.float().square().sum(), x)

    x = inputs(shape, torch.bfloat16, device)()[0].requires_grad_()
    assert all(torch.equal(a, b) for a, b in zip(results(), results()))


MUTATIONS = {
    "no maximum": ("tl.exp(x - _finite(tl.max(x, axis=1))[:, None])", "tl.exp(x)"),
    "no division": ("e * (1.0 / tl.sum(e, axis=1))[:, None]", "e"),
    "padding counts": (
        (
            "tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, "
            'other=float("-inf"))'
        ),
        "tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)",
    ),
    "no projection": ("dy - tl.sum(dy * y, axis=1)[:, None]", "dy"),
    "sign of the projection": (
        "dy - tl.sum(dy * y, axis=1)[:, None]",
        "dy + tl.sum(dy * y, axis=1)[:, None]",
    ),
    "no y": ("y * (dy - tl.sum(dy * y, axis=1)[:, None])", "dy - tl.sum(dy * y, axis=1)[:, None]"),
}

WIDE_MUTATIONS = {
    "the old sum keeps its maximum": ("total * tl.exp(highest - _finite(higher))", "total"),
    "the last block only": (
        "total * tl.exp(highest - _finite(higher)) + tl.sum(tl.exp(x - _finite(higher)), axis=0)",
        "tl.sum(tl.exp(x - _finite(higher)), axis=0)",
    ),
    "maximum of the last block": (
        "higher = tl.maximum(highest, tl.max(x, axis=0))",
        "higher = tl.max(x, axis=0)",
    ),
    "projection of the last block": (
        (
            "products += dy * tl.load(y_ptr + row * width + first + column, mask=inside, "
            "other=0.0).to(tl.float32)"
        ),
        (
            "products = dy * tl.load(y_ptr + row * width + first + column, mask=inside, "
            "other=0.0).to(tl.float32)"
        ),
    ),
    "no projection": ("y * (dy - projection)", "y * dy"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_faults_are_found(name, device):
    broken = mutant(sys.modules["chronicals.kernels.softmax"], *MUTATIONS[name])
    rows = torch.randn(67, 37, device=device) * 30
    rows[::2] += 70
    rows[1::2] -= 100
    with pytest.raises(AssertionError):
        compare(lambda: (rows,), broken.fused_softmax)


@pytest.mark.parametrize("name", WIDE_MUTATIONS)
def test_faults_planted_in_wide_rows_are_found(name, device):
    broken = mutant(sys.modules["chronicals.kernels.softmax"], *WIDE_MUTATIONS[name])
    ramp = torch.linspace(-4, 4, WIDE[1], device=device)
    rows = torch.stack((ramp, ramp.flip(0), 30 * ramp, -30 * ramp))
    with pytest.raises(AssertionError):
        compare(lambda: (rows,), broken.fused_softmax)
