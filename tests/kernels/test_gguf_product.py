"""Products of few rows with weights in GGUF blocks: as exact as those over the dequantised weight."""

import sys

import pytest
import torch

from chronicals.kernels.gguf_blocks import GGUF_KINDS
from chronicals.kernels.gguf_product import gguf_product, gguf_product_reference
from chronicals.kernels.nf4_product import few_rows_launch
from drawn_blocks import random_blocks
from mutants import mutant

module = sys.modules["chronicals.kernels.gguf_product"]

TYPES = [torch.bfloat16, torch.float16]
SIZES = {"one output": (1, 256), "a prime number": (67, 512), "splits": (64, 2048)}
"""Outputs and columns."""


def check(rows, outputs, columns, kind, dtype, device, of=module):
    """Against fp64 of the values that the blocks stand for, beside the plain product's own error."""
    if GGUF_KINDS[kind][0] < 256:
        columns += 32
    packed = random_blocks(outputs, columns, kind).to(device)
    x = (torch.randn(rows, columns, device=device) / 256).to(dtype)  # sums are within fp16
    one = torch.eye(columns, device=device).to(dtype)
    exact = x.double() @ gguf_product_reference(one, packed, outputs, kind).double()
    ours, theirs = (
        float((product(x, packed, outputs, kind).double() - exact).norm() / exact.norm())
        for product in (of.gguf_product, gguf_product_reference)
    )
    assert ours <= 1.5 * theirs < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_over_shapes(kind, size, rows, dtype, device):
    check(rows, *SIZES[size], kind, dtype, device)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_the_weight_is_the_dequantised_one_bit_by_bit(kind, device):
    packed = random_blocks(70, 256, kind).to(device)
    for rows in torch.eye(256, device=device).bfloat16().split(64):
        expected = gguf_product_reference(rows, packed, 70, kind)
        assert torch.equal(gguf_product(rows, packed, 70, kind), expected)


def test_rows_of_any_shape_and_splits_give_the_same_bits(device):
    packed = random_blocks(64, 2048, "Q4_K").to(device)
    x = torch.randn(3, 2, 2048, device=device).bfloat16()
    flat = x.flatten(0, 1)
    assert few_rows_launch(flat, 64).splits > 1
    expected = gguf_product(flat, packed, 64, "Q4_K")
    assert torch.equal(gguf_product(x, packed, 64, "Q4_K"), expected.view(3, 2, 64))


def test_sums_may_stay_in_fp32(device):
    packed = random_blocks(67, 2048, "Q8_0").to(device)
    x = torch.randn(7, 2048, device=device).bfloat16()
    sums = gguf_product(x, packed, 67, "Q8_0", torch.float32)
    narrow = gguf_product(x, packed, 67, "Q8_0")
    assert sums.dtype == torch.float32 and torch.equal(sums.bfloat16(), narrow)
    one = torch.eye(2048, device=device).bfloat16()
    exact = x.double() @ gguf_product_reference(one, packed, 67, "Q8_0").double()
    assert float((sums - exact).norm()) < 1e-5 * float(exact.norm())


def test_sizes_that_do_not_fit(device):
    packed = random_blocks(8, 256, "Q6_K").to(device)
    x = torch.zeros(2, 256, device=device).bfloat16()
    with pytest.raises(ValueError, match="1680 bytes are not 9 x 256 values in Q6_K"):
        gguf_product(x, packed, 9, "Q6_K")
    with pytest.raises(ValueError, match="kind='Q2_K': give one of Q8_0"):
        gguf_product(x, packed, 8, "Q2_K")


def test_it_is_an_operator_of_torch(device):
    packed = random_blocks(8, 256, "Q8_0").to(device).reshape(-1)
    x = torch.randn(2, 256, device=device).bfloat16()
    torch.library.opcheck(module._gguf_product, (x, packed, 8, "Q8_0"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("output[:, None] * groups", "output[:, None]"),
        ("number < end // SIZE", "number < end // SIZE - 1"),
        ("tl.minimum(begin + each, columns)", "tl.minimum(begin + each - COLUMNS, columns)"),
    ],
)
def test_a_wrong_kernel_is_found(old, new, device):
    wrong = mutant(module, old, new)
    with pytest.raises((AssertionError, IndexError)):
        check(3, 64, 2048, "Q8_0", torch.bfloat16, device, of=wrong)
