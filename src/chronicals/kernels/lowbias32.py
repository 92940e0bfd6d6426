"""A 32-bit hash that gives each element its own random bits (Ellis, 2018, "lowbias32").

Two rounds of multiplying and shifting take about ten instructions, as many as one of Philox's ten
rounds.
"""

from __future__ import annotations

from torch import Tensor

from chronicals.kernels.launch import tl, triton

MASK_32_BITS = 2**32 - 1
"""Keeps the low 32 bits of an int64, as arithmetic on uint32 does."""


@triton.jit
def lowbias32(x):
    """Return the hash of ``x``, uint32."""
    x = x.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


def lowbias32_reference(x: Tensor) -> Tensor:
    """Return the hash of ``x``, int64 from 0 to 2³² − 1; the same bits as the kernel's."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK_32_BITS
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK_32_BITS
    return x ^ (x >> 16)
