"""The unit of experts and its gradients, against torch's own derivative of the weighted output."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels import expert_glu as module
from chronicals.kernels.expert_glu import (
    GATE_ACTIVATIONS,
    Gate,
    expert_glu_gradient_reference,
    expert_glu_reference,
)
from comparison import assert_as_exact_as_plain
from mutants import mutant

GATES = [
    Gate(),
    Gate("gelu"),
    Gate("gelu_tanh", interleaved=True),
    Gate("silu", 1.702, 7.0, 1.0, True),
    Gate("silu", limit=1.5),
    Gate("silu", alpha=1.3, offset=0.5),
]
SHAPES = [(9, 32), (7, 33), (131, 64), (13, 300)]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def formula(h: Tensor, gate: Gate) -> Tensor:
    g, up = (h[:, ::2], h[:, 1::2]) if gate.interleaved else h.chunk(2, 1)
    if gate.limit is not None:
        g = g.clamp(max=gate.limit)
        up = up.clamp(-gate.limit, gate.limit)
    kinds = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    return kinds.get(gate.activation, lambda x: x * torch.sigmoid(gate.alpha * x))(g) * (
        up + gate.offset
    )


class Unit(torch.autograd.Function):
    """``p · u``, whose gradients are those of the kernel."""

    @staticmethod
    def forward(ctx, h, shares, order, gate, of):
        ctx.save_for_backward(h, shares, order)
        ctx.gate = gate
        ctx.of = of
        return of.expert_glu(h, gate) * shares[order.long(), None].to(h.dtype)

    @staticmethod
    def backward(ctx, g):
        h, shares, order = ctx.saved_tensors
        d_h, _, d_shares = ctx.of.expert_glu_gradient(g.contiguous(), h, shares, order, ctx.gate)
        return d_h, d_shares.to(shares.dtype), None, None, None


def compare(shape, dtype, device, gate, of=module):
    rows, width = shape
    order = torch.randperm(rows, device=device).int()

    def draw():
        h = torch.randn(rows, 2 * width, device=device) * 3
        return h.to(dtype), torch.rand(rows, device=device).to(dtype)

    assert_as_exact_as_plain(
        lambda h, p: Unit.apply(h, p, order, gate, of),
        lambda h, p: formula(h, gate) * p[order.long().to(p.device), None],
        draw,
    )


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_formula(shape, gate, dtype, device):
    compare(shape, dtype, device, gate)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_the_unit_times_its_share_comes_beside(gate, device):
    h = torch.randn(37, 48, device=device)
    g = torch.randn(37, 24, device=device)
    order = torch.randperm(37, device=device).int()
    shares = torch.rand(37, device=device)
    d_h, unit, d_shares = module.expert_glu_gradient(g, h, shares, order, gate)
    expected = expert_glu_gradient_reference(g, h, shares, order, gate)
    for got, want in zip((d_h, unit, d_shares), expected):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        unit, expert_glu_reference(h, gate) * shares[order.long(), None], rtol=1e-4, atol=1e-4
    )
    assert (
        module.expert_glu_gradient(g, h, shares, order, gate, has_unit=False)[1] is None
        or device.type == "cpu"
    )


def test_shares_of_another_type(device):
    """A router in fp32 above experts in bf16."""
    h = torch.randn(9, 16, device=device).bfloat16()
    g = torch.randn(9, 8, device=device).bfloat16()
    d_shares = module.expert_glu_gradient(
        g, h, torch.rand(9, device=device), torch.arange(9, device=device).int(), Gate()
    )[2]
    assert d_shares.dtype == torch.float32
    torch.testing.assert_close(
        d_shares, (g.float() * formula(h.float(), Gate())).sum(1), rtol=1e-3, atol=1e-3
    )


def test_names_of_activations():
    assert {gate.activation for gate in GATES} == set(GATE_ACTIVATIONS)


MUTATIONS = {
    "no share": ("d_u = share * g", "d_u = g"),
    "slope without alpha": ("1.0 + alpha * g * (1.0 - s)", "1.0 + g * (1.0 - s)"),
    "a limited gate learns": ("tl.where(raw_gate <= limit, d_gate, 0.0)", "d_gate"),
    "a limited up learns from below": ("(raw_up <= limit) & (raw_up >= -limit)", "raw_up <= limit"),
    "no offset": ("d_u * (up + offset) * slope", "d_u * up * slope"),
    "the share of the place": ("shares_ptr + pair", "shares_ptr + number"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_faults_are_found(name, device):
    with pytest.raises(AssertionError):
        compare(
            (37, 40),
            torch.float32,
            device,
            Gate("silu", 1.702, 2.0, 1.0, True),
            mutant(module, *MUTATIONS[name]),
        )
