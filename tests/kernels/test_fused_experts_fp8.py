"""A layer of experts whose products run in FP8, against expert by expert with operands that are
rounded likewise.
"""

import sys

import pytest
import torch
from test_expert_dispatch import drawn
from test_fused_experts import CASES as FEW
from test_fused_experts import GPT_OSS, OPTIONS, Watch, built, shapes

from chronicals.kernels.expert_glu import Gate, expert_glu_reference
from chronicals.kernels.fp8_experts import fp8_quantize_experts
from chronicals.kernels.fused_experts import fused_experts, fused_experts_reference
from chronicals.kernels.nf4_product import MOST_ROWS
from mutants import mutant

pytestmark = pytest.mark.of_file(5)

module = sys.modules["chronicals.kernels.fused_experts"]

CASES = [(tokens + MOST_ROWS, *sizes) for tokens, *sizes in FEW]
"""Sizes with more tokens than those whose rows are not quantised."""


class Quantised:
    """A weight in FP8, made at each use."""

    column_slots = None

    def __init__(self, weight, transposed):
        self.weight = weight
        self.layouts = ("columns", "rows") if transposed else ("rows", "columns")

    def made(self, layout, scale=None):
        return next(
            found
            for found in fp8_quantize_experts(self.weight.detach(), layout, scale)
            if found is not None
        )

    def rows(self):
        return self.made(self.layouts[0])

    def columns(self, scale):
        return self.made(self.layouts[1], scale)


def in_fp8(of):
    return of._replace(in_fp8=Quantised(of.weight, of.transposed))


def rounded(x, by_rows):
    most = x.abs().amax(-1, keepdim=True) if by_rows else x.abs().max()
    scale = most.clamp(min=1e-30) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class Product(torch.autograd.Function):
    """``x Wᵀ`` with both rounded, dx with dy rounded; dW of what is not."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return rounded(x, True) @ rounded(weight, False).t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return rounded(dy, True) @ rounded(weight, False), dy.t() @ x


def reference(x, experts, shares, first, second, gate=None):
    def through(rows, of, expert):
        y = Product.apply(rows, of.weight_ENK[expert])
        if of.down is not None:
            y = y + of.scale * (rows @ of.down[expert].t() @ of.up[expert].t())
        return y if of.bias is None else y + of.bias[expert]

    y = x.new_zeros(*experts.shape, x.shape[1])
    for expert in range(first.sizes[0]):
        token, rank = torch.where(experts == expert)
        if len(token):
            unit = expert_glu_reference(through(x[token], first, expert), gate or Gate())
            y = y.index_put(
                (token, rank), through(unit, second, expert) * shares[token, rank, None]
            )
    return y.sum(1)


def compare(case, device, gate=None, of=module, **options):
    """In relative Frobenius norm: what is rounded near a middle goes either way, and shares
    learn from other roundings; a scale that is wrong is off by far more."""
    experts = drawn(*case[:3], device)
    sizes = shapes(case, **options)
    tensors = [
        (torch.randn(*size, device=device) * (0.4 if n > 1 else 1)).bfloat16()
        for n, size in enumerate(sizes)
    ]
    dy = torch.randn(case[0], case[3], device=device).bfloat16()

    def run(function, kind, eight):
        leaves = [x.to(kind).requires_grad_() for x in tensors]
        x, shares, *products = built(leaves, **options)
        out = function(
            x, experts, shares, *(in_fp8(part) if eight else part for part in products), gate
        )
        return [out, *torch.autograd.grad(out, leaves, dy.to(kind))]

    alike, exact = (
        run(function, torch.float64, False) for function in (reference, fused_experts_reference)
    )
    ours = run(of.fused_experts, torch.bfloat16, True)
    for number, (got, expected, plain) in enumerate(zip(ours, alike, exact, strict=True)):
        assert got.dtype == torch.bfloat16 and got.shape == expected.shape
        limit = 0.1 if number == 2 else 0.04
        assert (got.double() - expected).norm() <= limit * expected.norm(), f"tensor {number}"
        assert number == 0 or (got.double() - plain).norm() <= 0.15 * plain.norm(), (
            f"tensor {number}"
        )


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("gate", [None, GPT_OSS], ids=["swiglu", "gpt-oss"])
def test_output_and_every_gradient(options, gate, device):
    compare((67, 2, 4, 48, 40), device, gate, **options)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_sizes(case, device):
    compare(case, device, rank=4)


def test_few_tokens_are_not_quantised(device):
    """Weights alone are rounded; the gradient is that of FP8."""
    case = FEW[1]
    tensors = [torch.randn(*shape, device=device).bfloat16() for shape in shapes(case)]
    x, shares, *products = built(tensors)
    experts = drawn(*case[:3], device)
    x.requires_grad_()
    out = fused_experts(x, experts, shares, *map(in_fp8, products))
    (dx,) = torch.autograd.grad(out.sum(), x)

    exact_x = x.detach().double().requires_grad_()
    rounded_weights = [
        of._replace(weight=torch.stack([rounded(w.double(), False) for w in of.weight]))
        for of in products
    ]
    exact = fused_experts_reference(exact_x, experts, shares.double(), *rounded_weights)
    (exact_dx,) = torch.autograd.grad(exact.sum(), exact_x)
    assert (out.double() - exact).norm() <= 2**-6 * exact.norm()
    assert (dx.double() - exact_dx).norm() <= 0.15 * exact_dx.norm()


def test_frozen_weights_and_what_learns_beside_them(device):
    """Nothing of 16 bits is made of the gradient within where nothing reads it; the weights are
    not kept.
    """
    case = CASES[1]
    tensors = [torch.randn(*shape, device=device).bfloat16() for shape in shapes(case)]
    tensors[0].requires_grad_()
    x, shares, *products = built(tensors)
    experts = drawn(*case[:3], device)
    made = []
    keep = module.expert_glu_gradient
    kept = []
    watched = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with pytest.MonkeyPatch.context() as patch, watched:
        patch.setattr(
            module, "expert_glu_gradient", lambda *given: made.append(given[5:]) or keep(*given)
        )
        out = fused_experts(x, experts, shares, *map(in_fp8, products))
        (dx,) = torch.autograd.grad(out.sum(), x)
    assert made == [(False, False, True)] and dx.abs().sum() > 0
    assert not any(t.data_ptr() in {of.weight.data_ptr() for of in products} for t in kept)


def test_twice_the_same_bits(device):
    tensors = [
        torch.randn(*shape, device=device).bfloat16().requires_grad_()
        for shape in shapes(CASES[2], rank=4)
    ]
    x, shares, *products = built(tensors, rank=4)
    experts = drawn(*CASES[2][:3], device)

    def run():
        out = fused_experts(x, experts, shares, *map(in_fp8, products))
        return out, *torch.autograd.grad(out.float().square().sum(), tensors)

    assert all(torch.equal(one, other) for one, other in zip(run(), run()))


def test_no_tokens(device):
    tensors = [
        torch.randn(*shape, device=device).requires_grad_() for shape in shapes((0, 2, 3, 16, 16))
    ]
    x, shares, *products = built(tensors)
    experts = torch.zeros(0, 2, dtype=torch.int64, device=device)
    out = fused_experts(x, experts, shares, *map(in_fp8, products))
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert out.shape == (0, 16) and not gradients[2].any()


def test_the_host_waits_for_nothing(device):
    options = {"bias": True, "rank": 4}
    tensors = [
        torch.randn(*shape, device=device).bfloat16().requires_grad_()
        for shape in shapes(CASES[1], **options)
    ]
    x, shares, *products = built(tensors, **options)
    experts = drawn(*CASES[1][:3], device)
    with Watch() as watch:
        fused_experts(x, experts, shares, *map(in_fp8, products)).sum().backward()
    assert "fp8_grouped_product" in watch.found and "expert_glu_forward" in watch.found
    assert not {
        "_local_scalar_dense",
        "lift_fresh",
        "nonzero",
        "is_nonzero",
        "masked_select",
        "unique",
    } & set(watch.found)


def test_one_product_alone_is_refused(device):
    tensors = [torch.randn(*shape, device=device).bfloat16() for shape in shapes(CASES[1])]
    x, shares, first, second = built(tensors)
    with pytest.raises(ValueError, match="in_fp8: one of the two products has it"):
        fused_experts(x, drawn(*CASES[1][:3], device), shares, in_fp8(first), second)


FAULTS = {
    "the gradient of x by another scale": (
        "of.in_fp8.columns(scale)",
        "of.in_fp8.columns(scale)._replace(scale=2 * scale)",
    ),
    "the adapter of down reads nothing": (
        "not in_fp8 or a2 is not None",
        "not in_fp8",
    ),
    "biases beside adapters alone": (
        'not in_fp8 or wanted["w1"] or wanted["b1"] or a1 is not None',
        'not in_fp8 or wanted["b1"] or a1 is not None',
    ),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, device):
    wrong = mutant(module, *FAULTS[fault])
    with pytest.raises((AssertionError, RuntimeError)):
        compare(CASES[1], device, of=wrong, bias=False, rank=0 if "biases" in fault else 4)
