"""Rewards by where they run: in a process of their own, or in the trainer's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from chronicals.rewards.calling import RewardFunction, Values
from chronicals.rewards.process import RewardProcess


class Reward(ABC):
    """Interface of what scores rows.

    Attributes:
        needed: columns without which it cannot be called.
        apart: whether it is called in a process of its own, beside the others.
    """

    needed: tuple[str, ...] = ()
    apart: bool = False

    @abstractmethod
    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> Values:
        """Return the values of rows, given as lists of one entry a row by their names."""

    def close(self) -> None:
        """Give back what it holds; it is not called any more."""
        return


class FunctionHere(Reward):
    """A function that is called in the trainer's process, which can be neither timed nor ended.

    Raises:
        ValueError: it is no reward; the message says why.
    """

    def __init__(self, function: Any):
        self._function = RewardFunction.of(function)
        self.needed = self._function.needed

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> Values:
        """Call it."""
        return self._function(rows)


class FunctionApart(Reward):
    """A function in a process of its own.

    Args:
        place: its path, or the name of a built-in reward.
        argument: of a built-in reward.
        timeout: seconds that it may take for each row of a call.

    Raises:
        ValueError: it cannot be imported or is no reward; the message says why.
    """

    apart = True

    def __init__(self, place: str, argument: str | None, timeout: float):
        self._timeout = timeout
        self._process = RewardProcess(place, argument)
        try:
            about = self._process.start()
        except ChildProcessError as error:
            raise ValueError(f"its process could not be started: {error}") from error
        if "refused" in about:
            self.close()
            raise ValueError(about["refused"])
        self.needed = tuple(about["needed"])
        self._taken = None if about["taken"] is None else {*about["taken"], "completions"}

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> Values:
        """Call it; a process that hangs is ended, and started anew for the next call."""
        count = len(rows["completions"])
        sent = {
            name: column
            for name, column in rows.items()
            if self._taken is None or name in self._taken
        }
        try:
            answer = self._process.ask(sent, self._timeout * count)
        except (ChildProcessError, TypeError) as error:
            return Values.failed(str(error), count)
        return Values(answer["values"], dict(answer["faults"]))

    def close(self) -> None:
        """End its process."""
        self._process.close()
