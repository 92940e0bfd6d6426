"""Steps of a run whose answers the model itself draws.

The prompts are a shuffled endless stream, a function of the seed: epoch e is the prompts in the
order of generator (seed, e). Rollout n takes the next ``prompts · updates`` of them. Its answers
are trained on in ``updates`` steps, ``iterations`` times; then the next rollout is drawn.

A state between two steps of a rollout holds the rollout, so that a resumed run goes on with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chronicals.config import ChronicalsConfig
from chronicals.data.packs.steps import Step
from chronicals.objectives.policy_gradient import DRAWN, OLD, RolloutSettings
from chronicals.training.errors import RolloutFailed
from chronicals.training.rollouts.answer_packs import AnswerGroup, AnswerPacks, DrawnAnswer
from chronicals.training.rollouts.draws import PromptRows
from chronicals.training.rollouts.rollout import Rollout
from chronicals.training.rollouts.rollout_maker import RolloutMaker

NEXT = "rollout"
UPDATE = "update"
HELD = "held"
"""Keys of a state: number of the rollout, its steps that are done, and if any are, the rollout."""

Draw = Callable[[int, np.ndarray, int], Rollout]
"""Draws a rollout from its number, its prompts, and how many prompts came before."""


class RolloutSteps:
    """``Steps`` of answers that are drawn when a step is asked for.

    Args:
        rows: the prompts.
        given: settings of the objective.
        config: configuration of the run.
        draw: draws a rollout.
        packs: makes Batches of answers.
        held: the last rollout that was drawn, which other steps of the same run may share.

    Attributes:
        data: the store's key.
        earlier_data: keys that earlier versions of this package gave to the same content.
    """

    @dataclass
    class Held:
        """The last rollout that was drawn."""

        rollout: Rollout | None = None

    def __init__(
        self,
        rows: PromptRows,
        given: RolloutSettings,
        config: ChronicalsConfig,
        draw: Draw,
        packs: AnswerPacks,
        held: Held | None = None,
    ):
        self.rows = rows
        self.given = given
        self.config = config
        self.draw = draw
        self.packs = packs
        self.data = rows.store.key
        self.earlier_data = rows.store.earlier_keys
        self._held = held or self.Held()
        self._known_order = -1, np.zeros(0, np.int64)

    @property
    def steps_a_rollout(self) -> int:
        """Optimizer steps between two draws."""
        return self.given.updates * self.given.iterations

    @property
    def prompts_a_rollout(self) -> int:
        """Prompts that are answered together."""
        return self.given.prompts * self.given.updates

    @property
    def fingerprint(self) -> str:
        """Hash of the order of the prompts, and of what decides which are answered together."""
        given = self.given
        numbers = [self.config.seed, given.prompts, given.updates, given.iterations, given.answers]
        order = hashlib.sha256(repr([*numbers, given.redraws]).encode())
        order.update(self.rows.store.rows.tobytes())
        return order.hexdigest()

    def epoch(self, state: Mapping[str, Any] | None) -> float:
        """Return the passes over the prompts up to ``state``."""
        if state is None:
            return 0.0
        done = state[NEXT] + state[UPDATE] / self.steps_a_rollout
        return float(done * self.prompts_a_rollout / len(self.rows.store))

    def left(self, state: Mapping[str, Any] | None) -> int | None:
        """Return the steps from ``state`` to the end of the epochs asked for; None without end."""
        if self.config.epochs is None:
            return None
        total = rollout_steps(self.given, self.config, len(self.rows.store))
        done = 0 if state is None else state[NEXT] * self.steps_a_rollout + state[UPDATE]
        return max(0, total - done)

    def steps(
        self, state: Mapping[str, Any] | None = None, count: int | None = None
    ) -> Iterator[Step]:
        """Yield steps; a rollout is drawn when its first step is asked for.

        Args:
            state: of the step before; None for the beginning.
            count: steps after which it ends; None for no end.
        """
        number = 0 if state is None else state[NEXT]
        update = 0 if state is None else state[UPDATE]
        if state is not None and HELD in state:
            self._held.rollout = Rollout.from_json(state[HELD])
        done = 0
        while count is None or done < count:
            began = state
            rollout = self._rollout(number)
            batches, counts = self.packs.batches(self.groups(began), update)
            update += 1
            if update == self.steps_a_rollout:
                number += 1
                update = 0
            state = {NEXT: number, UPDATE: update}
            if update:
                state[HELD] = rollout.to_json()
            shown = rollout.shown if update == 1 % self.steps_a_rollout else {}
            yield Step(batches, counts, began, state, shown)
            done += 1

    def heaviest(self) -> Step:
        """Return a step in which every answer is as long as it may be, to the longest prompts."""
        given = self.given
        store = self.rows.store
        places = np.argsort(-store.lengths, kind="stable")[: given.prompts]
        tokens = np.zeros(given.max_new_tokens, np.int32)
        nothing = np.zeros(given.max_new_tokens, np.float32)
        names = [DRAWN] if given.importance == "none" else [DRAWN, OLD]
        one = DrawnAnswer(0, tokens, True, 0.0, 0.0, dict.fromkeys(names, nothing))
        groups = [AnswerGroup(self.rows.ids(place), [one] * given.answers) for place in places]
        batches, counts = self.packs.batches(groups, age=1)
        return Step(batches, counts, None, None)

    def _rollout(self, number: int) -> Rollout:
        """Return a rollout, which is drawn unless it is held."""
        held = self._held.rollout
        if held is None or held.number != number:
            first = number * self.prompts_a_rollout
            places = range(first, first + self.prompts_a_rollout)
            prompts = np.array([self._prompt_at(place) for place in places])
            held = self.draw(number, prompts, first)
            self._held.rollout = held
        return held

    def _prompt_at(self, place: int) -> int:
        """Return the document of the prompt at a place of the stream."""
        epoch, within = divmod(place, len(self.rows.store))
        if self._known_order[0] != epoch:
            order = np.random.default_rng([self.config.seed, epoch]).permutation(
                len(self.rows.store)
            )
            self._known_order = epoch, order
        return int(self._known_order[1][within])

    def groups(self, state: Mapping[str, Any] | None) -> list[AnswerGroup]:
        """Return the prompts and answers of the step that begins at ``state``."""
        given = self.given
        number = 0 if state is None else state[NEXT]
        update = 0 if state is None else state[UPDATE]
        first = update % given.updates * given.prompts
        places = range(first, first + given.prompts)
        return groups_of(self.rows, self._rollout(number), places, given.truncated == "mask")


class HeldOutSteps:
    """``Steps`` of an evaluation: answers to all prompts, in their order.

    Args:
        rows: the prompts.
        maker: draws the answers, and rewards them.
        packs: makes Batches of answers.

    Attributes:
        data: the store's key.
        earlier_data: keys that earlier versions of this package gave to the same content.
    """

    PROMPTS = 64
    """Prompts that are answered together."""

    def __init__(self, rows: PromptRows, maker: RolloutMaker, packs: AnswerPacks):
        self.rows = rows
        self.maker = maker
        self.packs = packs
        self.data = rows.store.key
        self.earlier_data = rows.store.earlier_keys
        self.fingerprint = ""

    def epoch(self, state: int | None) -> float:
        """Return the part of the prompts that is answered."""
        return (state or 0) * self.PROMPTS / len(self.rows.store)

    def left(self, state: int | None) -> int | None:
        """Return the steps that are left."""
        return -(-len(self.rows.store) // self.PROMPTS) - (state or 0)

    def steps(self, state: int | None = None, count: int | None = None) -> Iterator[Step]:
        """Yield the steps; answers are drawn when a step is asked for."""
        left = self.left(state) or 0
        start = state or 0
        for number in range(start, start + min(left, left if count is None else count)):
            first = number * self.PROMPTS
            prompts = np.arange(first, min(first + self.PROMPTS, len(self.rows.store)))
            rollout = self.maker.rollout(number, prompts, first)
            groups = groups_of(self.rows, rollout, range(len(prompts)))
            batches, counts = self.packs.batches(groups, age=1)
            yield Step(batches, counts, number, number + 1)

    def heaviest(self) -> Step:
        """Return the first step."""
        return next(self.steps(count=1))


def groups_of(
    rows: PromptRows, rollout: Rollout, places: Sequence[int], masks_truncated: bool = False
) -> list[AnswerGroup]:
    """Return some prompts of a rollout with their answers, without those that have no reward.

    Args:
        rows: the prompts.
        rollout: the answers.
        places: of the prompts in the rollout.
        masks_truncated: leave answers without an end out of the loss.

    Raises:
        RolloutFailed: no answer has a reward.
    """
    groups = []
    for place in places:
        answers = []
        for number in range(place * rollout.answers, (place + 1) * rollout.answers):
            if not np.isnan(rollout.rewards[number]):
                masked = masks_truncated and not rollout.complete[number]
                answers.append(_answer(rollout, number, not masked))
        if answers:
            groups.append(AnswerGroup(rows.ids(rollout.prompts[place]), answers))
    if not groups:
        raise RolloutFailed(
            "no answer of a step has a reward: every reward gave None for all of them; look at "
            "what the rewards apply to"
        )
    return groups


def _answer(rollout: Rollout, number: int, is_trained: bool) -> DrawnAnswer:
    """Return an answer of a rollout."""
    places = rollout.places(number)
    of_tokens = {DRAWN: rollout.drawn[places]}
    if len(rollout.passed):
        of_tokens[OLD] = rollout.passed[places]
    return DrawnAnswer(
        number,
        rollout.tokens[places],
        is_trained,
        float(rollout.rewards[number]),
        float(rollout.advantages[number]),
        of_tokens,
    )


def rollout_steps(given: RolloutSettings, config: ChronicalsConfig, prompts: int) -> int:
    """Return the optimizer steps of a run over so many prompts.

    The last rollout goes on into the next pass over the prompts, if it needs more than are left.
    """
    if config.max_steps:
        return config.max_steps
    rollouts = -(-prompts * (config.epochs or 1) // (given.prompts * given.updates))
    return rollouts * given.updates * given.iterations
