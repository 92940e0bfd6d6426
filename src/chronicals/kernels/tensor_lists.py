"""Many tensors in one launch: a table of their addresses, and which of them a program finds its
chunk in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from chronicals.kernels.launch import tl, triton
from chronicals.kernels.two_streams import HIGH_PRIORITY

LIST_BLOCK = 1024
LIST_CHUNK = 2048
"""Elements that four warps hold at a time, and of a chunk; AdamW on an H200 is 2 % faster with
chunks of 2048 than of 8192.
"""

MAX_CACHED_TABLES = 64
"""Tables that are kept; an optimizer has a few for each of its groups and types, updates in the
backward pass dozens and more."""


@triton.jit
def pointers(table_ptr, tensor, at, KIND: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """To the elements ``at`` of a tensor of a row of the table."""
    found = tl.load(table_ptr + tensor).to(tl.pointer_type(KIND)) + at
    if ALIGNED:
        found = tl.max_contiguous(tl.multiple_of(found, 16), BLOCK)
    return found


@dataclass(frozen=True)
class Table:
    """Rows of tensors, of equal sizes column by column.

    Attributes:
        addresses: int64 ``[rows, count]``.
        sizes: int64 ``[count]``, elements.
        tensors: int32 ``[chunks]``, the tensor that a chunk lies in.
        firsts: int64 ``[count]``, the first chunk of each tensor.
        aligned: whether all suit loads of 16 bytes.
    """

    addresses: Tensor
    sizes: Tensor
    tensors: Tensor
    firsts: Tensor
    aligned: bool

    @property
    def on_device(self) -> list[Tensor]:
        """What a launch reads."""
        return [self.addresses, self.sizes, self.tensors, self.firsts]


_tables: dict[tuple, Table] = {}
_divisions: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}
_looked_up: list[list[Tensor]] = []


@contextmanager
def tables_looked_up() -> Iterator[list[Tensor]]:
    """Within, in whatever thread: what launches look up; who captures them must hold it as long
    as they are replayed.
    """
    found: list[Tensor] = []
    _looked_up.append(found)
    try:
        yield found
    finally:
        _looked_up[:] = [other for other in _looked_up if other is not found]


def table_of(rows: Sequence[Sequence[Tensor]], chunk: int = LIST_CHUNK) -> Table:
    """The table of dense tensors on one device, in chunks of so many elements; kept while they stay
    where they are.

    Raises:
        ValueError: a row has tensors of other sizes than the first.
    """
    device = rows[0][0].device
    sizes = tuple(x.numel() for x in rows[0])
    addresses = tuple(x.data_ptr() for row in rows for x in row)
    key = addresses, sizes, device, chunk
    if key not in _tables:
        _check_sizes(rows, sizes)
        if len(_tables) >= MAX_CACHED_TABLES:
            _tables.pop(next(iter(_tables)))
        aligned = all(address % 16 == 0 for address in addresses) and all(
            size % 8 == 0 for size in sizes
        )
        table = torch.tensor(addresses, dtype=torch.int64).view(len(rows), -1)
        _tables[key] = Table(_brought(table, device), *_division(sizes, device, chunk), aligned)
    for found in _looked_up:
        found += _tables[key].on_device
    return _tables[key]


def _check_sizes(rows: Sequence[Sequence[Tensor]], sizes: tuple[int, ...]) -> None:
    """A kernel would read and write beyond the smaller ones."""
    for number, row in enumerate(rows):
        own = tuple(x.numel() for x in row)
        if own != sizes:
            raise ValueError(
                f"row {number} of the tensors has {own} elements, the first {sizes}: they must be "
                "alike"
            )


def _division(
    sizes: tuple[int, ...], device: torch.device, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes, tensors of the chunks, first chunks: the same in every step, though gradients lie
    elsewhere each time.
    """
    if (sizes, device, chunk) not in _divisions:
        if len(_divisions) >= MAX_CACHED_TABLES:
            _divisions.pop(next(iter(_divisions)))
        chunks = torch.tensor([-(-size // chunk) for size in sizes])
        tensors = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), chunks)
        found = torch.tensor(sizes), tensors, chunks.cumsum(0) - chunks
        _divisions[sizes, device, chunk] = tuple(_brought(x, device) for x in found)  # type: ignore[assignment]
    return _divisions[sizes, device, chunk]


def _brought(values: Tensor, device: torch.device) -> Tensor:
    """On the device; at once, on another stream, where the copy would otherwise be captured."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return values.to(device, non_blocking=True)
    with torch.cuda.stream(_beside(device)):
        return values.to(device)


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody captures: torch has few of a priority, and hands them out again and
    again.
    """
    return torch.cuda.Stream(device, priority=2 * HIGH_PRIORITY)


def of_triton(kind: torch.dtype) -> object:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[kind]
