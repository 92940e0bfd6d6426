"""Tables of pointers by which one launch works on many tensors.

Tensors are divided into chunks, one for each program. A table holds the addresses of the tensors,
and for each chunk the tensor that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from chronicals.kernels.launch import tl, triton
from chronicals.kernels.products import HIGH_PRIORITY, stream_of_priority

LIST_BLOCK = 1024
"""Elements that a program's four warps hold at a time."""

# AdamW on an H200 is 2 % faster with chunks of 2048 than of 8192.
LIST_CHUNK = 2048
"""Elements of a chunk, which one program processes."""

MAX_CACHED_TABLES = 64
"""Tables that are cached. An optimizer has a few for each of its groups and dtypes; updates within
the backward pass have dozens.
"""


@triton.jit
def pointers(table_ptr, tensor, at, KIND: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Return pointers to the elements ``at`` of a tensor in a row of the table."""
    address = tl.load(table_ptr + tensor).to(tl.pointer_type(KIND)) + at
    if ALIGNED:
        address = tl.max_contiguous(tl.multiple_of(address, 16), BLOCK)
    return address


@dataclass(frozen=True)
class Table:
    """Addresses of rows of tensors; the tensors of a column have equal sizes.

    Attributes:
        addresses: int64 ``[rows, count]``.
        sizes: int64 ``[count]``, elements of each tensor.
        tensors: int32 ``[chunks]``, the tensor of each chunk.
        firsts: int64 ``[count]``, the first chunk of each tensor.
        aligned: whether all addresses and sizes suit loads of 16 bytes.
    """

    addresses: Tensor
    sizes: Tensor
    tensors: Tensor
    firsts: Tensor
    aligned: bool

    @property
    def on_device(self) -> list[Tensor]:
        """The tensors that a launch reads."""
        return [self.addresses, self.sizes, self.tensors, self.firsts]


_tables: dict[tuple, Table] = {}
_divisions: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}
"""``sizes``, ``tensors`` and ``firsts`` of a ``Table``."""

_looked_up: list[list[Tensor]] = []


@contextmanager
def tables_looked_up() -> Iterator[list[Tensor]]:
    """Collect the tables that launches read inside the ``with`` block, in all threads.

    A captured CUDA graph reads them again at each replay, so its owner must keep the list.
    """
    tables: list[Tensor] = []
    _looked_up.append(tables)
    try:
        yield tables
    finally:
        _looked_up[:] = [other for other in _looked_up if other is not tables]


def table_of(rows: Sequence[Sequence[Tensor]], chunk: int = LIST_CHUNK) -> Table:
    """Return the table of dense tensors on one device, cached by their addresses and sizes.

    Args:
        rows: lists of tensors; those of one column have equal sizes.
        chunk: elements of a chunk.

    Raises:
        ValueError: a row has tensors of other sizes than the first.
    """
    device = rows[0][0].device
    sizes = tuple(x.numel() for x in rows[0])
    addresses = tuple(x.data_ptr() for row in rows for x in row)
    key = addresses, sizes, device, chunk
    if key not in _tables:
        # A kernel would read and write beyond the ends of smaller tensors.
        for number, row in enumerate(rows):
            row_sizes = tuple(x.numel() for x in row)
            if row_sizes != sizes:
                raise ValueError(
                    f"row {number} of the tensors has {row_sizes} elements, the first {sizes}: "
                    "they must be equal"
                )
        if len(_tables) >= MAX_CACHED_TABLES:
            _tables.pop(next(iter(_tables)))
        # Cached apart from the addresses, which change from step to step if gradients move.
        if (sizes, device, chunk) not in _divisions:
            if len(_divisions) >= MAX_CACHED_TABLES:
                _divisions.pop(next(iter(_divisions)))
            chunks = torch.tensor([-(-size // chunk) for size in sizes])
            tensors = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), chunks)
            columns = torch.tensor(sizes), tensors, chunks.cumsum(0) - chunks
            _divisions[sizes, device, chunk] = tuple(_to_device(x, device) for x in columns)  # type: ignore[assignment]
        division = _divisions[sizes, device, chunk]
        aligned = all(address % 16 == 0 for address in addresses) and all(
            size % 8 == 0 for size in sizes
        )
        table = torch.tensor(addresses, dtype=torch.int64).view(len(rows), -1)
        _tables[key] = Table(_to_device(table, device), *division, aligned)
    for tables in _looked_up:
        tables += _tables[key].on_device
    return _tables[key]


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device.

    During a CUDA graph's capture this happens immediately, on a stream that is not captured.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return values.to(device, non_blocking=True)
    # torch has few streams of each priority and hands them out in turn; one of a priority that
    # nothing else uses is not being captured.
    with torch.cuda.stream(stream_of_priority(device, 2 * HIGH_PRIORITY)):
        return values.to(device)


def of_triton(kind: torch.dtype) -> object:
    """Return Triton's name of a dtype."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[kind]
