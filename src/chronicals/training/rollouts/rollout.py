"""A rollout: the answers to the prompts of one or several steps, as they were drawn."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Rollout:
    """Answers of P prompts, G each, prompt after prompt; T tokens of all answers together.

    Attributes:
        number: its number in the run, from 0.
        prompts: int64 ``[P]``, number of each prompt's document in the store.
        lengths: int64 ``[P · G]``, tokens of each answer, the stop token included.
        tokens: int32 ``[T]``.
        drawn: float32 ``[T]``, log-probability of each under the distribution that it was drawn
            from.
        complete: bool ``[P · G]``, False for answers without an end.
        rewards: float64 ``[P · G]``, the reward of each answer; NaN for one without, which is not
            trained.
        advantages: float32 ``[P · G]``.
        passed: float32 ``[T]``, log-probability of each token by the trainer's own pass when it was
            drawn; of length 0 if that is not needed.
        shown: metrics of the rollout, by name.
    """

    number: int
    prompts: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    drawn: np.ndarray
    complete: np.ndarray
    rewards: np.ndarray
    advantages: np.ndarray
    passed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    shown: Mapping[str, float] = field(default_factory=dict)

    @property
    def answers(self) -> int:
        """G, answers to each prompt."""
        return len(self.lengths) // len(self.prompts)

    def places(self, answer: int) -> slice:
        """Return where the tokens of an answer lie in ``tokens``."""
        end = int(self.lengths[: answer + 1].sum())
        return slice(end - int(self.lengths[answer]), end)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of ``values`` ``[T]`` over each answer's tokens, float64 ``[P · G]``."""
        bounds = np.append(0, np.cumsum(self.lengths))
        running = np.append(0.0, np.cumsum(values.astype(np.float64)))
        return np.diff(running[bounds])

    def with_advantages(
        self,
        rewards: np.ndarray,
        advantages: np.ndarray,
        passed: np.ndarray,
        shown: Mapping[str, float],
    ) -> Rollout:
        """Return the rollout with what was computed of its answers."""
        return replace(
            self, rewards=rewards, advantages=advantages, passed=passed, shown=dict(shown)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the rollout as JSON, bit for bit."""
        content = dict[str, Any]()
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, np.ndarray):
                text = base64.b64encode(value.tobytes()).decode()
                value = {"dtype": value.dtype.name, "values": text}
            content[one.name] = value
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Rollout:
        """Return the rollout that ``to_json`` described."""
        read = dict(content)
        for name, value in content.items():
            if name != "shown" and isinstance(value, dict):
                values = base64.b64decode(value["values"])
                read[name] = np.frombuffer(values, value["dtype"])
        return cls(**read)
