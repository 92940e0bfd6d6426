"""Draw of a token from each row of logits, and how likely it was.

    y = scores / temperature                        minus infinity where exp(y - max y) < min_p
    the token t with  Σ_{j < t} softmax(y)_j  <=  u  <  Σ_{j <= t} softmax(y)_j

u is a number from 0 to below 1, which depends on a row's key and position only: number n of the
stream of SplitMix64 with state ``key`` (Steele et al., 2014, doi 10.1145/2660193.2660195) is
``mix(key + (n + 1) · golden)``. Rows of temperature 0 take the likeliest token. Scores are the
logits after penalties, with minus infinity for what is left out.

Shapes: N rows, V tokens of the vocabulary, C chunks of a row.

Plain torch reads and writes the logits some twenty times, four of them in fp64. Here a first kernel
takes maxima and sums of the chunks, a second one the weights of the chunks relative to the row's
maximum, a third one finds the chunk that u falls in, and the token in it. Bytes that must move: one
read of logits, of scores where they are others, and with min_p another one of the scores. What a row
gets does not depend on the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from chronicals.kernels.launch import next_power_of_2, operator, runs_triton, tl, triton

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Step of SplitMix64, as a signed number; 2⁶⁴ divided by the golden ratio."""

MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
"""Shifts and factors of SplitMix64's output function (Stafford's variant 13)."""

MANTISSA_BITS = 53
"""Bits of a random number between 0 and 1 in fp64."""

CHUNK = 2048
"""Tokens of a program: 75 programs a row of 152,000 tokens fill a card with two rows; the last
kernel adds up one chunk in fp64.
"""


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right as if it had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Tensor) -> Tensor:
    """Return SplitMix64's output function of int64; products wrap around."""
    for bits, factor in MIXING:
        x = (x ^ _shifted(x, bits)) * factor
    return x


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return a number from 0 to below 1 for each key and position, in fp64."""
    bits = mixed(keys + (positions + 1) * GOLDEN)
    return _shifted(bits, 64 - MANTISSA_BITS).double() * 2.0**-MANTISSA_BITS


class Drawn(NamedTuple):
    """Tokens drawn from N rows of logits, and how likely they were.

    Attributes:
        tokens: int64 ``[N]``.
        log_probabilities: of the tokens under the distribution that they were drawn from; 0 where
            the likeliest token was taken.
        full_log_probabilities: of the tokens under the softmax of the logits as they are.
        entropies: of the softmax of the logits as they are, in nats.
        finite: bool ``[N]``, whether the largest logit is a number.
    """

    tokens: Tensor
    log_probabilities: Tensor
    full_log_probabilities: Tensor
    entropies: Tensor
    finite: Tensor


@triton.jit
def _scores_of(scores_ptr, temperature_ptr, row, place, exists):
    """Return the scores of tokens, divided by the row's temperature."""
    temperature = tl.load(temperature_ptr + row)
    score = tl.load(scores_ptr + place, mask=exists, other=float("-inf")).to(tl.float32)
    return score / tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def _weights_of(scores_ptr, temperature_ptr, min_p_ptr, row, place, exists, top):
    """Return ``exp(y - top)`` of tokens, and zero for those below the row's ``min_p``."""
    y = _scores_of(scores_ptr, temperature_ptr, row, place, exists)
    weight = tl.exp(y - top)
    return tl.where(weight >= tl.load(min_p_ptr + row), weight, 0.0)


@triton.jit
def _chunk_sums_kernel(
    logits_ptr,
    scores_ptr,
    temperature_ptr,
    # written, [N, C]: of the logits their maximum, Σ e^(x - max) and Σ (x - max) e^(x - max); of
    # y its maximum, and Σ e^(y - max) or, of a row that takes the likeliest token, that token
    highest_ptr,
    sum_ptr,
    moment_ptr,
    top_ptr,
    weight_ptr,
    best_ptr,
    vocabulary,
    logits_row,
    scores_row,
    CHUNK: tl.constexpr,
    SAME: tl.constexpr,  # scores are the logits
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = token < vocabulary
    x = tl.load(logits_ptr + row * logits_row + token, mask=exists, other=float("-inf"))
    x = x.to(tl.float32)
    highest = tl.max(x, axis=0)
    # a chunk of nothing but minus infinity has no weight, and no difference of infinities
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp(x - shift)
    moment = tl.where(weight > 0.0, (x - shift) * weight, 0.0)
    at = row * tl.num_programs(1) + chunk
    tl.store(highest_ptr + at, highest)
    tl.store(sum_ptr + at, tl.sum(weight, axis=0))
    tl.store(moment_ptr + at, tl.sum(moment, axis=0))
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        y = _scores_of(scores_ptr, temperature_ptr, row, row * scores_row + token, exists)
        top, best = tl.max(y, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(top_ptr + at, top)
        tl.store(best_ptr + at, chunk * CHUNK + best)
    elif SAME and temperature == 1.0:
        tl.store(top_ptr + at, highest)
        tl.store(weight_ptr + at, tl.sum(weight, axis=0))
    else:
        y = _scores_of(scores_ptr, temperature_ptr, row, row * scores_row + token, exists)
        top = tl.max(y, axis=0)
        tl.store(top_ptr + at, top)
        shift = tl.where(top == float("-inf"), 0.0, top)
        tl.store(weight_ptr + at, tl.sum(tl.exp(y - shift), axis=0))


@triton.jit
def _chunk_weights_kernel(
    scores_ptr,
    temperature_ptr,
    min_p_ptr,
    top_ptr,
    # read and written, [N, C]: Σ e^(y - max of the chunk), then Σ e^(y - max of the row) of the
    # tokens that are kept
    weight_ptr,
    vocabulary,
    scores_row,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    count = tl.num_programs(1)
    others = tl.arange(0, CHUNKS)
    tops = tl.load(top_ptr + row * count + others, mask=others < count, other=float("-inf"))
    top = tl.max(tops, axis=0)
    at = row * count + chunk
    if tl.load(min_p_ptr + row) > 0.0:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        place = row * scores_row + token
        exists = token < vocabulary
        weight = _weights_of(scores_ptr, temperature_ptr, min_p_ptr, row, place, exists, top)
        tl.store(weight_ptr + at, tl.sum(weight, axis=0))
    else:
        of_chunk = tl.load(weight_ptr + at)
        kept = tl.exp(tl.load(top_ptr + at) - top)
        tl.store(weight_ptr + at, tl.where(of_chunk > 0.0, of_chunk * kept, 0.0))


@triton.jit
def _uniform(keys_ptr, positions_ptr, row):
    """Return ``uniform`` of a row, fp64."""
    position = tl.load(positions_ptr + row).to(tl.uint64)
    x = tl.load(keys_ptr + row).to(tl.uint64) + (position + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2⁻⁵³


@triton.jit
def _pick_kernel(
    logits_ptr,
    scores_ptr,
    temperature_ptr,
    min_p_ptr,
    keys_ptr,
    positions_ptr,
    # read, [N, C]
    highest_ptr,
    sum_ptr,
    moment_ptr,
    top_ptr,
    best_ptr,
    weight_ptr,
    # written, [N]
    tokens_ptr,
    chosen_ptr,
    full_ptr,
    entropy_ptr,
    finite_ptr,
    vocabulary,
    logits_row,
    scores_row,
    count,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < count
    at = row * count + chunk
    highest = tl.load(highest_ptr + at, mask=is_chunk, other=float("-inf"))
    top_of = tl.load(top_ptr + at, mask=is_chunk, other=float("-inf"))

    # the softmax of the logits as they are
    most = tl.max(highest, axis=0)
    kept = tl.exp(highest - most)
    sums = tl.load(sum_ptr + at, mask=is_chunk, other=0.0)
    moments = tl.load(moment_ptr + at, mask=is_chunk, other=0.0)
    total = tl.sum(kept * sums, axis=0)
    apart = tl.where(kept > 0.0, highest - most, 0.0)
    moment = tl.sum(kept * (moments + apart * sums), axis=0)

    # the chunk that u falls in
    weights = tl.load(weight_ptr + at, mask=is_chunk, other=0.0).to(tl.float64)
    mass = tl.sum(weights, axis=0)
    bounds = tl.cumsum(weights, axis=0)
    wanted = _uniform(keys_ptr, positions_ptr, row) * mass
    last = tl.max(tl.where(weights > 0.0, chunk, 0), axis=0)
    found = tl.minimum(tl.sum((bounds <= wanted).to(tl.int32), axis=0), last)
    within = tl.sum(tl.where(chunk == found, wanted - (bounds - weights), 0.0), axis=0)
    of_chunk = tl.sum(tl.where(chunk == found, weights, 0.0), axis=0)

    # the token of that chunk; its sum in fp64 differs from the chunk's weight by rounding
    top = tl.max(top_of, axis=0)
    token = found * CHUNK + tl.arange(0, CHUNK)
    place = row * scores_row + token
    exists = token < vocabulary
    weight = _weights_of(scores_ptr, temperature_ptr, min_p_ptr, row, place, exists, top)
    weight = weight.to(tl.float64)
    sums_within = tl.cumsum(weight, axis=0)
    share = within / tl.where(of_chunk > 0.0, of_chunk, 1.0)
    reached = share * tl.sum(weight, axis=0)
    before = tl.sum((sums_within <= reached).to(tl.int32), axis=0)
    last = tl.max(tl.where(weight > 0.0, tl.arange(0, CHUNK), 0), axis=0)
    drawn = found * CHUNK + tl.minimum(before, last)

    best = tl.load(best_ptr + at, mask=is_chunk, other=0)
    likeliest = tl.min(tl.where(is_chunk & (top_of == top), best, vocabulary), axis=0)
    likeliest = tl.minimum(likeliest, vocabulary - 1)  # of a row that is not a number
    draws = tl.load(temperature_ptr + row) > 0.0
    result = tl.where(draws, drawn, likeliest)
    y = _scores_of(scores_ptr, temperature_ptr, row, row * scores_row + result, True)
    chosen = y - top - tl.log(mass.to(tl.float32))
    x = tl.load(logits_ptr + row * logits_row + result).to(tl.float32)
    tl.store(tokens_ptr + row, result)
    tl.store(chosen_ptr + row, tl.where(draws, chosen, 0.0))
    tl.store(full_ptr + row, x - most - tl.log(total))
    tl.store(entropy_ptr + row, tl.log(total) - moment / total)
    # a sum of weights is at least 1 and at most V where the maximum is a number
    tl.store(finite_ptr + row, (total >= 1.0) & (most < float("inf")))


@operator("chronicals::draw_tokens")
def _draw_tokens(
    logits: Tensor,
    scores: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    keys: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels."""
    results = _results(logits, scores, temperature, min_p, keys, positions)
    rows, vocabulary = logits.shape
    if not rows:
        return results
    chunks = triton.cdiv(vocabulary, CHUNK)
    parts = logits.new_empty((5, rows, chunks), dtype=torch.float32)
    highest, sums, moments, top, weights = parts
    best = logits.new_empty((rows, chunks), dtype=torch.int32)
    size = next_power_of_2(chunks)
    _chunk_sums_kernel[rows, chunks](
        logits,
        scores,
        temperature,
        highest,
        sums,
        moments,
        top,
        weights,
        best,
        vocabulary,
        logits.stride(0),
        scores.stride(0),
        CHUNK,
        scores.data_ptr() == logits.data_ptr(),
    )
    _chunk_weights_kernel[rows, chunks](
        scores, temperature, min_p, top, weights, vocabulary, scores.stride(0), CHUNK, size
    )
    _pick_kernel[(rows,)](
        logits,
        scores,
        temperature,
        min_p,
        keys,
        positions,
        *(highest, sums, moments, top, best, weights),
        *results,
        vocabulary,
        logits.stride(0),
        scores.stride(0),
        chunks,
        CHUNK,
        size,
    )
    return results


@torch.library.register_fake(_draw_tokens)
def _results(
    logits: Tensor,
    scores: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    keys: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate the results."""
    rows = len(logits)
    chosen, full, entropies = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    finite = logits.new_empty(rows, dtype=torch.bool)
    return positions.new_empty(rows), chosen, full, entropies, finite


def draw_tokens(
    logits: Tensor,
    scores: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    keys: Tensor,
    positions: Tensor,
) -> Drawn:
    """Draw a token from each row; without a gradient. The host waits for nothing.

    Kernels take fp32 and 16 bit on a card; other dtypes and devices take the reference.

    Args:
        logits: ``[N, V]``.
        scores: ``[N, V]``, the logits after penalties, minus infinity for what is left out; the
            same tensor as ``logits`` where nothing changes them.
        temperature: fp32 ``[N]``, 0 for rows that take the likeliest token.
        min_p: fp32 ``[N]``, least probability relative to the likeliest token's.
        keys: int64 ``[N]``, keys of the random numbers.
        positions: int64 ``[N]``, positions of the tokens to draw.
    """
    dense = logits.stride(1) == 1 and scores.stride(1) == 1
    if dense and runs_triton(logits, scores):
        return Drawn(*_draw_tokens(logits, scores, temperature, min_p, keys, positions))
    return draw_tokens_reference(logits, scores, temperature, min_p, keys, positions)


def draw_tokens_reference(
    logits: Tensor,
    scores: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    keys: Tensor,
    positions: Tensor,
) -> Drawn:
    """Compute ``draw_tokens`` in plain torch, in at least fp32."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide)
    full = logits.log_softmax(-1)
    entropies = torch.special.entr(full.exp()).sum(-1)
    log_shares = warped(scores.to(wide), temperature, min_p).log_softmax(-1)
    sampled = inverse_cumulative(log_shares.exp(), uniform(keys, positions))
    draws = temperature > 0
    tokens = torch.where(draws, sampled, scores.argmax(-1))
    chosen = torch.where(draws, log_shares.gather(-1, tokens[:, None])[:, 0], 0.0)
    full_chosen = full.gather(-1, tokens[:, None])[:, 0]
    return Drawn(tokens, chosen, full_chosen, entropies, logits.amax(-1).isfinite())


def warped(scores: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Return the logits of the distributions to draw from, minus infinity for what is left out."""
    scores = scores / torch.where(temperature > 0, temperature, 1.0)[:, None].to(scores.dtype)
    shares = scores.softmax(-1)
    rare = shares < min_p[:, None] * shares.amax(-1, keepdim=True)
    return scores.masked_fill(rare, float("-inf"))


def inverse_cumulative(shares: Tensor, numbers: Tensor) -> Tensor:
    """Return the token of each row whose interval of the cumulative distribution has the number.

    Args:
        shares: probabilities ``[N, V]``.
        numbers: fp64 ``[N]``, from 0 to below 1.
    """
    # in fp64, in which a token among 200,000 keeps its probability
    bounds = shares.double().cumsum(-1)
    return torch.searchsorted(bounds, numbers[:, None] * bounds[:, -1:], right=True)[:, 0].clamp(
        max=shares.shape[-1] - 1
    )
