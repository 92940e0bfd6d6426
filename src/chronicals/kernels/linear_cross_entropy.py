"""Cross-entropy of a linear head, without ever holding more than ``chunk_size`` rows of logits.

    z = s · (h Wᵀ + b)          z ← c · tanh(z / c) where there is a softcap c
    loss = Σ_t w_t · (logsumexp(z_t) − z_t[y_t])   over targets y_t ≠ −100

``h`` is ``[T, D]``, ``W`` ``[V, D]``, ``b`` ``[V]``. The sum is what is returned: who knows the count divides. Since the
upstream gradient of a sum is one number, the gradients are made chunk by chunk in the forward pass, when the logits are
at hand, and scaled later: three products, none repeated. Floor: 6·T·D·V operations and 4·V bytes a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # the default of torch.nn.functional.cross_entropy


def fused_cross_entropy(
    hidden: Tensor, lm_head_weight: Tensor, targets: Tensor, chunk_size: int = 4096, reduction: str = "mean"
) -> Tensor:
    """Cross-entropy of ``hidden @ lm_head_weight.T`` without whole logits.

    Args:
        hidden: ``[..., D]``.
        lm_head_weight: ``[V, D]``.
        targets: int64 ``[...]``, aligned with ``hidden`` (not shifted here); −100 is ignored.
        chunk_size: no more rows of logits than these exist at a time.
        reduction: ``mean`` over the targets that count, ``sum``, or ``none`` (float32 of the shape of ``targets``, 0
            where ignored).

    Returns:
        float32, ready for ``backward``. The mean over no target at all is an error in training and NaN here.

    Raises:
        ValueError: shapes do not fit, ``chunk_size`` < 1, or the reduction is unknown.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: expected 'mean', 'sum' or 'none'")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(f"targets {tuple(targets.shape)} must have the shape of hidden {tuple(hidden.shape)} but its last")
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if reduction == "none":
        _check(rows, lm_head_weight, flat, chunk_size)
        parts = [
            checkpoint(_losses, rows[part], lm_head_weight, flat[part], use_reentrant=False)
            for part in _parts(len(rows), chunk_size)
        ]
        return torch.cat(parts).view(targets.shape) if parts else rows.new_zeros(targets.shape, dtype=torch.float32)
    total = linear_cross_entropy(rows, lm_head_weight, flat, chunk_size=chunk_size)
    return total if reduction == "sum" else total / (flat != IGNORED).sum()


@torch.compiler.disable  # compiled by torch 2.11, the function below has gradients of zero
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    weights: Tensor | None = None,
    chunk_size: int = 4096,
) -> Tensor:
    """The weighted sum of the losses, a float32 scalar; see the module's docstring.

    Args:
        hidden: ``[T, D]``; differentiable, like ``weight`` ``[V, D]`` and ``bias`` ``[V]`` where they require it.
        targets: int64 ``[T]``, −100 is ignored.
        scale, softcap: applied to the logits, in this order.
        weights: optional ``[T]``, not differentiated.

    Raises:
        ValueError: shapes do not fit or ``chunk_size`` < 1.
    """
    _check(hidden, weight, targets, chunk_size)
    for name, given, size in (("bias", bias, len(weight)), ("weights", weights, len(targets))):
        if given is not None and given.shape != (size,):
            raise ValueError(f"{name} has shape {tuple(given.shape)}: expected [{size}]")
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, weights, scale, softcap, chunk_size)


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """The definition, with all logits at once."""
    losses = F.cross_entropy(_logits(hidden, weight, bias, scale, softcap), targets, reduction="none", ignore_index=IGNORED)
    return (losses if weights is None else losses * weights).sum()


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: must be at least 1")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}: expected "
            "[T, D], [V, D] and [T]"
        )


def _parts(rows: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, rows, size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    logits = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(_logits(hidden, weight, None, 1.0, None), targets, reduction="none", ignore_index=IGNORED)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor | None,
        scale: float,
        softcap: float | None,
        chunk_size: int,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        d_hidden = torch.zeros_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wants_bias else None
        narrow_weight = weight.to(hidden.dtype)
        # Selecting the trained rows first spares their share of the products, but asks a GPU for a number.
        trained = (targets != IGNORED).nonzero().squeeze(1) if targets.device.type == "cpu" else None
        for part in _parts(len(targets) if trained is None else len(trained), chunk_size):
            rows = part if trained is None else trained[part]
            some, wanted = hidden[rows], targets[rows]
            z = _logits(some, narrow_weight, bias, scale, softcap)
            keep = wanted != IGNORED
            of_row = keep.to(wide) if weights is None else keep * weights[rows].to(wide)
            at_target = wanted.masked_fill(~keep, 0)[:, None]
            log_p = torch.log_softmax(z, 1)  # not z - logsumexp(z), which loses what log_softmax keeps of a likely target
            total -= (log_p.gather(1, at_target).squeeze(1) * of_row).sum()
            if not any((wants_hidden, wants_weight, wants_bias)):
                continue
            d_z = log_p.exp_()
            d_z.scatter_add_(1, at_target, torch.full_like(at_target, -1, dtype=wide))
            d_z *= of_row[:, None] * scale
            if softcap is not None:
                d_z *= 1 - (z / softcap).square()
            narrow = d_z.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[rows] = (narrow @ narrow_weight).to(d_hidden.dtype)  # autocast may have narrowed it
            if d_weight is not None:
                d_weight += narrow.t() @ some
            if d_bias is not None:
                d_bias += d_z.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.types = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scaled = [
            None if gradient is None else (gradient * upstream).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.types)
        ]
        return *scaled, None, None, None, None, None
