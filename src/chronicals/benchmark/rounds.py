"""The order of a benchmark.

After preparation and rates come the reference, a scouting round of all arms, decisive rounds of the
best, and last the arms that are only scouted.

The decisive rounds run in alternating order (A B C, C B A, A B C …), so that a drift of the card's
clocks affects all arms equally. An arm continues in the process of its scouting round if the card
holds the memory of all waiting processes; otherwise it starts a new process over the same prepared
files. The last arm of a round is the first of the next and always continues in its process. While
one arm runs, the process of the next starts and imports what it needs; the process of the reference
starts during the preparation.

Here all arms are ours. ``benchmarks/peers/rounds.py`` adds peers.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chronicals.benchmark.measurement import COMPARED, Measurement
from chronicals.benchmark.parity import Tolerance, refusal
from chronicals.benchmark.processes import (
    OUR_ARM,
    REFERENCE_ARM,
    Arm,
    ArmFailed,
    ArmTimedOut,
    RunningArm,
    run_preparation,
)
from chronicals.benchmark.work import Work
from chronicals.config import ConfigurationError
from chronicals.step_work import Job

logger = logging.getLogger(__name__)

BEST_PEERS = 2
"""Peers that run in the decisive rounds."""

SCOUTING = "scout"
SURVEY = "survey"

CONTEXT_GIB = 0.7
"""Device memory of a process besides its tensors."""

PREPARATION_SECONDS = 600
"""Shortest time limit of the preparation, which writes weights."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """Options of the measurement of a row.

    Attributes:
        against: peers by name.
        variants: changes to our configuration, each an arm of its own.
        scouted: further changes, whose arms run once, after the decisive rounds.
        rounds: number of decisive rounds.
        time_limit: seconds for the whole benchmark; the arm that runs then is ended and has no
            figures. None: no limit.
        arm_timeout: seconds for one process.
        reference_steps: number of first steps that are compared with the fp32 reference, at most.
        trace: file for a trace of our arm; with None a few steps are still traced for the launch
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
        """Return the seconds of the time limit that are left."""
        if self.time_limit is None:
            return math.inf
        return self.time_limit - (time.perf_counter() - began)


@dataclass
class MeasuredRow:
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
        """Return the runs of the decisive rounds, or the scouting run of an arm without any."""
        return self.runs[name][1:] or self.runs[name]


def measure_row(
    work: Work,
    options: Options,
    say: Say = logger.info,
    keep: Callable[[MeasuredRow], None] = lambda row: None,
    began: float | None = None,
    session_class: type[BenchmarkSession] | None = None,
) -> MeasuredRow:
    """Measure a row.

    Args:
        work: what all arms train.
        options: which arms, rounds and limits.
        say: called with a line of text as each part begins.
        keep: called with the row after every arm, so that an interrupted benchmark keeps what it
            measured.
        began: start of its time by ``time.perf_counter``; by default now.
        session_class: which arms run; by default ours alone.

    Raises:
        ConfigurationError: the reference of adapters needs a package that is not installed, or the
            preparation failed.
    """
    if work.adapts and find_spec("peft") is None:
        raise ConfigurationError(
            f"mode={work.mode!r}: its reference needs peft; install chronicals[peft]"
        )
    began = time.perf_counter() if began is None else began
    say(
        "preparing weights, tokens and adapters; measuring this machine's rates at the step's "
        "shapes"
    )
    reference = RunningArm(work, REFERENCE_ARM, options.reference_steps, warm_up=0)
    with ExitStack() as unless_prepared:
        unless_prepared.callback(reference.end)
        timeout = min(max(options.arm_timeout, PREPARATION_SECONDS), options.left(began))
        try:
            rates = run_preparation(work, max(timeout, 0.0))  # the machine's
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
        unless_prepared.pop_all()
    row = MeasuredRow(work, work.job(), rates)
    if "error" in rates:
        row.notes.append(f"no reference step: the rates could not be measured: {rates['error']}")
    reason = row.job.why_uncounted
    if reason:
        row.notes.append(f"no MFU and no reference step: {reason}")
    session = (session_class or BenchmarkSession)(
        row, options, say, keep, began, begun_references={"": reference}
    )
    try:
        session.measure_reference()
        ours = [Arm(OUR_ARM), *(Arm(OUR_ARM, changes) for changes in options.variants)]
        session.decide(session.scout(ours))
        session.survey()
    finally:
        session.end_all_but([])
    row.seconds = time.perf_counter() - began
    keep(row)
    return row


@dataclass
class BenchmarkSession:
    """One row being measured.

    Attributes:
        began: start of the benchmark by ``time.perf_counter``.
        durations: seconds of each arm's last round, by name.
        begun: processes that have not been asked for a round.
        waiting: processes that can be asked for another round.
        runs_next: the arm that also begins the next round, which keeps its process.
        other_references: fp32 steps of other adapters or documents than the row's, by these as
            JSON.
        begun_references: processes of references that have not been asked; "" is the row's.
    """

    row: MeasuredRow
    options: Options
    say: Say
    keep: Callable[[MeasuredRow], None]
    began: float
    durations: dict[str, float] = field(default_factory=dict)
    begun: dict[str, RunningArm] = field(default_factory=dict)
    waiting: dict[str, RunningArm] = field(default_factory=dict)
    runs_next: str | None = None
    other_references: dict[str, Measurement] = field(default_factory=dict)
    begun_references: dict[str, RunningArm] = field(default_factory=dict)

    def measure_reference(self) -> None:
        """Run the row's fp32 reference, of a single step if the card holds no more."""
        self.say("running the fp32 reference")
        row = self.row
        steps = self.options.reference_steps
        # 16 bytes: fp32 weight, gradient and two states of AdamW.
        needed = 16 * row.job.shape.parameters if row.work.mode == "full" else 0
        if needed > row.rates.get("machine", {}).get("memory_gib", math.inf) * 2**30:
            self.begun_references.pop("").end()
            row.notes.append(
                "the reference has one step: fp32 weights and states are more than the card holds"
            )
            steps = 1
        try:
            row.reference = self.reference_with(Arm(REFERENCE_ARM), "", steps)
        except ArmFailed as error:
            row.notes.append(f"no reference: {error}")

    def reference_with(
        self, arm: Arm, label: str, steps: int, documents: Path | None = None
    ) -> Measurement:
        """Run fp32 steps.

        If they fail, they run again with all waiting processes ended, then the first step alone,
        which needs no optimizer states.

        Args:
            arm: the reference, with fields of other adapters than the row's as its changes.
            label: part of the names of its files.
            steps: number of steps.
            documents: file with the documents of each step; by default the work's.

        Raises:
            ArmFailed: the first step alone failed, too, or the time limit was reached.
        """

        def run(steps: int) -> Measurement:
            process = self.begun_references.pop(label, None) or RunningArm(
                self.row.work, arm, steps, documents=documents, label=label, warm_up=0
            )
            self.begin(Arm(OUR_ARM), SCOUTING)
            return process.measure(self._arm_seconds())

        try:
            return run(steps)
        except ArmFailed as error:
            if self.is_late():
                raise ArmFailed("the time limit was reached") from error
            if self.waiting:
                self._end_waiting()
                return self.reference_with(arm, label, steps, documents)
            if steps == 1:
                raise
            self.row.notes.append(f"the reference has one step, more failed: {error}")
            return run(1)

    def scout(self, ours: list[Arm]) -> list[Arm]:
        """Run our arms once. Returns the arms of the decisive rounds."""
        self.run_once(ours, SCOUTING)
        chosen = self.with_speed(ours)
        self.end_all_but(chosen)
        return chosen

    def with_speed(self, arms: Sequence[Arm]) -> list[Arm]:
        """Return the arms that ran and were not refused."""
        return [arm for arm in arms if arm.name in self.row.runs and self._can_run(arm)]

    def survey(self) -> None:
        """Run the arms that are only scouted, once each, after the decisive rounds."""
        self.end_all_but([])
        scouted = [Arm(OUR_ARM, changes) for changes in self.options.scouted]
        arms = {arm.name: arm for arm in scouted}  # each once
        self.run_once([arm for name, arm in arms.items() if name not in self.row.runs], SURVEY)

    def run_once(self, arms: Sequence[Arm], label: str) -> None:
        """Run a round of each arm; the process of the next one starts meanwhile."""
        for number, arm in enumerate(arms):
            for next_arm in arms[number : number + 2]:
                self.begin(next_arm, label)
            self.runs_next = arm.name if arm is arms[-1] and not self.waiting else None
            self.run(arm, "scouting", label)

    def begin(self, arm: Arm, label: str) -> None:
        """Start the arm's process, unless it was started or had its first round."""
        known = {*self.begun, *self.row.runs, *self.row.failed}
        if arm.name not in known and not self.is_late():
            self.begun[arm.name] = self._start(arm, label)

    def decide(self, arms: list[Arm]) -> None:
        """Run the decisive rounds of the arms."""
        count = self.options.rounds
        if count and Arm(OUR_ARM) not in arms:
            self.row.notes.append("no decisive rounds: our own arm has no speed")
            return
        # The arm that was scouted last may have kept its process while the first has not.
        last_goes_on = (
            len(arms) > 1 and arms[-1].name in self.waiting and arms[0].name not in self.waiting
        )
        for number in range(count):
            expected = 0.0  # seconds of this round
            for arm in arms:
                if self._can_run(arm) and arm.name in self.waiting:
                    steps = self.row.runs[arm.name][-1].seconds[-self.row.work.steps :]
                    expected += 2.0 * sum(steps)
                elif self._can_run(arm):
                    expected += self.durations.get(arm.name, 0.0)
            if self.is_late(expected):
                self.row.notes.append(
                    f"stopped by the time limit after {number} of {count} decisive rounds"
                )
                self.say(self.row.notes[-1])
                return
            label = f"round{number + 1}"
            ran = []
            turned = (number + last_goes_on) % 2 == 1
            in_order = reversed(arms) if turned else arms
            left = [arm for arm in in_order if self._can_run(arm)]
            while left:
                arm = left.pop(0)
                if left and self._can_run(left[0]):
                    next_name = left[0].name
                    if next_name not in self.waiting and next_name not in self.begun:
                        self.begun[next_name] = self._start(left[0], label)
                if self._can_run(arm):
                    another_round = not left and number + 1 < count
                    self.runs_next = arm.name if another_round else None
                    self.run(arm, f"round {number + 1} of {count}", label)
                    ran.append(arm.name)
            self.row.orders.append(ran)

    def _can_run(self, arm: Arm) -> bool:
        return arm.name not in self.row.refused and arm.name not in self.row.failed

    def run(self, arm: Arm, stage: str, label: str) -> None:
        """Run a round of the arm, compare it with its reference, and keep the row.

        Args:
            arm: the arm.
            stage: the round in words.
            label: part of the names of the arm's files.
        """
        if self.is_late():
            self._stopped(arm, stage)
            return
        self.say(f"{stage}: {arm.name}")
        row = self.row
        began = time.perf_counter()
        self.begin_reference_of(arm, label)
        try:
            measured = self._measured(arm, label)
        except ArmFailed as error:
            if self.is_late():
                self._stopped(arm, stage)
                return
            row.failed[arm.name] = str(error)
            self.say(f"{arm.name}: failed, {error}")
            self.keep(row)
            return
        self.durations[arm.name] = time.perf_counter() - began
        row.runs.setdefault(arm.name, []).append(measured)
        reason = self._refusal(arm, measured, label)
        if reason:
            row.refused[arm.name] = reason
            self.say(f"{arm.name}: no speed, {reason}")
        row.seconds = time.perf_counter() - self.began
        self.keep(row)

    def _stopped(self, arm: Arm, stage: str) -> None:
        note = f"{arm.name}: not measured in the {stage}, the time limit was reached"
        self.row.notes.append(note)
        self.say(note)
        self.keep(self.row)

    def _measured(self, arm: Arm, label: str) -> Measurement:
        """Run a round of the arm, in its waiting process or in a new one.

        Waiting processes are ended if it does not fit beside them.
        """
        peak = max((run.peak_gib for run in self.row.runs.get(arm.name, [])), default=0.0)
        if arm.name not in self.waiting and not self._has_memory_for(peak):
            self._end_waiting()
        try:
            if arm.name not in self.waiting:
                return self._first_round(arm, label)
            process = self.waiting.pop(arm.name)
            measured = process.measure(self._arm_seconds())
            if process.waits:
                self.waiting[arm.name] = process
            return measured
        except ArmFailed as error:
            if not self.waiting or self.is_late() or isinstance(error, ArmTimedOut):
                raise
            self.say(
                f"{arm.name}: failed while others waited in the card's memory; these are ended, "
                "it is run again"
            )
            self._end_waiting()
            return self._first_round(arm, label)

    def _start(self, arm: Arm, label: str) -> RunningArm:
        """Start the arm's process.

        It can run further rounds unless the arm is only scouted; ours is traced when scouted.
        """
        work = self.row.work
        trace = None
        if label == SCOUTING and arm == Arm(OUR_ARM):
            trace = self.options.trace or work.folder / "results" / "trace.json"
        further = 0 if label == SURVEY else self.options.rounds
        return RunningArm(work, arm, work.steps, trace, label=label, further=further)

    def _first_round(self, arm: Arm, label: str) -> Measurement:
        process = self.begun.pop(arm.name, None) or self._start(arm, label)
        measured = process.measure(self._arm_seconds())
        # It may wait if the card holds the memory of this and all waiting processes while any of
        # them, or one like it, runs.
        waiting = [self.row.runs[name][-1] for name in self.waiting]
        largest = max([measured.peak_gib, *(run.peak_gib - run.held_gib for run in waiting)])
        fits = self._has_memory_for(largest, measured)
        if process.waits and (fits or arm.name == self.runs_next):
            self.waiting[arm.name] = process
        else:
            process.end()
        return measured

    def _has_memory_for(self, gib: float, *beside: Measurement) -> bool:
        memory = self.row.rates.get("machine", {}).get("memory_gib", math.inf)
        waiting = [self.row.runs[name][-1] for name in self.waiting]
        held = [run.held_gib + CONTEXT_GIB for run in (*waiting, *beside)]
        return sum(held) + gib + CONTEXT_GIB < memory

    def _end_waiting(self) -> None:
        while self.waiting:
            self.waiting.popitem()[1].end()

    def end_all_but(self, arms: Sequence[Arm]) -> None:
        """End all processes except those of ``arms``."""
        names = {arm.name for arm in arms}
        for processes in (self.begun, self.waiting, self.begun_references):
            for name in processes.keys() - names:
                processes.pop(name).end()

    def _refusal(self, arm: Arm, measured: Measurement, label: str) -> str | None:
        """Return why the arm has no speed; None if it has one.

        It is compared with the reference that has its adapters and documents.
        """
        row = self.row
        changes = row.work.other_adapters(arm.changes)
        try:
            if changes:
                key = json.dumps(changes)
                if key not in self.other_references:
                    adapters = f"adapters{len(self.other_references)}"
                    self.other_references[key] = self.reference_with(
                        Arm(REFERENCE_ARM, changes), adapters, self.options.reference_steps
                    )
                reference: Measurement | None = self.other_references[key]
            else:
                reference = self.reference_of(arm, measured, label)
        except ArmFailed as error:
            what = "with its own adapters" if changes else "on its own batches"
            return f"no reference {what}: {error}"
        if reference is not None and reference is not row.reference:
            measured.extra["reference"] = {
                "losses": reference.losses,
                "grad_norms": reference.grad_norms,
            }
        fields = {**row.work.fields, **arm.changes}
        dropout = (
            arm.kind == OUR_ARM
            and bool(fields.get("use_lora"))
            and bool(row.work.config(**arm.changes).lora_dropout)
        )
        return refusal(measured, reference, self.options.tolerance, dropout)

    def reference_of(self, arm: Arm, measured: Measurement, label: str) -> Measurement | None:
        """Return what the arm's first steps should be. Our arms take the row's documents."""
        return self.row.reference

    def begin_reference_of(self, arm: Arm, label: str) -> None:
        """Start the process of a reference that the arm will need; end one that was not used."""
        while self.begun_references:
            self.begun_references.popitem()[1].end()

    def is_late(self, seconds: float = 0.0) -> bool:
        """Return whether less than ``seconds`` of the time limit are left."""
        return self.options.left(self.began) < seconds

    def _arm_seconds(self) -> float:
        """Return the time limit, in seconds, of a process that starts now."""
        return max(min(self.options.arm_timeout, self.options.left(self.began)), 0.0)
