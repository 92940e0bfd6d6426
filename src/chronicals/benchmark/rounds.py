"""The order of a benchmark: prepare, rates, reference, a scouting round of all arms, decisive
rounds of the best, and last the arms that are only scouted.

The decisive rounds hold our arms and the two fastest peers, in alternating order (A B C, C B A, A B
C …), so that a drift of the card's clocks affects all alike. An arm continues in the process of its
scouting round if the card holds the memory of all waiting processes, else it starts a new process
over the same prepared files. The last arm of a round is the first of the next and continues in its
process in any case. While one arm runs, the process of the next starts and imports what it needs,
and so does that of the reference, beside the preparation and beside a peer that makes its own steps
of pairs.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chronicals.benchmark.floor import Job
from chronicals.benchmark.measurement import COMPARED, Measurement
from chronicals.benchmark.parity import Tolerance, refusal
from chronicals.benchmark.processes import (
    OURS,
    REFERENCE,
    Arm,
    ArmFailed,
    ArmTimedOut,
    RunningArm,
    missing,
    run_preparation,
)
from chronicals.benchmark.work import Work
from chronicals.config import ConfigurationError

logger = logging.getLogger(__name__)

BEST_PEERS = 2
SCOUTING = "scout"
SURVEY = "survey"
CONTEXT_GIB = 0.7
"""Device memory of a process besides its tensors."""

PREPARATION_SECONDS = 600
"""Least time limit of the preparation, which writes weights."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How a row is measured.

    Attributes:
        against: peers by name.
        variants: changes to our configuration, each an arm of its own.
        scouted: further changes, whose arms run in the scouting round only.
        rounds: number of decisive rounds.
        time_limit: seconds for the whole benchmark; the arm that runs then is ended and has no
            figures. None: no limit.
        arm_timeout: seconds for one process.
        reference_steps: at most so many are compared with the fp32 reference.
        trace: where to write a trace of ours; with None a few steps are still traced for the launch
            gaps.
    """

    against: Sequence[str] = ()
    variants: Sequence[dict[str, Any]] = ()
    scouted: Sequence[dict[str, Any]] = ()
    rounds: int = 3
    time_limit: float | None = None
    arm_timeout: float = 300
    reference_steps: int = COMPARED
    tolerance: Tolerance = field(default_factory=Tolerance)
    trace: Path | None = None

    def left(self, began: float) -> float:
        """Seconds of the time limit that are left."""
        return (
            math.inf if self.time_limit is None else self.time_limit - (time.perf_counter() - began)
        )

    def within_limit(self, seconds: float, began: float) -> float:
        """``seconds``, or what is left of the time limit if that is less."""
        return max(min(seconds, self.left(began)), 0.0)


@dataclass
class Row:
    """All that was measured of a row, also if it ended early.

    Attributes:
        rates: of the machine, with the reference step; empty if they could not be measured.
        job: sizes of a mean step.
        reference: the fp32 steps.
        runs: measurements of each arm; the first is the scouting round's.
        refused, failed, absent: arms without a speed, with the reason.
        orders: arms of each decisive round, in the order they ran.
        notes: what the reader must know besides.
        seconds: of the whole benchmark.
    """

    work: Work
    job: Job
    rates: dict[str, Any] = field(default_factory=dict)
    reference: Measurement | None = None
    runs: dict[str, list[Measurement]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    orders: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def decisive(self, name: str) -> list[Measurement]:
        """Runs of the decisive rounds, or the scouting run of an arm that was in none."""
        return self.runs[name][1:] or self.runs[name]


def measure(
    work: Work,
    options: Options,
    say: Say = logger.info,
    keep: Callable[[Row], None] = lambda row: None,
    began: float | None = None,
) -> Row:
    """Measure a row.

    Args:
        began: start of its time by ``time.perf_counter``; by default now.
        say: called with a line of text as each part begins.
        keep: called with the row after every arm, so that an interrupted benchmark keeps what it
            measured.

    Raises:
        ConfigurationError: the reference of adapters needs a package that is not installed, or the
            preparation failed.
    """
    lacking = missing(REFERENCE, work.mode)
    if lacking:
        raise ConfigurationError(
            f"mode={work.mode!r}: its reference needs {', '.join(lacking)}; install "
            "chronicals[peft]"
        )
    began = time.perf_counter() if began is None else began
    say(
        "preparing weights, tokens and adapters; measuring this machine's rates at the step's "
        "shapes"
    )
    reference = RunningArm(work, REFERENCE, options.reference_steps, warm_up=0)
    with ExitStack() as unless_prepared:
        unless_prepared.callback(reference.end)
        rates = _prepared(work, options, began)
        unless_prepared.pop_all()
    row = Row(work, work.job(), rates)
    if "error" in rates:
        row.notes.append(f"no reference step: the rates could not be measured: {rates['error']}")
    if not row.job.shape.countable:
        row.notes.append(
            "no MFU and no reference step: beside its experts this model has parts (latent "
            "attention, shared experts, dense "
            "layers) that are not counted here"
        )
    elif row.job.pairs:
        row.notes.append(
            "no MFU and no reference step: prompts that answers share, and a reference policy, "
            "are not counted here; tokens "
            "are those of prompt and answer of both sides, in every arm"
        )
    elif row.job.taught:
        row.notes.append(
            "no MFU and no reference step: the products of a teacher are not counted here"
        )
    elif row.job.uneven:
        row.notes.append(
            "no MFU and no reference step: adapters differ between layers or have lengths, and "
            "their products are not counted"
        )
    session = _Session(row, options, say, keep, began, begun_references={"": reference})
    try:
        session.measure_reference()
        arms = session.scout()
        session.decide(arms)
        session.survey()
    finally:
        session.end_all_but([])
    row.seconds = time.perf_counter() - began
    keep(row)
    return row


def _prepared(work: Work, options: Options, began: float) -> dict[str, Any]:
    """Prepare the work's files. Returns the machine's rates."""
    try:
        return run_preparation(
            work, options.within_limit(max(options.arm_timeout, PREPARATION_SECONDS), began)
        )
    except ArmFailed as error:
        if options.left(began) <= 0:
            raise ConfigurationError(
                f"time_limit={options.time_limit:g}: it passed while weights, tokens and rates "
                "were prepared, and no arm ran; "
                "give more seconds, or keep what is prepared with --folder"
            ) from None
        raise ConfigurationError(
            f"model={work.name!r}, data={work.data!r}: could not be prepared: {error}"
        ) from None


def order_of(arms: Sequence[Arm], number: int) -> list[Arm]:
    """The arms of decisive round ``number`` (from 0) in the order they run."""
    return list(arms) if number % 2 == 0 else list(reversed(arms))


@dataclass
class _Session:
    """One row being measured."""

    row: Row
    options: Options
    say: Say
    keep: Callable[[Row], None]
    began: float
    took: dict[str, float] = field(default_factory=dict)
    begun: dict[str, RunningArm] = field(default_factory=dict)
    waiting: dict[str, RunningArm] = field(default_factory=dict)
    runs_next: str | None = None
    own_references: dict[str, Measurement] = field(default_factory=dict)
    begun_references: dict[str, RunningArm] = field(default_factory=dict)

    def measure_reference(self) -> None:
        self.say("running the fp32 reference")
        try:
            fills = self._weights_fill_card()
            if fills:
                self.begun_references.pop("").end()
                self.row.notes.append(
                    "the reference has one step: fp32 weights and states are more than the card "
                    "holds"
                )
            self.row.reference = self._reference(
                None, "", steps=1 if fills else self.options.reference_steps
            )
        except ArmFailed as error:
            self.row.notes.append(f"no reference: {error}")

    def _weights_fill_card(self) -> bool:
        """Whether fp32 weights, gradients and states, where all of them are trained, are more
        than the card's memory.
        """
        gib = self.row.rates.get("machine", {}).get("memory_gib", math.inf)
        return self.row.work.mode == "full" and 16 * self.row.job.shape.parameters > gib * 2**30

    def _reference(
        self,
        documents: Path | None,
        label: str,
        changes: dict[str, Any] | None = None,
        steps: int | None = None,
    ) -> Measurement:
        """The fp32 ``steps``, by default as many as the options say. If they fail, they run again
        with all waiting processes ended, then the first step alone, which needs no optimizer
        states.

        Args:
            changes: fields of other adapters than the row's.
        """

        def run(steps: int) -> Measurement:
            arm = Arm(REFERENCE, changes or {})
            reference = self.begun_references.pop(label, None) or RunningArm(
                self.row.work, arm, steps, documents=documents, label=label, warm_up=0
            )
            self._begin(Arm(OURS), SCOUTING)
            return reference.measure(
                self.options.within_limit(self.options.arm_timeout, self.began)
            )

        steps = steps or self.options.reference_steps
        try:
            return run(steps)
        except ArmFailed as error:
            if self._late(0.0):
                raise ArmFailed("the time limit was reached") from error
            if self.waiting:
                self._end_waiting()
                return self._reference(documents, label, changes, steps)
            if steps == 1:
                raise
            self.row.notes.append(f"the reference has one step, more failed: {error}")
            return run(1)

    def scout(self) -> list[Arm]:
        """Run every arm once. Returns those of the decisive rounds: ours, and the fastest peers
        that were not refused.
        """
        row = self.row
        ours = [Arm(OURS), *(Arm(OURS, changes) for changes in self.options.variants)]
        peers = []
        for name in self.options.against:
            lacking = missing(name, row.work.mode)
            if lacking:
                row.absent[name] = f"not installed: {', '.join(lacking)}"
                self.say(f"{name}: skipped, {row.absent[name]}")
            else:
                peers.append(Arm(name))
        self._run_once([*ours, *peers], SCOUTING)
        able = [arm for arm in peers if arm.name in row.runs and arm.name not in row.refused]
        best = sorted(able, key=lambda arm: -_median(row.runs[arm.name][0].rates))[:BEST_PEERS]
        best.sort(key=lambda arm: arm.name in self.waiting)
        chosen = [
            arm for arm in ours if arm.name in row.runs and arm.name not in row.refused
        ] + best
        self.end_all_but(chosen)
        return chosen

    def survey(self) -> None:
        """Run the arms that are only scouted, once each, after the decisive rounds."""
        self.end_all_but([])
        arms = {arm.name: arm for arm in (Arm(OURS, changes) for changes in self.options.scouted)}
        self._run_once([arm for name, arm in arms.items() if name not in self.row.runs], SURVEY)

    def _run_once(self, arms: Sequence[Arm], label: str) -> None:
        for number, arm in enumerate(arms):
            for soon in arms[number : number + 2]:
                self._begin(soon, label)
            self.runs_next = arm.name if arm is arms[-1] and not self.waiting else None
            self.run(arm, "scouting", label)

    def _begin(self, arm: Arm, label: str) -> None:
        """Start the arm's process, unless it is started or had its first round."""
        if arm.name not in {*self.begun, *self.row.runs, *self.row.failed} and not self._late(0.0):
            self.begun[arm.name] = self._start(arm, label)

    def decide(self, arms: list[Arm]) -> None:
        if self.options.rounds and Arm(OURS) not in arms:
            self.row.notes.append("no decisive rounds: our own arm has no speed")
            return
        last_goes_on = (
            len(arms) > 1 and arms[-1].name in self.waiting and arms[0].name not in self.waiting
        )
        for number in range(self.options.rounds):
            if self._late(sum(self._expected(arm) for arm in arms if self._able(arm))):
                self.row.notes.append(
                    f"stopped by the time limit after {number} of {self.options.rounds} decisive "
                    "rounds"
                )
                self.say(self.row.notes[-1])
                return
            ran = []
            left = [arm for arm in order_of(arms, number + last_goes_on) if self._able(arm)]
            while left:
                arm = left.pop(0)
                if (
                    left
                    and self._able(left[0])
                    and left[0].name not in {*self.waiting, *self.begun}
                ):
                    self.begun[left[0].name] = self._start(left[0], f"round{number + 1}")
                if self._able(arm):
                    self.runs_next = (
                        arm.name if not left and number + 1 < self.options.rounds else None
                    )
                    self.run(
                        arm, f"round {number + 1} of {self.options.rounds}", f"round{number + 1}"
                    )
                    ran.append(arm.name)
            self.row.orders.append(ran)

    def _able(self, arm: Arm) -> bool:
        return arm.name not in self.row.refused and arm.name not in self.row.failed

    def _expected(self, arm: Arm) -> float:
        """Expected seconds of the arm's next round."""
        if arm.name in self.waiting:
            return 2.0 * sum(self.row.runs[arm.name][-1].seconds[-self.row.work.steps :])
        return self.took.get(arm.name, 0.0)

    def run(self, arm: Arm, stage: str, label: str) -> None:
        if self._late(0.0):
            self._stopped(arm, stage)
            return
        self.say(f"{stage}: {arm.name}")
        row = self.row
        began = time.perf_counter()
        self._begin_reference(arm, label)
        try:
            measured = self._measured(arm, label)
        except ArmFailed as error:
            if self._late(0.0):
                self._stopped(arm, stage)
                return
            row.failed[arm.name] = str(error)
            self.say(f"{arm.name}: failed, {error}")
            self.keep(row)
            return
        self.took[arm.name] = time.perf_counter() - began
        row.runs.setdefault(arm.name, []).append(measured)
        reason = self._refusal(arm, measured, label)
        if reason:
            row.refused[arm.name] = reason
            self.say(f"{arm.name}: no speed, {reason}")
        row.seconds = time.perf_counter() - self.began
        self.keep(row)

    def _stopped(self, arm: Arm, stage: str) -> None:
        self.row.notes.append(
            f"{arm.name}: not measured in the {stage}, the time limit was reached"
        )
        self.say(self.row.notes[-1])
        self.keep(self.row)

    def _measured(self, arm: Arm, label: str) -> Measurement:
        """A round of the arm, in its waiting process or in a new one; waiting processes are
        ended if it does not fit beside them."""
        peak = max((run.peak_gib for run in self.row.runs.get(arm.name, [])), default=0.0)
        if arm.name not in self.waiting and not self._has_memory_for(peak):
            self._end_waiting()
        try:
            return (
                self._next_round(arm) if arm.name in self.waiting else self._first_round(arm, label)
            )
        except ArmFailed as error:
            if not self.waiting or self._late(0.0) or isinstance(error, ArmTimedOut):
                raise
            self.say(
                f"{arm.name}: failed while others waited in the card's memory; these are ended, "
                "it is run again"
            )
            self._end_waiting()
            return self._first_round(arm, label)

    def _next_round(self, arm: Arm) -> Measurement:
        running = self.waiting.pop(arm.name)
        measured = running.measure(self.options.within_limit(self.options.arm_timeout, self.began))
        if running.waits:
            self.waiting[arm.name] = running
        return measured

    def _start(self, arm: Arm, label: str) -> RunningArm:
        """Start the arm's process. It can run further rounds unless the arm is only scouted;
        ours is traced when scouted.
        """
        work = self.row.work
        scouting = label == SCOUTING
        trace = (
            (self.options.trace or work.folder / "results" / "trace.json")
            if scouting and arm == Arm(OURS)
            else None
        )
        return RunningArm(
            work,
            arm,
            work.steps,
            trace,
            label=label,
            further=0 if label == SURVEY else self.options.rounds,
        )

    def _first_round(self, arm: Arm, label: str) -> Measurement:
        running = self.begun.pop(arm.name, None) or self._start(arm, label)
        measured = running.measure(self.options.within_limit(self.options.arm_timeout, self.began))
        if running.waits and (arm.name == self.runs_next or self._fits_beside_others(measured)):
            self.waiting[arm.name] = running
        else:
            running.end()
        return measured

    def _fits_beside_others(self, measured: Measurement) -> bool:
        """Whether the card holds the memory of this and all waiting processes while any of them,
        or one like it, runs.
        """
        more = [run.peak_gib - run.held_gib for run in self._waiting_runs()]
        return self._has_memory_for(max([measured.peak_gib, *more]), measured)

    def _has_memory_for(self, gib: float, *beside: Measurement) -> bool:
        memory = self.row.rates.get("machine", {}).get("memory_gib", math.inf)
        return (
            sum(run.held_gib + CONTEXT_GIB for run in (*self._waiting_runs(), *beside))
            + gib
            + CONTEXT_GIB
            < memory
        )

    def _waiting_runs(self) -> list[Measurement]:
        return [self.row.runs[name][-1] for name in self.waiting]

    def _end_waiting(self) -> None:
        while self.waiting:
            self.waiting.popitem()[1].end()

    def end_all_but(self, arms: Sequence[Arm]) -> None:
        names = {arm.name for arm in arms}
        for running in (self.begun, self.waiting, self.begun_references):
            for name in running.keys() - names:
                running.pop(name).end()

    def _refusal(self, arm: Arm, measured: Measurement, label: str) -> str | None:
        """Why the arm has no speed, by the reference on the documents that the arm itself took;
        None if it has one.
        """
        reference = self.row.reference
        changes = self.row.work.other_adapters(arm.changes)
        try:
            if changes:
                reference = self._reference_with(changes)
            elif measured.own_batches:
                reference = self._reference_on(measured, arm, label)
        except ArmFailed as error:
            return (
                f"no reference {'with its own adapters' if changes else 'on its own batches'}: "
                f"{error}"
            )
        if reference is not None and reference is not self.row.reference:
            measured.extra["reference"] = {
                "losses": reference.losses,
                "grad_norms": reference.grad_norms,
            }
        fields = {**self.row.work.fields, **arm.changes}
        dropout = (
            arm.ours
            and bool(fields.get("use_lora"))
            and bool(self.row.work.config(**arm.changes).lora_dropout)
        )
        return refusal(measured, reference, self.options.tolerance, dropout)

    def _reference_with(self, changes: dict[str, Any]) -> Measurement:
        text = json.dumps(changes)
        if text not in self.own_references:
            self.own_references[text] = self._reference(
                None, f"adapters{len(self.own_references)}", changes
            )
        return self.own_references[text]

    def _reference_on(self, measured: Measurement, arm: Arm, label: str) -> Measurement:
        """What the arm's own first steps should be, as many as the row's reference has. Where
        that has one, for the model fills the card, it is the reference of all arms that begin as
        the row does."""
        of_row = self.row.reference
        steps = self.options.reference_steps if of_row is None else len(of_row.losses)
        if of_row and steps == 1 and measured.begins_alike:
            return of_row
        text = json.dumps(measured.own_batches)
        if text not in self.own_references:
            path, name = self._batches_of(arm, label)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            self.own_references[text] = self._reference(path, name, steps=steps)
        return self.own_references[text]

    def _begin_reference(self, arm: Arm, label: str) -> None:
        """Start the process of the reference on the arm's own steps; one that nothing asked for
        is ended.
        """
        while self.begun_references:
            self.begun_references.popitem()[1].end()
        work = self.row.work
        of_row = self.row.reference
        if (
            of_row is not None
            and work.kind == "pairs"
            and not arm.ours
            and arm.name not in self.row.runs
        ):
            path, name = self._batches_of(arm, label)
            self.begun_references[name] = RunningArm(
                work, REFERENCE, len(of_row.losses), documents=path, label=name, warm_up=0
            )

    def _batches_of(self, arm: Arm, label: str) -> tuple[Path, str]:
        """Where the steps of the arm's own are written, and the name of the reference on them."""
        return (
            self.row.work.folder / "results" / f"batches-{arm.kind}-{label}.json",
            f"{arm.kind}-{label}",
        )

    def _late(self, needed: float) -> bool:
        return self.options.left(self.began) < needed


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
