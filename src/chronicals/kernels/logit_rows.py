"""Loss and gradient, or log-probability and entropy, of each row of logits.

The chunked heads build on these.

    z_j = c · tanh(s · x_j / c)   of raw logits x;  without a softcap c, z = s · x
    lse = log Σ_j e^{z_j},   p_j = e^{z_j − lse},   H = lse − Σ_j p_j z_j   (entropy)
    loss = w · [(1 − ε)(lse − z_y) + ε (lse − mean_j z_j) + ζ · lse²]
    dloss/dz_j = w · [(1 + 2ζ · lse) p_j − (1 − ε) 1(j = y) − ε / V],   dz_j/dx_j = s · (1 − (z_j / c)²)

ε is label smoothing (Szegedy et al., 2016, section 7), ζ the z-loss (Chowdhery et al., 2022,
section 5), w the weight of the row. A program takes a row and overwrites its logits with their
gradient. Bytes a row in 16 bit: 2·V for statistics, 4·V with the gradient.

Without smoothing one pass over the logits suffices. The normaliser of a row is a factor f of the
whole row; the products that follow can apply it more cheaply than a second pass would:

    S = Σ_j e^{z_j − r}      for a reference r chosen before the largest logit is known
    dloss/dx_j = f · n_j,    n_j = (e^{z_j − r} − S / (1 + 2ζ · lse) · 1(j = y)) · (1 − (z_j / c)²),
    f = w · s · (1 + 2ζ · lse) / S

The target's numerator n_y, the one large number of a row, is rounded like the others. f absorbs its
rounding error, so that f · n_y is exact; otherwise the errors of many rows would add up where their
gradients cancel.

r is the largest logit of the first block, or the target's if that is larger. If a later logit
exceeds r by more than 40, r is raised, and what was already written is scaled down at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chronicals.kernels.launch import Tile, next_power_of_2, runs_triton, tl, triton

IGNORE_INDEX = -100  # the default of torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class LossOptions:
    """Numbers of the formula.

    Attributes:
        scale: s, by which raw logits are multiplied.
        softcap: c, the bound of the logits; None for no bound.
        label_smoothing: ε.
        z_loss: ζ.
    """

    scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def tile_of(vocabulary: int) -> Tile:
    """Return the tile for a row of logits."""
    # 16 elements a thread, and many warps, so that a row has few blocks and few reductions.
    block = min(4096, max(8, next_power_of_2(vocabulary)))
    return Tile(1, block, warps=min(16, max(1, block // 512)))


@triton.jit
def _tanh(x):
    """Return tanh(x) to the precision of fp32."""
    # Near 0 by the series, since 1 − 2 / (e^2x + 1) would cancel.
    y = x * x
    series = 1.0 + y * (
        -0.33333333 + y * (0.13333333 + y * (-0.053968254 + y * (0.021869489 - y * 0.0088632358)))
    )
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.3, x * series, tl.where(x < 0, -far, far))


@triton.jit
def shaped(x, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return logits z of raw logits x, fp32: scaled, then bounded by the softcap."""
    z = x.to(tl.float32) * scale
    if HAS_SOFTCAP:
        z = softcap * _tanh(z / softcap)
    return z


@triton.jit
def _statistics(
    x_ptr,
    vocabulary,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    WANTS_SUM: tl.constexpr,
    WANTS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the statistics of a row in one pass.

    Returns the largest logit m, log Σ e^{z − m}, Σ z, and Σ (z − m) e^{z − m} / Σ e^{z − m}.
    """
    # Every eight neighbours are in one thread and have a maximum and sums of their own until the
    # end of the row, so threads wait for each other once a row and not once a block.
    largest = tl.full((BLOCK // 8,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK // 8,), tl.float32)
    plain_sum = tl.zeros((BLOCK // 8,), tl.float32)
    weighted = tl.zeros((BLOCK // 8,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(
            x_ptr + column, mask=column < vocabulary, other=0.0, eviction_policy="evict_last"
        )
        z = tl.where(column < vocabulary, shaped(x, scale, softcap, HAS_SOFTCAP), -float("inf"))
        if WANTS_SUM:
            plain_sum += tl.sum(
                tl.reshape(tl.where(column < vocabulary, z, 0.0), (BLOCK // 8, 8)), axis=1
            )
        z = tl.reshape(z, (BLOCK // 8, 8))
        new = tl.maximum(largest, tl.max(z, axis=1))
        shrink = tl.exp(largest - new)
        below = z - new[:, None]
        share = tl.exp(below)
        if WANTS_ENTROPY:
            weighted = (weighted + total * (largest - new)) * shrink
            weighted += tl.sum(tl.where(share > 0, below * share, 0.0), axis=1)
        total = total * shrink + tl.sum(share, axis=1)
        largest = new
    top = tl.max(largest, axis=0)
    shrink = tl.exp(largest - top)
    if WANTS_ENTROPY:
        weighted = tl.where(total > 0, (weighted + total * (largest - top)) * shrink, 0.0)
    sum_of_shares = tl.sum(total * shrink, axis=0)
    return (
        top,
        tl.log(sum_of_shares),
        tl.sum(plain_sum, axis=0),
        tl.sum(weighted, axis=0) / sum_of_shares,
    )


@triton.jit
def _loss_and_numerators_kernel(
    # logits, overwritten by numerators
    x_ptr,
    # read
    target_ptr,
    weight_ptr,
    # written
    loss_ptr,
    factor_ptr,
    # size and the stride of rows
    vocabulary,
    stride,
    # numbers of the formula
    scale,
    softcap,
    z_loss,
    # options
    HAS_SOFTCAP: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    # columns of a block, and blocks of a row
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write loss and factor f of a row, and overwrite its logits with the numerators n.

    ``BLOCKS`` is at least the number of blocks of a row, ``BLOCK`` columns each.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    target = tl.load(target_ptr + row)
    lane = tl.arange(0, BLOCK)
    kind = x_ptr.dtype.element_ty
    if target == -100:
        tl.store(loss_ptr + row, 0.0)
        tl.store(factor_ptr + row, 0.0)
        for start in range(0, vocabulary, BLOCK):
            tl.store(x_ptr + start + lane, tl.zeros((BLOCK,), kind), mask=start + lane < vocabulary)
    else:
        in_vocabulary = (target >= 0) & (target < vocabulary)
        at_target = shaped(
            tl.load(x_ptr + target, mask=in_vocabulary, other=0.0), scale, softcap, HAS_SOFTCAP
        )
        x = tl.load(x_ptr + lane, mask=lane < vocabulary, other=0.0, eviction_policy="evict_first")
        z = tl.where(lane < vocabulary, shaped(x, scale, softcap, HAS_SOFTCAP), -float("inf"))
        first_reference = tl.maximum(tl.maximum(tl.max(z, axis=0), at_target), -3.0e38)
        reference = first_reference
        references = tl.zeros((BLOCKS,), tl.float32)
        total = tl.zeros((BLOCK // 8,), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            column = start + lane
            ahead = tl.load(
                x_ptr + column + BLOCK,
                mask=column + BLOCK < vocabulary,
                other=0.0,
                eviction_policy="evict_first",
            )
            z = tl.where(column < vocabulary, shaped(x, scale, softcap, HAS_SOFTCAP), -float("inf"))
            top = tl.max(z, axis=0)
            raised = tl.where(top > reference + 40.0, top, reference)
            total *= tl.exp(reference - raised)
            reference = raised
            references = tl.where(tl.arange(0, BLOCKS) * BLOCK == start, reference, references)
            numerator = tl.exp(z - reference)
            total += tl.sum(tl.reshape(numerator, (BLOCK // 8, 8)), axis=1)
            if HAS_SOFTCAP:
                numerator *= 1.0 - (z / softcap) * (z / softcap)
            tl.store(
                x_ptr + column,
                numerator.to(kind),
                mask=column < vocabulary,
                eviction_policy="evict_first",
            )
            x = ahead
        whole = tl.sum(total, axis=0)
        tl.debug_barrier()  # the code below overwrites what other threads wrote
        # Scaling down happens here and not in the loop above, where the branch would cost every
        # row a tenth of its time.
        if reference > first_reference:
            for start in range(0, vocabulary, BLOCK):
                of_block = tl.sum(
                    tl.where(tl.arange(0, BLOCKS) * BLOCK == start, references, 0.0), axis=0
                )
                written = tl.load(
                    x_ptr + start + lane, mask=start + lane < vocabulary, other=0.0
                ).to(tl.float32)
                scaled = written * tl.exp(of_block - reference)
                tl.store(x_ptr + start + lane, scaled.to(kind), mask=start + lane < vocabulary)
            tl.debug_barrier()
        rest = tl.log(whole)
        lse = reference + rest
        weight = tl.load(weight_ptr + row).to(tl.float32) if HAS_WEIGHTS else 1.0
        # NaN, so that a target outside the vocabulary is noticed.
        weight = tl.where(in_vocabulary, weight, float("nan"))
        steepness = 1.0 + 2.0 * z_loss * lse
        tl.store(loss_ptr + row, weight * (rest - (at_target - reference) + z_loss * lse * lse))
        numerator = tl.exp(at_target - reference) - whole / steepness
        if HAS_SOFTCAP:
            numerator *= 1.0 - (at_target / softcap) * (at_target / softcap)
        rounded = numerator.to(kind)
        tl.store(x_ptr + target, rounded, mask=in_vocabulary)
        off = tl.where(rounded == 0.0, 1.0, numerator / rounded.to(tl.float32))
        tl.store(factor_ptr + row, weight * scale * steepness / whole * off)


@triton.jit
def _loss_and_gradient_kernel(
    # logits, overwritten by their gradient
    x_ptr,
    # read
    target_ptr,
    weight_ptr,
    # written
    loss_ptr,
    # size and the stride of rows
    vocabulary,
    stride,
    # numbers of the formula
    scale,
    softcap,
    smoothing,
    z_loss,
    # options
    HAS_SOFTCAP: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    WANTS_GRADIENT: tl.constexpr,
    # columns of a block
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    target = tl.load(target_ptr + row)
    blocks = tl.cdiv(vocabulary, BLOCK)
    kind = x_ptr.dtype.element_ty
    if target == -100:
        tl.store(loss_ptr + row, 0.0)
        if WANTS_GRADIENT:
            for block in range(blocks):
                column = block * BLOCK + tl.arange(0, BLOCK)
                tl.store(x_ptr + column, tl.zeros((BLOCK,), kind), mask=column < vocabulary)
    else:
        in_vocabulary = (target >= 0) & (target < vocabulary)
        at_target = shaped(
            tl.load(x_ptr + target, mask=in_vocabulary, other=0.0), scale, softcap, HAS_SOFTCAP
        )
        largest, rest, plain_sum, _ = _statistics(
            x_ptr, vocabulary, scale, softcap, HAS_SOFTCAP, HAS_SMOOTHING, False, BLOCK
        )
        weight = tl.load(weight_ptr + row).to(tl.float32) if HAS_WEIGHTS else 1.0
        # NaN, so that a target outside the vocabulary is noticed.
        weight = tl.where(in_vocabulary, weight, float("nan"))
        loss = (1.0 - smoothing) * (rest - (at_target - largest))
        if HAS_SMOOTHING:
            loss += smoothing * (rest - (plain_sum / vocabulary - largest))
        lse = largest + rest
        tl.store(loss_ptr + row, weight * (loss + z_loss * lse * lse))
        if WANTS_GRADIENT:
            of_all = weight * (1.0 + 2.0 * z_loss * lse)
            of_target = weight * (1.0 - smoothing)
            of_each = weight * smoothing / vocabulary
            for back in range(blocks):
                column = (blocks - 1 - back) * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(
                    x_ptr + column,
                    mask=column < vocabulary,
                    other=0.0,
                    eviction_policy="evict_first",
                )
                z = shaped(x, scale, softcap, HAS_SOFTCAP)
                gradient = of_all * tl.exp(z - largest - rest) - tl.where(
                    column == target, of_target, 0.0
                )
                if HAS_SMOOTHING:
                    gradient -= of_each
                gradient *= scale
                if HAS_SOFTCAP:
                    gradient *= 1.0 - (z / softcap) * (z / softcap)
                tl.store(
                    x_ptr + column,
                    gradient.to(kind),
                    mask=column < vocabulary,
                    eviction_policy="evict_first",
                )


@triton.jit
def _log_probability_kernel(
    # read
    x_ptr,
    target_ptr,
    # written
    log_p_ptr,
    lse_ptr,
    entropy_ptr,
    # size and the stride of rows
    vocabulary,
    stride,
    # numbers of the formula
    scale,
    softcap,
    # options
    HAS_SOFTCAP: tl.constexpr,
    WANTS_ENTROPY: tl.constexpr,
    # columns of a block
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    target = tl.load(target_ptr + row)
    largest, rest, _, mean = _statistics(
        x_ptr, vocabulary, scale, softcap, HAS_SOFTCAP, False, WANTS_ENTROPY, BLOCK
    )
    in_vocabulary = (target >= 0) & (target < vocabulary)
    at_target = shaped(
        tl.load(x_ptr + target, mask=in_vocabulary, other=0.0), scale, softcap, HAS_SOFTCAP
    )
    # NaN, so that a target outside the vocabulary is noticed.
    log_p = tl.where(in_vocabulary, (at_target - largest) - rest, float("nan"))
    tl.store(log_p_ptr + row, tl.where(target == -100, 0.0, log_p))
    tl.store(lse_ptr + row, largest + rest)
    if WANTS_ENTROPY:
        tl.store(entropy_ptr + row, rest - mean)


@triton.jit
def _log_probability_gradient_kernel(
    # logits, overwritten by their gradient
    x_ptr,
    # read
    target_ptr,
    d_log_p_ptr,
    d_entropy_ptr,
    lse_ptr,
    entropy_ptr,
    # size and the stride of rows
    vocabulary,
    stride,
    # numbers of the formula
    scale,
    softcap,
    # options
    HAS_SOFTCAP: tl.constexpr,
    WANTS_ENTROPY: tl.constexpr,
    # columns of a block
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_ptr += row * stride
    target = tl.load(target_ptr + row)
    lse = tl.load(lse_ptr + row)
    of_target = tl.where(target == -100, 0.0, tl.load(d_log_p_ptr + row))
    x = tl.load(x_ptr + column, mask=column < vocabulary, other=0.0)
    z = shaped(x, scale, softcap, HAS_SOFTCAP)
    p = tl.exp(z - lse)
    gradient = tl.where(column == target, of_target, 0.0) - of_target * p
    if WANTS_ENTROPY:
        gradient -= tl.load(d_entropy_ptr + row) * p * (z - lse + tl.load(entropy_ptr + row))
    gradient *= scale
    if HAS_SOFTCAP:
        gradient *= 1.0 - (z / softcap) * (z / softcap)
    tl.store(x_ptr + column, gradient.to(x_ptr.dtype.element_ty), mask=column < vocabulary)


def loss_and_gradient_(
    x: Tensor, targets: Tensor, weights: Tensor | None, options: LossOptions, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each row, and overwrite ``x`` with its gradient up to a factor a row.

    Args:
        x: raw logits ``[rows, V]``. Afterwards row t of their gradient is ``factors[t] · x[t]``.
        targets: int64 ``[rows]``; the loss and the gradient of −100 are zero.
        weights: w, ``[rows]`` or None.
        options: numbers of the formula.
        wants_gradient: if False, ``x`` is left as it is.

    Returns:
        Losses and factors, fp32 ``[rows]`` each.
    """
    if not runs_triton(x):
        losses = loss_and_gradient_reference_(x, targets, weights, options, wants_gradient)
        return losses, torch.ones_like(losses)
    rows, vocabulary = x.shape
    losses, factors = x.new_empty((2, rows), dtype=torch.float32)
    tile = tile_of(vocabulary)
    # Not in fp16, whose range the unnormalised numerators, up to e^40, exceed.
    if wants_gradient and not options.label_smoothing and x.dtype != torch.float16:
        _loss_and_numerators_kernel[(rows,)](
            x,
            targets,
            weights,
            losses,
            factors,
            vocabulary,
            x.stride(0),
            options.scale,
            options.softcap or 1.0,
            options.z_loss,
            options.softcap is not None,
            weights is not None,
            tile.block,
            next_power_of_2(triton.cdiv(vocabulary, tile.block)),
            num_warps=tile.warps,
        )
    else:
        _loss_and_gradient_kernel[(rows,)](
            x,
            targets,
            weights,
            losses,
            vocabulary,
            x.stride(0),
            options.scale,
            options.softcap or 1.0,
            options.label_smoothing,
            options.z_loss,
            options.softcap is not None,
            weights is not None,
            options.label_smoothing != 0,
            wants_gradient,
            tile.block,
            num_warps=tile.warps,
        )
        factors.fill_(1.0)
    return losses, factors


def target_log_probabilities(
    x: Tensor, targets: Tensor, options: LossOptions, wants_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return statistics of each row of raw logits ``x`` ``[rows, V]``, all fp32 ``[rows]``.

    They are the target's log-probability (0 for −100), lse, and entropy (0 if not wanted).
    """
    if not runs_triton(x):
        return target_log_probabilities_reference(x, targets, options, wants_entropy)
    rows, vocabulary = x.shape
    log_p, lse, entropy = x.new_zeros((3, rows), dtype=torch.float32)
    tile = tile_of(vocabulary)
    _log_probability_kernel[(rows,)](
        x,
        targets,
        log_p,
        lse,
        entropy,
        vocabulary,
        x.stride(0),
        options.scale,
        options.softcap or 1.0,
        options.softcap is not None,
        wants_entropy,
        tile.block,
        num_warps=tile.warps,
    )
    return log_p, lse, entropy


def log_probability_gradient_(
    x: Tensor,
    targets: Tensor,
    d_log_p: Tensor,
    d_entropy: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    options: LossOptions,
) -> None:
    """Overwrite the raw logits ``x`` ``[rows, V]`` with their gradient.

    Args:
        x: ``[rows, V]``.
        targets: int64 ``[rows]``.
        d_log_p: upstream gradient of the log-probability, ``[rows]``.
        d_entropy: upstream gradient of the entropy, ``[rows]``, or None.
        lse: from ``target_log_probabilities``.
        entropy: from ``target_log_probabilities``.
        options: numbers of the formula.
    """
    if not runs_triton(x):
        log_probability_gradient_reference_(x, targets, d_log_p, d_entropy, lse, entropy, options)
        return
    rows, vocabulary = x.shape
    block = min(2048, next_power_of_2(vocabulary))
    _log_probability_gradient_kernel[(rows, triton.cdiv(vocabulary, block))](
        x,
        targets,
        d_log_p,
        d_entropy,
        lse,
        entropy,
        vocabulary,
        x.stride(0),
        options.scale,
        options.softcap or 1.0,
        options.softcap is not None,
        d_entropy is not None,
        block,
        num_warps=4,
    )


def shaped_reference(x: Tensor, options: LossOptions) -> Tensor:
    """Return logits z of raw logits ``x``, in fp32 or wider."""
    z = x.to(torch.promote_types(x.dtype, torch.float32)) * options.scale
    return z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)


def places_of(targets: Tensor, vocabulary: int) -> Tensor:
    """Return the column of each target, ``[rows, 1]``; 0 for ignored ones.

    Raises:
        IndexError: a target is outside the vocabulary. Checked on the CPU only, since a check
            on a card would make the host wait.
    """
    at = targets.masked_fill(targets == IGNORE_INDEX, 0)
    if (
        at.device.type == "cpu"
        and at.numel()
        and not 0 <= int(at.min()) <= int(at.max()) < vocabulary
    ):
        outside = int(at[(at < 0) | (at >= vocabulary)][0])
        raise IndexError(
            f"targets hold {outside}: outside the vocabulary of {vocabulary}; use {IGNORE_INDEX} "
            "for targets to ignore"
        )
    return at[:, None]


def chain_(d_z: Tensor, z: Tensor, x: Tensor, options: LossOptions) -> None:
    """Write the gradient of raw logits into ``x``, given that of logits, ``d_z``, by the chain rule.

    ``d_z`` is overwritten.
    """
    d_z *= options.scale
    if options.softcap is not None:
        d_z *= 1 - (z / options.softcap).square()
    x.copy_(d_z)


def loss_and_gradient_reference_(
    x: Tensor, targets: Tensor, weights: Tensor | None, options: LossOptions, wants_gradient: bool
) -> Tensor:
    """Compute the losses of ``loss_and_gradient_`` in plain torch.

    ``x`` becomes the gradient itself, without factors.
    """
    z = shaped_reference(x, options)
    counted = targets != IGNORE_INDEX
    at_target = places_of(targets, x.shape[1])
    row_weights = counted.to(z.dtype) if weights is None else counted * weights.to(z.dtype)
    smoothing = options.label_smoothing
    # Not z − logsumexp(z), which cancels for a likely target.
    log_p = torch.log_softmax(z, 1)
    losses = (smoothing - 1) * log_p.gather(1, at_target).squeeze(1)
    lse = torch.logsumexp(z, 1) if options.z_loss else torch.zeros_like(losses)
    # Skipped without smoothing: a banned token's log-probability is infinite, and 0 · ∞ is NaN.
    spread = smoothing * log_p.mean(1) if smoothing else 0.0
    losses = losses - spread + options.z_loss * lse.square()
    if wants_gradient:
        d_z = log_p.exp_()
        d_z *= (1 + 2 * options.z_loss * lse)[:, None]
        d_z.scatter_add_(1, at_target, torch.full_like(at_target, smoothing - 1, dtype=z.dtype))
        d_z -= smoothing / x.shape[1]
        d_z *= row_weights[:, None]
        chain_(d_z, z, x, options)
    return losses * row_weights


def target_log_probabilities_reference(
    x: Tensor, targets: Tensor, options: LossOptions, wants_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``target_log_probabilities`` in plain torch."""
    z = shaped_reference(x, options)
    log_p = torch.log_softmax(z, 1)
    at_target = (
        log_p.gather(1, places_of(targets, x.shape[1]))
        .squeeze(1)
        .masked_fill(targets == IGNORE_INDEX, 0.0)
    )
    entropy = (
        -(log_p.exp() * log_p.clamp(min=torch.finfo(z.dtype).min)).sum(1)
        if wants_entropy
        else torch.zeros_like(at_target)
    )
    return at_target, torch.logsumexp(z, 1), entropy


def log_probability_gradient_reference_(
    x: Tensor,
    targets: Tensor,
    d_log_p: Tensor,
    d_entropy: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    options: LossOptions,
) -> None:
    """Compute ``log_probability_gradient_`` in plain torch."""
    z = shaped_reference(x, options)
    log_p = torch.log_softmax(z, 1)
    p = log_p.exp()
    of_target = d_log_p.to(z.dtype).masked_fill(targets == IGNORE_INDEX, 0.0)[:, None]
    d_z = -of_target * p
    d_z.scatter_add_(1, places_of(targets, x.shape[1]), of_target)
    if d_entropy is not None:
        d_z -= d_entropy.to(z.dtype)[:, None] * p * (log_p + entropy[:, None])
    chain_(d_z, z, x, options)
