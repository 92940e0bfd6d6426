"""The exact fp32 master in 16 + 16 bits, over all low halves."""

import pytest
import torch
from torch import Tensor

from chronicals.kernels.master import join_master, split_master

LOWS = torch.arange(1 << 16, dtype=torch.int64)

HIGHS = {
    "zero": 0x0000,
    "smallest subnormals": 0x0001,
    "largest subnormals": 0x007F,
    "smallest normals": 0x0080,
    "one": 0x3F80,
    "just below two": 0x3FFF,
    "odd": 0x4123,
    "largest": 0x7F7F,
}


def from_bits(bits: Tensor) -> Tensor:
    """fp32 from unsigned 32-bit patterns in int64."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def bits_of(x: Tensor) -> Tensor:
    """Unsigned patterns in int64, of fp32 or bf16."""
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    return x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


@pytest.mark.parametrize("negative", [False, True], ids=["positive", "negative"])
@pytest.mark.parametrize("high", HIGHS)
def test_every_low_half(high, negative):
    """Joined, every bit is there again; hi is ``(bits + 0x8000) >> 16``, and lo what that
    leaves, in 16 signed bits.
    """
    bits = ((HIGHS[high] | 0x8000 * negative) << 16) + LOWS
    value = from_bits(bits)
    hi, lo = split_master(value)
    assert (hi.dtype, lo.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(bits_of(join_master(hi, lo)), bits)
    assert torch.equal(bits_of(hi), (bits + 0x8000) >> 16)
    magnitude = bits & 0x7FFFFFFF
    of_hi = ((bits + 0x8000) >> 16) & 0x7FFF
    assert torch.equal(lo.to(torch.int64), magnitude - (of_hi << 16))


@pytest.mark.parametrize("negative", [False, True], ids=["positive", "negative"])
def test_every_low_half_of_what_is_not_finite(negative):
    """Infinity stays infinity of its sign, NaN stays NaN also when all its mantissa lies in the
    lower half.
    """
    bits = ((0x7F80 | 0x8000 * negative) << 16) + LOWS
    hi, lo = split_master(from_bits(bits))
    joined = join_master(hi, lo)
    assert not lo.any()
    assert joined[0].item() == hi[0].item() == (float("-inf") if negative else float("inf"))
    assert torch.isnan(joined[1:]).all() and torch.isnan(hi[1:]).all()
    again = split_master(joined)
    assert torch.equal(bits_of(again[0]), bits_of(hi)) and torch.equal(again[1], lo)


@pytest.mark.parametrize(
    "pattern", [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F80FFFF, 0x7FFF8000]
)
def test_nan(pattern):
    hi, lo = split_master(from_bits(torch.tensor([pattern])))
    assert torch.isnan(hi).all() and torch.isnan(join_master(hi, lo)).all() and lo.item() == 0
    assert bits_of(hi).item() >> 15 == pattern >> 31  # the sign too


def test_random_patterns():
    bits = torch.randint(0, 1 << 32, (200_000,))
    bits = bits[(bits & 0x7F800000) != 0x7F800000]
    assert torch.equal(bits_of(join_master(*split_master(from_bits(bits)))), bits)


def test_ties_go_away_from_zero():
    """``.bfloat16()`` goes to the even neighbour: for 1 + 2⁻⁸ that is 1."""
    value = torch.tensor([1 + 2.0**-8, -1 - 2.0**-8, 1 + 3 * 2.0**-8])
    assert torch.equal(
        split_master(value)[0].float(), torch.tensor([1 + 2.0**-7, -1 - 2.0**-7, 1 + 2 * 2.0**-7])
    )
    assert value.bfloat16()[0].item() == 1


def test_hi_is_the_nearest_bf16():
    value = torch.randn(10_000) * torch.exp(torch.randn(10_000) * 5)
    hi, _ = split_master(value)
    assert (
        (hi.double() - value.double()).abs() <= (value.bfloat16().double() - value.double()).abs()
    ).all()


def test_bf16_values_need_no_low_half():
    value = torch.randn(1000).bfloat16()
    hi, lo = split_master(value.float())
    assert torch.equal(hi, value) and not lo.any()


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 1, 4)], ids=str)
def test_shapes(shape):
    value = torch.randn(shape)
    hi, lo = split_master(value)
    assert hi.shape == lo.shape == value.shape
    assert torch.equal(join_master(hi, lo), value)


def test_non_contiguous():
    value = torch.randn(8, 6).t()[::2]
    assert torch.equal(join_master(*split_master(value)), value)
    hi, lo = split_master(value.contiguous())
    spread = (
        torch.zeros(3, 16, dtype=torch.bfloat16)[:, ::2],
        torch.zeros(3, 16, dtype=torch.int16)[:, ::2],
    )
    for there, x in zip(spread, (hi, lo), strict=True):
        there.copy_(x)
    assert torch.equal(join_master(*spread), value)
