"""Linear layers of one input as one product, with their adapters inside it.

    y_i = x W_iᵀ + b_i + s_i · u_i B_iᵀ,   u_i = dropout(x) A_iᵀ          for the layers i, side by side

Weights lie in one buffer M whose margins hold the adapters, so that no sum passes over y or dx by itself:

    M = | W    s·B |       [y] = [x  u] · [W  s·B]ᵀ        u is laid behind the rows of x
        | A     ·  |       [dx] = [dy  g] · [W ; A]        g = s · dy B is laid behind the rows of dy

    dW = dyᵀ x,   dA = gᵀ dropout(x),   dB = s · dyᵀ u

B stands on the diagonal of its margin. Dropout cannot ride along in dx: there g A is masked and added. ``x`` is ``[T, in]``;
weights of the type of x, adapters in fp32 (Hu et al., 2022, section 4.1). Operations: those of the frozen layers with
``in + R`` and ``out + R`` in place of ``in`` and ``out``, and four products as wide as R, the sum of the ranks rounded up.

With W in FP8 (``fp8``) its three products are, too; adapters stay as they are, so u and g no longer ride but are added. Where
dW alone wants x again, both its layouts are made in one pass and what is kept is its columns, a byte a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.adapter_gradients import LAYERS, adapter_gradients
from chronicals.kernels.dropped_products import (
    add_dropped_product_,
    draw_seed,
    dropped_down,
    dropped_gradient_of_down,
)
from chronicals.kernels.fp8 import Scaled, fp8_quantize
from chronicals.kernels.fp8_linear import MULTIPLE, FP8Weight, scaled_product
from chronicals.kernels.launch import differentiable_once, in_rows, runs_triton, tl, triton
from chronicals.kernels.linear_cross_entropy import Adapter
from chronicals.kernels.peak import Peak
from chronicals.kernels.products import product, product_into

MARGIN = 64
"""Their width is a multiple of it: behind rows of whole multiples, rows then begin at multiples of 128 bytes and products take
whole steps, which is up to 3 % faster than with 16."""


@dataclass(frozen=True)
class Merged:
    """Where the weights of some linear layers lie, and the margins of their adapters; in one buffer, M, unless ``apart``.

    Attributes:
        matrix: W, ``[out, in]``.
        down: places of all A, ``[R, in]``.
        up: places of all s·B, ``[out, R]``.
        bias: ``[out]``, or None.
        sizes: outputs of each layer.
        ranks: ranks of their adapters, 0 where there is none.
        apart: the matrix lies elsewhere than its margins, on the host while a card multiplies by what it is in FP8.
        laid: which adapters lie in the margins now, in which version.
    """

    matrix: Tensor
    down: Tensor
    up: Tensor
    bias: Tensor | None
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    apart: bool = False
    laid: list[tuple] = field(default_factory=list, compare=False)

    @classmethod
    def of_one(cls, weight: Tensor, bias: Tensor | None) -> Merged:
        """A layer without an adapter, where it is."""
        return cls(weight, weight[:0], weight[:, :0], bias, (len(weight),), (0,))

    @classmethod
    def within(cls, buffer: Tensor, bias: Tensor | None, sizes: tuple[int, ...], ranks: tuple[int, ...]) -> Merged:
        """In a buffer ``[out + R, in + R]``."""
        outputs, width = sum(sizes), buffer.shape[1] - room_for(ranks)
        return cls(buffer[:outputs, :width], buffer[outputs:, :width], buffer[:outputs, width:], bias, sizes, ranks)

    @property
    def outputs(self) -> int:
        return sum(self.sizes)

    @property
    def room(self) -> int:
        """R: columns that x and dy should have free behind their rows."""
        return room_for(self.ranks)

    @property
    def used(self) -> int:
        """Of these, those that hold something."""
        return sum(self.ranks)

    @property
    def width(self) -> int:
        return self.matrix.shape[1]

    @property
    def with_up(self) -> Tensor:
        """``[W s·B]``."""
        return self.matrix.as_strided((self.outputs, self.width + self.room), self.matrix.stride())

    @property
    def with_down(self) -> Tensor:
        """``[W ; A]``."""
        return self.matrix.as_strided((self.outputs + self.room, self.width), self.matrix.stride())

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Views ``[out_i, in]``."""
        return self.matrix.split(self.sizes)

    def margins(self) -> list[tuple[Tensor, Tensor]]:
        """For each layer the places of A ``[r, in]`` and of s·B ``[out_i, r]``."""
        found, row, column = [], 0, 0
        for size, rank in zip(self.sizes, self.ranks):
            found.append((self.down[column:][:rank], self.up[row : row + size, column:][:, :rank]))
            row, column = row + size, column + rank
        return found

    def together(self) -> Merged:
        """In a buffer of its own, where the margins are; nothing lies in them yet."""
        found = self.within(_buffer(self.up, self.sizes, self.width, self.ranks), self.bias, self.sizes, self.ranks)
        found.matrix.copy_(self.matrix)
        return found


def _buffer(like: Tensor, sizes: Sequence[int], width: int, ranks: Sequence[int]) -> Tensor:
    return like.new_zeros((sum(sizes) + room_for(ranks), width + room_for(ranks)))


def room_for(ranks: Sequence[int]) -> int:
    """R for adapters of these ranks."""
    return -(-sum(ranks) // MARGIN) * MARGIN


@triton.jit
def _margins_kernel(
    a0_ptr, a1_ptr, a2_ptr, b0_ptr, b1_ptr, b2_ptr, down_ptr, up_ptr, size0, size1, size2, rank0, rank1, rank2,
    scale0, scale1, scale2, width, down_stride, up_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Three layers, along the second axis of programs; a rank of 0 is none. The first programs lay A, the others s·B."""
    layer = tl.program_id(1)
    a_ptr, b_ptr, size, rank, scale, row, column = a0_ptr, b0_ptr, size0, rank0, scale0, 0, 0
    if layer == 1:
        a_ptr, b_ptr, size, rank, scale, row, column = a1_ptr, b1_ptr, size1, rank1, scale1, size0, rank0
    if layer == 2:
        a_ptr, b_ptr, size, rank, scale = a2_ptr, b2_ptr, size2, rank2, scale2
        row, column = size0 + size1, rank0 + rank1
    a_elements, b_elements = rank * width, size * rank
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


def _lay_adapters(merged: Merged, downs: Sequence[Tensor | None], ups: Sequence[Tensor | None], scales: list[float]) -> None:
    there = [x for x in (*downs, *ups) if x is not None]
    merged.laid[:] = [_identity(there, scales)]
    fits = len(merged.sizes) <= LAYERS and len({x.dtype for x in there}) == 1 and all(x.is_contiguous() for x in there)
    if not fits or not runs_triton(merged.up, *there):
        for (down, up), a, b, scale in zip(merged.margins(), downs, ups, scales):
            if a is not None and b is not None:
                down.copy_(a)
                up.copy_(b * scale)
        return
    missing = LAYERS - len(merged.sizes)
    of_a, of_b = ([there[0] if x is None else x for x in (*row, *[None] * missing)] for row in (downs, ups))
    sizes, ranks, factors = (*merged.sizes, *[0] * missing), (*merged.ranks, *[0] * missing), (*scales, *[0.0] * missing)
    programs = max(triton.cdiv(rank * merged.width, 1024) + triton.cdiv(size * rank, 1024) for size, rank in zip(sizes, ranks))
    _margins_kernel[(programs, len(merged.sizes))](
        *of_a,
        *of_b,
        merged.down,
        merged.up,
        *sizes,
        *ranks,
        *factors,
        merged.width,
        merged.down.stride(0),
        merged.up.stride(0),
        1024,
    )


def _identity(adapters: Sequence[Tensor], scales: list[float]) -> tuple:
    return tuple((x.data_ptr(), x._version) for x in adapters), tuple(scales)


def _extended(x: Tensor, room: int, made_with_room: bool) -> Tensor:
    """``[T, width + room]`` that begins with ``x``: its own memory, where it was made so.

    Taken from ``x.data``, whose version autograd does not follow: what is written behind the rows is nothing of x. It is of
    another version, since whoever has copied x has not copied that.
    """
    rows, width = x.shape
    if made_with_room and x.stride() == (width + room, 1):
        extended = x.data.as_strided((rows, width + room), x.stride())
        torch.autograd.graph.increment_version(extended)
        return extended
    extended = x.new_empty((rows, width + room))
    extended[:, :width].copy_(x)
    return extended


@dataclass(frozen=True)
class Remake:
    """How the backward pass makes x again, ``make(source)``; ``source`` is kept in place of x."""

    make: Callable[[Tensor], Tensor]
    source: Tensor


OPTIONS = 10
"""Arguments of the function below that come before the tensors of the layers; x is one of them."""


class _MergedLinear(torch.autograd.Function):
    """After the options: the weights, biases, A and B of all layers, each list as long as there are layers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, merged: Merged, scales: list[float], dropout: float, roomy: tuple[bool, bool],
        remake: Remake | None, unread: bool, fp8: FP8Weight | None, peaks: tuple[Peak | None, Peak | None],
        keeps_columns: bool, *tensors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        count = len(merged.sizes)
        rows, seed = x, None
        if merged.room:
            _lay_adapters(merged, tensors[2 * count : 3 * count], tensors[3 * count :], scales)
            rows, seed = _extended(x, merged.room, roomy[0]), draw_seed(x) if dropout else None
            _down(merged, x, seed, dropout, rows[:, merged.width :])
        ctx.fp8, ctx.scale_of_x, ctx.keeps_columns, (peak, ctx.peak) = fp8, None, keeps_columns, peaks
        source = rows if remake is None else remake.source
        in_fp8, columns = None, None
        if fp8 is not None and (keeps_columns or not unread):
            layout = "columns" if unread else "both" if keeps_columns else "rows"
            in_fp8, columns = fp8_quantize(rows[:, : merged.width], layout=layout, most=None if peak is None else peak.take(x))
        if keeps_columns:
            assert columns is not None
            source, ctx.scale_of_x = columns
        if unread:
            y = rows.new_empty((len(rows), merged.outputs))
        elif fp8 is None:
            y = _of_rows(merged, rows)
        else:
            assert in_fp8 is not None
            y, ctx.scale_of_x = _of_rows_in_fp8(merged, rows, in_fp8, fp8), in_fp8.scale
        needs = ctx.needs_input_grad
        kept = any(needs[OPTIONS : OPTIONS + count]) or any(needs[OPTIONS + 2 * count :])  # biases want dy alone
        ctx.make = remake.make if remake is not None and kept else None
        ctx.save_for_backward(source if kept else None, seed, *tensors[2 * count :])
        ctx.laid = list(merged.laid)
        ctx.merged, ctx.scales, ctx.dropout, ctx.roomy = merged, scales, dropout, roomy[1]
        ctx.kind = next((x.dtype for x in tensors[2 * count :] if x is not None), None)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        merged: Merged = ctx.merged
        rows, seed, *adapters = ctx.saved_tensors
        if merged.laid != ctx.laid:  # others came by since
            half = len(adapters) // 2
            _lay_adapters(merged, adapters[:half], adapters[half:], ctx.scales)
        if ctx.make is not None:
            rows = _made_again(ctx, rows, seed)
        dy = in_rows(upstream)
        x = rows if rows is None or ctx.keeps_columns else rows[:, : merged.width]
        extended = dy if not merged.room else _extended(dy, merged.room, ctx.roomy)
        needs, count = ctx.needs_input_grad, len(merged.sizes)
        g = extended[:, merged.outputs :]
        of_adapters: list[Tensor | None] = [None for _ in range(2 * count)]
        adapting = any(needs[OPTIONS + 2 * count :])
        if adapting and rows is not None:
            of_adapters[count:] = _of_ups(ctx, dy, rows[:, merged.width :], g)
        elif merged.room:
            product_into(g, dy, merged.up)
        trained = any(needs[OPTIONS : OPTIONS + count]) and x is not None
        dy_rows, dy_columns = _in_fp8(ctx, dy, None if ctx.peak is None else ctx.peak.take(upstream), needs[0], trained)
        dx = _of_input(ctx, dy if dy_rows is None else dy_rows, extended, seed) if needs[0] else None
        of_weights: list[Tensor | None] = [None for _ in range(2 * count)]
        if trained and x is not None:
            of_weights[:count] = _of_weights(ctx, dy if dy_columns is None else dy_columns, x).split(merged.sizes)
        if any(needs[OPTIONS + count : OPTIONS + 2 * count]):
            of_weights[count:] = _of_biases(dy).split(merged.sizes)
        if adapting and x is not None:
            of_adapters[:count] = _of_downs(ctx, x, g, seed)
        wanted = zip([*of_weights, *of_adapters], needs[OPTIONS:])
        return dx, *(None,) * (OPTIONS - 1), *(gradient if needed else None for gradient, needed in wanted)


def _of_rows(merged: Merged, rows: Tensor) -> Tensor:
    matrix = merged.with_up.t()
    return product(rows, matrix, rows.dtype) if merged.bias is None else torch.addmm(merged.bias, rows, matrix)


def _of_rows_in_fp8(merged: Merged, rows: Tensor, in_fp8: Scaled, fp8: FP8Weight) -> Tensor:
    y = scaled_product(in_fp8, fp8.rows(), rows.dtype, fast=True, bias=merged.bias)
    return y.addmm_(rows[:, merged.width :], merged.up.t()) if merged.room else y


def _in_fp8(ctx: Any, dy: Tensor, most: Tensor | None, of_input: bool, of_weights: bool) -> tuple[Scaled | None, Scaled | None]:
    """dy by rows for dX, by columns for dW; None where it is taken as it is."""
    if ctx.fp8 is None or not (of_input or of_weights):
        return None, None
    layout = "both" if of_input and of_weights else "rows" if of_input else "columns"
    return fp8_quantize(dy, layout=layout, most=most)


def _made_again(ctx: Any, source: Tensor, seed: Tensor | None) -> Tensor:
    """x and u behind it, as they were in the forward pass."""
    x, merged = ctx.make(source), ctx.merged
    if not merged.room:
        return x
    rows = _extended(x, merged.room, True)
    _down(merged, x, seed, ctx.dropout, rows[:, merged.width :])
    return rows


def _down(merged: Merged, x: Tensor, seed: Tensor | None, dropout: float, out: Tensor) -> None:
    """``out = dropout(x) Aᵀ``."""
    if seed is None:
        product_into(out, x, merged.down.t())
    else:
        dropped_down(x, merged.down[: merged.used], seed, dropout, out)


def _of_input(ctx: Any, dy: Tensor | Scaled, extended: Tensor, seed: Tensor | None) -> Tensor:
    merged, kind = ctx.merged, extended.dtype
    if isinstance(dy, Scaled):
        dx = scaled_product(dy, ctx.fp8.columns(), kind)
    elif seed is None:
        return product(extended, merged.with_down, kind)
    else:
        dx = product(dy, merged.matrix, kind)
    g, down = extended[:, merged.outputs :][:, : merged.used], merged.down[: merged.used]
    if seed is not None:
        return add_dropped_product_(dx, g, down, seed, ctx.dropout)
    return dx.addmm_(g, down) if merged.room else dx


def _of_weights(ctx: Any, dy: Tensor | Scaled, x: Tensor) -> Tensor:
    """dW of all layers, ``[out, in]``; of x, or of its columns in FP8, ``[in, T]``."""
    if not isinstance(dy, Scaled):
        return product(dy.t(), x, x.dtype)
    if ctx.keeps_columns:
        return scaled_product(dy, Scaled(x, ctx.scale_of_x), ctx.merged.matrix.dtype)
    _, columns = fp8_quantize(x, layout="columns", scale=ctx.scale_of_x)
    assert columns is not None
    return scaled_product(dy, columns, x.dtype)


def _of_biases(dy: Tensor) -> Tensor:
    """The sum of its rows: in 16 bit on a card as a product, in half the time; one of fp32 would be less exact."""
    return torch.mm(dy.new_ones(1, len(dy)), dy)[0] if dy.is_cuda and dy.element_size() == 2 else dy.sum(0)


def _of_ups(ctx: Any, dy: Tensor, u: Tensor, g: Tensor) -> list[Tensor]:
    """Gradients of all B, and g in its place."""
    merged = ctx.merged
    return adapter_gradients(dy, merged.up, u, g, merged.sizes, merged.ranks, ctx.scales, ctx.kind)


def _of_downs(ctx: Any, x: Tensor, g: Tensor, seed: Tensor | None) -> list[Tensor]:
    """Gradients of all A."""
    g = g[:, : ctx.merged.used]
    found = product(g.t(), x, ctx.kind) if seed is None else dropped_gradient_of_down(g, x, seed, ctx.dropout).to(ctx.kind)
    return list(found.split(ctx.merged.ranks))


def merged_linear(
    x: Tensor,
    merged: Merged,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    adapters: Sequence[Adapter | None],
    roomy: bool = False,
    gradient_roomy: bool = False,
    remake: Remake | None = None,
    unread: bool = False,
    fp8: FP8Weight | None = None,
    peaks: tuple[Peak | None, Peak | None] = (None, None),
    kept: bool = False,
) -> Tensor:
    """The outputs of all layers side by side, ``[T, out]``; differentiable in x, weights, biases and adapters.

    Dropout is drawn once for all layers.

    Args:
        x: ``[T, in]``.
        weights, biases: of each layer; they must lie in ``merged``.
        adapters: of each layer, or None.
        roomy, gradient_roomy: x, and the gradient of what is returned, were made with ``merged.room`` columns behind each
            row, which are written to here.
        remake: makes x again for the backward pass, in which case x is not kept.
        unread: nobody reads the outputs, which are left as they are found: only the backward pass is wanted.
        fp8: the weights in ``merged`` for products in FP8; T must be a multiple of 16. Without it, weights that lie ``apart``
            are fetched, and kept until the backward pass.
        peaks: of x, and of the gradient of what is returned, which those who made them may have been told.
        kept: others keep x for the backward pass anyway, so that its columns in FP8 would only be more.

    Raises:
        ValueError: adapters differ in dropout, or T is no such multiple.
    """
    there = [adapter for adapter in adapters if adapter is not None]
    dropouts = {adapter.dropout for adapter in there}
    if len(dropouts) > 1:
        raise ValueError(f"adapters of one input have dropouts {sorted(dropouts)}: give them one")
    scales = [0.0 if adapter is None else adapter.scale for adapter in adapters]
    matrices = [*(x and x.a for x in adapters), *(x and x.b for x in adapters)]
    dropout = dropouts.pop() if dropouts else 0.0
    if fp8 is not None and len(x) % MULTIPLE:
        raise ValueError(f"x has {len(x)} rows: FP8 products need multiples of {MULTIPLE}")
    if fp8 is None and merged.apart:
        merged = merged.together()
    trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    keeps_columns = fp8 is not None and trained and remake is None and not (kept or merged.room)
    options = merged, scales, dropout, (roomy, gradient_roomy), remake, unread, fp8, peaks, keeps_columns
    return _MergedLinear.apply(x, *options, *weights, *biases, *matrices)


def side_by_side(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], ranks: Sequence[int], apart: torch.device | None = None
) -> Merged:  # fmt: skip
    """Copies of the weights and biases, laid out with room for adapters of these ranks.

    Args:
        apart: leaves the weights on the host, and their margins and biases here.

    Raises:
        ValueError: some layers have a bias and some have none.
    """
    if len({bias is None for bias in biases}) > 1:
        raise ValueError("some of the layers have a bias and some have none")
    sizes, width = tuple(len(weight) for weight in weights), weights[0].shape[1]
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases if b is not None])
    if apart is None:
        merged = Merged.within(_buffer(weights[0], sizes, width, ranks), bias, sizes, tuple(ranks))
    else:
        matrix, room = weights[0].new_empty((sum(sizes), width), device="cpu"), room_for(ranks)
        down, up = (matrix.new_zeros(shape, device=apart) for shape in ((room, width), (sum(sizes), room)))
        merged = Merged(matrix, down, up, bias, sizes, tuple(ranks), apart=True)
    for place, weight in zip(merged.weights, weights):
        place.copy_(weight.detach())
    return merged


def merged_linear_reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], adapters: Sequence[Adapter | None]
) -> Tensor:  # fmt: skip
    dropped = F.dropout(x, max((adapter.dropout for adapter in adapters if adapter is not None), default=0.0))
    outputs = []
    for weight, bias, adapter in zip(weights, biases, adapters):
        y = F.linear(x, weight, bias)
        if adapter is not None:
            down = F.linear(dropped, adapter.a.to(x.dtype))
            y = y + adapter.scale * F.linear(down, adapter.b.to(x.dtype))
        outputs.append(y)
    return torch.cat(outputs, 1)
