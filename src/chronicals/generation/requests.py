"""Requests to the engine, and their answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from chronicals.generation.sampling import Sampling
from chronicals.log_once import log_once
from chronicals.models import last_position, positions_below, within_adapters

logger = logging.getLogger(__name__)

LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, of which a token has at least one."""

TOKENS_AROUND = 8
"""Further tokens that are decoded before a stop string, such as half a character."""


@dataclass(frozen=True)
class Ending:
    """Tokens and strings that end an answer.

    Attributes:
        tokenizer: tokenizer of transformers; None without strings.
        tokens: ids of stop tokens, special or not.
        strings: stop strings.
    """

    tokenizer: Any = None
    tokens: Sequence[int] = ()
    strings: Sequence[str] = ()

    def text(self, produced: list[int]) -> str:
        """Return the text of token ids up to the first stop token or stop string, stripped."""
        stops = (place for place, token in enumerate(produced) if token in self.tokens)
        last = next(stops, len(produced))
        text = self.tokenizer.decode(produced[:last], skip_special_tokens=True)
        end = min(
            (text.find(string) for string in self.strings if string in text), default=len(text)
        )
        return text[:end].strip()

    def has_string(self, produced: list[int]) -> bool:
        """Return whether the last tokens contain a stop string, perhaps one of special tokens."""
        if not self.strings:
            return False
        count = LONGEST_CHARACTER * max(map(len, self.strings)) + TOKENS_AROUND
        text = self.tokenizer.decode(produced[-count:], skip_special_tokens=False)
        return any(string in text for string in self.strings)

    def is_reached(self, produced: list[int]) -> bool:
        """Return whether the last token ends the answer."""
        return produced[-1] in self.tokens or self.has_string(produced)


@dataclass(frozen=True)
class Request:
    """A prompt, and how many answers it gets.

    Attributes:
        prompt: token ids.
        max_new_tokens: most tokens of an answer. There are fewer if the model has no further
            positions.
        sampling: how tokens are chosen.
        answers: number of answers; the prompt is computed and stored once.
        number: identifies the request's random numbers. Answers depend on the seed, on this number
            and on the place of the answer, not on what is generated beside them.
        ending: what ends an answer.
        notes_experts: note the experts that the tokens of the answers go to, in a mixture.

    Raises:
        ValueError: a value is out of its range.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    answers: int = 1
    number: int = 0
    ending: Ending = field(default_factory=Ending)
    notes_experts: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(
                f"{self}: the prompt is empty; a model goes on from at least one token, ask "
                "something"
            )
        for name in ("max_new_tokens", "answers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self}: {name}={getattr(self, name)} must be at least 1")

    def __str__(self) -> str:
        return f"request {self.number}"


@dataclass
class Answer:
    """One answer of a request.

    Attributes:
        tokens: token ids, with the stop token if one was generated.
        log_probabilities: of each token under the distribution that it was drawn from, with
            temperature, penalties and limits; 0 where the likeliest token was taken.
        full_log_probabilities: of each token under the model's own distribution.
        entropies: of the model's own distribution at each token, in nats.
        ended: ``stop`` at a stop token or string, ``length`` after ``max_new_tokens``,
            ``positions`` where the model has no further ones, ``time`` after the time limit.
        experts: int16 ``[n - 1, L, k]``, the experts that each token but the last went to, in each
            layer that has them; None where they are not noted.
    """

    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    full_log_probabilities: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    ended: Literal["", "stop", "length", "positions", "time"] = ""
    experts: Tensor | None = field(default=None, compare=False)


def new_tokens_within(model: Any, prompt: int, asked: int, what: str) -> int:
    """Return ``asked`` new tokens, or as many as the model has positions for.

    Logs a warning, once, if the model goes on beyond the positions that it was made for.

    Args:
        model: a causal language model.
        prompt: tokens of the prompt.
        asked: new tokens.
        what: the prompt, for the message.

    Raises:
        ValueError: there are none.
    """
    last = last_position(model, prompt + asked)
    limit = asked if last is None else last - prompt
    if limit < 1:
        raise ValueError(
            f"{what} has {prompt:,} tokens, {type(model).__name__} {last:,} positions: ask "
            "something shorter"
        )
    made_for = positions_below(model, prompt + limit)
    if made_for is not None:
        log_once(
            logger.warning,
            f"{type(within_adapters(model)).__name__} is made for {made_for:,} positions "
            "(max_position_embeddings), a prompt and its new tokens are more: ask for fewer "
            "(max_new_tokens), or give its configuration a RoPE that reaches further",
        )
    return limit
