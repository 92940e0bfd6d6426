"""Write the adapters of merged linear layers into the padding around their merged weight.

    | W     s·B |       A of all layers one below the other, s·B of all layers as a block diagonal
    | A      ·  |

``down`` is ``[R, K]``, ``up`` ``[N, R]``, of the dtype of W; A ``[r, K]`` and B ``[n, r]`` are
fp32. Bytes: 6 a value.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from chronicals.kernels.adapter_gradients import MAX_FUSED_LAYERS
from chronicals.kernels.launch import runs_triton, tl, triton


@triton.jit
def _write_kernel(
    # read: A and B of each layer
    a0_ptr,
    a1_ptr,
    a2_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    # written
    down_ptr,
    up_ptr,
    # outputs, rank and scale of each layer
    size0,
    size1,
    size2,
    rank0,
    rank1,
    rank2,
    scale0,
    scale1,
    scale2,
    # inputs, and strides of rows
    width,
    down_stride,
    up_stride,
    BLOCK: tl.constexpr,
):
    """Write A and s·B of up to three layers; rank 0 means no adapter.

    Programs along the second axis are layers. Along the first axis the first programs write A, the
    others s·B.
    """
    layer = tl.program_id(1)
    a_ptr = a0_ptr
    b_ptr = b0_ptr
    size = size0
    rank = rank0
    scale = scale0
    row = 0
    column = 0
    if layer == 1:
        a_ptr = a1_ptr
        b_ptr = b1_ptr
        size = size1
        rank = rank1
        scale = scale1
        row = size0
        column = rank0
    if layer == 2:
        a_ptr = a2_ptr
        b_ptr = b2_ptr
        size = size2
        rank = rank2
        scale = scale2
        row = size0 + size1
        column = rank0 + rank1
    a_elements = rank * width
    b_elements = size * rank
    of_a = tl.cdiv(a_elements, BLOCK)
    kind = down_ptr.dtype.element_ty
    if tl.program_id(0) < of_a:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(a_ptr + at, mask=at < a_elements)
        place = (column + at // width).to(tl.int64) * down_stride + at % width
        tl.store(down_ptr + place, value.to(kind), mask=at < a_elements)
    elif rank > 0:
        at = (tl.program_id(0) - of_a) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(b_ptr + at, mask=at < b_elements).to(tl.float32) * scale
        place = (row + at // rank).to(tl.int64) * up_stride + column + at % rank
        tl.store(up_ptr + place, value.to(kind), mask=at < b_elements)


def write_adapters(
    down: Tensor,
    up: Tensor,
    sizes: Sequence[int],
    ranks: Sequence[int],
    downs: Sequence[Tensor | None],
    ups: Sequence[Tensor | None],
    scales: Sequence[float],
) -> None:
    """Write every A into ``down`` and every s·B into ``up``; one launch for up to three layers.

    Other elements of ``down`` and ``up`` are left as they are; they must be zero.

    Args:
        down: A of all layers one below the other, ``[R, K]``.
        up: s·B of all layers as a block diagonal, ``[N, R]``.
        sizes: outputs n of each layer.
        ranks: rank of each layer's adapter, 0 for none.
        downs: A of each layer, None without an adapter.
        ups: B of each layer, None without an adapter.
        scales: s of each layer.
    """
    matrices = [x for x in (*downs, *ups) if x is not None]
    fits = (
        len(sizes) <= MAX_FUSED_LAYERS
        and len({x.dtype for x in matrices}) == 1
        and all(x.is_contiguous() for x in matrices)
    )
    if not fits or not runs_triton(up, *matrices):
        write_adapters_reference(down, up, sizes, ranks, downs, ups, scales)
        return
    missing = MAX_FUSED_LAYERS - len(sizes)
    width = down.shape[1]
    of_a, of_b = (
        [matrices[0] if x is None else x for x in (*row, *[None] * missing)] for row in (downs, ups)
    )
    none = [0] * missing
    programs = max(
        triton.cdiv(rank * width, 1024) + triton.cdiv(size * rank, 1024)
        for size, rank in zip(sizes, ranks)
    )
    _write_kernel[(programs, len(sizes))](
        *of_a,
        *of_b,
        down,
        up,
        *sizes,
        *none,
        *ranks,
        *none,
        *scales,
        *map(float, none),
        width,
        down.stride(0),
        up.stride(0),
        1024,
    )


def write_adapters_reference(
    down: Tensor,
    up: Tensor,
    sizes: Sequence[int],
    ranks: Sequence[int],
    downs: Sequence[Tensor | None],
    ups: Sequence[Tensor | None],
    scales: Sequence[float],
) -> None:
    """Compute ``write_adapters`` in plain torch."""
    row = 0
    column = 0
    for size, rank, a, b, scale in zip(sizes, ranks, downs, ups, scales, strict=True):
        if a is not None and b is not None:
            down[column : column + rank].copy_(a)
            up[row : row + size, column : column + rank].copy_(b * scale)
        row = row + size
        column = column + rank
