"""The unit of experts and its gradients, against torch's own derivative of the weighted output.

In FP8: the unit's own values, rounded once with the scale of their row.
"""

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
from chronicals.kernels.fp8 import dequantize, fp8_quantize_reference
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
        u, _ = of.expert_glu(h, gate)
        return u * shares[order.long(), None].to(h.dtype)

    @staticmethod
    def backward(ctx, g):
        h, shares, order = ctx.saved_tensors
        d_h, _, _, d_shares = ctx.of.expert_glu_gradient(g.contiguous(), h, shares, order, ctx.gate)
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
    d_h, _, unit, d_shares = module.expert_glu_gradient(g, h, shares, order, gate)
    expected = expert_glu_gradient_reference(g, h, shares, order, gate)
    for got, want in zip((d_h, unit, d_shares), expected):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        unit, expert_glu_reference(h, gate) * shares[order.long(), None], rtol=1e-4, atol=1e-4
    )
    assert module.expert_glu_gradient(g, h, shares, order, gate, has_unit=False)[2] is None


def test_shares_of_another_type(device):
    """A router in fp32 above experts in bf16."""
    h = torch.randn(9, 16, device=device).bfloat16()
    g = torch.randn(9, 8, device=device).bfloat16()
    d_shares = module.expert_glu_gradient(
        g, h, torch.rand(9, device=device), torch.arange(9, device=device).int(), Gate()
    )[3]
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


HALF_A_STEP = 2.0**-4
"""A value of e4m3 is off by so much of itself at most, and below 2⁻⁶ by 2⁻¹⁰."""


def of_different_sizes(shape, dtype, device):
    """Rows of very different sizes, so that another's scale shows."""
    rows, width = shape
    h = (
        torch.randn(rows, 2 * width, device=device)
        * torch.logspace(-1, 1, rows, device=device)[:, None]
    )
    g = (
        torch.randn(rows, width, device=device)
        * torch.logspace(2, -2, rows, device=device)[:, None]
    )
    return (
        h.to(dtype),
        g.to(dtype),
        torch.rand(rows, device=device).to(dtype),
        torch.randperm(rows, device=device).int(),
    )


def assert_rounded_once(scaled, exact):
    """Each row's largest value is 448, and every value within half a step of what it stands for."""
    exact = exact.double()
    assert scaled.values.shape == exact.shape and scaled.scale.shape == (len(exact), 1)
    largest = exact.abs().amax(1)
    there = largest > 0
    torch.testing.assert_close(
        scaled.scale[there, 0].double() * 448, largest[there], rtol=1e-3, atol=0
    )
    error = (dequantize(scaled).double() - exact).abs()
    assert (
        error <= 1.01 * HALF_A_STEP * exact.abs() + 1.1 * 2.0**-10 * scaled.scale.double()
    ).all()


def assert_near(got, expected):
    """But for roundings: what is multiplied and added at once depends on what else a kernel
    does.
    """
    assert (
        got.dtype == expected.dtype
        and (got - expected).norm() <= torch.finfo(got.dtype).eps * expected.norm()
    )


def check_forward_in_fp8(of, shape, dtype, device, gate, dense=True):
    h, *_ = of_different_sizes(shape, dtype, device)
    u, scaled = of.expert_glu(h, gate, dense, in_fp8=True)
    assert (u is not None) == dense
    if u is not None:
        assert_near(u, module.expert_glu(h, gate)[0])
    assert_rounded_once(scaled, expert_glu_reference(h.double(), gate))


def check_backward_in_fp8(of, shape, dtype, device, gate, dense=True, has_unit=True):
    h, g, shares, order = of_different_sizes(shape, dtype, device)
    d_h, scaled, unit, d_shares = of.expert_glu_gradient(
        g, h, shares, order, gate, has_unit, dense, in_fp8=True
    )
    own_d_h, _, own_unit, own_d_shares = module.expert_glu_gradient(g, h, shares, order, gate)
    assert (d_h is not None, unit is not None) == (dense, has_unit)
    for got, expected in ((d_h, own_d_h), (unit, own_unit)):
        if got is not None:
            assert_near(got, expected)
    assert (d_shares - own_d_shares).norm() <= 1e-5 * own_d_shares.norm()
    assert_rounded_once(
        scaled,
        expert_glu_gradient_reference(g.double(), h.double(), shares.double(), order, gate)[0],
    )


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_unit_in_fp8(shape, gate, dtype, device):
    check_forward_in_fp8(module, shape, dtype, device, gate)


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_its_gradient_in_fp8(shape, gate, dtype, device):
    check_backward_in_fp8(module, shape, dtype, device, gate)


@pytest.mark.parametrize(("dense", "has_unit"), [(False, False), (False, True), (True, False)])
def test_what_nobody_reads_is_not_written(dense, has_unit, device):
    check_forward_in_fp8(module, (13, 300), torch.bfloat16, device, GATES[3], dense)
    check_backward_in_fp8(module, (13, 300), torch.bfloat16, device, GATES[3], dense, has_unit)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_in_fp8_the_references_beside_the_kernels(gate, device):
    """But for values at the middle between two of e4m3."""
    h, g, shares, order = of_different_sizes((37, 48), torch.bfloat16, device)
    _, unit = module.expert_glu(h, gate, in_fp8=True)
    _, gradient, _, _ = module.expert_glu_gradient(g, h, shares, order, gate, in_fp8=True)
    of_unit = expert_glu_reference(h.float(), gate)
    of_gradient, _, _ = expert_glu_gradient_reference(g, h.float(), shares, order, gate)
    for got, plain in ((unit, of_unit), (gradient, of_gradient)):
        expected, _ = fp8_quantize_reference(plain, "row")
        torch.testing.assert_close(got.scale, expected.scale, rtol=1e-4, atol=0)
        assert (dequantize(got) - dequantize(expected)).norm() <= 5e-3 * dequantize(expected).norm()


def test_rows_of_zeros_in_fp8(device):
    h, g, shares, order = of_different_sizes((9, 32), torch.bfloat16, device)
    h[4], shares[order[5].long()] = 0, 0
    _, scaled = module.expert_glu(h, Gate(), in_fp8=True)
    assert scaled.scale[4] == 1 and not scaled.values[4].float().any()
    _, of_h, _, _ = module.expert_glu_gradient(g, h, shares, order, Gate(), in_fp8=True)
    assert of_h.scale[5] == 1 and not of_h.values[5].float().any()


def test_in_fp8_in_a_graph(device):
    h, g, shares, order = of_different_sizes((37, 48), torch.bfloat16, device)

    def both(h, g):
        return (
            module.expert_glu(h, Gate(), in_fp8=True),
            module.expert_glu_gradient(g, h, shares, order, Gate(), in_fp8=True),
        )

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for (_, got, *_), (_, expected, *_) in zip(compiled(h, g), both(h, g)):
        assert torch.equal(got.values.float(), expected.values.float()) and torch.equal(
            got.scale, expected.scale
        )


FAULTS_IN_FP8 = {
    "the unit without its scale": ("(u * inverse).to", "u.to"),
    "the maximum of the gate alone": (
        "tl.maximum(magnitude(d_gate), magnitude(d_up))",
        "magnitude(d_gate)",
    ),
    "the maximum of the last columns": (
        "most = tl.maximum(most, tl.max(tl.where(inside, magnitude(u), 0.0), 1))",
        "most = tl.max(tl.where(inside, magnitude(u), 0.0), 1)",
    ),
    "up's gradient without its scale": ("d_up * inverse", "d_up"),
}


@pytest.mark.parametrize("fault", FAULTS_IN_FP8)
def test_planted_faults_in_fp8_are_found(fault, device):
    wrong = mutant(module, *FAULTS_IN_FP8[fault])
    with pytest.raises(AssertionError):
        for check in (check_forward_in_fp8, check_backward_in_fp8):
            check(wrong, (37, 300), torch.bfloat16, device, Gate())
