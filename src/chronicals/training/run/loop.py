"""Loop of a run: steps, and between them metrics, evaluations, checkpoints and the end.

Ctrl-C, SIGTERM or ``ChronicalsTrainer.stop`` end a run after the current step.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from chronicals.data.packs.steps import Step, Steps
from chronicals.distributed import (
    WAITING,
    Mesh,
    RankWatch,
    fingerprint_here,
    prove_alike,
    whole_parts,
)
from chronicals.training.errors import Interrupted, RolloutFailed, TrainingError
from chronicals.training.run.callbacks import Callback, Callbacks
from chronicals.training.run.evaluation import evaluate
from chronicals.training.run.guard import check_finite_weights, check_step
from chronicals.training.run.live_samples import LiveSamples
from chronicals.training.run.recovery import (
    Recovery,
    is_limited,
    own_random_states,
    set_random_states,
)
from chronicals.training.run.resume import how_to_resume
from chronicals.training.run.run_checkpoints import RunCheckpoints
from chronicals.training.run.run_state import Run
from chronicals.training.session import Session, StepHooks
from chronicals.training.step.audit import FirstStepAudit
from chronicals.training.step.metrics import DeviceMoment, PendingMetrics
from chronicals.training.step.training_step import rate_factor, set_learning_rate

logger = logging.getLogger(__name__)


@dataclass
class Stop:
    """Request to end a run, from any rank.

    Attributes:
        reason: reason for the user; None if nobody has asked.
        save: True if a checkpoint is written first.
    """

    reason: str | None = None
    save: bool = True

    def ask(self, reason: str, save: bool = True) -> None:
        """Ask the run to end; may be called from any thread and from signal handlers."""
        self.save = save
        self.reason = reason

    def is_asked(
        self, ranks: Mesh, device: torch.device, callbacks: Callbacks, failed: bool
    ) -> bool:
        """Return whether the run is to end after this step, the same on all ranks.

        All ranks must call it.

        Args:
            ranks: all ranks of the run.
            device: device of the run.
            callbacks: callbacks of the run, one of which may have raised an exception.
            failed: whether this rank could not write a checkpoint; then, too, it is to end.

        Raises:
            BaseException: what a callback raised on the first rank since the last time;
                ``TrainingError`` on the others.
        """
        ends = failed or self.reason is not None
        if ranks.count == 1:
            return ends
        own = [ends, self.reason is not None and not self.save, callbacks.error is not None]
        with WAITING.within():  # around tolist() too: with nccl only it waits for the other ranks
            asked, unsaved, raised = ranks.sum(
                torch.tensor(own, dtype=torch.float32, device=device)
            ).tolist()
        if raised:
            callbacks.raise_anywhere()
        if asked:
            reasons = enumerate(ranks.gather_values(self.reason))
            elsewhere = next(
                (f"{reason} on rank {rank}" for rank, reason in reasons if reason is not None), None
            )
            self.reason = self.reason or elsewhere
            self.save = not unsaved
        return bool(asked)  # a request since the sum counts after the next step

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Return a context in which the first Ctrl-C or SIGTERM asks the run to end.

        The second ends the process at once. Both work in the main thread only.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def heed(number: int, _frame: object) -> None:
            reason = f"stopped by {signal.Signals(number).name}"
            logger.warning("%s: finishing the step and saving; again to stop at once", reason)
            restore()
            self.ask(reason)

        for number in before:
            signal.signal(number, heed)
        try:
            yield
        finally:
            restore()


class Loop:
    """The steps of a run, from the one where it stands to its end.

    Args:
        session: a session inside its ``stepping``.
        held_out: data to evaluate on; None for none.
        about: returns the description of the run's data that a checkpoint holds.
        recovery: what the run does when a step runs out of memory; None to end.
        live_samples: answers while the run goes on; None for none.
    """

    def __init__(
        self,
        session: Session,
        run: Run,
        steps: Steps,
        held_out: Steps | None,
        saved: RunCheckpoints,
        callbacks: Callbacks,
        stop: Stop,
        about: Callable[[], dict[str, Any]],
        watch: RankWatch,
        recovery: Recovery | None = None,
        live_samples: LiveSamples | None = None,
    ):
        self.session = session
        self.run = run
        self.steps = steps
        self.held_out = held_out
        self.saved = saved
        self.callbacks = callbacks
        self.stop = stop
        self.about = about
        self.watch = watch
        self.recovery = recovery
        self.live_samples = live_samples
        self.config = session.config
        self.device = session.precision.device
        self._told = False
        self._passes: list[DeviceMoment] = []
        self._pending: PendingMetrics | None = None

    def hooks(self) -> StepHooks:
        """Return what the session's steps call, for ``Session.stepping``."""
        hooks = StepHooks(self.saved.hold_update, self._wants_to_stop)
        if self.session.ranks.count > 1:  # else no watch needs to know of progress
            compiling = partial(self.watch.alone, "compiling the first step")
            hooks = replace(hooks, passed=self._passed, compiling=compiling)
        if self.recovery is not None:
            hooks = replace(hooks, agree=self.recovery.agree, free=self.recovery.free)
        return hooks

    def prove_that_ranks_are_alike(self) -> None:
        """Check that all ranks are at the same step of the same data, with the same weights.

        Raises:
            ConfigurationError: they are not; the message names what differs.
        """
        ranks = self.session.ranks
        if ranks.count == 1:
            return
        run = self.run
        weights = (
            p
            for p in whole_parts(self.session.model.parameters())
            if p.device.type == self.device.type
        )
        facts = {
            "training data": self.steps.data,
            "held-out data": None if self.held_out is None else self.held_out.data,
            "order": self.steps.fingerprint,
            "step": run.step,
            "position": run.position,
            "steps in all": run.total_steps,
            "best step": run.best_step,
            "weights": fingerprint_here(weights),
        }
        prove_alike(ranks, facts)

    def _wants_to_stop(self) -> bool:
        asked = self.stop.reason is not None
        return self.saved.failed or asked or self.callbacks.error is not None

    def train(self) -> None:
        """Run all steps; the metrics of one arrive while the next is computed.

        Raises:
            TrainingError: a loss or gradient is not a number, or nothing is learned.
            Interrupted: the run was asked to stop.
        """
        run = self.run
        session = self.session
        config = self.config
        audit = FirstStepAudit(session.model, session.optimizer) if run.applied == 0 else None
        session.model.train()
        self._rehearse()
        began = DeviceMoment(self.device)

        for step in self._steps_until_failure():
            factor = rate_factor(config, run.step, run.total_steps)
            set_learning_rate(session.optimizer, factor)
            with self.watch.step(run.step + 1):
                scalars = self._train_once(step, audit.see_gradients if audit else None)
            if scalars is None:  # its documents come again
                audit = audit and FirstStepAudit(session.model, session.optimizer)
                continue
            run.step = run.step + 1
            run.position = step.state
            if audit:
                # It waits for the device, which a first step may.
                values = {name: float(value) for name, value in scalars.items()}
                is_flat = (
                    values["grad_norm"] == 0.0
                    and session.objective.why_no_gradient(values) is not None
                )
                run.coverage = audit.close(bool(values["applied"] and factor), flat=is_flat)
                # A step that was skipped, whose rate is 0 or whose loss is flat has no coverage: look
                # at the next.
                audit = None if run.coverage else FirstStepAudit(session.model, session.optimizer)
            self.saved.prepare(run, session.optimizer)
            self._deliver_pending()
            passes = self._passes
            self._passes = []
            self._pending = PendingMetrics(
                scalars,
                began,
                passes,
                step.shown,
                step=run.step,
                learning_rate=config.learning_rate * factor,
                tokens=step.counts["tokens"],
                targets=step.counts["targets"],
                fill=step.counts["tokens"] / step.counts["slots"],
                epoch=self.steps.epoch(step.state),
            )
            began = self._pending.moment
            due = self._due()
            if due:
                self._deliver_pending()
                if self._is_over_after(due):
                    break
                began = DeviceMoment(self.device)
            self._tell_what_is_saved()
        self.saved.finish()
        self._tell_what_is_saved()
        self.callbacks.raise_anywhere()

    def _rehearse(self) -> None:
        """Rehearse the longest documents before the first step, if the run can take less.

        Where answers are drawn, no step is known before, and the largest possible one is rehearsed
        on any card: memory is then too small before the first step, and not in the hundredth.
        """
        if not self.run.total_steps - self.run.step:
            return
        with self.watch.limited("rehearsing, before the first step"):
            if self.recovery is not None:
                self.recovery.rehearse()
                self._take_over()
            elif self.session.objective.draws_answers and is_limited(self.device):
                before = own_random_states()
                self.session.rehearse(self.steps.heaviest())
                set_random_states(before)
                logger.info("a step of the longest possible answers was rehearsed, and fits")

    def _steps_left(self) -> Iterator[Step]:
        """Yield the steps to the end of the run; after one that was not taken, the same documents.

        These are divided into the micro-batches that the run takes from then on.
        """
        run = self.run
        left = 0 if run.gains_no_more(self.config) else run.total_steps - run.step
        while left > 0:
            for step in self.steps.steps(run.position, left):
                before = run.step
                yield step
                if run.step == before:
                    break
            left = run.total_steps - run.step

    def _steps_until_failure(self) -> Iterator[Step]:
        """Yield the steps to the end of the run; before answers that fail end it, save it.

        Raises:
            TrainingError: answers could not be drawn or rewarded.
        """
        try:
            yield from self._steps_left()
        except RolloutFailed as failure:
            self._deliver_pending()
            run = self.run
            if run.step:
                check_finite_weights(run, self.session.parameters, self.session.ranks)
                self._save()
                self.saved.finish()
                self._tell_what_is_saved()
            raise TrainingError(
                f"after step {run.step}: {failure}; {how_to_resume(run.output_dir)}"
            ) from failure

    def _save(self) -> None:
        """Start a checkpoint of the last step."""
        self.saved.save(
            self.run, self.session.optimizer, self.session.precision, self.steps, self.about()
        )

    def _train_once(
        self, step: Step, inspect: Callable[[], None] | None
    ) -> dict[str, Tensor] | None:
        """Take a step; return its scalars, or None if it is to be taken again with less memory."""
        if self.recovery is None:
            return self.session.train_once(step, inspect)
        scalars = self.recovery.train(self.run.step + 1, step, inspect)
        if scalars is None:
            self._passes = []
            self._take_over()
        return scalars

    def _take_over(self) -> None:
        """Take the batch and the steps to which a recovery has changed the run."""
        assert self.recovery is not None
        self.steps = self.recovery.steps
        self.config = self.session.config
        self.saved.config = self.session.config

    def _due(self) -> set[str]:
        """Return what is due after this step: ``evaluate``, ``save``, ``stop``."""
        run = self.run
        config = self.config
        due = set()
        last = run.step == run.total_steps
        if self.held_out is not None and (
            last or (config.eval_steps and run.step % config.eval_steps == 0)
        ):
            due.add("evaluate")
        if last or (config.save_steps and run.step % config.save_steps == 0):
            due.add("save")
        # Several ranks ask each other, which waits for the device, only if the metrics of the step,
        # which are the same on all of them, say that one rank was asked.
        ranks = self.session.ranks
        if (ranks.count == 1 or self._told) and self.stop.is_asked(
            ranks, self.device, self.callbacks, self.saved.failed
        ):
            due.add("stop")
        return due

    def _is_over_after(self, due: set[str]) -> bool:
        """Do what is due, and return whether the held-out loss no longer falls enough to go on.

        Raises:
            Interrupted: the run was asked to stop, perhaps during the evaluation.
        """
        run = self.run
        better = "evaluate" in due and self._evaluate()
        if self.live_samples is not None and due & {"evaluate", "save"}:
            self.live_samples.after_step(run.step)
        asked = self.stop.is_asked(
            self.session.ranks, self.device, self.callbacks, self.saved.failed
        )
        enough = run.gains_no_more(self.config)
        if (
            "save" in due
            or (better and self.saved.keeps_best)
            or enough
            or (asked and self.stop.save)
        ):
            check_finite_weights(run, self.session.parameters, self.session.ranks)
            self._save()
        if asked:
            self.saved.finish()
            self._tell_what_is_saved()
            if self.callbacks.error is not None:
                raise self.callbacks.error
            raise Interrupted(
                f"{self.stop.reason} after step {run.step}; {how_to_resume(run.output_dir)}"
            )
        if enough:
            # Older checkpoints do not know the best step.
            after = "" if run.best_step is None else f", after step {run.best_step}"
            lowest = f"the lowest held-out loss was {run.best_loss:.4f}{after}"
            logger.info("stopped early after step %d: %s", run.step, lowest)
        return enough

    def _deliver_pending(self) -> None:
        """Wait for the metrics of the last step, if they are not delivered, and deliver them."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        with self.watch.step(self.run.step):
            metrics = pending.arrive(self.watch.passed)
        self._told |= pending.told
        check_step(self.run, metrics, self.config, self.session.objective)
        self._tell(lambda callback: callback.step_done(metrics))
        self.run.last_loss = metrics.loss

    def _passed(self) -> None:
        """Record that the host has launched a micro-batch.

        The device reaches it later; the host waits for it when the metrics arrive.
        """
        self._passes.append(DeviceMoment(self.device))
        self.watch.passed()

    def _evaluate(self) -> bool:
        """Evaluate the held-out data, and return whether the loss is the lowest so far."""
        assert self.held_out is not None
        run = self.run
        session = self.session
        limited = partial(self.watch.limited, f"evaluating after step {run.step}")
        evaluation = evaluate(
            session.presented,
            session.objective,
            self.held_out,
            session.precision,
            session.ranks,
            limited,
            self.watch.passed,
        )
        if not math.isfinite(evaluation.loss):
            raise TrainingError(
                f"held-out loss after step {run.step}: {evaluation.loss}, not a number: the "
                "weights were damaged by training, "
                "which a lower learning_rate avoids, or what the model predicts for the held-out "
                "rows overflows; look at both. "
                f"This step is not saved; {how_to_resume(run.output_dir)}"
            )
        better = run.evaluated(evaluation)
        self._tell(lambda callback: callback.evaluated(run.step, evaluation))
        return better

    def _tell_what_is_saved(self) -> None:
        """Tell the callbacks about checkpoints that were written since the last call."""
        while self.saved.written:
            step, folder = self.saved.written.popleft()
            self._tell(methodcaller("saved", step, folder))

    def _tell(self, event: Callable[[Callback], None]) -> None:
        """Call the callbacks.

        If a user's callback may call the model, it attends as before the run meanwhile. The
        callback may leave it in evaluation mode, so training mode is set again.
        """
        if not self.callbacks.may_call_the_model:
            self.callbacks.tell(event)
            return
        with self.session.presented.attending_as_before():
            self.callbacks.tell(event)
        self.session.model.train()
