"""Going on after an out-of-memory error, in the same process (``fit: auto``).

The allocator raises on the host, before a kernel runs without its memory. So weights, states and
the place in the data are those from before the step, unless its update has begun. What the step
holds is freed, the run is planned again with the measured peak, and the same documents are trained
in smaller micro-batches, with the random state of before.

An update allocates what it needs before it changes a weight. If it fails all the same, memory is
freed and the weights that are left are updated.
"""

from __future__ import annotations

import gc
import logging
import re
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.data.packs.steps import Step, Steps
from chronicals.distributed import HostExchange, gathers_of
from chronicals.memory import checkpoints_end_with_errors, draws_numbers
from chronicals.objectives import Objective
from chronicals.policies.facts import DIVIDE_WEIGHTS
from chronicals.policies.needed_memory import GIB
from chronicals.policies.smaller_steps import in_smaller_batches
from chronicals.training.errors import TrainingError
from chronicals.training.run.added_policies import additions
from chronicals.training.run.guard import less_is_taken_by
from chronicals.training.run.resume import how_to_resume
from chronicals.training.session import Session

logger = logging.getLogger(__name__)

MAX_RECOVERIES = 3
"""Most times that a run takes less: what does not fit after three plans, no plan will make fit."""

SIZES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}
"""Units in the messages of torch's allocator."""

REHEARSAL = "in the rehearsal of the longest documents"

Result = TypeVar("Result")


class OutOfMemoryElsewhere(torch.OutOfMemoryError):
    """Another rank ran out of memory in this step."""


@dataclass(frozen=True)
class Shortage:
    """An out-of-memory error, without the frames and tensors that it holds.

    Attributes:
        words: first line of its message.
        needed: bytes that the process held or asked for at most; 0 without a card.
    """

    words: str
    needed: int

    @classmethod
    def of(cls, error: torch.OutOfMemoryError, device: torch.device) -> Shortage:
        """Read an error while what the step holds is still allocated."""
        words = str(error).partition("\n")[0]
        if device.type != "cuda":
            return cls(words, 0)
        asked = re.search(r"Tried to allocate ([\d.]+) (\w+)", words)
        size = int(float(asked[1]) * SIZES[asked[2]]) if asked else 0
        held = torch.cuda.memory_allocated(device) + size
        return cls(words, max(held, torch.cuda.max_memory_allocated(device)))


class Recovery(AbstractContextManager["Recovery"]):
    """Recovery of a run whose step runs out of memory; a context manager around its steps.

    Args:
        session: the session, whose batch and policies change.
        divided: returns the run's steps in the batches of a configuration.
        output_dir: folder of the run, for messages.

    Attributes:
        steps: the run's steps; others after the batch has changed.
    """

    def __init__(
        self,
        session: Session,
        steps: Steps,
        divided: Callable[[ChronicalsConfig], Steps],
        output_dir: Path,
    ):
        self.session = session
        self.steps = steps
        self._divided = divided
        self._output_dir = output_dir
        self._times = 0
        self._updates_freed = 0
        self._bound = why_ranks_are_bound(session)
        self._exchange: HostExchange | None = None
        self._has_agreed = False
        self._doing = ""

    def __enter__(self) -> Recovery:
        if self.session.ranks.count > 1 and self._bound is None:
            self._exchange = HostExchange(self.session.ranks)
        return self

    def __exit__(self, *_: object) -> None:
        if self._exchange is not None:
            self._exchange.close()

    def rehearse(self) -> None:
        """Rehearse the step with the longest documents; all ranks call it before the first step.

        If that runs out of memory, the run takes less before it has trained anything.

        Raises:
            TrainingError: there is no way to take less.
        """
        if not is_limited(self.session.precision.device):
            return
        if self._bound is not None:
            logger.info("fit: the longest documents are not rehearsed: %s", self._bound)
            return
        before = own_random_states()
        while self._attempt(REHEARSAL, self._rehearsal) is None:
            pass
        set_random_states(before)
        logger.info("fit: a step of the longest documents was rehearsed, and fits")

    def _rehearsal(self) -> bool:
        self.session.rehearse(self.steps.heaviest())
        self.agree()
        return True

    def train(
        self, number: int, step: Step, inspect: Callable[[], None] | None
    ) -> dict[str, Tensor] | None:
        """Take an optimizer step, as ``Session.train_once``; all ranks call it.

        Returns:
            The step's scalars. None if memory was too small: all is then as before the step, and
                the same documents are to be taken from ``steps`` again.

        Raises:
            TrainingError: memory was too small, and there is no way to take less or to go on.
        """
        return self._attempt(
            f"in step {number}", lambda: self.session.train_once(step, inspect), updates=True
        )

    def _attempt(
        self, doing: str, work: Callable[[], Result], updates: bool = False
    ) -> Result | None:
        """Return the result of ``work``; None if memory was too small, and the run takes less now."""
        self._doing = doing
        self._has_agreed = False
        before = own_random_states()
        try:
            with checkpoints_end_with_errors():
                return work()
        except torch.OutOfMemoryError as error:
            shortage = Shortage.of(error, self.session.precision.device)
            is_told = isinstance(error, OutOfMemoryElsewhere)
            traceback.clear_frames(error.__traceback__)
        # Only here are the error and the tensors of its frames gone.
        self._check_that_nothing_changed(shortage, updates)
        if self._exchange is not None and not is_told:
            self._exchange([1])
        self.session.forget_step()
        release_memory()
        set_random_states(before)
        self._take_less(self._of_all_ranks(shortage, is_told))
        return None

    def agree(self) -> None:
        """Find out whether another rank ran out of memory; all ranks call it once in an attempt.

        A rank that ran out does not come here, but exchanges the same number.

        Raises:
            OutOfMemoryElsewhere: one did.
        """
        if self._exchange is None:
            return
        ran_out = [rank for rank, (failed,) in enumerate(self._exchange([0])) if failed]
        if ran_out:
            raise OutOfMemoryElsewhere(f"rank {ran_out[0]} ran out of memory")
        self._has_agreed = True

    def free(self, words: str) -> None:
        """Free memory after an update ran out of it, so that it can be finished.

        Raises:
            TrainingError: that was done ``MAX_RECOVERIES`` times already.
        """
        if self._updates_freed == MAX_RECOVERIES:
            raise self._error(words, f"{MAX_RECOVERIES} updates ran out of memory before")
        self._updates_freed += 1
        release_memory()
        logger.warning(
            "%s: out of memory in the update (%s): what was free is given back, and the update is "
            "finished (%d of at most %d times)",
            self._doing,
            words.partition("\n")[0],
            self._updates_freed,
            MAX_RECOVERIES,
        )

    def _check_that_nothing_changed(self, shortage: Shortage, updates: bool) -> None:
        """Check that what was attempted can be repeated, on all ranks.

        Raises:
            TrainingError: weights may have changed, or other ranks have gone on or cannot be told.
        """
        session = self.session
        words = shortage.words
        if updates and session.decisions["optimizer_in_backward"].runs:
            raise self._error(
                words,
                "optimizer_in_backward may have updated some weights already, so the step cannot "
                f"be repeated; with less, {how_to_resume(self._output_dir)}",
            )
        if updates and (session.is_updated or session.optimizer.is_begun):
            raise self._error(
                words,
                "the weights are updated already, at least in part, so the step cannot be "
                f"repeated; with less, {how_to_resume(self._output_dir)}",
            )
        if self._bound is not None:
            raise self._error(words, f"the other processes wait within the step: {self._bound}")
        if self._has_agreed:
            raise self._error(words, "the other processes have gone on to the update")

    def _of_all_ranks(self, shortage: Shortage, is_told: bool) -> Shortage:
        """Return the first rank's shortage, with the most bytes that a rank needs.

        Args:
            shortage: of this rank.
            is_told: whether another rank ran out, and not this one.
        """
        ranks = self.session.ranks
        if ranks.count == 1:
            return shortage
        told = ranks.gather_values([None if is_told else shortage.words, shortage.needed])
        ran_out = [f"rank {rank}: {words}" for rank, (words, _) in enumerate(told) if words]
        return Shortage(ran_out[0], max(needed for _, needed in told))

    def _take_less(self, shortage: Shortage) -> None:
        """Make the session take less memory, the same on all ranks, and log it.

        Raises:
            TrainingError: it did so ``MAX_RECOVERIES`` times already, or there is no way.
        """
        if self._times == MAX_RECOVERIES:
            reason = f"the run has taken less {MAX_RECOVERIES} times before"
            raise self._error(shortage.words, reason)
        before = self.session.config
        change = self._take_smaller_batches(shortage.needed) or self._take_a_policy()
        if change is None:
            raise self._error(
                shortage.words,
                f"{batch_in_words(before)} cannot be divided further, and no policy is left that "
                "changes no result and can be added between steps",
            )
        self._times += 1
        logger.warning(
            "%s: out of memory (%s): %s (%d of at most %d times); weights, data and random numbers "
            "are as before the step",
            self._doing,
            shortage.words,
            change,
            self._times,
            MAX_RECOVERIES,
        )

    def _take_smaller_batches(self, needed: int) -> str | None:
        """Divide the steps into smaller micro-batches; return that in words, None if impossible."""
        session = self.session
        if session.decisions["optimizer_in_backward"].runs:  # has one micro-batch a step
            return None
        before = session.config
        planned = in_smaller_batches(session.facts, session.decisions, needed)
        size = min(session.ranks.gather_values(0 if planned is None else planned.batch_size))
        if not size:
            return None
        packs = before.batch_size * before.gradient_accumulation_steps
        smaller = before.fitted(batch_size=size, gradient_accumulation_steps=packs // size)
        session.divide(smaller)
        self.steps = self._divided(smaller)
        words = f"{batch_in_words(before)} becomes {batch_in_words(smaller)}"
        if draws_numbers(session.model):
            words += ", and dropout draws other masks than in the larger batches"
        return words

    def _take_a_policy(self) -> str | None:
        """Start the next policy that can be added; return that in words, None if there is none."""
        addition = next(additions(self.session), None)
        if addition is None:
            return None
        addition.start()
        return f"{batch_in_words(self.session.config)} stays, and {addition.words}"

    def _error(self, words: str, reason: str) -> TrainingError:
        session = self.session
        ways = less_is_taken_by(session.config, session.ranks.count, session)
        return TrainingError(f"{self._doing}: out of memory ({words}): {reason}. {ways}")


def why_ranks_are_bound(session: Session) -> str | None:
    """Return why a rank that runs out of memory leaves others in a collective; None if it does not.

    Ranks agree once in a step, before gradients are summed over them.
    """
    if session.ranks.count == 1:
        return None
    reasons = {
        "processes that share packs exchange heads in each layer": session.ranks.context
        is not None,
        "weights are gathered for each layer": session.decisions["sharding"].how == DIVIDE_WEIGHTS
        or gathers_of(session.model) is not None,
        "gradients are summed in the backward pass": session.decisions["reduce_in_backward"].runs,
        "the objective takes means over all processes before a step": (
            type(session.objective).before_step is not Objective.before_step
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def is_limited(device: torch.device) -> bool:
    """Return whether a device has memory of its own that a step can run out of."""
    return device.type == "cuda"


def release_memory() -> None:
    """Free what nothing refers to, and give the allocator's free blocks back to the card."""
    gc.collect()
    if torch.cuda.is_available():
        # Copies of a failed step may still run on other streams, to memory that was just freed.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def own_random_states() -> list[Tensor]:
    """Return the random states of the host and of the current card."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return states


def set_random_states(states: list[Tensor]) -> None:
    """Set the random states that ``own_random_states`` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def batch_in_words(config: ChronicalsConfig) -> str:
    """Return how a step is divided into micro-batches, by the fields that say so."""
    return (
        f"batch_size {config.batch_size} x gradient_accumulation_steps "
        f"{config.gradient_accumulation_steps}"
    )
