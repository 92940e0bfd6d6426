"""The unit of experts in FP8 and its gradient: the unit's own values, rounded once with the
scale of their row.
"""

import sys

import pytest
import torch
from test_expert_glu import GATES, SHAPES, TYPES

from chronicals.kernels.expert_glu import (
    Gate,
    expert_glu,
    expert_glu_fp8,
    expert_glu_fp8_gradient,
    expert_glu_fp8_gradient_reference,
    expert_glu_fp8_reference,
    expert_glu_gradient,
    expert_glu_gradient_reference,
)
from chronicals.kernels.fp8 import dequantize
from mutants import mutant

module = sys.modules["chronicals.kernels.expert_glu"]

HALF_A_STEP = 2.0**-4
"""A value of e4m3 is off by so much of itself at most, and below 2⁻⁶ by 2⁻¹⁰."""


def drawn(shape, dtype, device):
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


def check_forward(of, shape, dtype, device, gate, dense=True):
    h, *_ = drawn(shape, dtype, device)
    u, scaled = of.expert_glu_fp8(h, gate, dense)
    assert (u is not None) == dense
    if u is not None:
        assert_near(u, expert_glu(h, gate))
    assert_rounded_once(scaled, module.expert_glu_reference(h.double(), gate))


def check_backward(of, shape, dtype, device, gate, dense=True, has_unit=True):
    h, g, shares, order = drawn(shape, dtype, device)
    d_h, scaled, unit, d_shares = of.expert_glu_fp8_gradient(
        g, h, shares, order, gate, dense, has_unit
    )
    own = expert_glu_gradient(g, h, shares, order, gate, True)
    assert (d_h is not None, unit is not None) == (dense, has_unit)
    for got, expected in zip((d_h, unit), own):
        if got is not None:
            assert_near(got, expected)
    assert (d_shares - own[2]).norm() <= 1e-5 * own[2].norm()
    assert_rounded_once(
        scaled,
        expert_glu_gradient_reference(g.double(), h.double(), shares.double(), order, gate)[0],
    )


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_unit(shape, gate, dtype, device):
    check_forward(module, shape, dtype, device, gate)


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_its_gradient(shape, gate, dtype, device):
    check_backward(module, shape, dtype, device, gate)


@pytest.mark.parametrize(("dense", "has_unit"), [(False, False), (False, True), (True, False)])
def test_what_nobody_reads_is_not_written(dense, has_unit, device):
    check_forward(module, (13, 300), torch.bfloat16, device, GATES[3], dense)
    check_backward(module, (13, 300), torch.bfloat16, device, GATES[3], dense, has_unit)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_the_references_beside_the_kernels(gate, device):
    """But for values at the middle between two of e4m3."""
    h, g, shares, order = drawn((37, 48), torch.bfloat16, device)
    pairs = (
        (expert_glu_fp8(h, gate)[1], expert_glu_fp8_reference(h, gate)[1]),
        (
            expert_glu_fp8_gradient(g, h, shares, order, gate)[1],
            expert_glu_fp8_gradient_reference(g, h, shares, order, gate)[1],
        ),
    )
    for got, expected in pairs:
        torch.testing.assert_close(got.scale, expected.scale, rtol=1e-4, atol=0)
        assert (dequantize(got) - dequantize(expected)).norm() <= 5e-3 * dequantize(expected).norm()


def test_rows_of_zeros(device):
    h, g, shares, order = drawn((9, 32), torch.bfloat16, device)
    h[4], shares[order[5].long()] = 0, 0
    _, scaled = expert_glu_fp8(h, Gate())
    assert scaled.scale[4] == 1 and not scaled.values[4].float().any()
    _, of_h, _, _ = expert_glu_fp8_gradient(g, h, shares, order, Gate())
    assert of_h.scale[5] == 1 and not of_h.values[5].float().any()


def test_in_a_graph(device):
    h, g, shares, order = drawn((37, 48), torch.bfloat16, device)

    def both(h, g):
        return expert_glu_fp8(h, Gate()), expert_glu_fp8_gradient(g, h, shares, order, Gate())

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for (_, got, *_), (_, expected, *_) in zip(compiled(h, g), both(h, g)):
        assert torch.equal(got.values.float(), expected.values.float()) and torch.equal(
            got.scale, expected.scale
        )


FAULTS = {
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


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, device):
    wrong = mutant(module, *FAULTS[fault])
    with pytest.raises(AssertionError):
        for check in (check_forward, check_backward):
            check(wrong, (37, 300), torch.bfloat16, device, Gate())
