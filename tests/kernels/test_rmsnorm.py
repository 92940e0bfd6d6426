"""fused_rmsnorm against equation 4 of Zhang and Sennrich and against transformers' LlamaRMSNorm."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels import fused_rmsnorm
from chronicals.kernels.rmsnorm import rmsnorm_reference
from comparison import assert_as_exact_as_plain

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (13, 64), (1, 1), (7, 1), (13, 37), (2, 5, 101), (3, 257)]


def exact(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight


def plain(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def compare(inputs, eps: float = 1e-6, plain=plain, ours=fused_rmsnorm) -> None:
    assert_as_exact_as_plain(
        lambda x, w: ours(x, w, eps), lambda x, w: plain(x, w, eps), inputs, exact=lambda x, w: exact(x, w, eps)
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
        x, weight = x.to(dtype), torch.randn(74, device=device).to(dtype)[::2]
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


def test_compiled(device):
    """In one graph, and as exact."""
    compiled = torch.compile(fused_rmsnorm, backend="aot_eager", fullgraph=True)
    compare(inputs((13, 37), torch.float32, device), ours=compiled)
