"""fused_layernorm against equations 3 and 4 of Ba et al. and against torch's layer_norm."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels import fused_layernorm
from chronicals.kernels.layernorm import layernorm_reference
from comparison import assert_as_exact_as_plain, outputs_and_gradients
from mutants import mutant

MODULE = sys.modules["chronicals.kernels.layernorm"]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (13, 64), (7, 2), (13, 37), (2, 5, 101), (3, 257)]


def exact(x: Tensor, weight: Tensor | float, bias: Tensor | float, eps: float = 1e-5) -> Tensor:
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return (
        centred / torch.sqrt((centred * centred).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight
        + bias
    )


def plain(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def compare(draw, eps: float = 1e-5, plain=plain, ours=fused_layernorm) -> None:
    assert_as_exact_as_plain(
        lambda x, w, b: ours(x, w, b, eps),
        lambda x, w, b: plain(x, w, b, eps),
        draw,
        exact=lambda x, w, b: exact(x, w, b, eps),
    )


def inputs(shape, dtype, device, scale=1.0, shift=0.0):
    return lambda: (
        (torch.randn(*shape, device=device) * scale + shift).to(dtype),
        torch.empty(shape[-1], device=device).uniform_(-2, 2).to(dtype),
        torch.randn(shape[-1], device=device).to(dtype),
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_formula(shape, dtype, device):
    """With two elements, all is in eps."""
    compare(inputs(shape, dtype, device, shift=0.7), eps=0.1 if shape[-1] <= 2 else 1e-5)


def test_one_element_is_its_bias(device):
    """Whatever it is; of its gradient a rounding is left where a product and a sum are one
    instruction.
    """
    x, weight, bias = (t.requires_grad_() for t in inputs((7, 1), torch.float32, device)())
    y = fused_layernorm(x, weight, bias, 0.1)
    assert torch.equal(y, bias.expand(7, 1))
    y.sum().backward()
    assert x.grad.abs().max() <= 1e-6 * weight.abs().item() / 0.1**0.5
    assert weight.grad.item() == 0 and bias.grad.item() == 7


@pytest.mark.slow
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.5])
def test_eps_counts(eps, device):
    """Small rows, so that eps is a large part of what is under the root."""
    compare(inputs((13, 37), torch.float32, device, scale=0.3), eps)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("has", [(True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("ours", [fused_layernorm, layernorm_reference])
def test_without_a_weight_or_bias(ours, has, dtype, device):
    def fit(function, one, zero):
        def run(x, *given):
            given = iter(given)
            return function(
                x, *(next(given) if there else missing for there, missing in zip(has, (one, zero)))
            )

        return run

    def draw():
        x, *others = inputs((13, 37), dtype, device)()
        return x, *(tensor for tensor, there in zip(others, has) if there)

    assert_as_exact_as_plain(
        fit(ours, None, None), fit(plain, None, None), draw, exact=fit(exact, 1.0, 0.0)
    )


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_reference_is_the_formula(dtype):
    compare(inputs((13, 37), dtype, "cpu"), ours=layernorm_reference)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("layout", ["every second column", "transposed", "expanded"])
def test_non_contiguous(layout, dtype, device):
    def draw():
        def random(*shape):
            return torch.randn(*shape, device=device).to(dtype)

        x = {
            "every second column": lambda: random(13, 74)[:, ::2],
            "transposed": lambda: random(37, 13).t(),
            "expanded": lambda: random(1, 37).expand(13, 37),
        }[layout]()
        weight = random(74)[::2]
        bias = random(74)[1::2]
        assert not any(tensor.is_contiguous() for tensor in (x, weight, bias))
        return x, weight, bias

    compare(draw)


@pytest.mark.slow
def test_fp32_weight_over_bf16_rows(device):
    """As with fp32 norms in a bf16 model: the result is fp32, the widest type."""

    def draw():
        x, weight, bias = inputs((13, 37), torch.float32, device)()
        return x.bfloat16(), weight, bias.bfloat16()

    assert fused_layernorm(*draw()).dtype == torch.float32
    compare(draw, plain=lambda x, w, b, eps: plain(x.float(), w, b.float(), eps))


def test_a_large_mean_does_not_cancel(device):
    """Mean of the squares less square of the mean would be off by more than the variance; the
    mean by its rounding.
    """
    given = inputs((13, 64), torch.float32, device, shift=1e4)()
    upstream = [torch.randn(13, 64, device=device)]
    got = outputs_and_gradients(fused_layernorm, given, upstream)
    expected = outputs_and_gradients(exact, [x.double() for x in given], upstream)
    for ours, e in zip(got, expected, strict=True):
        assert (ours - e).norm() < 0.01 * e.norm()


def test_squares_do_not_overflow(device):
    """fp16 ends at 65504, the square of 256."""
    compare(inputs((13, 64), torch.float16, device, scale=2000.0))


def test_constant_rows_are_the_bias(device):
    x = torch.full((3, 8), 7.0, device=device, requires_grad=True)
    bias = torch.randn(8, device=device)
    out = fused_layernorm(x, torch.randn(8, device=device), bias)
    out.sum().backward()
    assert torch.equal(out, bias.expand(3, 8))
    assert torch.isfinite(x.grad).all()


def test_no_rows(device):
    x = torch.zeros(0, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    out = fused_layernorm(x, weight, None)
    out.sum().backward()
    assert out.shape == x.grad.shape == (0, 8)
    assert not weight.grad.any()


@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)], ids=str)
def test_a_frozen_one_gets_no_gradient(trained, device):
    """And the other gets its own."""

    def gradients(function):
        torch.manual_seed(0)
        x, *others = inputs((13, 37), torch.float32, device)()
        leaves = [
            x.requires_grad_(),
            *(t.requires_grad_(wanted) for t, wanted in zip(others, trained)),
        ]
        function(*leaves).backward(torch.randn(13, 37, device=device))
        return [leaf.grad for leaf in leaves]

    ours = gradients(fused_layernorm)
    assert [g is not None for g in ours] == [True, *trained]
    for got, expected in zip(ours, gradients(plain)):
        assert got is None or torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1,), (9,), (4, 8), ()], ids=str)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_another_width_is_refused(name, shape):
    given = {"weight": torch.randn(8), "bias": torch.randn(8)} | {name: torch.randn(shape)}
    with pytest.raises(ValueError, match=rf"{name} has shape .*must be \[8\]"):
        fused_layernorm(torch.randn(4, 8), **given)


@pytest.mark.slow
def test_compiled(device):
    """In one graph, and as exact."""
    compiled = torch.compile(fused_layernorm, backend="aot_eager", fullgraph=True)
    compare(inputs((13, 37), torch.float32, device), ours=compiled)


@pytest.mark.parametrize("rows", [1, 5, None])
def test_every_row_counts_once_in_the_gradients_of_weight_and_bias(rows, device, set_constants):
    """More rows than programs, and fewer."""
    set_constants(MODULE, LAYERNORM_BACKWARD_WARPS=2)
    compare(inputs((rows or ROWS[device.type], 64), torch.float32, device))


@pytest.mark.slow
def test_twice_gives_the_same_bits(device):
    leaves = [t.requires_grad_() for t in inputs((300, 96), torch.bfloat16, device)()]

    def gradients():
        return torch.autograd.grad(fused_layernorm(*leaves).float().square().sum(), leaves)

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients()))


ROWS = {"cpu": 45, "cuda": 40_000}
"""So many that a program of 2 warps takes several blocks of rows, where a processor gets one
program.
"""

MUTATIONS = {
    "no mean of the gradient": ("g - mean_g[:, None]", "g"),
    "no projection": ("g - mean_g[:, None] - x * mean_gx[:, None]", "g - mean_g[:, None]"),
    "sign of the projection": (
        "g - mean_g[:, None] - x * mean_gx[:, None]",
        "g - mean_g[:, None] + x * mean_gx[:, None]",
    ),
    "no rstd": (
        "rstd * (g - mean_g[:, None] - x * mean_gx[:, None])",
        "1.0 * (g - mean_g[:, None] - x * mean_gx[:, None])",
    ),
    "no weight in the backward": ("g *= w[None, :]", "g *= 1.0"),
    "the weight's last rows only": ("dw += g * x", "dw = g * x"),
    "the bias's last rows only": ("db += g", "db = g"),
    "the weight before its bias": (
        "shares_ptr + share + WANTS_WEIGHT * width",
        "shares_ptr + share",
    ),
    "padding counts in the variance": (
        "tl.where(inside, x - mean[:, None], 0.0)",
        "x - mean[:, None]",
    ),
    "eps outside of the root": (
        "1.0 / tl.sqrt_rn(tl.sum(centred * centred, axis=1) / width + eps)",
        "1.0 / tl.sqrt_rn(tl.sum(centred * centred, axis=1) / width) + eps",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_faults_are_found(name, device):
    broken = mutant(MODULE, *MUTATIONS[name])
    broken.LAYERNORM_BACKWARD_WARPS = 2
    with pytest.raises(AssertionError):
        compare(
            inputs((ROWS[device.type], 37), torch.float32, device, shift=0.7),
            eps=0.1,
            ours=broken.fused_layernorm,
        )
