"""fp8_linear: each product is that of the operands in FP8, and close to the layer's own."""

import sys

import pytest
import torch
import torch.nn.functional as F

from chronicals.kernels.fp8 import dequantize, fp8_quantize
from chronicals.kernels.fp8_linear import LINEAR_SCALINGS, Layouts, fp8_linear
from mutants import mutant

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
MODULE = sys.modules["chronicals.kernels.fp8_linear"]


def draw(device, dtype=torch.bfloat16, tokens=48, inner=64, outer=80, scaling=None):
    """Rows and columns of very different sizes, so that a scale in the wrong place shows."""
    if scaling == "block":
        tokens = 160
        inner = 640
        outer = 256
    x = (
        torch.randn(tokens, inner, device=device)
        * torch.logspace(-2, 2, tokens, device=device)[:, None]
    )
    weight = (
        torch.randn(outer, inner, device=device)
        * torch.logspace(-1, 1, outer, device=device)[:, None]
    )
    dy = (
        torch.randn(tokens, outer, device=device)
        * torch.logspace(1, -3, tokens, device=device)[:, None]
    )
    return (x / 8).to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), dy.to(dtype)


def meant(x, scaling, dtype=torch.float8_e4m3fn):
    """What FP8 makes of a matrix, by rows and by columns, in fp64."""
    rows, columns = fp8_quantize(x.detach(), scaling, dtype, "both")
    return dequantize(rows).double(), dequantize(columns).double().t()


def assert_rounded_once(got, exact):
    torch.testing.assert_close(
        got.double(), exact, rtol=2**-8, atol=float(exact.abs().max()) * 2**-12
    )


def check_products(layer, scaling, gradient_type, device):
    x, weight, dy = draw(device, scaling=scaling)
    y = layer(x, weight, scaling=scaling, gradient_type=gradient_type)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    (x_rows, x_columns) = meant(x, scaling)
    (w_rows, w_columns) = meant(weight, LINEAR_SCALINGS[scaling])
    dy_rows, dy_columns = meant(dy, scaling, gradient_type)
    assert y.dtype == dx.dtype == dw.dtype == torch.bfloat16
    assert_rounded_once(y, x_rows @ w_rows.t())
    assert_rounded_once(dx, dy_rows @ w_columns)
    assert_rounded_once(dw, dy_columns.t() @ x_columns)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaling", "gradient_type"),
    [("tensor", E5M2), ("tensor", E4M3), ("row", E5M2), ("row", E4M3), ("block", E4M3)],
    ids=str,
)
def test_products_are_those_of_the_operands(scaling, gradient_type, device):
    check_products(fp8_linear, scaling, gradient_type, device)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", LINEAR_SCALINGS)
def test_close_to_the_layer(scaling, device):
    """Gaussian operands: a value is off by 2.6 % in the root mean square, a product by both."""
    x, weight, dy = (
        torch.randn(size, device=device).bfloat16() for size in ((256, 512), (128, 512), (256, 128))
    )
    x.requires_grad_(), weight.requires_grad_()
    found = []
    for layer in (F.linear, lambda x, w: fp8_linear(x, w, scaling=scaling)):
        y = layer(x, weight)
        found.append([y, *torch.autograd.grad(y, (x, weight), dy)])
    for exact, ours, allowed in zip(*found, (0.045, 0.045, 0.045)):
        assert (ours - exact).float().norm() <= allowed * exact.float().norm()
        assert F.cosine_similarity(ours.float().flatten(), exact.float().flatten(), 0) > 0.99


@pytest.mark.slow
def test_a_bias_dimensions_and_rows_that_are_no_multiple(device):
    x, weight, _ = draw(device, tokens=35)
    bias = torch.randn(80, device=device).bfloat16().requires_grad_()
    y = fp8_linear(x.view(5, 7, 64), weight, bias)
    assert y.shape == (5, 7, 80)
    assert torch.equal(y.view(35, 80), fp8_linear(x, weight) + bias)
    dy = torch.randn_like(y)
    dx, dw, db = torch.autograd.grad(y, (x, weight, bias), dy)
    plain = torch.autograd.grad(
        fp8_linear(F.pad(x, (0, 0, 0, 13)), weight)[:35], (x, weight), dy.view(35, 80)
    )
    assert torch.equal(dx, plain[0]) and torch.equal(dw, plain[1])
    torch.testing.assert_close(db, dy.float().sum((0, 1)).bfloat16(), rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_costs_nothing(frozen, device, monkeypatch):
    x, weight, dy = draw(device)
    expected = dict(zip("xw", torch.autograd.grad(fp8_linear(x, weight), (x, weight), dy)))
    made = []
    usual = MODULE.fp8_quantize
    monkeypatch.setattr(
        MODULE,
        "fp8_quantize",
        lambda *a, **k: made.append(k.get("layout", a[-1])) or usual(*a, **k),
    )
    (x if frozen == "x" else weight).requires_grad_(False)
    fp8_linear(x, weight).backward(dy)
    assert made == (["both", "rows", "columns"] if frozen == "x" else ["rows", "both", "rows"])
    assert (
        torch.equal(weight.grad, expected["w"])
        if frozen == "x"
        else torch.equal(x.grad, expected["x"])
    )


@pytest.mark.slow
@pytest.mark.parametrize("scaling", LINEAR_SCALINGS)
def test_a_weight_that_is_known_already(scaling, device):
    x, weight, dy = draw(device, scaling=scaling)
    known = Layouts(*fp8_quantize(weight.detach(), LINEAR_SCALINGS[scaling], layout="both"))
    weight.requires_grad_(False)
    found = [
        (
            y := fp8_linear(x, weight, scaling=scaling, known=layouts),
            torch.autograd.grad(y, x, dy)[0],
        )
        for layouts in (None, known)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_a_known_weight_that_does_not_fit(device):
    x, weight, _ = draw(device)
    rows, columns = fp8_quantize(weight.detach(), "row", layout="both")
    with pytest.raises(ValueError, match="known: was not scaled by scaling='tensor'"):
        fp8_linear(x, weight, known=Layouts(rows, columns))
    x, weight, _ = draw(device, scaling="block")
    runs = Layouts(*fp8_quantize(weight.detach(), "block", layout="both"))
    with pytest.raises(
        ValueError, match="known: was not scaled by scaling='square', as scaling='block' needs it"
    ):
        fp8_linear(x, weight, scaling="block", known=runs)
    with pytest.raises(ValueError, match="known: lacks a layout"):
        fp8_linear(x, weight, scaling="row", known=Layouts(rows, None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x, w: fp8_linear(x, w, scaling="square"),
            "scaling='square': expected one of tensor, row, block",
        ),
        (lambda x, w: fp8_linear(x, w, scaling="block"), "multiples of 128; leave it in 16 bit"),
        (
            lambda x, w: fp8_linear(x, w, scaling="block", gradient_type=E5M2),
            "gradient_type=torch.float8_e5m2: .* alone",
        ),
        (lambda x, w: fp8_linear(x[:, :32], w), r"x is \(48, 32\) .* expected \[..., K\]"),
        (lambda x, w: fp8_linear(x.float(), w), "of one dtype"),
        (lambda x, w: fp8_linear(x, w[:70]), "multiples of 16; leave it in 16 bit"),
    ],
)
def test_what_does_not_fit_is_refused(change, message, device):
    x, weight, _ = draw(device)
    with pytest.raises(ValueError, match=message):
        change(x, weight)


def test_a_card_without_fp8(device, let_return):
    x, weight, _ = draw(device)
    let_return(MODULE, lacks_fp8="NVIDIA A100 (8.0) has no FP8")
    with pytest.raises(
        ValueError,
        match=r"fp8_linear: NVIDIA A100 \(8.0\) has no FP8; use torch.nn.functional.linear",
    ):
        fp8_linear(x, weight)


FAULTS = {
    "dy in another type": (
        "fp8_quantize(dy, scaling, gradient_type, layout)",
        "fp8_quantize(dy, scaling, ({torch.float8_e4m3fn, torch.float8_e5m2} - "
        "{gradient_type}).pop(), layout)",
    ),
    "dy scaled twice": (
        "scaled_product(dy_rows, Scaled(values, scale), dy.dtype)",
        (
            "scaled_product(dy_rows._replace(scale=2 * dy_rows.scale), Scaled(values, "
            "scale), dy.dtype)"
        ),
    ),
    "the scale of x forgotten": (
        "Scaled(x_values, x_scale)",
        "Scaled(x_values, torch.ones_like(x_scale))",
    ),
    "rows of dy for columns": (
        "scaled_product(dy_columns, Scaled(x_values, x_scale), weight_type)",
        (
            "scaled_product(Scaled(dy_rows[0].t().contiguous(), dy_columns[1]), "
            "Scaled(x_values, x_scale), weight_type)"
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["row", "block"])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, scaling, device):
    wrong = mutant(MODULE, *FAULTS[fault])
    no_such_product = (fault, scaling) == ("dy in another type", "block")
    refused = ValueError if no_such_product else AssertionError
    with pytest.raises((AssertionError, refused)):
        check_products(wrong.fp8_linear, scaling, E5M2 if scaling == "row" else E4M3, device)


@pytest.mark.slow
def test_scales_of_blocks_lie_as_cublas_wants_them(device, monkeypatch):
    """1 × 128 by 128 × 128 for both products with W, 1 × 128 by 1 × 128 for dW; K of 640 is five
    blocks of eight.
    """
    seen = []

    def scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, output_dtype):
        seen.append(
            (
                kind_a.name,
                kind_b.name,
                *((x.shape, x.stride()) for x in (scale_a, scale_b)),
                b.stride(0),
            )
        )
        return a.new_zeros(len(a), b.shape[1], dtype=output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(
        MODULE,
        "scaled_product",
        lambda left, right, *a, **k: MODULE._product_of_blocks(left, right),
    )
    x, weight, dy = draw(device, tokens=256, inner=640, outer=384)
    torch.autograd.grad(fp8_linear(x, weight, scaling="block"), (x, weight), dy)
    runs = "BlockWise1x128"
    squares = "BlockWise128x128"
    assert seen == [
        (runs, squares, ((256, 5), (1, 256)), ((8, 3), (1, 8)), 1),
        (runs, squares, ((256, 3), (1, 256)), ((4, 5), (1, 4)), 1),
        (runs, runs, ((384, 2), (1, 384)), ((640, 2), (1, 640)), 1),
    ]


def test_blocks_on_a_card_without_such_products(device, set_constants):
    if (
        device.type == "cuda"
        and torch.cuda.get_device_capability() == MODULE.BLOCK_SCALING_CAPABILITY
    ):
        set_constants(MODULE, BLOCK_SCALING_CAPABILITY=(9, 9))
    elif device.type == "cpu":
        pytest.skip("what has no card emulates them")
    x, weight, _ = draw(device, scaling="block")
    with pytest.raises(ValueError, match="has no such products; use 'row' or 'tensor'"):
        fp8_linear(x, weight, scaling="block")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled(dtype, device):
    """In fp32 nothing is left to convert: see ``scaled_product``."""
    x, weight, dy = draw(device, dtype)
    compiled = torch.compile(fp8_linear, backend="aot_eager", fullgraph=True)
    found = [
        (y := layer(x, weight), *torch.autograd.grad(y, (x, weight), dy))
        for layer in (fp8_linear, compiled)
    ]
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
