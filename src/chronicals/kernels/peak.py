"""The largest absolute value of a tensor, found by the kernel that makes it, for who quantises it next.

A kernel raises one cell, as the integer of the value's bits, which has the same order: what is no number has no part in it.
Where nobody reads the tensor but who quantises it, it need not be written: it is made again then, in 8 bits at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from chronicals.kernels.launch import tl, triton


@triton.jit
def magnitude(x):
    """|x| for a maximum."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def raise_peak(peak_ptr, most):
    """The cell becomes at least the largest of ``most``, fp32 ``[n]``; a program that is below what it reads writes nothing."""
    bits = tl.max(most, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(peak_ptr, bits, mask=bits > tl.load(peak_ptr), sem="relaxed")


def new_peak(like: Tensor) -> Tensor:
    """A cell for ``raise_peak``, int32 ``[1]``, at 0."""
    return like.new_zeros(1, dtype=torch.int32)


Maker = Callable[[str], list[Tensor]]
"""Makes a tensor in 8 bits, in a layout: values and scales (``fp8_quantize_made``)."""


class Found(NamedTuple):
    """What is known of a tensor.

    Attributes:
        most: its largest absolute value, fp32 ``[1]``, or None.
        made: what makes it where it is ``unwritten``.
    """

    most: Tensor | None
    made: Maker | None = None


class Peak:
    """Handed to what makes a tensor and to what quantises it.

    It is taken once, and only for the very tensor that it was found for: where something came in between, as a gradient that
    was added or a hook, there is none.

    Args:
        alone: who quantises the tensor is the only one who reads it, so that it may be left unwritten.
    """

    def __init__(self, alone: bool = False) -> None:
        self.alone = alone
        self._found: tuple[tuple, StorageWeakRef, Found] | None = None

    def put(self, x: Tensor, cell: Tensor | None, made: Maker | None = None) -> None:
        most = None if cell is None else cell.view(torch.float32)
        self._found = _identity(x), StorageWeakRef(x.untyped_storage()), Found(most, made)

    def take(self, x: Tensor) -> Found | None:
        found, self._found = self._found, None
        if found is None or found[0] != _identity(x) or found[1].expired():
            return None
        return found[2]


def with_peak(peak: Peak | None, x: Tensor, cell: Tensor | None = None, made: Maker | None = None) -> Tensor:
    """``x``, of which ``peak`` now knows the largest absolute value, where a kernel found it, and how it is made, where it is
    unwritten."""
    if peak is not None and (cell is not None or made is not None):
        peak.put(x, cell, made)
    return x


def unwritten(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Stands for a matrix that nobody reads, in the memory of one row; who does finds that nothing in it is a number."""
    return torch.full_like(like[:1], float("nan"), dtype=dtype).expand_as(like)


def _identity(x: Tensor) -> tuple:
    """Of a tensor whose memory is still its own."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype, 0 if x.is_inference() else x._version
