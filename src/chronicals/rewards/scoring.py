"""The rewards of a run, and what they give for the rows of a rollout.

Each reward is called once for all rows. If something is wrong then, it is called once more for each
group by itself, which finds the rows whose reward fails; the others keep theirs. A function that
fails or hangs for some answers costs these answers, and not the run.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ConfigurationError
from chronicals.config.reward_entries import DROP
from chronicals.rewards.calling import ROLLOUT, Values
from chronicals.rewards.kinds import Reward

logger = logging.getLogger(__name__)

FAILURES_NAMED = 8
"""Rows that a message names; the others are counted."""


class RewardsFailed(RuntimeError):
    """Rewards fail for more than half of the rows of a rollout."""


@dataclass(frozen=True)
class Scored:
    """Rows of a rollout, an answer each.

    Attributes:
        prompts: texts or messages, as their rows had them.
        completions: texts; lists of one message of the assistant where prompts are messages.
        completion_ids: tokens of the answers.
        columns: values of the other columns of the rows, by name.
        groups: number of the group of each row; a group has the answers to one prompt.
        among: rows of the whole rollout, if these are a part of it that was drawn again.
    """

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    groups: list[int]
    among: int | None = None

    @property
    def most_failures(self) -> float:
        """Half of the rows of the rollout: if more of them fail, nothing could be learnt from it."""
        return (len(self.prompts) if self.among is None else self.among) / 2

    def arguments(self, rows: Sequence[int]) -> dict[str, list[Any]]:
        """Return the arguments of a reward for some rows."""
        given = dict(zip(ROLLOUT, (self.prompts, self.completions, self.completion_ids)))
        columns = {**self.columns, **given}
        return {name: [column[row] for row in rows] for name, column in columns.items()}

    def rows_of_groups(self) -> list[list[int]]:
        """Return the rows of each group."""
        found = defaultdict[int, list[int]](list)
        for row, group in enumerate(self.groups):
            found[group].append(row)
        return list(found.values())


@dataclass(frozen=True)
class Failure:
    """A row whose reward has failed.

    Attributes:
        row: of the rollout.
        reward: name of the reward.
        reason: what was wrong, in words.
    """

    row: int
    reward: str
    reason: str


@dataclass
class Outcome:
    """Rewards of the rows of a rollout.

    Attributes:
        values: fp64 ``[rows, rewards]`` on the host; NaN where a reward does not apply (None), and
            where it failed and its row is dropped.
        dropped: bool ``[rows]``; True for a row that is out of its group.
        failures: rows whose rewards failed, one for each row and reward.
    """

    values: Tensor
    dropped: Tensor
    failures: list[Failure] = field(default_factory=list)


class Rewards:
    """The rewards of a run; a context manager, whose end ends their processes.

    Args:
        rewards: by name, in the order of their values.
        weights: factors of their values in the sum.
        on_error: ``drop``, or the reward of a row whose reward fails.

    Attributes:
        names: of the rewards, as metrics and samples show them.
        weights: factors of their values in the sum.
        columns_wanted: columns without which a reward cannot be called.
    """

    def __init__(
        self, rewards: dict[str, Reward], weights: Sequence[float], on_error: str | float
    ) -> None:
        self._rewards = rewards
        self._on_error = on_error
        self._threads = ThreadPoolExecutor(len(rewards), thread_name_prefix="rewards")
        self.names = list(rewards)
        self.weights = list(weights)
        self.columns_wanted = {name for reward in rewards.values() for name in reward.needed}

    def __enter__(self) -> Rewards:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of the rewards, and give back what models hold."""
        for reward in self._rewards.values():
            reward.close()
        self._threads.shutdown()

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that rows have the columns that rewards ask for.

        Raises:
            ConfigurationError: one is missing; the message names reward and column.
        """
        lines = []
        there = ", ".join(sorted(columns)) or "none"
        for name, reward in self._rewards.items():
            missing = [column for column in reward.needed if column not in columns]
            lines += [
                f"rewards: {name} asks for the column {column!r}, which rows do not have (beside "
                f"the prompt they have {there}); map theirs to it: "
                f"columns={{{column!r}: 'THEIR_NAME'}}"
                for column in missing
            ]
        if lines:
            raise ConfigurationError("\n".join(lines))

    def score(self, rows: Scored) -> Outcome:
        """Return the rewards of the rows of a rollout.

        Functions in processes of their own run beside each other and beside those of this process.

        Raises:
            RewardsFailed: of more than half of the rows a reward fails.
        """
        asked = {
            name: self._threads.submit(_values_of, name, reward, rows)
            for name, reward in self._rewards.items()
            if reward.apart
        }
        given = {
            name: _values_of(name, reward, rows)
            for name, reward in self._rewards.items()
            if not reward.apart
        }
        given |= {name: answer.result() for name, answer in asked.items()}
        return self._outcome([given[name] for name in self.names], rows)

    def _outcome(self, columns: Sequence[Values], rows: Scored) -> Outcome:
        count = len(rows.prompts)
        values = torch.full((count, len(columns)), torch.nan, dtype=torch.float64)
        dropped = torch.zeros(count, dtype=torch.bool)
        failures = []
        for number, (name, column) in enumerate(zip(self.names, columns)):
            kept = [torch.nan if value is None else value for value in column.values]
            values[:, number] = torch.tensor(kept, dtype=torch.float64)
            for row, reason in sorted(column.faults.items()):
                failures.append(Failure(row, name, reason))
                if self._on_error == DROP:
                    dropped[row] = True
                else:
                    values[row, number] = float(self._on_error)
            if column.faults:
                logger.warning(
                    "%s; reward_on_error=%r", _said(name, column.faults, count), self._on_error
                )
        failed = {failure.row for failure in failures}
        if len(failed) > rows.most_failures:
            raise RewardsFailed(
                f"rewards fail for {len(failed)} of {count} answers, more than half: "
                + "; ".join(
                    _said(name, column.faults, count)
                    for name, column in zip(self.names, columns)
                    if column.faults
                )
            )
        return Outcome(values, dropped, failures)


def _values_of(name: str, reward: Reward, rows: Scored) -> Values:
    """Return the values of a reward, called once, or once more by group if something is wrong.

    Raises:
        RewardsFailed: it fails for more than half of the rows.
    """
    count = len(rows.prompts)
    at_once = reward(rows.arguments(range(count)))
    if not at_once.faults:
        return at_once
    values: list[float | None] = [None] * count
    faults = dict[int, str]()
    for members in rows.rows_of_groups():
        part = reward(rows.arguments(members))
        for row, value in zip(members, part.values):
            values[row] = value
        faults |= {members[position]: reason for position, reason in part.faults.items()}
        if len(faults) > rows.most_failures:
            raise RewardsFailed(
                f"rewards fail for more than half of the answers: {_said(name, faults, count)}"
            )
    return Values(values, faults)


def _said(name: str, faults: dict[int, str], count: int) -> str:
    """Return in words which rows' reward failed, and why."""
    rows = sorted(faults)
    named = ", ".join(map(str, rows[:FAILURES_NAMED]))
    further = f" and {len(rows) - FAILURES_NAMED} more" if len(rows) > FAILURES_NAMED else ""
    return (
        f"reward {name}: failed for {len(rows)} of {count} answers (rows {named}{further}), the "
        f"first because {faults[rows[0]]}"
    )
