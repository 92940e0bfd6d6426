"""scale_columns and its gradients against fp64, with strided rows, and in the place of what was
scaled.
"""

import sys

import pytest
import torch

from chronicals.kernels.column_scaling import (
    scale_columns,
    scale_columns_reference,
    scaled_columns_gradient,
)
from chronicals.kernels.launch import with_padding
from comparison import assert_as_exact_as_plain
from mutants import mutant

MODULE = sys.modules["chronicals.kernels.column_scaling"]
TYPES = [torch.float32, torch.bfloat16]


def in_one_function(of=MODULE, made_with_padding=False, in_place=False):
    """``z`` of y and the factor, whose backward pass is ours."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, factor, bias):
            ctx.save_for_backward(y, factor)
            given = with_padding(y, y.shape, 5).copy_(y) if made_with_padding else y.clone()
            z = of.scale_columns(given, factor, bias, given if in_place else None)
            assert (z.data_ptr() == given.data_ptr()) == in_place
            return z * 1 if made_with_padding else z

        @staticmethod
        def backward(ctx, dz):
            y, factor = ctx.saved_tensors
            dy = with_padding(dz, dz.shape, 3) if made_with_padding else torch.empty_like(dz)
            of_factor = of.scaled_columns_gradient(dz, factor, dy, y)
            return dy * 1, of_factor, dz.float().sum(0)

    return Scaled.apply


def draw(rows, width, dtype, device):
    return lambda: [
        torch.randn(rows, width, device=device).to(dtype),
        1 + 0.3 * torch.randn(width, device=device),
        torch.randn(width, device=device),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("way", [{}, {"made_with_padding": True}, {"in_place": True}], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (13, 37), (300, 301)], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_equals_the_reference(dtype, shape, way, device):
    assert_as_exact_as_plain(
        in_one_function(**way), scale_columns_reference, draw(*shape, dtype, device)
    )


def test_without_a_bias_and_without_a_sum(device):
    y = torch.randn(9, 31, device=device)
    factor = torch.randn(31, device=device)
    torch.testing.assert_close(scale_columns(y, factor), y * factor)
    out = torch.empty_like(y)
    assert scaled_columns_gradient(y, factor, out) is None
    torch.testing.assert_close(out, y * factor)


def test_no_rows(device):
    y = torch.randn(0, 31, device=device)
    factor = torch.randn(31, device=device)
    assert scale_columns(y, factor).shape == (0, 31)
    assert not scaled_columns_gradient(y, factor, torch.empty_like(y), y).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dz * factor[None, :]", "dz"),
        (
            (
                "total += dz * tl.load(y_ptr + row * y_stride + column[None, :], mask=inside, "
                "other=0.0).to(tl.float32)"
            ),
            (
                "total = dz * tl.load(y_ptr + row * y_stride + column[None, :], mask=inside, "
                "other=0.0).to(tl.float32)"
            ),
        ),
        ("return None if y is None else sums.sum(0)", "return None if y is None else sums[0]"),
        (
            "tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[None, :]",
            (
                "tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[None, :] * "
                "factor[None, :]"
            ),
        ),
    ],
)
def test_planted_faults_are_found(old, new, device):
    wrong = mutant(MODULE, old, new)
    with pytest.raises(AssertionError):
        assert_as_exact_as_plain(
            in_one_function(wrong), scale_columns_reference, draw(300, 37, torch.float32, device)
        )
