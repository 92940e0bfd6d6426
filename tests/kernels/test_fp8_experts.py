"""Stacked weights in FP8: each expert as the quantiser of a whole tensor would have it, in both
layouts.
"""

import sys

import pytest
import torch

from chronicals.kernels.fp8 import Scaled, fp8_quantize_reference
from chronicals.kernels.fp8_experts import (
    fp8_experts_transposed,
    fp8_quantize_experts,
    fp8_quantize_experts_reference,
)
from mutants import mutant

module = sys.modules["chronicals.kernels.fp8_experts"]

SHAPES = [(1, 16, 16), (3, 130, 72), (2, 256, 128), (4, 33, 57), (2, 7, 300)]
TYPES = [torch.bfloat16, torch.float16, torch.float32]


def drawn(shape, dtype, device):
    """Experts of very different sizes, so that another's scale shows."""
    sizes = torch.logspace(-2, 1, shape[0], device=device)[torch.randperm(shape[0], device=device)]
    return (torch.randn(shape, device=device) * sizes[:, None, None]).to(dtype)


def check(of, shape, dtype, device, layout):
    w = drawn(shape, dtype, device)
    rows, columns = of.fp8_quantize_experts(w, layout)
    assert (rows is None, columns is None) == (layout == "columns", layout == "rows")
    for expert, own in enumerate(w):
        by_rows, by_columns = fp8_quantize_reference(own, layout="both")
        for got, expected in ((rows, by_rows), (columns, by_columns)):
            if got is not None:
                assert got.values.is_contiguous() and got.scale.shape == (len(w),)
                assert torch.equal(got.scale[expert], expected.scale)
                assert torch.equal(
                    got.values[expert].view(torch.uint8), expected.values.view(torch.uint8)
                )


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_expert_as_a_tensor(shape, dtype, layout, device):
    check(module, shape, dtype, device, layout)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_with_the_scales_of_before(shape, device):
    """As the backward pass makes the columns of what the forward pass made the rows of; beyond
    the limit is the limit.
    """
    w = drawn(shape, torch.bfloat16, device)
    rows, columns = fp8_quantize_experts(w, "both")
    _, again = fp8_quantize_experts(w, "columns", rows.scale)
    assert torch.equal(columns.values.view(torch.uint8), again.values.view(torch.uint8))
    assert torch.equal(rows.scale, again.scale)
    small, _ = fp8_quantize_experts(w, "rows", rows.scale / 2)
    expected, _ = fp8_quantize_experts_reference(w, "rows", rows.scale / 2)
    assert (
        torch.equal(small.values.float(), expected.values.float())
        and small.values.float().abs().max() == 448
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposed(shape, device):
    rows, columns = fp8_quantize_experts(drawn(shape, torch.bfloat16, device), "both")
    got = fp8_experts_transposed(rows)
    assert (
        torch.equal(got.values.view(torch.uint8), columns.values.view(torch.uint8))
        and got.scale is rows.scale
    )


def test_experts_of_zeros_and_what_is_no_number(device):
    w = torch.zeros(3, 16, 16, device=device, dtype=torch.bfloat16)
    w[1, 2, 3], w[1, 0, 0], w[2, 5, 5] = float("nan"), 4.0, 1e-30
    rows, _ = fp8_quantize_experts(w)
    assert rows.scale[0] == 1 and not rows.values[0].float().any()
    assert rows.values[1].float().isnan().sum() == 1 and rows.values[1, 0, 0].float() == 448
    assert torch.isfinite(rows.scale).all()


@pytest.mark.slow
def test_weights_that_are_not_dense(device):
    w = drawn((3, 24, 40), torch.bfloat16, device)
    rows, _ = fp8_quantize_experts(w.mT)
    assert torch.equal(
        rows.values.view(torch.uint8),
        fp8_quantize_experts(w, "columns")[1].values.view(torch.uint8),
    )


@pytest.mark.slow
def test_in_a_graph(device):
    w = drawn((3, 24, 40), torch.bfloat16, device)
    compiled = torch.compile(fp8_quantize_experts, backend="aot_eager", fullgraph=True)
    for got, expected in zip(compiled(w, "both"), fp8_quantize_experts(w, "both")):
        assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(got.scale, expected.scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "lines"}, "layout='lines': expected one of"),
        ({"w": torch.zeros(3, 4)}, r"expected \[E, A, B\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        fp8_quantize_experts(**{"w": torch.zeros(2, 3, 4), **change})


FAULTS = {
    "the maximum of the first expert": (
        "raise_amax(most_ptr + expert, most)",
        "raise_amax(most_ptr, most)",
    ),
    "the scale of the first expert": (
        "known = tl.load(most_ptr + expert)",
        "known = tl.load(most_ptr)",
    ),
    "columns of the first expert": (
        "into = columns_ptr + (place // 4 if columns_ptr.dtype.element_ty == tl.uint32 else place)",
        "into = columns_ptr",
    ),
    "the first block of an expert has no part": (
        "first + step * BLOCK",
        "BLOCK + first + step * BLOCK",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, device):
    wrong = mutant(module, *FAULTS[fault])
    with pytest.raises(AssertionError):
        for shape in SHAPES[:3]:
            check(wrong, shape, torch.bfloat16, device, "both")


def test_scaled_is_what_products_take(device):
    assert isinstance(fp8_quantize_experts(drawn((2, 16, 16), torch.bfloat16, device))[0], Scaled)
