"""Rewards of answers: the first rank calls them, once for the rows of a rollout, and tells all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chronicals.distributed import Mesh
from chronicals.generation import Answer
from chronicals.rewards import Rewards, RewardsFailed, Scored
from chronicals.training.errors import RolloutFailed
from chronicals.training.rollouts.draws import PromptRows

PROMPT_FIELDS = ("prompt", "messages")
"""Fields of a row that hold its prompt; all others are columns of the rewards."""


def prompt_of(record: Mapping[str, Any]) -> Any:
    """Return the prompt of a row as it has it, a text or messages."""
    return next(record[name] for name in PROMPT_FIELDS if record.get(name) is not None)


@dataclass(frozen=True)
class AnswerScores:
    """Rewards of the answers to P prompts, G each.

    Attributes:
        names: of the rewards.
        weights: float64 ``[rewards]``, factors of the rewards in their sum.
        values: float64 ``[P, G, rewards]``; NaN where a reward does not apply.
        kept: bool ``[P, G]``; False for answers that are left out of their group.
        failed: bool ``[P, G]``; True for answers of which a reward has failed.
    """

    names: Sequence[str]
    weights: Tensor
    values: Tensor
    kept: Tensor
    failed: Tensor

    def with_groups(self, places: np.ndarray, other: AnswerScores) -> AnswerScores:
        """Return these scores with those of some prompts replaced."""
        values = self.values.clone()
        kept = self.kept.clone()
        failed = self.failed.clone()
        replaced = torch.as_tensor(places)
        values[replaced] = other.values
        kept[replaced] = other.kept
        failed[replaced] = other.failed
        return AnswerScores(self.names, self.weights, values, kept, failed)


class Scoring:
    """Rewards the answers of a run.

    Args:
        tokenizer: the model's tokenizer, by which rewards read answers.
        rows: the prompts.
        rewards: called on the first rank; None on the others.
        ranks: all ranks of the run.
    """

    def __init__(self, tokenizer: Any, rows: PromptRows, rewards: Rewards | None, ranks: Mesh):
        self.tokenizer = tokenizer
        self.rows = rows
        self.rewards = rewards
        self.ranks = ranks

    def scores(
        self,
        prompts: np.ndarray,
        answers: Sequence[Sequence[Answer]],
        among: int | None = None,
    ) -> AnswerScores:
        """Return the rewards of answers on all ranks; all must call it.

        Args:
            prompts: int64 ``[P]``, documents in the store.
            answers: to each prompt.
            among: answers of the whole rollout, if these are a part of it that was drawn again.

        Raises:
            RolloutFailed: rewards fail for more than half of the answers.
        """
        told = self.ranks.writer_does(lambda: self._told(prompts, answers, among), RolloutFailed)
        if "failed" in told:
            raise RolloutFailed(told["failed"])
        shape = len(prompts), len(answers[0])
        values = torch.tensor(told["values"], dtype=torch.float64)
        failed = torch.zeros(values.shape[0], dtype=torch.bool)
        failed[told["failing"]] = True
        return AnswerScores(
            told["names"],
            torch.tensor(told["weights"], dtype=torch.float64),
            values.reshape(*shape, len(told["names"])),
            ~torch.tensor(told["dropped"], dtype=torch.bool).reshape(shape),
            failed.reshape(shape),
        )

    def _told(
        self, prompts: np.ndarray, answers: Sequence[Sequence[Answer]], among: int | None
    ) -> dict[str, Any]:
        """Return what the first rank tells the others, as JSON."""
        assert self.rewards is not None
        try:
            outcome = self.rewards.score(replace(self._rows(prompts, answers), among=among))
        except RewardsFailed as failure:
            return {"failed": str(failure)}
        return {
            "names": list(self.rewards.names),
            "weights": list(self.rewards.weights),
            "values": outcome.values.tolist(),
            "dropped": outcome.dropped.tolist(),
            "failing": [failure.row for failure in outcome.failures],
        }

    def _rows(self, prompts: np.ndarray, answers: Sequence[Sequence[Answer]]) -> Scored:
        """Return the rows that the rewards get, one an answer."""
        asked = list[Any]()
        completions = list[Any]()
        records = list[Mapping[str, Any]]()
        groups = list[int]()
        for number, (place, group) in enumerate(zip(prompts, answers, strict=True)):
            record = self.rows.record(place)
            prompt = prompt_of(record)
            for answer in group:
                text = self.text_of(answer.tokens)
                is_text = isinstance(prompt, str)
                completions.append(text if is_text else [{"role": "assistant", "content": text}])
                asked.append(prompt)
                records.append(record)
                groups.append(number)
        names = dict.fromkeys(name for record in records for name in record)
        columns = {
            name: [record.get(name) for record in records]
            for name in names
            if name not in PROMPT_FIELDS
        }
        ids = [answer.tokens for group in answers for answer in group]
        return Scored(asked, completions, ids, columns, groups)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer without its special tokens, as rewards read it."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text
