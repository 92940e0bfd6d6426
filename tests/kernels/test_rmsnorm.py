"""fused_rmsnorm against equation 4 of Zhang and Sennrich and against transformers' LlamaRMSNorm."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels import fused_add_rmsnorm, fused_rmsnorm
from chronicals.kernels.rmsnorm import add_rmsnorm_reference, rmsnorm_reference
from comparison import assert_as_exact_as_plain
from mutants import mutant

MODULE = sys.modules["chronicals.kernels.rmsnorm"]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (13, 64), (1, 1), (7, 1), (13, 37), (2, 5, 101), (3, 257)]


def exact(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight


def plain(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def compare(draw, eps: float = 1e-6, plain=plain, ours=fused_rmsnorm) -> None:
    assert_as_exact_as_plain(
        lambda x, w: ours(x, w, eps),
        lambda x, w: plain(x, w, eps),
        draw,
        exact=lambda x, w: exact(x, w, eps),
    )


def inputs(shape, dtype, device, scale=1.0):
    return lambda: (
        (torch.randn(*shape, device=device) * scale).to(dtype),
        torch.empty(shape[-1], device=device).uniform_(-2, 2).to(dtype),
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_formula(shape, dtype, device):
    """A row of one element is its sign, unless eps counts."""
    compare(inputs(shape, dtype, device), eps=0.1 if shape[-1] == 1 else 1e-6)


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.5])
def test_eps_counts(eps, device):
    """Small rows, so that eps is a large part of what is under the root."""
    compare(inputs((13, 37), torch.float32, device, scale=0.3), eps)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_equals_llama(dtype, device):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(37, eps=1e-5).to(device)

    def llama(x, weight, eps):
        return torch.func.functional_call(module, {"weight": weight}, x)

    compare(inputs((29, 37), dtype, device), 1e-5, llama)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_reference_is_the_formula(dtype):
    compare(inputs((13, 37), dtype, "cpu"), ours=rmsnorm_reference)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("layout", ["every second column", "transposed", "expanded"])
def test_non_contiguous(layout, dtype, device):
    def draw():
        x = {
            "every second column": lambda: torch.randn(13, 74, device=device)[:, ::2],
            "transposed": lambda: torch.randn(37, 13, device=device).t(),
            "expanded": lambda: torch.randn(1, 37, device=device).expand(13, 37),
        }[layout]()
        x = x.to(dtype)
        weight = torch.randn(74, device=device).to(dtype)[::2]
        assert not (x.is_contiguous() and weight.is_contiguous())
        return x, weight

    compare(draw)


def test_fp32_weight_over_bf16_rows(device):
    """As in a model with fp32 norms: the result is fp32, as transformers' is."""

    def draw():
        return torch.randn(13, 37, device=device).bfloat16(), torch.randn(37, device=device)

    assert fused_rmsnorm(*draw()).dtype == torch.float32
    compare(draw, plain=lambda x, w, eps: F.rms_norm(x, w.shape, None, eps) * w)


def test_squares_do_not_overflow(device):
    """fp16 ends at 65504, the square of 256."""
    compare(inputs((13, 64), torch.float16, device, scale=2000.0))


def test_zero_rows_stay_zero(device):
    x = torch.zeros(3, 8, device=device, requires_grad=True)
    out = fused_rmsnorm(x, torch.randn(8, device=device))
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isfinite(x.grad).all()


def test_no_rows(device):
    x = torch.zeros(0, 8, device=device, requires_grad=True)
    assert fused_rmsnorm(x, torch.ones(8, device=device)).shape == (0, 8)


@pytest.mark.parametrize("shape", [(1,), (9,), (4, 8), ()], ids=str)
def test_weight_of_another_width_is_refused(shape):
    with pytest.raises(ValueError, match=r"weight has shape .*must be \[8\]"):
        fused_rmsnorm(torch.randn(4, 8), torch.randn(shape))


@pytest.mark.slow
def test_compiled(device):
    """In one graph, and as exact."""
    compiled = torch.compile(fused_rmsnorm, backend="aot_eager", fullgraph=True)
    compare(inputs((13, 37), torch.float32, device), ours=compiled)


# --- with an offset, without a weight, after a residual
# --------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("shape", [(13, 37), (2, 5, 101)], ids=str)
def test_offset(shape, dtype, device):
    """As Gemma does: all in fp32, rounded once."""

    def gemma(x, w, eps):
        return (F.rms_norm(x.float(), w.shape, None, eps) * (1 + w.float())).to(x.dtype)

    assert_as_exact_as_plain(
        lambda x, w: fused_rmsnorm(x, w, 1e-6, offset=1.0),
        lambda x, w: gemma(x, w, 1e-6),
        inputs(shape, dtype, device),
        exact=lambda x, w: exact(x, 1 + w, 1e-6),
    )


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_without_a_weight(dtype, device):
    def draw():
        return ((torch.randn(13, 37, device=device)).to(dtype),)

    assert_as_exact_as_plain(
        lambda x: fused_rmsnorm(x, None),
        lambda x: F.rms_norm(x, x.shape[-1:], None, 1e-6),
        draw,
        exact=lambda x: exact(x, torch.ones((), dtype=x.dtype)),
    )


def with_residual(shape, dtype, device):
    return lambda: (*inputs(shape, dtype, device)(), torch.randn(*shape, device=device).to(dtype))


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 64), (13, 37), (2, 5, 101)], ids=str)
@pytest.mark.parametrize("ours", [fused_add_rmsnorm, add_rmsnorm_reference])
def test_after_a_residual(ours, shape, offset, dtype, device):
    """Both outputs have gradients of their own."""

    def plain_pair(x, w, r):
        total = x + r
        return (F.rms_norm(total.float(), w.shape, None, 1e-6) * (offset + w.float())).to(
            x.dtype
        ), total

    assert_as_exact_as_plain(
        lambda x, w, r: ours(x, r, w, 1e-6, offset),
        plain_pair,
        with_residual(shape, dtype, device),
        exact=lambda x, w, r: (exact(x + r, offset + w), x + r),
    )


@pytest.mark.parametrize("shape", [(1, 64), (13, 37), (2, 5, 101)], ids=str)
@pytest.mark.parametrize("ours", [fused_add_rmsnorm, add_rmsnorm_reference])
def test_after_a_residual_in_fp32(ours, shape, device):
    """The sum is in fp32, as the residual, and the norm in the dtype that is asked for."""

    def draw():
        x, weight = inputs(shape, torch.bfloat16, device)()
        return x, weight, torch.randn(*shape, device=device)

    def plain_pair(x, w, r):
        total = x + r
        return (F.rms_norm(total, w.shape, None, 1e-6) * w.float()).bfloat16(), total

    def in_two_types(x, w, r):
        return ours(x, r, w, dtype=torch.bfloat16)

    assert [out.dtype for out in in_two_types(*draw())] == [torch.bfloat16, torch.float32]
    assert_as_exact_as_plain(
        in_two_types, plain_pair, draw, exact=lambda x, w, r: (exact(x + r, w), x + r)
    )
    alone, total = ours(*(draw()[n] for n in (2,)), None, None, dtype=torch.bfloat16)
    assert alone.dtype == torch.bfloat16 and total.dtype == torch.float32


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_of_the_outputs_is_used(used, device):
    x, weight, residual = (
        t.requires_grad_() for t in with_residual((13, 37), torch.float32, device)()
    )
    upstream = torch.randn(13, 37, device=device)
    for function in (fused_add_rmsnorm, add_rmsnorm_reference):
        function(x, residual, weight)[used].backward(upstream)
    wanted = [x.grad, residual.grad] + ([weight.grad] if used == 0 else [])
    x.grad = residual.grad = weight.grad = None
    add_rmsnorm_reference(x, residual, weight)[used].backward(2 * upstream)
    for got, tensor in zip(wanted, (x, residual, weight)):
        torch.testing.assert_close(got, tensor.grad, rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_gets_no_gradient(device):
    x, weight = inputs((13, 37), torch.float32, device)()
    fused_rmsnorm(x.requires_grad_(), weight).sum().backward()
    assert weight.grad is None
    assert x.grad.abs().sum() > 0


def test_residual_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="residual has shape"):
        fused_add_rmsnorm(torch.randn(4, 8), torch.randn(4, 7), torch.randn(8))


@pytest.mark.parametrize("rows", [1, 5, None])
def test_every_row_counts_once_in_the_gradient_of_the_weight(rows, device, set_constants):
    """More rows than programs, and fewer."""
    set_constants(MODULE, RMSNORM_BACKWARD_WARPS=2)
    compare(inputs((rows or ROWS[device.type], 64), torch.float32, device))


@pytest.mark.slow
def test_twice_gives_the_same_bits(device):
    def gradient(x, weight):
        return torch.autograd.grad(fused_rmsnorm(x, weight).float().square().sum(), (x, weight))

    x, weight = (t.requires_grad_() for t in inputs((300, 96), torch.bfloat16, device)())
    assert all(torch.equal(a, b) for a, b in zip(gradient(x, weight), gradient(x, weight)))


ROWS = {"cpu": 45, "cuda": 40_000}
"""So many that a program of 2 warps takes several blocks of rows, where a processor gets one
program.
"""

MUTATIONS = {
    "no projection": ("g - s * (tl.sum(g * s, axis=1) / width)[:, None]", "g"),
    "sign of the projection": (
        "g - s * (tl.sum(g * s, axis=1) / width)[:, None]",
        "g + s * (tl.sum(g * s, axis=1) / width)[:, None]",
    ),
    "no rstd": (
        "rstd * (g - s * (tl.sum(g * s, axis=1) / width)[:, None])",
        "1.0 * (g - s * (tl.sum(g * s, axis=1) / width)[:, None])",
    ),
    "no weight in the backward": ("g *= w[None, :]", "g *= 1.0"),
    "last rows only": ("dw += g * s", "dw = g * s"),
    "eps outside of the root": (
        "1.0 / tl.sqrt_rn(tl.sum(s * s, axis=1) / width + eps)",
        "1.0 / tl.sqrt_rn(tl.sum(s * s, axis=1) / width) + eps",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_faults_are_found(name, device):
    broken = mutant(MODULE, *MUTATIONS[name])
    broken.RMSNORM_BACKWARD_WARPS = 2
    with pytest.raises(AssertionError):
        compare(
            inputs((ROWS[device.type], 37), torch.float32, device),
            eps=0.1,
            ours=broken.fused_rmsnorm,
        )


def test_a_dropped_residual_gradient_is_found(device):
    broken = mutant(
        MODULE,
        "tl.load(at_extra, mask=here, other=0.0).to(tl.float32)",
        "0 * tl.load(at_extra, mask=here, other=0.0).to(tl.float32)",
    )
    with pytest.raises(AssertionError):
        assert_as_exact_as_plain(
            lambda x, w, r: broken.fused_add_rmsnorm(x, r, w),
            lambda x, w, r: add_rmsnorm_reference(x, r, w),
            with_residual((13, 37), torch.float32, device),
        )
