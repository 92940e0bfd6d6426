"""Cross-entropy of a linear head, without ever holding more than ``chunk_size`` rows of logits.

    x = h Wᵀ + b + α (h Aᵀ) Bᵀ      raw logits; (A, B, α) an adapter on the head, or none
    x[:, i] = h Rᵀ + b[i]            where some rows i of W are replaced by R, which alone are trained
    Σ_t loss_t(x_t)                  over targets y_t ≠ −100; the loss of a row is in ``logit_rows``

``h`` is ``[T, D]``, ``W`` ``[V, D]``, ``b`` ``[V]``. The sum is what is returned: who knows the
count divides. Since the upstream gradient of a sum is one number, the gradients are made chunk by
chunk in the forward pass, when the logits are at hand, and scaled later: three products, none
repeated. Floor: 6·T·D·V operations and 4·V bytes a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.adapter import Adapter, Rows
from chronicals.kernels.launch import differentiable_once, runs_triton, tl, triton
from chronicals.kernels.linear_head import (
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
    shaped_reference,
)
from chronicals.kernels.operators import operator
from chronicals.kernels.products import product
from chronicals.kernels.token_log_probability import token_log_probability
from chronicals.kernels.two_streams import at_once

DEFAULT_CHUNK_ROWS = 4352
"""Rows of logits that exist at a time. On an H200, 16384 rows, 896 wide, with a vocabulary of
151936 take 23.7 ms in chunks of 4352, as they do all at once, and 24.4 in chunks of 4096; 1.25
GiB exist beside the gradients."""


@triton.jit
def _scale_rows_kernel(
    x_ptr, factor_ptr, y_ptr, elements, width, factor_stride, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr + at // width * factor_stride, mask=at < elements, other=0.0)
    x = tl.load(x_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * factor).to(y_ptr.dtype.element_ty), mask=at < elements)


def scale_rows(x: Tensor, factors: Tensor, out: Tensor) -> Tensor:
    """``out = factors · x`` for one factor, or one a row ``[rows]``; torch's own is slow where
    types are mixed.
    """
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
    """The sum, and the gradients of hidden, weight, more_weight, bias and values that are
    ``wanted``, else nothing there.

    ``more_weight`` ``[V, r]`` continues the columns of ``weight`` ``[V, D]``; ``hidden`` is ``[T, D
    + r]``. Without it, ``values`` ``[n, D]`` may stand for the rows of ``weight`` at ``index``.
    """
    options = LossOptions(scale, softcap, label_smoothing, z_loss)
    total, d_hidden, *of_head = sum_and_gradients(
        hidden, weight, more_weight, bias, values, gradient_type, wanted
    )
    narrow = side_by_side(weight, more_weight, hidden.dtype)
    replaced = None if values is None or index is None else Rows(index, values.to(hidden.dtype))
    rows = trained_rows(targets, count)
    picked, wanted_targets = (hidden, targets) if rows is None else (hidden[rows], targets[rows])
    weights = weights if weights is None or rows is None else weights[rows]
    d_picked = torch.zeros_like(picked) if wanted[0] and rows is not None else d_hidden
    buffer = hidden.new_empty((min(chunk_size, len(picked)), len(narrow)))
    for part in chunks(len(picked), chunk_size):
        x = chunk_logits(picked[part], narrow, bias, buffer)
        if replaced is not None:
            x.index_copy_(1, replaced.ids, _logits_of(replaced, picked[part], bias))
        of_row = None if weights is None else weights[part]
        losses, factors = loss_and_gradient_(x, wanted_targets[part], of_row, options, any(wanted))
        total += losses.sum()
        theirs = None if replaced is None else _taken_out(x, replaced.ids)
        at_once(
            partial(put_of_states, d_picked[part], x, narrow, factors, theirs, replaced),
            partial(
                accumulate_of_head,
                of_head,
                x,
                picked[part],
                factors,
                weight.shape[1],
                part.start == 0,
                theirs,
                index,
            ),
            x.device,
        )
    if wanted[0] and rows is not None:
        d_hidden[rows] = d_picked
    if not len(picked):
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
    return sum_and_gradients(hidden, weight, more_weight, bias, values, gradient_type, wanted)


def sum_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    more_weight: Tensor | None,
    bias: Tensor | None,
    values: Tensor | None,
    gradient_type: torch.dtype,
    wanted: list[bool],
) -> list[Tensor]:
    """What a sum's operator writes: the sum and the gradients of states are 0, those of the head
    not yet filled, or empty.
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


def _logits_of(rows: Rows, hidden: Tensor, bias: Tensor | None) -> Tensor:
    """``[T, n]``, of the rows that are replaced."""
    x = hidden @ rows.values.t()
    return x if bias is None else x + bias[rows.ids].to(x.dtype)


def _taken_out(x: Tensor, index: Tensor) -> Tensor:
    """Those columns of x, in which zeros stand afterwards: the frozen rows beneath have no part
    in the gradient.
    """
    theirs = x.index_select(1, index)
    x.index_fill_(1, index, 0)
    return theirs


def put_of_states(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    factors: Tensor,
    theirs: Tensor | None = None,
    rows: Rows | None = None,
) -> None:
    """The gradient of a chunk's hidden states, of rows of logits whose gradient is ``factors``
    ``[rows]`` times ``x``, and times ``theirs`` for the logits of ``rows``."""
    if theirs is not None and rows is not None and out.numel():
        found = product(x, weight, factors.dtype) + product(theirs, rows.values, factors.dtype)
        scale_rows(found, factors, out)
    elif out.numel():
        scale_rows(product(x, weight, factors.dtype), factors, out)


def accumulate_of_head(
    of_head: list[Tensor],
    x: Tensor,
    hidden: Tensor,
    factors: Tensor,
    width: int,
    first: bool,
    theirs: Tensor | None = None,
    index: Tensor | None = None,
) -> None:
    """Add the shares of such a chunk."""
    d_weight, d_more, d_bias, d_rows = of_head
    if not any(gradient.numel() for gradient in of_head):
        return
    scaled = scale_rows(hidden, factors, torch.empty_like(hidden))
    for gradient, columns in ((d_weight, scaled[:, :width]), (d_more, scaled[:, width:])):
        if gradient.numel():
            _add_product(gradient, x.t(), columns, first)
    if d_rows.numel() and theirs is not None:
        _add_product(d_rows, theirs.t(), scaled, first)
    if d_bias.numel():
        _add_product(d_bias[:, None], x.t(), factors[:, None].to(x.dtype), first)
        if theirs is not None and index is not None:
            d_bias.index_add_(0, index, (theirs.t().to(factors.dtype) @ factors).to(d_bias.dtype))


def _add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """``total += left @ right``, rounded to the type of ``total`` only; ``first`` takes what is
    in it for nothing.
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
    """The weighted sum of the losses, a float32 scalar; see the module's docstring.

    Args:
        hidden: ``[T, D]``; differentiable, like ``weight`` ``[V, D]``, ``bias`` ``[V]`` and the
            adapter's matrices where they require it. A frozen head costs no gradient of its size.
        targets: int64 ``[T]``, −100 is ignored. One outside the vocabulary is an IndexError on the
            CPU; on a card, which is not asked, it makes the loss and the gradients NaN.
        adapter: a low-rank addition to the head.
        rows: of the weight that others stand for, differentiable; no copy of the weight is made.
        scale, softcap: applied to the logits, in this order.
        label_smoothing: share ε of the target's probability spread over the vocabulary.
        z_loss: factor ζ on the squared log of the partition sum.
        weights: optional ``[T]``, not differentiated.
        count: a bound on how many targets are not −100, where the host knows one: on a card only so
            many rows go through the products, without a synchronisation. On the CPU exactly those
            that count do.
        chunk_size: no more rows of logits than these exist at a time.
        gradient_type: the type in which the head's gradient is summed over chunks, at least that of
            ``hidden``.

    Raises:
        ValueError: shapes or types do not fit, ``chunk_size`` < 1, ``softcap`` is not positive, or
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
    """Cross-entropy of ``hidden @ lm_head_weight.T`` without whole logits.

    Older scripts pass logits ``[..., V]``, targets and ``vocab_size=V`` instead:
    ``fused_cross_entropy(logits, targets, vocab_size=V)`` is the same loss of logits that are there
    already.

    Args:
        hidden: ``[..., D]``.
        lm_head_weight: ``[V, D]``.
        targets: int64 ``[...]``, aligned with ``hidden`` (not shifted here); −100 is ignored.
        chunk_size: no more rows of logits than these exist at a time.
        reduction: ``mean`` over the targets that count, ``sum``, or ``none`` (float32 of the shape
            of ``targets``, 0 where ignored).
        vocab_size: V, where the first two arguments are logits and targets.

    Returns:
        float32, ready for ``backward``. The mean over no target at all is an error in training and
        NaN here, with no gradient.

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
    """A sum over the targets that count, divided by their number; where none does NaN without a
    gradient, as torch has it.
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
    """The definition, with all logits at once."""
    x = torch.nn.functional.linear(hidden, weight if rows is None else rows.within(weight), bias)
    if adapter is not None:
        down = torch.nn.functional.dropout(hidden, adapter.dropout) @ adapter.a.t()
        x = x + adapter.scale * down @ adapter.b.t()
    z = shaped_reference(x, LossOptions(scale, softcap))
    losses = torch.nn.functional.cross_entropy(
        z, targets, reduction="none", ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing
    )
    losses = losses + z_loss * (targets != IGNORE_INDEX) * torch.logsumexp(z, 1).square()
    return (losses if weights is None else losses * weights).sum()
