"""Draws of answers to prompts: ranks divide the prompts, and then hold all answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chronicals.data import TokenStore
from chronicals.data.tokens.template import stop_token_ids
from chronicals.distributed import Mesh
from chronicals.generation import Answer, Ending, Request, Sampling
from chronicals.generation.sampling import ALL_TOKENS
from chronicals.objectives.policy_gradient import RolloutSettings


@dataclass(frozen=True)
class PromptRows:
    """The prompts of a store, with the rows that they come from.

    Attributes:
        store: tokens of the prompts.
        records: all rows of the source, in reading order; empty but on the first rank.
    """

    store: TokenStore
    records: Sequence[Any] = ()

    def ids(self, place: int) -> np.ndarray:
        """Return the tokens of a prompt, int32."""
        return self.store.document(place)[0]

    def record(self, place: int) -> Mapping[str, Any]:
        """Return the row of a prompt."""
        found: Mapping[str, Any] = self.records[int(self.store.rows[place])]
        return found


PROMPTS_NOTED = 2
"""Prompts of a rollout of whose answers the experts are compared: a pass over all would take as long
as a third of an update."""


@dataclass(frozen=True)
class DrawSettings:
    """Settings by which answers are drawn.

    Attributes:
        answers: to each prompt.
        max_new_tokens: most tokens of an answer.
        temperature: divides the logits; 0 takes the likeliest token each time.
        redraws: most times that a group whose rewards are all equal is drawn again.
        margin: tokens over which the penalty of long answers grows; None without that penalty.
        noted: prompts of a rollout whose answers' experts are noted, in a mixture.
    """

    answers: int
    max_new_tokens: int
    temperature: float
    redraws: int = 0
    margin: int | None = None
    noted: int = 0

    @classmethod
    def of(cls, given: RolloutSettings) -> DrawSettings:
        """Return the settings of the answers that are trained on."""
        return cls(
            given.answers,
            given.max_new_tokens,
            given.temperature,
            given.redraws,
            given.margin if given.truncated == "shape" else None,
            PROMPTS_NOTED,
        )

    @classmethod
    def greedy(cls, given: RolloutSettings) -> DrawSettings:
        """Return the settings of one answer to each prompt, of the likeliest tokens."""
        return cls(1, given.max_new_tokens, 0.0)

    def sampling(self, seed: int) -> Sampling:
        """Return how a token is chosen.

        Settings of the model's own generation config do not apply: ratios are of the whole
        distribution at this temperature.
        """
        greedy = Sampling(self.temperature, seed)
        if not self.temperature:
            return greedy
        return replace(greedy, top_p=1.0, top_k=ALL_TOKENS, repetition_penalty=1.0, min_p=0.0)


Generate = Callable[[Sequence[Request]], list[list[Answer]]]
"""Generates the answers of requests, as ``Turns.generate`` does between the steps of a run."""


class Draws:
    """Draws answers.

    Args:
        generate: generates with the model.
        tokenizer: the model's tokenizer.
        rows: the prompts.
        settings: how answers are drawn.
        seed: of the random numbers.
        ranks: all ranks, which divide the prompts.
        limited: context entered wherever processes wait for each other.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: Any,
        rows: PromptRows,
        settings: DrawSettings,
        seed: int,
        ranks: Mesh | None = None,
        limited: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.generate = generate
        self.rows = rows
        self.settings = settings
        self.sampling = settings.sampling(seed)
        self.ranks = ranks or Mesh()
        self.limited = limited
        self.ending = Ending(tokenizer, stop_token_ids(tokenizer, rows.store.chats))

    def answers(
        self, prompts: np.ndarray, numbers: np.ndarray, attempt: int = 0
    ) -> list[list[Answer]]:
        """Return the answers to each prompt, on all ranks; all must call it.

        Args:
            prompts: int64 ``[P]``, documents in the store.
            numbers: int64 ``[P]``, of the prompts in the run. They identify the random numbers,
                which so do not depend on what is drawn beside them, nor on the number of ranks.
            attempt: number of draws of the same prompts before.
        """
        given = self.settings
        ranks = self.ranks
        requests = [
            Request(
                self.rows.ids(prompts[place]).tolist(),
                given.max_new_tokens,
                self.sampling,
                given.answers,
                int(numbers[place]) * (given.redraws + 1) + attempt,
                self.ending,
                place < given.noted and ranks.count == 1,
            )
            for place in range(ranks.rank, len(prompts), ranks.count)
        ]
        drawn = self.generate(requests)
        if ranks.count == 1:
            return drawn
        told = [
            [[one.tokens, one.log_probabilities, one.ended] for one in group] for group in drawn
        ]
        with self.limited():
            of_ranks = ranks.gather_values(told)
        answers: list[list[Answer]] = []
        for place in range(len(prompts)):
            group = of_ranks[place % ranks.count][place // ranks.count]
            answers.append([Answer(tokens, log_p, ended=ended) for tokens, log_p, ended in group])
        return answers
