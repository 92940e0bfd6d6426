"""Log-probability of each target and entropy of each prediction of a linear head.

The logits of all rows never exist at once.

    log p_t = z_t[y_t] − lse_t,   H_t = lse_t − Σ_j p_tj z_tj;   see ``logit_rows`` for z, lse and p

    dL/dz_j = g · (1(j = y) − p_j) − e · p_j · (log p_j + H)        g, e: upstream gradients of log p_t and H_t

The upstream gradient differs from token to token, so the backward pass computes the logits again,
chunk by chunk. Floor: 2·T·D·V operations forward, 6·T·D·V backward; 2·V and 4·V bytes a token. If
the number of targets that are not ignored is known beforehand, T counts only these rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.launch import differentiable_once, operator
from chronicals.kernels.linear_head import (
    Adapter,
    HeadBytes,
    HeadShape,
    HeadWork,
    LinearHead,
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
    log_probability_gradient_,
    target_log_probabilities,
)


@operator("chronicals::token_log_probability")
def _forward(
    hidden: Tensor,
    weight: Tensor,
    more: Tensor | None,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    chunk_size: int,
    wants_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p, lse and entropy, each ``[T]``.

    ``more`` ``[V, r]`` are further columns of the head.
    """
    out = _outputs(hidden, weight, more, bias, targets, scale, softcap, chunk_size, wants_entropy)
    narrow = side_by_side(weight, more, hidden.dtype)
    buffer = hidden.new_empty((min(chunk_size, len(hidden)), len(weight)))
    for part in chunks(len(hidden), chunk_size):
        x = chunk_logits(hidden[part], narrow, bias, buffer)
        for whole, some in zip(
            out,
            target_log_probabilities(x, targets[part], LossOptions(scale, softcap), wants_entropy),
        ):
            whole[part] = some
    return out


@torch.library.register_fake(_forward)
def _outputs(
    hidden: Tensor,
    weight: Tensor,
    more: Tensor | None,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    chunk_size: int,
    wants_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate log p, lse and entropy."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return tuple(hidden.new_empty(len(hidden), dtype=wide) for _ in range(3))  # type: ignore[return-value]


@operator("chronicals::token_log_probability_backward")
def _backward(
    hidden: Tensor,
    weight: Tensor,
    more: Tensor | None,
    bias: Tensor | None,
    targets: Tensor,
    d_log_p: Tensor,
    d_entropy: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    scale: float,
    softcap: float | None,
    chunk_size: int,
    wanted: list[bool],
) -> list[Tensor]:
    """Return the gradients of hidden, weight, more and bias; empty tensors for those not ``wanted``."""
    d_hidden, d_weight, d_more, d_bias = _gradients(
        hidden,
        weight,
        more,
        bias,
        targets,
        d_log_p,
        d_entropy,
        lse,
        entropy,
        scale,
        softcap,
        chunk_size,
        wanted,
    )
    narrow = side_by_side(weight, more, hidden.dtype)
    buffer = hidden.new_empty((min(chunk_size, len(hidden)), len(weight)))
    width = weight.shape[1]
    for part in chunks(len(hidden), chunk_size):
        x = chunk_logits(hidden[part], narrow, bias, buffer)
        log_probability_gradient_(
            x,
            targets[part],
            d_log_p[part],
            None if d_entropy is None else d_entropy[part],
            lse[part],
            entropy[part],
            LossOptions(scale, softcap),
        )
        if wanted[0]:
            torch.mm(x, narrow, out=d_hidden[part])
        for gradient, columns in ((d_weight, hidden[part, :width]), (d_more, hidden[part, width:])):
            if gradient.numel():
                gradient += (x.t() @ columns).to(gradient.dtype)
        if d_bias.numel():
            d_bias += x.sum(0, dtype=d_bias.dtype)
    return [d_hidden, d_weight, d_more, d_bias]


@torch.library.register_fake(_backward)
def _gradients(
    hidden: Tensor,
    weight: Tensor,
    more: Tensor | None,
    bias: Tensor | None,
    targets: Tensor,
    d_log_p: Tensor,
    d_entropy: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    scale: float,
    softcap: float | None,
    chunk_size: int,
    wanted: list[bool],
) -> list[Tensor]:
    """Allocate the gradients that ``_backward`` returns, as zeros."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return [
        hidden.new_empty(0) if not wants or x is None else x.new_zeros(x.shape, dtype=kind)
        for x, wants, kind in zip(
            (hidden, weight, more, bias), wanted, (hidden.dtype, wide, wide, wide)
        )
    ]


class _TokenLogProbability(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        more: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        chunk_size: int,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        kind = product_type(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            log_p, lse, entropy = _forward(
                hidden.to(kind),
                weight,
                more,
                bias,
                targets,
                scale,
                softcap,
                chunk_size,
                wants_entropy,
            )
        ctx.save_for_backward(hidden, weight, more, bias, targets, lse, entropy)
        ctx.options = (scale, softcap, chunk_size)
        ctx.dtype = kind
        ctx.wants_entropy = wants_entropy
        if not wants_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_p, entropy

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_log_p: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, more, bias, targets, lse, entropy = ctx.saved_tensors
        wanted = [bool(needed) for needed in ctx.needs_input_grad[:4]]
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = _backward(
                hidden.to(ctx.dtype),
                weight,
                more,
                bias,
                targets,
                d_log_p.contiguous(),
                d_entropy.contiguous() if ctx.wants_entropy else None,
                lse,
                entropy,
                *ctx.options,
                wanted,
            )
        return tuple(
            gradient.to(x.dtype) if wants else None
            for gradient, x, wants in zip(gradients, (hidden, weight, more, bias), wanted)
        )


LOG_PROBABILITY_WORK = HeadWork(logits=2, moved=6)
"""Logits are computed and read for the sums, and again for their gradient, which is written."""


def log_probability_bytes(shape: HeadShape) -> HeadBytes:
    """Return the bytes that ``token_log_probability`` needs at most at a time: its backward pass.

    These are the rows whose targets are not ignored, their gradient and that of all states; for a
    trained head the fp32 sum of its gradient, and a chunk's product before and after it is cast.
    """
    of_head = shape.weights * (4 + shape.element + 4)
    return HeadBytes(
        shape.logits, 3 * shape.states, of_head, returned=shape.element * shape.weights
    )


def token_log_probability(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    adapter: Adapter | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int = 4096,
    entropy: bool = False,
    count: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``log p`` of each target and the entropy of each prediction, float32 ``[T]`` each.

    Args:
        hidden: ``[T, D]``; differentiable, like ``weight`` ``[V, D]`` and ``bias`` ``[V]`` if they
            require it.
        weight: ``[V, D]``.
        targets: int64 ``[T]``; the log-probability of −100 is 0. A target outside the vocabulary
            raises IndexError on the CPU; on a card its log-probability is NaN.
        bias: ``[V]``, or None.
        adapter: a low-rank addition to the head, differentiable too.
        scale: factor of the logits, 1 / temperature.
        softcap: bound of the logits, applied after the factor; None for none.
        chunk_size: rows of logits that exist at a time, at most.
        entropy: whether entropies are wanted; if not they are zeros.
        count: upper bound on the number of targets that are not −100, if the host knows one. Only
            so many rows then go through the products, without a synchronisation, and ignored rows
            get entropy 0 instead of their own.

    Raises:
        ValueError: shapes or dtypes do not fit, ``chunk_size`` < 1, or ``softcap`` is not positive.
    """
    check_head(hidden, weight, targets, bias, chunk_size, softcap)
    targets = targets.contiguous()
    rows = None if count is None else trained_rows(targets, count)
    states, state_targets = (
        (hidden, targets) if rows is None else (hidden.index_select(0, rows), targets[rows])
    )
    states, more = with_adapter(states, weight, adapter)
    results: tuple[Tensor, Tensor] = _TokenLogProbability.apply(
        states, weight, more, bias, state_targets, scale, softcap, chunk_size, entropy
    )
    if rows is None:
        return results
    log_p, entropies = (x.new_zeros(len(targets)).index_copy(0, rows, x) for x in results)
    return log_p, torch.where(targets == IGNORE_INDEX, 0.0, entropies)


def token_log_probability_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    adapter: Adapter | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies in plain torch with all logits at once."""
    z = LinearHead(hidden, weight, bias, adapter, scale, softcap).logits()
    log_p = torch.log_softmax(z, 1)
    ignored = targets == IGNORE_INDEX
    return (
        log_p.gather(1, targets.masked_fill(ignored, 0)[:, None])
        .squeeze(1)
        .masked_fill(ignored, 0.0),
        -(log_p.exp() * log_p).sum(1),
    )
