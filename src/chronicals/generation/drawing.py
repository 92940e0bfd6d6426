"""Draws of the next token from rows of logits, as transformers' processors define them.

In this order: repetition penalty, temperature, top-k, top-p, min-p. Each row has its own settings
and its own random numbers, which depend on a key and the token's position only, not on the other
rows. They are those of SplitMix64 (Steele et al., 2014, doi 10.1145/2660193.2660195): number n of
the stream with state ``key`` is ``mix(key + (n + 1) · golden)``.

Shapes: N rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chronicals.generation.sampling import ALL_TOKENS, Sampling

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Step of SplitMix64, as a signed number; 2⁶⁴ divided by the golden ratio."""

MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
"""Shifts and factors of SplitMix64's output function (Stafford's variant 13)."""

MANTISSA_BITS = 53
"""Bits of a random number between 0 and 1 in fp64."""


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right as if it had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Tensor) -> Tensor:
    """Return SplitMix64's output function of int64; products wrap around."""
    for bits, factor in MIXING:
        x = (x ^ _shifted(x, bits)) * factor
    return x


def stream_keys(seeds: Tensor, numbers: Tensor, answers: Tensor) -> Tensor:
    """Return the key of each answer's random numbers, int64 ``[N]``.

    Args:
        seeds: seeds of the requests.
        numbers: numbers of the requests.
        answers: number of each answer within its request.
    """
    key = mixed(seeds + GOLDEN)
    for number in (numbers, answers):
        key = mixed((key ^ number) + GOLDEN)
    return key


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return a number from 0 to below 1 for each key and position, in fp64."""
    bits = mixed(keys + (positions + 1) * GOLDEN)
    return _shifted(bits, 64 - MANTISSA_BITS).double() * 2.0**-MANTISSA_BITS


@dataclass(frozen=True)
class Choices:
    """Settings of N rows.

    Attributes:
        keys: int64, keys of the random numbers.
        temperature: 0 for rows that take the likeliest token.
        top_k: number of tokens to draw from, V or more for all.
        below: 1 - top_p, the probability that is left out.
        min_p: least probability relative to the likeliest token's.
        penalty: repetition penalty, 1 for none.
        draws: whether any row draws.
        narrows: whether any row has a top-k or a top-p.
        penalises: whether any row has a repetition penalty.
    """

    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    below: Tensor
    min_p: Tensor
    penalty: Tensor
    draws: bool
    narrows: bool
    penalises: bool

    @classmethod
    def of(
        cls, rows: Sequence[Sampling], keys: Sequence[int], device: torch.device | str = "cpu"
    ) -> Choices:
        """Build the tensors of rows with these settings and keys."""

        def numbers(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        every = torch.iinfo(torch.int64).max
        top_k = [every if row.top_k in (None, ALL_TOKENS) else row.top_k for row in rows]
        below = [0.0 if row.top_p is None else 1 - row.top_p for row in rows]
        penalty = [row.repetition_penalty or 1.0 for row in rows]
        return cls(
            torch.tensor(keys, dtype=torch.int64, device=device),
            numbers([row.temperature for row in rows]),
            torch.tensor(top_k, dtype=torch.int64, device=device),
            numbers(below),
            numbers([row.min_p or 0.0 for row in rows]),
            numbers(penalty),
            draws=any(row.temperature > 0 for row in rows),
            narrows=any(k != every for k in top_k) or any(below),
            penalises=any(value != 1 for value in penalty),
        )

    def rows(self, start: int, end: int) -> Choices:
        """Return the settings of some rows."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        kept: dict[str, Any] = {
            name: x[start:end] for name, x in named.items() if isinstance(x, Tensor)
        }
        return replace(self, **kept)


class Drawn(NamedTuple):
    """Tokens drawn from N rows of logits, and how likely they were.

    Attributes:
        tokens: int64.
        log_probabilities: of the tokens under the distributions that they were drawn from; 0 for
            the likeliest token taken.
        full_log_probabilities: of the tokens under the softmax of the logits as they are.
        entropies: of that softmax, in nats.
        finite: whether the logits were numbers; some may be minus infinity.
    """

    tokens: Tensor
    log_probabilities: Tensor
    full_log_probabilities: Tensor
    entropies: Tensor
    finite: Tensor


def draw(logits: Tensor, choices: Choices, positions: Tensor, seen: Tensor | None) -> Drawn:
    """Draw a token from each row of logits ``[N, V]``.

    Args:
        logits: in any dtype; the rest is computed in at least fp32.
        choices: settings of the rows.
        positions: int64 ``[N]``, positions of the tokens to draw.
        seen: bool ``[N, V]``, tokens that the text has already; only with repetition penalties.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    full = logits.log_softmax(-1)
    entropies = torch.special.entr(full.exp()).sum(-1)
    scores = logits
    if choices.penalises:
        assert seen is not None
        scores = penalised(scores, seen, choices.penalty)
    tokens = scores.argmax(-1)
    log_probabilities = torch.zeros_like(entropies)
    if choices.draws:
        drawing = choices.temperature > 0
        log_shares = warped(scores, choices).log_softmax(-1)
        sampled = inverse_cumulative(log_shares.exp(), uniform(choices.keys, positions))
        tokens = torch.where(drawing, sampled, tokens)
        chosen = log_shares.gather(-1, tokens[:, None])[:, 0]
        log_probabilities = torch.where(drawing, chosen, 0.0)
    full_chosen = full.gather(-1, tokens[:, None])[:, 0]
    return Drawn(tokens, log_probabilities, full_chosen, entropies, logits.amax(-1).isfinite())


def penalised(scores: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Return scores in which ``seen`` tokens are less likely; by ``RepetitionPenalty``."""
    factor = penalty[:, None].to(scores.dtype)
    return torch.where(seen, torch.where(scores < 0, scores * factor, scores / factor), scores)


def warped(scores: Tensor, choices: Choices) -> Tensor:
    """Return the logits of the distributions to draw from, minus infinity for what is left out."""
    temperature = torch.where(choices.temperature > 0, choices.temperature, 1.0)
    scores = scores / temperature[:, None].to(scores.dtype)
    if choices.narrows:
        ordered, order = scores.sort(-1)
        size = scores.shape[-1]
        kth = size - choices.top_k.clamp(max=size)
        least = ordered.gather(-1, kth[:, None])
        ordered = ordered.masked_fill(ordered < least, float("-inf"))
        removed = ordered.softmax(-1).cumsum(-1) <= choices.below[:, None]
        removed[:, -1] = False
        removed = removed | (ordered == float("-inf"))
        scores = scores.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
    shares = scores.softmax(-1)
    rare = shares < choices.min_p[:, None] * shares.amax(-1, keepdim=True)
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
