"""The joint Euclidean norm of many tensors, in one pass and one launch for each of their dtypes.

    norm = sqrt(Σ x²)        squares and sums in fp32

A program sums every n-th chunk, n being the number of programs; their shares are added afterwards
in one order. Bytes: those of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chronicals.kernels.launch import multiprocessors, runs_triton, tl, triton
from chronicals.kernels.tensor_lists import (
    LIST_BLOCK,
    LIST_CHUNK,
    Table,
    of_triton,
    pointers,
    table_of,
)

NORM_PROGRAMS = 16
"""Programs on a multiprocessor: it holds 64 warps, and a program has four."""


@triton.jit
def _square_sums_kernel(
    # addresses, sizes and chunks of the tensors (tensor_lists.py)
    table_ptr,
    sizes_ptr,
    tensors_ptr,
    firsts_ptr,
    # written
    shares_ptr,
    # chunks in all
    chunks,
    # dtype of the tensors
    KIND: tl.constexpr,
    # addresses and sizes suit loads of 16 bytes
    ALIGNED: tl.constexpr,
    # elements at a time, and of a chunk
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), tl.float32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        tensor = tl.load(tensors_ptr + chunk)
        start = (chunk - tl.load(firsts_ptr + tensor)) * CHUNK
        size = tl.load(sizes_ptr + tensor)
        if ALIGNED:
            size = tl.multiple_of(size, 8)
        for offset in tl.static_range(0, CHUNK, BLOCK):
            at = start + offset + tl.arange(0, BLOCK)
            x = tl.load(
                pointers(table_ptr, tensor, at, KIND, ALIGNED, BLOCK), mask=at < size, other=0.0
            ).to(tl.float32)
            total += x * x
    tl.store(shares_ptr + tl.program_id(0), tl.sum(total))


def gradient_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all elements of ``tensors``, an fp32 scalar on their device; 0 for none."""
    if not tensors:
        return torch.zeros(())
    tables = norm_tables(tensors)
    if tables is None:
        return gradient_norm_reference(tensors)
    shares_of_types = []
    for kind, table in tables.items():
        device = table.sizes.device
        chunks = len(table.tensors)
        programs = max(1, min(chunks, NORM_PROGRAMS * multiprocessors(device)))
        shares = torch.zeros(programs, dtype=torch.float32, device=device)
        if chunks:
            _square_sums_kernel[(programs,)](
                *table.on_device,
                shares,
                chunks,
                of_triton(kind),
                table.aligned,
                LIST_BLOCK,
                LIST_CHUNK,
                num_warps=4,
            )
        shares_of_types.append(shares)
    return torch.cat(shares_of_types).sum().sqrt()


def norm_tables(tensors: Sequence[Tensor]) -> dict[torch.dtype, Table] | None:
    """Return the tables that launches for the tensors read, one for each dtype.

    None if no kernel takes them. Tables are cached: a launch that is captured in a CUDA graph must
    find its own there.
    """
    if (
        not tensors
        or not runs_triton(*tensors)
        or not all(x.is_contiguous() for x in tensors)
        or len({x.device for x in tensors}) > 1
    ):
        return None
    kinds = dict.fromkeys(x.dtype for x in tensors)
    return {kind: table_of([[x for x in tensors if x.dtype == kind]]) for kind in kinds}


def gradient_norm_reference(tensors: Sequence[Tensor]) -> Tensor:
    """Compute ``gradient_norm`` in plain torch."""
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))
