"""Cross-entropy of a linear head that never holds more than ``chunk_size`` rows of logits.

    x = h Wᵀ + b + α (h Aᵀ) Bᵀ      raw logits; (A, B, α) an adapter on the head, or none
    x[:, i] = h Rᵀ + b[i]            if rows i of W are replaced by R, the only trained part
    Σ_t loss_t(x_t)                  over targets y_t ≠ −100; the loss of a row is in ``logit_rows``

``h`` is ``[T, D]``, ``W`` ``[V, D]``, ``b`` ``[V]``. The function returns the sum, and the caller
divides by the count, which it knows for the whole step. The upstream gradient of a sum is one
number, so the forward pass computes all gradients chunk by chunk while it has the logits, and the
backward pass only scales them: three products, none repeated. Floor: 6·T·D·V operations and 4·V
bytes a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.launch import differentiable_once, operator, runs_triton, tl, triton
from chronicals.kernels.linear_head import (
    Adapter,
    HeadBytes,
    HeadShape,
    HeadWork,
    LinearHead,
    Rows,
    check_head,
    chunk_logits,
    chunks,
    product_type,
    side_by_side,
    trained_rows,
    with_adapter,
)
from chronicals.kernels.logit_rows import (
    IGNORE_INDEX,
    LossOptions,
    loss_and_gradient_,
)
from chronicals.kernels.products import at_once, product
from chronicals.kernels.token_log_probability import token_log_probability

# Measured on an H200 with 16384 rows, 896 wide, and a vocabulary of 151936: 23.7 ms in chunks of
# 4352, as in one chunk, and 24.4 ms in chunks of 4096. The logits of a chunk take 1.25 GiB.
DEFAULT_CHUNK_ROWS = 4352
"""Rows of logits that exist at a time."""


@triton.jit
def _scale_rows_kernel(
    x_ptr, factor_ptr, y_ptr, elements, width, factor_stride, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr + at // width * factor_stride, mask=at < elements, other=0.0)
    x = tl.load(x_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * factor).to(y_ptr.dtype.element_ty), mask=at < elements)


def scale_rows(x: Tensor, factors: Tensor, out: Tensor) -> Tensor:
    """Write ``factors · x`` into ``out``, for one factor or one a row ``[rows]``; return ``out``."""
    # A kernel, since torch's own multiplication is slow for mixed dtypes.
    if not runs_triton(x, factors) or not x.is_contiguous() or not out.is_contiguous():
        return out.copy_(x * (factors.view(-1, *(1,) * (x.ndim - 1)) if factors.ndim else factors))
    if x.numel():
        _scale_rows_kernel[(triton.cdiv(x.numel(), 2048),)](
            x,
            factors,
            out,
            x.numel(),
            x.shape[-1],
            factors.stride(0) if factors.ndim else 0,
            2048,
            num_warps=4,
        )
    return out


@operator("chronicals::linear_cross_entropy")
def _forward(
    hidden: Tensor,
    weight: Tensor,
    more_weight: Tensor | None,
    bias: Tensor | None,
    values: Tensor | None,
    index: Tensor | None,
    targets: Tensor,
    weights: Tensor | None,
    scale: float,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    chunk_size: int,
    count: int | None,
    gradient_type: torch.dtype,
    wanted: list[bool],
) -> list[Tensor]:
    """Compute the sum of the losses and all gradients that are wanted.

    Args:
        hidden: ``[T, D]``, or ``[T, D + r]`` with ``more_weight``.
        weight: ``[V, D]``.
        more_weight: ``[V, r]``, further columns of the head.
        bias: ``[V]``, or None.
        values: ``[n, D]`` that replace the rows ``index`` of ``weight``, or None; only without
            ``more_weight``.
        index: int64 ``[n]``, or None.
        targets: int64 ``[T]``.
        weights: weights of the rows, ``[T]``, or None.
        scale: factor of the logits.
        softcap: bound of the logits, applied after the factor; None for none.
        label_smoothing: ε of the loss.
        z_loss: ζ of the loss.
        chunk_size: rows of logits that exist at a time, at most.
        count: upper bound on the number of targets that are not ignored, or None.
        gradient_type: dtype in which the head's gradients are summed, at least that of ``hidden``.
        wanted: for hidden, weight, more_weight, bias and values, whether its gradient is wanted.

    Returns:
        The sum and five gradients; an empty tensor for each that is not wanted.
    """
    options = LossOptions(scale, softcap, label_smoothing, z_loss)
    total, d_hidden, *of_head = empty_results(
        hidden, weight, more_weight, bias, values, gradient_type, wanted
    )
    head = side_by_side(weight, more_weight, hidden.dtype)
    replaced = None if values is None or index is None else Rows(index, values.to(hidden.dtype))
    rows = trained_rows(targets, count)
    states, state_targets = (hidden, targets) if rows is None else (hidden[rows], targets[rows])
    weights = weights if weights is None or rows is None else weights[rows]
    d_states = torch.zeros_like(states) if wanted[0] and rows is not None else d_hidden
    buffer = hidden.new_empty((min(chunk_size, len(states)), len(head)))
    for part in chunks(len(states), chunk_size):
        x = chunk_logits(states[part], head, bias, buffer)
        if replaced is not None:
            logits = states[part] @ replaced.values.t()
            if bias is not None:
                logits = logits + bias[replaced.ids].to(x.dtype)
            x.index_copy_(1, replaced.ids, logits)
        row_weights = None if weights is None else weights[part]
        losses, factors = loss_and_gradient_(
            x, state_targets[part], row_weights, options, any(wanted)
        )
        total += losses.sum()
        d_replaced = None
        if replaced is not None:
            d_replaced = x.index_select(1, replaced.ids)
            # The frozen rows of the head that were replaced get no part of the gradient.
            x.index_fill_(1, replaced.ids, 0)
        at_once(
            partial(write_states_gradient, d_states[part], x, head, factors, d_replaced, replaced),
            partial(
                add_head_gradients,
                of_head,
                x,
                states[part],
                factors,
                weight.shape[1],
                part.start == 0,
                d_replaced,
                index,
            ),
            x.device,
        )
    if wanted[0] and rows is not None:
        d_hidden[rows] = d_states
    if not len(states):
        for gradient in of_head:
            gradient.zero_()
    return [total, d_hidden, *of_head]


@torch.library.register_fake(_forward)
def _(
    hidden: Tensor,
    weight: Tensor,
    more_weight: Tensor | None,
    bias: Tensor | None,
    values: Tensor | None,
    index: Tensor | None,
    targets: Tensor,
    weights: Tensor | None,
    scale: float,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    chunk_size: int,
    count: int | None,
    gradient_type: torch.dtype,
    wanted: list[bool],
) -> list[Tensor]:
    return empty_results(hidden, weight, more_weight, bias, values, gradient_type, wanted)


def empty_results(
    hidden: Tensor,
    weight: Tensor,
    more_weight: Tensor | None,
    bias: Tensor | None,
    values: Tensor | None,
    gradient_type: torch.dtype,
    wanted: list[bool],
) -> list[Tensor]:
    """Allocate the results of ``_forward``, an empty tensor for each gradient that is not wanted.

    The sum and the gradient of ``hidden`` are zeros, gradients of the head uninitialised.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    kind = torch.promote_types(hidden.dtype, gradient_type)
    nothing = hidden.new_empty(0)
    of_head = [
        x.new_empty(x.shape, dtype=kind) if wants and x is not None else nothing.clone()
        for x, wants in zip((weight, more_weight, bias, values), wanted[1:])
    ]
    return [
        hidden.new_zeros((), dtype=wide),
        torch.zeros_like(hidden) if wanted[0] else nothing,
        *of_head,
    ]


def write_states_gradient(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    factors: Tensor,
    d_replaced: Tensor | None = None,
    rows: Rows | None = None,
) -> None:
    """Write the gradient of a chunk's hidden states into ``out`` ``[rows, D]``.

    Args:
        out: empty if this gradient is not wanted.
        x: gradient of the chunk's logits ``[rows, V]`` up to a factor a row.
        weight: the head ``[V, D]``.
        factors: fp32 ``[rows]``.
        d_replaced: gradient, up to the same factors, of the logits of the replaced rows, or None.
        rows: the replaced rows, or None.
    """
    if d_replaced is not None and rows is not None and out.numel():
        total = product(x, weight, factors.dtype) + product(d_replaced, rows.values, factors.dtype)
        scale_rows(total, factors, out)
    elif out.numel():
        scale_rows(product(x, weight, factors.dtype), factors, out)


def add_head_gradients(
    of_head: list[Tensor],
    x: Tensor,
    hidden: Tensor,
    factors: Tensor,
    width: int,
    first: bool,
    d_replaced: Tensor | None = None,
    index: Tensor | None = None,
) -> None:
    """Add a chunk's share to the gradients of the head.

    Args:
        of_head: gradients of weight, more_weight, bias and values; empty ones are not wanted.
        x: gradient of the chunk's logits ``[rows, V]`` up to a factor a row.
        hidden: the chunk's hidden states.
        factors: fp32 ``[rows]``.
        width: columns of weight; those of ``hidden`` beyond belong to more_weight.
        first: whether this is the first chunk, which overwrites the gradients.
        d_replaced: gradient, up to the same factors, of the logits of the replaced rows, or None.
        index: rows of the weight that are replaced.
    """
    d_weight, d_more, d_bias, d_rows = of_head
    if not any(gradient.numel() for gradient in of_head):
        return
    scaled = scale_rows(hidden, factors, torch.empty_like(hidden))
    for gradient, columns in ((d_weight, scaled[:, :width]), (d_more, scaled[:, width:])):
        if gradient.numel():
            _add_product(gradient, x.t(), columns, first)
    if d_rows.numel() and d_replaced is not None:
        _add_product(d_rows, d_replaced.t(), scaled, first)
    if d_bias.numel():
        _add_product(d_bias[:, None], x.t(), factors[:, None].to(x.dtype), first)
        if d_replaced is not None and index is not None:
            d_bias.index_add_(
                0, index, (d_replaced.t().to(factors.dtype) @ factors).to(d_bias.dtype)
            )


def _add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Add ``left @ right`` to ``total``, rounded only to the dtype of ``total``.

    If ``first``, the present values of ``total`` are ignored.
    """
    beta = 0 if first else 1
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=beta)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.mul_(beta) if not first else total.zero_()
        total += left.to(total.dtype) @ right.to(total.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        more: Tensor | None,
        bias: Tensor | None,
        values: Tensor | None,
        *options: Any,
    ) -> Tensor:
        wanted = [bool(needed) for needed in ctx.needs_input_grad[:5]]
        kind = product_type(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            total, *gradients = _forward(
                hidden.to(kind), weight, more, bias, values, *options, wanted
            )
        ctx.save_for_backward(*gradients)
        ctx.types = [
            x.dtype if x is not None else None for x in (hidden, weight, more, bias, values)
        ]
        ctx.wanted = wanted
        return total

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return tuple(
            scale_rows(gradient, upstream, torch.empty_like(gradient, dtype=kind))
            if wanted
            else None
            for gradient, kind, wanted in zip(ctx.saved_tensors, ctx.types, ctx.wanted)
        )


CROSS_ENTROPY_WORK = HeadWork(logits=1, moved=4)
"""Logits are computed once; each is read, and its gradient written in its place."""


def cross_entropy_bytes(shape: HeadShape) -> HeadBytes:
    """Return the bytes that ``linear_cross_entropy`` needs at most at a time.

    These are the states and their gradient, the rows of both whose targets are not ignored (a copy
    where some are), an fp32 product of a chunk with the head, and for a trained head the chunk's
    scaled states and its gradient's fp32 sum, which is saved until it was scaled into another tensor.
    """
    of_chunk = shape.rows * shape.width * (4 + shape.element * shape.trained)
    return HeadBytes(
        shape.logits,
        4 * shape.states + of_chunk,
        4 * shape.weights,
        returned=(4 + shape.element) * shape.weights,
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    adapter: Adapter | None = None,
    rows: Rows | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_ROWS,
    count: int | None = None,
    gradient_type: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weighted sum of the losses, a float32 scalar; formulas are above.

    Args:
        hidden: ``[T, D]``; differentiable, as are the head's tensors that require it.
        weight: ``[V, D]``; a frozen head costs no gradient of its size.
        targets: int64 ``[T]``, −100 is ignored. A target outside the vocabulary raises IndexError
            on the CPU; on a card, where a check would make the host wait, it makes the loss and the
            gradients NaN.
        bias: ``[V]``, or None.
        adapter: a low-rank addition to the head, whose matrices are differentiable.
        rows: replacements of some rows of the weight, differentiable; no copy of the weight is
            made.
        scale: factor of the logits.
        softcap: bound of the logits, applied after the factor; None for none.
        label_smoothing: share ε of the target's probability spread over the vocabulary.
        z_loss: factor ζ on the squared log of the partition sum.
        weights: optional ``[T]``, not differentiated.
        chunk_size: rows of logits that exist at a time, at most.
        count: upper bound on the number of targets that are not −100, if the host knows one. On a
            card only so many rows then go through the products, without a synchronisation. On the
            CPU exactly the rows that are not ignored do, in any case.
        gradient_type: dtype in which the head's gradient is summed over chunks, at least that of
            ``hidden``.

    Raises:
        ValueError: shapes or dtypes do not fit, ``chunk_size`` < 1, ``softcap`` is not positive, or
            ``label_smoothing`` is not in [0, 1).
    """
    check_head(hidden, weight, targets, bias, chunk_size, softcap)
    if weights is not None and weights.shape != targets.shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}: expected [{len(targets)}]")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing}: must be at least 0 and less than 1")
    hidden, more = with_adapter(hidden, weight, adapter)
    values, index = (None, None) if rows is None else (rows.values, rows.ids)
    if rows is not None and (
        more is not None or rows.values.shape != (len(rows.ids), weight.shape[1])
    ):
        raise ValueError(
            f"rows are {tuple(rows.ids.shape)} and {tuple(rows.values.shape)}: expected [n] and "
            f"[n, {weight.shape[1]}], of a "
            "weight without an adapter"
        )
    return _LinearCrossEntropy.apply(
        hidden,
        weight,
        more,
        bias,
        values,
        index,
        targets.contiguous(),
        None if weights is None else weights.contiguous(),
        scale,
        softcap,
        label_smoothing,
        z_loss,
        chunk_size,
        count,
        gradient_type,
    )


def fused_cross_entropy(
    hidden: Tensor,
    lm_head_weight: Tensor,
    targets: Tensor | None = None,
    chunk_size: int = 4096,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> Tensor:
    """Return the cross-entropy of ``hidden @ lm_head_weight.T`` without materialising all logits.

    Older scripts pass logits instead: ``fused_cross_entropy(logits, targets, vocab_size=V)``
    returns the same loss for logits ``[..., V]``.

    Args:
        hidden: ``[..., D]``.
        lm_head_weight: ``[V, D]``.
        targets: int64 ``[...]``, aligned with ``hidden`` (not shifted here); −100 is ignored.
        chunk_size: rows of logits that exist at a time, at most.
        reduction: ``mean`` over the targets that are not ignored, ``sum``, or ``none`` (float32
            ``[...]``, 0 for ignored targets).
        vocab_size: V, if the first two arguments are logits and targets.

    Returns:
        float32, differentiable. A mean over no targets is NaN, as in torch, with no gradient.

    Raises:
        ValueError: shapes do not fit, ``chunk_size`` < 1, or the reduction is unknown.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: expected 'mean', 'sum' or 'none'")
    if vocab_size is not None:
        if targets is not None:
            raise ValueError(
                "vocab_size: is given beside logits and targets alone; leave it out with hidden "
                "states and a head"
            )
        return _cross_entropy_of_logits(hidden, lm_head_weight, vocab_size, reduction)
    if targets is None:
        raise ValueError(
            "targets: missing; give hidden states, the head's weight and targets, or logits, "
            "targets, vocab_size"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets {tuple(targets.shape)} must have the shape of hidden {tuple(hidden.shape)} "
            "but its last"
        )
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = targets.reshape(-1)
    if reduction == "none":
        return -token_log_probability(rows, lm_head_weight, flat, chunk_size=chunk_size)[0].view(
            targets.shape
        )
    total = linear_cross_entropy(rows, lm_head_weight, flat, chunk_size=chunk_size)
    return total if reduction == "sum" else mean_of(total, flat)


def _cross_entropy_of_logits(
    logits: Tensor, targets: Tensor, vocab_size: int, reduction: str
) -> Tensor:
    if logits.shape[-1] != vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}: the logits {tuple(logits.shape)} have {logits.shape[-1]} "
            "in a row"
        )
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets {tuple(targets.shape)} must have the shape of logits {tuple(logits.shape)} "
            "but its last"
        )
    rows = logits.reshape(-1, vocab_size).float()
    losses = torch.nn.functional.cross_entropy(
        rows, targets.reshape(-1), reduction="none", ignore_index=IGNORE_INDEX
    )
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else mean_of(losses.sum(), targets)


def mean_of(total: Tensor, targets: Tensor) -> Tensor:
    """Return ``total`` divided by the number of targets that are not ignored.

    NaN without a gradient if there are none, as in torch.
    """
    count = (targets != IGNORE_INDEX).sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    adapter: Adapter | None = None,
    rows: Rows | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute ``linear_cross_entropy`` in plain torch with all logits at once."""
    whole = weight if rows is None else rows.within(weight)
    z = LinearHead(hidden, whole, bias, adapter, scale, softcap).logits()
    losses = torch.nn.functional.cross_entropy(
        z, targets, reduction="none", ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing
    )
    losses = losses + z_loss * (targets != IGNORE_INDEX) * torch.logsumexp(z, 1).square()
    return (losses if weights is None else losses * weights).sum()
