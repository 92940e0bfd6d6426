"""Products of few rows with the norm, the unit and the addition beside them: as exact as plain ones."""

from dataclasses import replace

import pytest
import torch

from chronicals.kernels import few_rows_product as module
from chronicals.kernels.few_rows_product import (
    MOST_ROWS,
    FewRowsTile,
    RowNorm,
    few_rows_product_reference,
    few_rows_sum_reference,
    few_rows_tile,
    takes_few_rows,
)
from comparison import assert_as_exact_as_plain
from mutants import mutant

TYPES = [torch.bfloat16, torch.float16]
ROWS = [1, 2, 7, 16, 17, 64]
SIZES = {
    "one output": (1, 64),
    "a prime number of outputs": (67, 200),
    "splits": (16, 2048),
    "several programs and a step": (130, 320),
}
"""Outputs and columns."""

ACTIVATIONS = [None, "silu", "gelu", "gelu_tanh"]


def in_fp64(tensors):
    return [None if x is None else x.double() for x in tensors]


def without_gradient(run):
    """A function of tensors for the comparison, which asks for gradients: they are zero."""

    def function(x, *others):
        with torch.no_grad():
            out = run(x, *others)
        zero = 0 * sum(y.sum().to(out.dtype) for y in (x, *others))
        return out + zero

    return function


def compare_product(
    rows,
    outputs,
    columns,
    dtype,
    device,
    of=module,
    *,
    activation=None,
    norm=None,
    bias=True,
    tile=None,
):
    """Ours against plain torch, both beside fp64.

    Args:
        norm: dtype of x before a norm, or None.
    """
    width = outputs if activation is None else 2 * outputs

    def draw():
        x = torch.randn(rows, columns + 8, device=device)
        weight = torch.randn(width, columns + 16, device=device) / columns**0.5
        of_norm = 0.5 + torch.rand(columns, device=device)
        tensors = [weight.to(dtype), torch.randn(width, device=device).to(dtype), of_norm.to(dtype)]
        return [x.to(norm or dtype), *tensors]

    def run(function, **options):
        def product(x, weight, b, of_norm):
            x, weight = x[:, :columns], weight[:, :columns]
            how = None
            if norm is not None:
                wide = x.to(torch.promote_types(x.dtype, torch.float32)).square()
                half = columns // 2
                squares = torch.stack([wide[:, :half].sum(1), wide[:, half:].sum(1)])
                how = RowNorm(squares, of_norm, 1e-6, 1.0)
            given = x, weight, b if bias else None
            return function(*given, norm=how, activation=activation, **options)

        return without_gradient(product)

    assert_as_exact_as_plain(
        run(of.few_rows_product, tile=tile), run(few_rows_product_reference), draw
    )


def compare_sum(rows, outputs, columns, dtype, device, of=module, *, wide, bias=True):
    """Ours against plain torch, both beside fp64: the sum, and its sums of squares."""

    def draw():
        x = torch.randn(rows, columns, device=device).to(dtype)
        weight = (torch.randn(outputs, columns, device=device) / columns**0.5).to(dtype)
        residual = torch.randn(rows, outputs + 8, device=device)
        b = torch.randn(outputs, device=device).to(dtype)
        return [x, weight, residual.to(torch.float32 if wide else dtype), b]

    def run(function, which):
        def product(x, weight, residual, b):
            total, squares = function(x, weight, residual[:, :outputs], b if bias else None)
            return (total, squares.sum(0))[which]

        return without_gradient(product)

    for which in range(2):
        ours, plain = (run(f, which) for f in (of.few_rows_sum, few_rows_sum_reference))
        assert_as_exact_as_plain(ours, plain, draw)


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_over_shapes(size, rows, bias, dtype, device):
    compare_product(rows, *SIZES[size], dtype, device, bias=bias)


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("norm", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_norms_and_units(rows, activation, norm, device):
    compare_product(rows, 67, 200, torch.bfloat16, device, activation=activation, norm=norm)


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("wide", [False, True], ids=["rounded", "fp32"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("size", SIZES)
def test_sums(size, rows, bias, wide, device):
    compare_sum(rows, *SIZES[size], torch.bfloat16, device, wide=wide, bias=bias)


def test_a_sum_of_another_dtype_than_the_residual(device):
    """What a residual in 16 bits gives is rounded to 16 bits, also where fp32 is returned."""
    x, weight = drawn(3, 40, 64, device)
    residual = torch.randn(3, 40, device=device)
    short = residual.bfloat16()
    total, _ = module.few_rows_sum(x, weight, short, dtype=torch.float32)
    expected, _ = module.few_rows_sum(x, weight, short)
    assert total.dtype == torch.float32 and torch.equal(total.bfloat16(), expected)
    assert torch.equal(total.bfloat16().float(), total)
    rounded, _ = module.few_rows_sum(x, weight, residual, dtype=torch.bfloat16)
    whole, squares = module.few_rows_sum(x, weight, residual)
    assert torch.equal(rounded, whole.bfloat16())
    torch.testing.assert_close(squares.sum(0), whole.square().sum(1))


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("outputs", [16, 32, 64])
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_tiles(splits, columns, outputs, device):
    tile = FewRowsTile(16, outputs, columns, splits)
    compare_product(5, 70, 700, torch.bfloat16, device, tile=tile)


def drawn(rows, outputs, columns, device, dtype=torch.bfloat16):
    x = torch.randn(rows, columns, device=device).to(dtype)
    return x, torch.randn(outputs, columns, device=device).to(dtype)


def test_splits_give_the_same_bits_each_time(device):
    x, weight = drawn(4, 16, 2048, device)
    assert few_rows_tile(x, 16).splits > 1
    first = module.few_rows_product(x, weight)
    assert all(torch.equal(module.few_rows_product(x, weight), first) for _ in range(3))


def test_squares_are_those_of_the_sum_that_is_returned(device):
    """Rounded, as the norm reads it; one sum a program."""
    x, weight = drawn(3, 40, 64, device)
    residual = torch.randn(3, 40, device=device).bfloat16()
    tile = FewRowsTile(16, 16)
    total, squares = module.few_rows_sum(x, weight, residual, tile=tile)
    expected = torch.stack([part.float().square().sum(1) for part in total.split(16, 1)])
    torch.testing.assert_close(squares, expected)


def test_a_norm_follows_a_sum(device):
    """As a layer has them: the sums of squares of one are what the other reads."""
    x, weight = drawn(5, 96, 64, device)
    residual = torch.randn(5, 96, device=device)
    total, squares = module.few_rows_sum(x, weight, residual)
    _, weight = drawn(5, 32, 96, device)
    of_norm = torch.rand(96, device=device).bfloat16()
    found = module.few_rows_product(total, weight, norm=RowNorm(squares, of_norm, 1e-5))
    normed = torch.nn.functional.rms_norm(total, (96,), of_norm.float(), 1e-5).bfloat16()
    torch.testing.assert_close(found, module.few_rows_product(normed, weight), rtol=0.02, atol=0.02)


def apart(x):
    """The same values with gaps between them."""
    return torch.stack([x, torch.full_like(x, 7)], -1)[..., 0]


def test_residuals_vectors_and_squares_may_lie_apart(device):
    x, weight = drawn(5, 96, 64, device)
    residual = torch.randn(5, 96, device=device)
    bias, of_norm = (torch.randn(n, device=device).bfloat16() for n in (96, 64))
    expected = module.few_rows_sum(x, weight, residual, bias)
    got = module.few_rows_sum(x, weight, apart(residual), apart(bias))
    assert all(torch.equal(*pair) for pair in zip(got, expected))
    assert torch.equal(
        module.few_rows_sum(x, weight, residual.t().contiguous().t())[0],
        module.few_rows_sum(x, weight, residual)[0],
    )
    squares = torch.rand(3, 5, device=device)
    whole, gaps = (RowNorm(f(squares), f(of_norm), 1e-6) for f in (torch.clone, apart))
    assert torch.equal(*(module.few_rows_product(x, weight, norm=norm) for norm in (whole, gaps)))


def test_what_does_not_fit_is_refused(device):
    x, weight = drawn(5, 96, 64, device)
    with pytest.raises(ValueError, match="x has 64 columns, the weight 48"):
        module.few_rows_product(x, weight[:, :48])
    with pytest.raises(ValueError, match="x is torch.float32, the weight torch.bfloat16"):
        module.few_rows_product(x.float(), weight)
    with pytest.raises(ValueError, match="x is torch.float32, the weight torch.bfloat16"):
        module.few_rows_sum(x.float(), weight, torch.zeros(5, 96, device=device))
    with pytest.raises(ValueError, match=r"residual is \[4, 96\], the product \[5, 96\]"):
        module.few_rows_sum(x, weight, torch.zeros(4, 96, device=device))
    norm = RowNorm(torch.ones(1, 4, device=device), None, 1e-6)
    with pytest.raises(ValueError, match="norm.squares are of 4 rows, x has 5"):
        module.few_rows_product(x, weight, norm=norm)
    tile = FewRowsTile(16, 16, 64, 2)
    with pytest.raises(ValueError, match="tile.splits=2: the columns of a gated unit"):
        module.few_rows_product(x, weight, activation="silu", tile=tile)


def test_what_the_kernel_takes(device):
    def takes(rows, dtype=torch.bfloat16, **changes):
        x, weight = drawn(rows, 8, 64, device, dtype)
        return takes_few_rows(changes.get("x", x), changes.get("weight", weight))

    assert takes(1) and takes(MOST_ROWS) and takes(1, torch.float16)
    assert not takes(MOST_ROWS + 1)
    apart = torch.zeros(64, 3, device=device).bfloat16().t()
    assert not takes(3, x=apart)
    assert not takes(3, weight=torch.zeros(64, 8, device=device).bfloat16().t())


def test_a_launch_fits_the_shape():
    """On a card of two multiprocessors, as the interpreter has it."""
    x = torch.zeros(64, 896, dtype=torch.bfloat16)
    assert few_rows_tile(x, 16) == FewRowsTile(64, 16, 128, 2)
    assert few_rows_tile(x, 1152) == FewRowsTile(64, 64, 128, 1)
    assert few_rows_tile(x, 64, "silu") == FewRowsTile(64, 16, 128, 1)
    # stages of rows in fp32 and two weights have fewer columns
    assert few_rows_tile(x.float(), 9728, "silu").columns == 64
    assert few_rows_tile(x[:1], 16).rows == 16


PLANTED = {
    "a norm without its offset": ("factor.to(tl.float32)[None, :] + offset", "factor[None, :]"),
    "a mean over a split": (
        "tl.sum(squares, axis=0) / columns",
        "tl.sum(squares, axis=0) / each",
    ),
    "a unit of gate alone": ("gate * up.to(kind).to(tl.float32)", "gate"),
    "rows of up are those of gate": ("(outputs + output)[:, None]", "output[:, None]"),
    "no bias of up": ("up += bias.to(tl.float32)[None, :]", "up += 0"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_faults_are_found(fault, device):
    wrong = mutant(module, *PLANTED[fault], "_few_rows_product_kernel")
    with pytest.raises(AssertionError):
        compare_product(
            7, 67, 200, torch.bfloat16, device, wrong, activation="silu", norm=torch.float32
        )


SUMS_PLANTED = {
    "a split is left out": ("tl.static_range(SPLITS)", "tl.static_range(1, SPLITS)"),
    "the residual's rows lie as those of the sum": (
        "row.to(tl.int64)[:, None] * residual_row",
        "row.to(tl.int64)[:, None] * outputs",
    ),
    "no residual": ("residual.to(tl.float32) + total", "total"),
    "squares without one column": (
        "tl.where(exists, y.to(tl.float32), 0.0)",
        "tl.where(exists & (output > 0)[None, :], y.to(tl.float32), 0.0)",
    ),
    "a bias for each split": (
        "tl.store(parts_ptr + tl.program_id(1) * count + place, total, mask=exists)",
        "tl.store(parts_ptr + tl.program_id(1) * count + place, total + 1, mask=exists)",
    ),
}


@pytest.mark.parametrize("fault", SUMS_PLANTED)
def test_faults_of_sums_are_found(fault, device):
    wrong = mutant(module, *SUMS_PLANTED[fault], "_few_rows_product_kernel")
    with pytest.raises(AssertionError):
        compare_sum(7, 16, 2048, torch.bfloat16, device, wrong, wide=True)


def test_a_launch_that_splits_leaves_none_as_done(device):
    x, weight = drawn(4, 16, 2048, device)
    module.few_rows_product(x, weight)
    assert not module.arrivals(x.device).any()
    tile = replace(few_rows_tile(x, 16), splits=1)
    torch.testing.assert_close(
        module.few_rows_product(x, weight), module.few_rows_product(x, weight, tile=tile)
    )
