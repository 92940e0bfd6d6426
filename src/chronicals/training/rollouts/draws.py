"""Draws of a rollout: the trained model answers prompts, and the answers are rewarded.

The engine generates with the trainer's own modules, so nothing is copied. Ranks divide the prompts
and then hold all answers; the first rank calls the rewards, once for the rows of a rollout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from chronicals.data import TokenStore
from chronicals.data.tokens.template import stop_token_ids
from chronicals.generation import Answer, Ending, Engine, EngineSettings, Request, Sampling
from chronicals.generation.sampling import ALL_TOKENS
from chronicals.objectives.advantages import (
    overlong_penalty,
    summed_rewards,
    without_variance,
)
from chronicals.objectives.policy_gradient import PolicyGradient, RolloutSettings
from chronicals.training.errors import TrainingError
from chronicals.training.rollouts.rollout import Rollout
from chronicals.training.session import Session


@dataclass(frozen=True)
class PromptRows:
    """The prompts of a store, with the rows that they come from.

    Attributes:
        store: tokens of the prompts.
        records: all rows of the source, in reading order; empty but on the first rank.
    """

    store: TokenStore
    records: Sequence[Mapping[str, Any]]

    def ids(self, place: int) -> np.ndarray:
        """Return the tokens of a prompt, int32."""
        return self.store.document(place)[0]

    def record(self, place: int) -> Mapping[str, Any]:
        """Return the row of a prompt."""
        return self.records[int(self.store.rows[place])]


@dataclass(frozen=True)
class DrawSettings:
    """How answers are drawn.

    Attributes:
        answers: to each prompt.
        max_new_tokens: most tokens of an answer.
        temperature: divides the logits; 0 takes the likeliest token each time.
        redraws: most times that a group whose rewards are all equal is drawn again.
        margin: tokens over which the penalty of long answers grows; None without that penalty.
    """

    answers: int
    max_new_tokens: int
    temperature: float
    redraws: int = 0
    margin: int | None = None

    @classmethod
    def of(cls, given: RolloutSettings) -> DrawSettings:
        """Return the settings of the answers that are trained on."""
        return cls(
            given.answers,
            given.max_new_tokens,
            given.temperature,
            given.redraws,
            given.margin if given.truncated == "shape" else None,
        )

    @classmethod
    def greedy(cls, given: RolloutSettings) -> DrawSettings:
        """Return the settings of one answer to each prompt, of the likeliest tokens."""
        return cls(1, given.max_new_tokens, 0.0)


def prompt_of(record: Mapping[str, Any]) -> Any:
    """Return the prompt of a row as it has it, a text or messages."""
    return record["prompt"] if record.get("prompt") is not None else record["messages"]


class Draws:
    """Draws rollouts with the model of a session.

    Args:
        session: inside its ``stepping``.
        tokenizer: the model's tokenizer.
        rows: the prompts.
        rewards: ``chronicals.rewards.Rewards``, called on the first rank.
        settings: how answers are drawn.
        engine_settings: sizes of the engine.
        limited: context entered wherever processes wait for each other.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Any,
        rows: PromptRows,
        rewards: Any,
        settings: DrawSettings,
        engine_settings: EngineSettings,
        limited: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        assert isinstance(session.objective, PolicyGradient)
        self.session = session
        self.objective: PolicyGradient = session.objective
        self.given = settings
        self.tokenizer = tokenizer
        self.rows = rows
        self.rewards = rewards
        self.limited = limited
        self.engine = Engine(session.model, engine_settings)
        self.ending = Ending(tokenizer, stop_token_ids(tokenizer, rows.store.chats))

    def rollout(self, number: int, prompts: np.ndarray, first: int) -> Rollout:
        """Draw the answers to prompts, and return them with rewards and advantages.

        Args:
            number: of the rollout in the run.
            prompts: int64 ``[P]``, their documents in the store.
            first: how many prompts were drawn before in the run; it identifies the random numbers.
        """
        groups: list[list[Answer]] = [[] for _ in prompts]
        values = torch.full((len(prompts), self.given.answers, len(self.rewards.names)), torch.nan)
        values = values.double()
        kept = torch.ones(values.shape[:2], dtype=torch.bool)
        seconds = {"seconds/draws": 0.0, "seconds/rewards": 0.0}
        drawn = 0
        missing = np.arange(len(prompts))
        attempt = 0
        while len(missing):
            began = time.perf_counter()
            answers = self._answers(prompts[missing], first + missing, attempt)
            between = time.perf_counter()
            seconds["seconds/draws"] += between - began
            scores, dropped = self._scores(prompts[missing], answers)
            seconds["seconds/rewards"] += time.perf_counter() - between
            drawn += len(missing)
            for place, group in zip(missing, answers, strict=True):
                groups[place] = group
            values[missing] = scores
            kept[missing] = ~dropped
            rewards = self._rewards(values, kept, groups)
            missing = missing[without_variance(rewards)[missing].numpy()]
            attempt += 1
            if attempt > self.given.redraws:
                break
        advantages = self.objective.advantages(rewards)
        shown = {
            **self._shown(values, kept, rewards, groups),
            "groups/drawn_again": float(drawn - len(prompts)),
            **seconds,
        }
        flat = [answer for group in groups for answer in group]
        return Rollout(
            number,
            np.asarray(prompts, np.int64),
            np.array([len(answer.tokens) for answer in flat], np.int64),
            np.concatenate([np.array(answer.tokens, np.int32) for answer in flat]),
            np.concatenate([np.array(answer.log_probabilities, np.float32) for answer in flat]),
            np.array([answer.ended == "stop" for answer in flat]),
            rewards.flatten().numpy(),
            advantages.flatten().float().numpy(),
            shown=shown,
        )

    def _answers(
        self, prompts: np.ndarray, numbers: np.ndarray, attempt: int
    ) -> list[list[Answer]]:
        """Return the answers to prompts, on all ranks; each rank draws those of some prompts.

        Args:
            prompts: documents in the store.
            numbers: of the prompts in the run, which identify their random numbers.
            attempt: number of draws of the same prompts before.
        """
        given = self.given
        session = self.session
        ranks = session.ranks
        # Settings of the model's own generation config do not apply: ratios are of this distribution.
        sampling = Sampling(given.temperature, session.config.seed)
        if given.temperature:
            sampling = replace(
                sampling, top_p=1.0, top_k=ALL_TOKENS, repetition_penalty=1.0, min_p=0.0
            )
        own = range(ranks.rank, len(prompts), ranks.count)
        requests = [
            Request(
                self.rows.ids(prompts[place]).tolist(),
                given.max_new_tokens,
                sampling,
                given.answers,
                int(numbers[place]) * (given.redraws + 1) + attempt,
                self.ending,
            )
            for place in own
        ]
        try:
            with session.presented.attending_as_before(), session.precision.autocast():
                drawn = self.engine.generate(requests)
        finally:
            self.engine.release()  # the step needs the memory
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

    def _scores(
        self, prompts: np.ndarray, answers: Sequence[Sequence[Answer]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rewards ``[prompts, answers, rewards]``, and which answers are left out."""

        def score() -> list[Any]:
            outcome = self.rewards.score(self._scored(prompts, answers))
            return [outcome.values.tolist(), outcome.dropped.tolist()]

        values, dropped = self.session.ranks.writer_does(score, TrainingError)
        shape = len(prompts), self.given.answers
        scores = torch.tensor(values, dtype=torch.float64).reshape(*shape, len(self.rewards.names))
        return scores, torch.tensor(dropped, dtype=torch.bool).reshape(shape)

    def _scored(self, prompts: np.ndarray, answers: Sequence[Sequence[Answer]]) -> Any:
        """Return the rows that the rewards get, one an answer."""
        from chronicals.rewards import Scored

        asked = list[Any]()
        completions = list[Any]()
        ids = list[list[int]]()
        records = list[Mapping[str, Any]]()
        groups = list[int]()
        for number, (place, group) in enumerate(zip(prompts, answers, strict=True)):
            record = self.rows.record(place)
            prompt = prompt_of(record)
            for answer in group:
                text = self.text_of(answer.tokens)
                asked.append(prompt)
                is_text = isinstance(prompt, str)
                completions.append(text if is_text else [{"role": "assistant", "content": text}])
                ids.append(answer.tokens)
                records.append(record)
                groups.append(number)
        names = dict.fromkeys(name for record in records for name in record)
        columns = {
            name: [record.get(name) for record in records]
            for name in names
            if name not in ("prompt", "messages")
        }
        return Scored(asked, completions, ids, columns, groups)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer without its stop token, as rewards read it."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def _rewards(
        self, values: torch.Tensor, kept: torch.Tensor, groups: Sequence[Sequence[Answer]]
    ) -> torch.Tensor:
        """Return the reward of each answer, ``[prompts, answers]``, NaN for those left out."""
        weights = torch.tensor(self.rewards.weights, dtype=torch.float64)
        rewards = summed_rewards(values, weights)
        if self.given.margin is not None:
            lengths = torch.tensor([[len(one.tokens) for one in group] for group in groups])
            rewards = rewards + overlong_penalty(
                lengths, self.given.max_new_tokens, self.given.margin
            )
        return rewards.masked_fill(~kept, torch.nan)

    def _shown(
        self,
        values: torch.Tensor,
        kept: torch.Tensor,
        rewards: torch.Tensor,
        groups: Sequence[Sequence[Answer]],
    ) -> dict[str, float]:
        """Return the metrics of a rollout."""
        lengths = np.array([len(answer.tokens) for group in groups for answer in group])
        complete = np.array([answer.ended == "stop" for group in groups for answer in group])
        by_name = {
            f"rewards/{name}": _mean(values[..., number])
            for number, name in enumerate(self.rewards.names)
        }
        return {
            "reward": _mean(rewards),
            **by_name,
            "groups/without_variance": float(without_variance(rewards).double().mean()),
            "answers/length": float(lengths.mean()),
            "answers/longest": float(lengths.max()),
            "answers/truncated": float(1 - complete.mean()),
            "answers/left_out": float((~kept).double().mean()),
        }


def _mean(values: torch.Tensor) -> float:
    """Return the mean of the values that are numbers; 0 without any."""
    return float(values.nanmean().nan_to_num(0.0))
