"""Log-probability of each target and entropy of each prediction of a linear head, without whole logits.

    log p_t = z_t[y_t] − lse_t,   H_t = lse_t − Σ_j p_tj z_tj;   see ``logit_rows`` for z, lse and p

    dL/dz_j = g · (1(j = y) − p_j) − e · p_j · (log p_j + H)        g, e: upstream gradients of log p_t and H_t

The upstream gradient differs from token to token, so the backward pass makes the logits again, chunk by chunk. Floor:
2·T·D·V operations forward, 6·T·D·V backward; 2·V and 4·V bytes a token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.launch import differentiable_once
from chronicals.kernels.logit_rows import IGNORED, LossOptions, log_probabilities, log_probability_gradient_


def chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Raw logits of some rows, written to the first rows of ``buffer``."""
    out = buffer[: len(hidden)]
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias.to(hidden.dtype), hidden, weight.t(), out=out)


def product_type(hidden: Tensor) -> torch.dtype:
    """The type of the products: autocast's where it is on, else that of ``hidden``."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def check_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, chunk_size: int, softcap: float | None
) -> None:
    """Raises ValueError unless hidden is ``[T, D]``, weight ``[V, D]``, targets int64 or int32 ``[T]``, bias ``[V]``, and the
    numbers are in their ranges."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: must be at least 1")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap}: must be a positive number, or None where there is no bound")
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets are {targets.dtype}: expected torch.int64; give targets.long()")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}: expected "
            "[T, D], [V, D] and [T]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}: expected [{len(weight)}]")


@torch.library.custom_op("chronicals::token_log_probability", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float, softcap: float | None,
    chunk_size: int, wants_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """log p, lse and entropy, each ``[T]``."""
    out = _outputs(hidden)
    narrow, buffer = weight.to(hidden.dtype), hidden.new_empty((min(chunk_size, len(hidden)), len(weight)))
    for part in chunks(len(hidden), chunk_size):
        x = chunk_logits(hidden[part], narrow, bias, buffer)
        for whole, some in zip(out, log_probabilities(x, targets[part], LossOptions(scale, softcap), wants_entropy)):
            whole[part] = some
    return out


@_forward.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float, softcap: float | None,
    chunk_size: int, wants_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(hidden)


def _outputs(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return tuple(hidden.new_empty(len(hidden), dtype=wide) for _ in range(3))  # type: ignore[return-value]


@torch.library.custom_op("chronicals::token_log_probability_backward", mutates_args=())
def _backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, d_log_p: Tensor, d_entropy: Tensor | None,
    lse: Tensor, entropy: Tensor, scale: float, softcap: float | None, chunk_size: int, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of hidden, weight and bias that are ``wanted``, else nothing in their place."""
    d_hidden, d_weight, d_bias = _gradients(hidden, weight, bias, wanted)
    narrow, buffer = weight.to(hidden.dtype), hidden.new_empty((min(chunk_size, len(hidden)), len(weight)))
    for part in chunks(len(hidden), chunk_size):
        x = chunk_logits(hidden[part], narrow, bias, buffer)
        log_probability_gradient_(
            x, targets[part], d_log_p[part], None if d_entropy is None else d_entropy[part], lse[part], entropy[part],
            LossOptions(scale, softcap),
        )  # fmt: skip
        if wanted[0]:
            torch.mm(x, narrow, out=d_hidden[part])
        if wanted[1]:
            d_weight += (x.t() @ hidden[part]).to(d_weight.dtype)
        if wanted[2]:
            d_bias += x.sum(0, dtype=d_bias.dtype)
    return [d_hidden, d_weight, d_bias]


@_backward.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, d_log_p: Tensor, d_entropy: Tensor | None,
    lse: Tensor, entropy: Tensor, scale: float, softcap: float | None, chunk_size: int, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    return _gradients(hidden, weight, bias, wanted)


def _gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> list[Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return [
        hidden.new_empty(0) if not wants or x is None else x.new_zeros(x.shape, dtype=kind)
        for x, wants, kind in zip((hidden, weight, bias), wanted, (hidden.dtype, wide, wide))
    ]


class _TokenLogProbability(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float, softcap: float | None,
        chunk_size: int, wants_entropy: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        kind = product_type(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            log_p, lse, entropy = _forward(
                hidden.to(kind), weight, bias, targets, scale, softcap, chunk_size, wants_entropy
            )  # fmt: skip
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.options, ctx.dtype, ctx.wants_entropy = (scale, softcap, chunk_size), kind, wants_entropy
        if not wants_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_p, entropy

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_log_p: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        wanted = [bool(needed) for needed in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = _backward(
                hidden.to(ctx.dtype), weight, bias, targets, d_log_p.contiguous(),
                d_entropy.contiguous() if ctx.wants_entropy else None, lse, entropy, *ctx.options, wanted,
            )  # fmt: skip
        return tuple(
            gradient.to(x.dtype) if wants else None for gradient, x, wants in zip(gradients, (hidden, weight, bias), wanted)
        )


def token_log_probability(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int = 4096,
    entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """``log p`` of each target and, if wanted, the entropy of each prediction; float32 ``[T]`` both.

    Args:
        hidden: ``[T, D]``; differentiable, like ``weight`` ``[V, D]`` and ``bias`` ``[V]`` where they require it.
        targets: int64 ``[T]``; the log-probability of −100 is 0. One outside the vocabulary is an IndexError on the CPU; on a
            card its log-probability is NaN. The entropy is that of every row.
        scale, softcap: applied to the logits, in this order; ``scale`` is one over a temperature.
        chunk_size: no more rows of logits than these exist at a time.
        entropy: whether entropies are wanted; zeros otherwise.

    Raises:
        ValueError: shapes or types do not fit, ``chunk_size`` < 1, or ``softcap`` is not positive.
    """
    check_head(hidden, weight, targets, bias, chunk_size, softcap)
    return _TokenLogProbability.apply(hidden, weight, bias, targets.contiguous(), scale, softcap, chunk_size, entropy)


def token_log_probability_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, with all logits at once; entropies always."""
    x = torch.nn.functional.linear(hidden, weight, bias)
    z = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z, 1)
    ignored = targets == IGNORED
    return (
        log_p.gather(1, targets.masked_fill(ignored, 0)[:, None]).squeeze(1).masked_fill(ignored, 0.0),
        -(log_p.exp() * log_p).sum(1),
    )
