"""A hash of 32 bits where random numbers are wanted for many places (Ellis, 2018, "lowbias32"): two
rounds of multiplying and shifting, about ten instructions, as many as one round of Philox takes.
"""

from __future__ import annotations

from torch import Tensor

from chronicals.kernels.launch import tl, triton

MASK_32_BITS = 2**32 - 1


@triton.jit
def lowbias32(x):
    """The hash of ``x`` in 32 bits."""
    x = x.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


def lowbias32_reference(x: Tensor) -> Tensor:
    """The hash of ``x``, int64 between 0 and 2³² − 1."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK_32_BITS
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK_32_BITS
    return x ^ (x >> 16)
