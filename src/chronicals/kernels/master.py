"""An exact fp32 master in 16 + 16 bits: the bf16 weight and a 16-bit remainder.

With ``bits`` the pattern of the fp32 value, ``hi = (bits + 0x8000) >> 16`` (ties away from zero,
unlike ``.bfloat16()``) and ``lo = bits − (hi << 16)``, a signed 16-bit remainder: every finite fp32
is ``(hi << 16) + lo`` exactly. NaN and infinity keep their kind, with ``lo = 0``.
"""

import torch
from torch import Tensor

EXPONENT_BITS = 0x7F80
"""The exponent bits of a bf16 pattern; with all set it is infinity or NaN."""


def split_master(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 ``[...]`` into bf16 ``hi`` and int16 ``lo`` of the same shape."""
    bits = value.detach().contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    sign = bits & -0x80000000
    finite = magnitude < EXPONENT_BITS << 16
    # A NaN whose mantissa is all in the lower half keeps a bit of it, or it would become infinity.
    high = torch.where(
        finite, (magnitude + 0x8000) >> 16, (magnitude >> 16) | ((magnitude & 0xFFFF) != 0).int()
    )
    low = torch.where(finite, magnitude - (high << 16), 0)
    pattern = (high | (sign >> 16 & 0x8000)).to(torch.int32)
    # Unsigned 16-bit patterns in int32, as int16 of the same bits.
    wrapped = torch.where(pattern >= 0x8000, pattern - 0x10000, pattern).to(torch.int16)
    return wrapped.view(torch.bfloat16), low.to(torch.int16)


def join_master(hi: Tensor, lo: Tensor) -> Tensor:
    """Return the fp32 value of a pair from ``split_master``."""
    pattern = hi.detach().contiguous().view(torch.int16).to(torch.int32)
    magnitude = ((pattern & 0x7FFF) << 16) + lo.to(torch.int32)
    return (magnitude | torch.where(pattern < 0, -0x80000000, 0).to(torch.int32)).view(
        torch.float32
    )
