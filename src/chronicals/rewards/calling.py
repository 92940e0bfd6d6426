"""One call of a reward function, and what it may return.

It is the same in the process of a function and in the trainer's, so nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicals.rewards.built_in import BUILT_IN, text_of

ROLLOUT = ("prompts", "completions", "completion_ids")
"""Arguments that every reward may take; all others are columns of the rows."""

OF_A_TRAINER = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
"""Arguments that TRL's trainer gives beside the columns, and that do not exist here."""

LONGEST_REASON = 400
"""Letters of a reason; a message of a library may hold the whole answer."""


@dataclass(frozen=True)
class Values:
    """Result of a call for its rows.

    Attributes:
        values: a number for each row, None where the reward does not apply or has failed.
        faults: the reason by row, for those whose reward has failed.
    """

    values: list[float | None]
    faults: dict[int, str]

    @classmethod
    def failed(cls, reason: str, rows: int) -> Values:
        """Return that the whole call has failed."""
        return cls([None] * rows, dict.fromkeys(range(rows), reason[:LONGEST_REASON]))


@dataclass(frozen=True)
class RewardFunction:
    """A function that scores rows, and the arguments it takes.

    Attributes:
        function: called with lists of one entry a row, by name.
        needed: columns without which it cannot be called.
        taken: names of the arguments that it takes; None if it takes all.
    """

    function: Callable[..., Any]
    needed: tuple[str, ...]
    taken: frozenset[str] | None

    @classmethod
    def of(cls, function: Any) -> RewardFunction:
        """Return the reward of a function, of an object with ``get_score``, or of its class.

        Raises:
            ValueError: it is none; the message says why.
        """
        if inspect.isclass(function):
            function = _made(function)
        if hasattr(function, "get_score"):
            return cls(_scores_of(function.get_score), needed=(), taken=frozenset(ROLLOUT[:2]))
        if not callable(function):
            raise ValueError(
                f"is {type(function).__name__}, and neither a function nor an object with "
                "get_score(messages, answer)"
            )
        return cls._of_signature(function)

    @classmethod
    def _of_signature(cls, function: Callable[..., Any]) -> RewardFunction:
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [
            parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        taken = frozenset(parameter.name for parameter in named)
        required = [parameter.name for parameter in named if parameter.default is parameter.empty]
        shown = f"takes {inspect.signature(function)}"
        form = "a reward is reward(prompts, completions, completion_ids, **columns)"
        if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
            raise ValueError(f"{shown}, some of it without a name; {form}, called by names")
        if "completions" not in taken and not takes_all:
            raise ValueError(f"{shown}, and not completions, the answers; {form}")
        absent = sorted(OF_A_TRAINER.intersection(required))
        if absent:
            raise ValueError(
                f"{shown}, and {', '.join(absent)} of TRL's trainer does not exist here; give it a "
                "default"
            )
        needed = tuple(name for name in required if name not in ROLLOUT)
        return cls(function, needed, None if takes_all else taken)

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> Values:
        """Return the values of rows.

        Whatever the function raises, and whatever it returns that is no value, is a fault of the
        rows.

        Args:
            rows: lists of one entry a row: those of ``ROLLOUT``, and the columns.
        """
        count = len(rows["completions"])
        given = {
            name: column
            for name, column in rows.items()
            if self.taken is None or name in self.taken
        }
        try:
            returned = self.function(**given)
            if inspect.isawaitable(returned):
                returned = _awaited(returned)
            return _checked(returned, count)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return Values.failed(_reason(error), count)


def reward_function(place: str, argument: str | None = None) -> RewardFunction:
    """Return the reward at a place: a built-in one, or that of a path.

    Args:
        place: ``module:function``, ``file.py:function``, or the name of a built-in reward.
        argument: of a built-in reward.

    Raises:
        ValueError: it cannot be imported, or is no reward; the message says why.
    """
    if ":" not in place:
        function, needed = BUILT_IN[place](argument)
        return RewardFunction(function, needed, None)
    where, _, path = place.rpartition(":")
    try:
        found = _module(where)
        for name in path.split("."):
            found = getattr(found, name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"cannot be imported: {_reason(error)}") from error
    return RewardFunction.of(found)


def _module(where: str) -> Any:
    """Import a module by its name or by its file."""
    if not where.endswith(".py"):
        return importlib.import_module(where)
    file = Path(where)
    if not file.exists():
        raise FileNotFoundError(f"there is no file {where}")
    sys.path.append(str(file.parent.absolute()))  # for what it imports from beside it
    name = f"chronicals_rewards_of_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of the file look themselves up
    spec.loader.exec_module(module)
    return module


def _made(cls: type) -> Any:
    """Return an object of a class."""
    try:
        return cls()
    except Exception as error:
        raise ValueError(
            f"is a class, and cannot be made without arguments ({_reason(error)}); name an object "
            "of it"
        ) from error


def _scores_of(get_score: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return the reward function of ``get_score(messages, answer)``, which is called by row."""

    def scores(prompts: Sequence[Any], completions: Sequence[Any]) -> Any:
        returned = []
        for prompt, completion in zip(prompts, completions):
            messages = prompt
            if isinstance(prompt, str):
                messages = [{"role": "user", "content": prompt}]
            returned.append(get_score(messages, text_of(completion)))
        return _together(returned) if any(map(inspect.isawaitable, returned)) else returned

    return scores


async def _together(scores: Sequence[Any]) -> list[Any]:
    """Wait for the scores of all rows at once."""
    return await asyncio.gather(*scores)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Start the loop in which the asynchronous functions of this process run.

    There is one for all calls, since clients for HTTP stay with the loop of their first call, and
    it has a thread of its own, since a notebook's thread has a loop already.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


def _awaited(returned: Any) -> Any:
    """Return what an asynchronous function gives."""

    async def finished() -> Any:
        try:
            return await returned
        except SystemExit as error:  # it would end the loop
            raise RuntimeError(f"SystemExit: {error}") from error

    return asyncio.run_coroutine_threadsafe(finished(), _loop()).result()


def _checked(returned: Any, count: int) -> Values:
    """Return the values that a function returned for ``count`` rows.

    Raises:
        TypeError: they are no list.
        ValueError: they are not one a row.
    """
    listed = returned.tolist() if hasattr(returned, "tolist") else returned
    if isinstance(listed, (str, bytes, Mapping)) or not isinstance(listed, Iterable):
        raise TypeError(
            f"it returned {type(returned).__name__}, not a list of a number or None for each row"
        )
    listed = list(listed)
    if len(listed) != count:
        raise ValueError(f"it returned {len(listed)} values for {count} rows")
    values = list[float | None]()
    faults = dict[int, str]()
    for row, value in enumerate(listed):
        value = value.item() if hasattr(value, "item") else value
        is_number = isinstance(value, numbers.Real)
        values.append(float(value) if is_number and math.isfinite(value) else None)
        if value is not None and values[-1] is None:
            faults[row] = f"it returned {value!r}"[:LONGEST_REASON]
    return Values(values, faults)


def _reason(error: BaseException) -> str:
    """Return an error with the last line of a file in which it was raised."""
    text = f"{type(error).__name__}: {error}"
    trace = traceback.extract_tb(error.__traceback__)
    between = (str(Path(__file__).parent), str(Path(importlib.__file__).parent), "<")
    outside = [frame for frame in trace if not frame.filename.startswith(between)]
    if outside:
        text += f" ({Path(outside[-1].filename).name}, line {outside[-1].lineno})"
    return text
