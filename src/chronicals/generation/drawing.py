"""Draws of the next token from rows of logits, as transformers' processors define them.

In this order: repetition penalty, temperature, top-k, top-p, min-p. Each row has its own settings
and its own random numbers, which depend on a key and the token's position only, not on the other
rows; ``kernels/token_draws.py`` draws them.

Shapes: N rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from chronicals.generation.sampling import ALL_TOKENS, Sampling
from chronicals.kernels.host_memory import sent
from chronicals.kernels.token_draws import GOLDEN, Drawn, draw_tokens, mixed


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
        narrows: whether any row has a top-k or a top-p.
        penalises: whether any row has a repetition penalty.
    """

    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    below: Tensor
    min_p: Tensor
    penalty: Tensor
    narrows: bool
    penalises: bool

    @classmethod
    def of(
        cls, rows: Sequence[Sampling], keys: Sequence[int], device: torch.device | str = "cpu"
    ) -> Choices:
        """Build the tensors of rows with these settings and keys."""

        def numbers(values: Sequence[float]) -> Tensor:
            return sent(values, torch.float32, torch.device(device))

        every = torch.iinfo(torch.int64).max
        top_k = [every if row.top_k in (None, ALL_TOKENS) else row.top_k for row in rows]
        below = [0.0 if row.top_p is None else 1 - row.top_p for row in rows]
        penalty = [row.repetition_penalty or 1.0 for row in rows]
        return cls(
            sent(keys, torch.int64, torch.device(device)),
            numbers([row.temperature for row in rows]),
            sent(top_k, torch.int64, torch.device(device)),
            numbers(below),
            numbers([row.min_p or 0.0 for row in rows]),
            numbers(penalty),
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


def draw(logits: Tensor, choices: Choices, positions: Tensor, seen: Tensor | None) -> Drawn:
    """Draw a token from each row of logits ``[N, V]``.

    Args:
        logits: in any dtype; the rest is computed in at least fp32.
        choices: settings of the rows.
        positions: int64 ``[N]``, positions of the tokens to draw.
        seen: bool ``[N, V]``, tokens that the text has already; only with repetition penalties.
    """
    scores = logits
    if choices.penalises:
        assert seen is not None
        scores = penalised(scores, seen, choices.penalty)
    if choices.narrows:
        scores = narrowed(scores, choices)
    return draw_tokens(logits, scores, choices.temperature, choices.min_p, choices.keys, positions)


def penalised(scores: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Return scores in which ``seen`` tokens are less likely; by ``RepetitionPenalty``."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    factor = penalty[:, None].to(scores.dtype)
    return torch.where(seen, torch.where(scores < 0, scores * factor, scores / factor), scores)


def narrowed(scores: Tensor, choices: Choices) -> Tensor:
    """Return scores with minus infinity for what top-k and then top-p leave out."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    temperature = torch.where(choices.temperature > 0, choices.temperature, 1.0)
    ordered, order = (scores / temperature[:, None].to(scores.dtype)).sort(-1)
    kth = scores.shape[-1] - choices.top_k.clamp(max=scores.shape[-1])
    least = ordered.gather(-1, kth[:, None])
    ordered = ordered.masked_fill(ordered < least, float("-inf"))
    removed = ordered.softmax(-1).cumsum(-1) <= choices.below[:, None]
    removed[:, -1] = False
    removed = removed | (ordered == float("-inf"))
    return scores.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
