"""The order of a benchmark, and what becomes of arms that are absent, crash, or train wrongly."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import made
import pytest
from peers import names
from peers import rounds as peer_rounds
from peers.rounds import PeerSession

from chronicals.benchmark import processes, record, rounds
from chronicals.benchmark.processes import Arm, ArmFailed, ArmProcess, ArmTimedOut
from chronicals.benchmark.record import draw_row, to_dict
from chronicals.benchmark.rounds import Options, measure_row
from chronicals.config import ConfigurationError
from chronicals.step_work import DecoderShape, Job
from process_groups import members, wait_until

SPEEDS = {
    "ours": 2000.0,
    "ours lora_dropout=0.1": 1900.0,
    "transformers": 1000.0,
    "liger": 1500.0,
    "torch-compile": 1200.0,
}
FLOOR = {
    "products": 0.03,
    "attention": 0.005,
    "elementwise": 0.003,
    "loss": 0.001,
    "optimizer": 0.001,
    "seconds": 0.04,
    "tokens_per_second": 2500.0,
    "tokens": 100,
}


@pytest.fixture
def bench(tmp_path, monkeypatch, let_return):
    """Arms that measure nothing: their speeds are a table, and ``bench.ran`` is who ran."""

    class Bench:
        def __init__(self):
            self.ran = []
            self.started = []
            self.ended = []
            self.crash = set()
            self.changes = {}
            self.absent = set()
            self.processes, self.too_many = [], 99  # so many that wait make another one crash
            self.crash_in_round = {}
            self.too_many_for = {}
            self.slow = set()

        def measure(self, began=None, session_class=PeerSession, **options):
            work = made.work(tmp_path)
            job = Job(DecoderShape(2, 64, 4, 2, 16, 128, 1024, 0, 10**5), 100, 64.0)
            let_return(type(work), job=job)
            return measure_row(work, Options(**options), began=began, session_class=session_class)

    bench = Bench()

    class Running:
        def __init__(
            self, work, arm, steps, trace=None, documents=None, label="", warm_up=None, further=0
        ):
            self.name = arm if isinstance(arm, str) else arm.name
            self.trace = trace
            self.further = further
            self.rounds = 0
            self.steps = steps
            bench.started.append(self.name)
            bench.processes.append(self)

        @property
        def waits(self):
            return 0 < self.rounds <= self.further

        def measure(self, timeout):
            bench.ran.append(self.name)
            waiting = sum(running.waits for running in bench.processes)
            late = bench.crash_in_round.get(self.name) == self.rounds + 1
            if self.name in bench.slow:
                bench.ended.append(self.name)
                raise ArmTimedOut("took longer than 180 s")
            if (
                self.name in bench.crash
                or waiting >= bench.too_many_for.get(self.name, bench.too_many)
                or late
            ):
                bench.ended.append(self.name)
                raise ArmFailed("OutOfMemoryError: CUDA out of memory")
            self.rounds += 1
            profile = {"share": {"gaps": 0.1}} if self.trace else None
            speed = SPEEDS.get(self.name, 1.0) + len(bench.ran)
            changes = bench.changes.get(self.name, {})
            if self.name == "reference" or not self.waits:
                self.end()
            measured = made.measurement(
                speed, **{"first": self.rounds == 1, "profile": profile, **changes}
            )
            if self.name == "reference":
                measured.losses = measured.losses[: self.steps]
                measured.grad_norms = measured.grad_norms[: self.steps]
            return measured

        def end(self):
            self.further = 0
            bench.ended.append(self.name)

    bench.machine = {"card": "none"}
    rates = {
        "floor": dict(FLOOR),
        "machine": bench.machine,
        "copy_bytes_per_second": 1.0,
        "products": {},
        "attention": {},
    }
    bench.rates = rates
    monkeypatch.setattr(rounds, "RunningArm", Running)
    monkeypatch.setattr(peer_rounds, "RunningArm", Running)
    let_return(rounds, run_preparation=rates)
    monkeypatch.setattr(
        peer_rounds,
        "missing_packages_of",
        lambda peer, mode: [peer] if peer in bench.absent else [],
    )
    return bench


PEERS = ["transformers", "torch-compile", "liger"]


def test_scouting_then_ours_and_the_two_fastest_in_turning_order(bench):
    row = bench.measure(against=PEERS, rounds=3)
    assert bench.ran[:5] == ["reference", "ours", *PEERS]
    forth = ["ours", "liger", "torch-compile"]
    assert row.orders == [forth, forth[::-1], forth]
    assert [name for order in row.orders for name in order] == bench.ran[5:]


def test_arms_go_on_in_the_process_of_their_scouting_round(bench):
    row = bench.measure(against=PEERS, rounds=3)
    assert bench.started == ["reference", "ours", *PEERS]
    assert sorted(set(bench.ended)) == sorted(bench.started)
    assert [len(row.runs[name]) for name in ("ours", "liger", "torch-compile", "transformers")] == [
        4,
        4,
        4,
        1,
    ]


@pytest.mark.parametrize(
    ("memory", "held", "processes", "first"),
    [
        (
            4.0,
            1.0,
            {"ours": 1, "liger": 2},
            "ours",
        ),  # one that waits and another one at work, which keep what they have
        (4.0, 0.1, {"ours": 1, "liger": 1}, "ours"),  # the same, which keep little
        (
            1.5,
            0.1,
            {"ours": 2, "liger": 2},
            "liger",
        ),  # the last of a round is the first of the next
    ],
)
def test_arms_that_do_not_fit_together_have_a_process_for_each_round(
    memory, held, processes, first, bench
):
    bench.machine["memory_gib"] = (
        memory  # an arm at work takes 1, and 0.7 beside it as every process does
    )
    bench.changes = {name: {"held_gib": held} for name in ("ours", "liger")}
    row = bench.measure(against=["liger"], rounds=2)
    assert {name: bench.started.count(name) for name in processes} == processes
    order = ["ours", "liger"] if first == "ours" else ["liger", "ours"]
    assert row.orders == [order, order[::-1]] and set(bench.started) == set(bench.ended)


def test_the_last_that_was_scouted_begins_the_rounds_where_it_stays(bench):
    bench.machine["memory_gib"] = 1.5
    row = bench.measure(against=PEERS, rounds=3)
    first = ["liger", "torch-compile", "ours"]
    assert row.orders == [first, first[::-1], first]
    assert {name: bench.started.count(name) for name in first} == {
        "ours": 3,
        "torch-compile": 4,
        "liger": 2,
    }


def test_the_last_that_was_scouted_is_ended_where_it_does_not_stay(bench):
    bench.machine["memory_gib"] = 1.5
    row = bench.measure(against=["liger", "torch-compile", "transformers"], rounds=1)
    assert row.orders == [["ours", "liger", "torch-compile"]] and set(bench.started) == set(
        bench.ended
    )


def test_a_reference_has_the_card_for_itself_where_it_needs_it(bench):
    """Also beside the last that was scouted, which would go on in any case."""
    bench.machine["memory_gib"] = 1.5
    bench.changes = {"liger": {"own_batches": [[[1, 2, 3]]]}}
    bench.too_many_for = {"reference": 1}
    row = bench.measure(against=["transformers", "liger"], rounds=1)
    assert not row.refused and not row.notes
    assert row.orders == [["ours", "liger", "transformers"]]


@pytest.mark.parametrize("crash", [{"ours"}, {"ours", "liger"}])
def test_without_any_arm_there_is_no_round(crash, bench):
    bench.crash = crash
    assert set(bench.measure(against=["liger"], rounds=0).failed) == crash


def test_an_arm_that_needs_the_card_for_itself_has_it(bench):
    """Whoever waits beside it is ended first, and not found to be in the way by a failure."""
    bench.machine["memory_gib"] = 10.0
    bench.changes = {"ours": {"held_gib": 1.0}, "liger": {"peak_gib": 9.0, "held_gib": 8.0}}
    row = bench.measure(against=["liger"], rounds=2)
    assert row.orders == [["ours", "liger"], ["liger", "ours"]] and not row.failed
    assert bench.ended.index("ours") < len(bench.ended) - 1 and bench.started.count("liger") == 2


def test_a_waiting_arm_that_fails_in_its_round_runs_again_alone(bench):
    bench.crash_in_round = {"ours": 2}
    row = bench.measure(against=["liger"], rounds=1)
    assert not row.failed and row.orders == [["ours", "liger"]]
    assert bench.started.count("ours") == 2


def test_an_arm_that_failed_is_not_begun_again(bench):
    """By a reference of another arm's own documents, say."""
    bench.crash = {"ours"}
    bench.changes = {"liger": {"own_batches": [[[1, 2, 3]]]}}
    bench.measure(against=["liger"], rounds=0)
    assert bench.started.count("ours") == 1


def test_what_was_measured_is_not_scouted(bench):
    same = {"lora_dropout": 0.1}
    row = bench.measure(
        variants=[same], scouted=[same, {"lora_dropout": 0.2}, {"lora_dropout": 0.2}], rounds=1
    )
    assert [len(runs) for runs in row.runs.values()] == [2, 2, 1]


def test_what_is_only_scouted_comes_last(bench):
    row = bench.measure(
        against=["liger"], scouted=[{"lora_dropout": 0.1}, {"lora_dropout": 0.2}], rounds=1
    )
    last = ["ours lora_dropout=0.1", "ours lora_dropout=0.2"]
    assert bench.ran == ["reference", "ours", "liger", "ours", "liger", *last]
    assert row.orders == [["ours", "liger"]] and [len(row.runs[name]) for name in last] == [1, 1]
    assert to_dict(row)["arms"][last[0]]["rounds"] == 0


def test_an_arm_that_fails_beside_waiting_ones_runs_again_alone(bench):
    bench.too_many = 2
    row = bench.measure(against=["liger", "transformers"], rounds=1)
    assert not row.failed and [len(runs) for runs in row.runs.values()] == [2, 2, 2]
    assert bench.started.count("transformers") > 1


def test_an_arm_that_took_too_long_beside_waiting_ones_does_not_run_again(bench):
    """Others' memory is not why: its time would be spent twice."""
    bench.slow = {"liger"}
    row = bench.measure(against=["liger", "transformers"], rounds=2)
    assert bench.ran.count("liger") == 1 and row.failed == {"liger": "took longer than 180 s"}
    assert (
        row.orders == [["ours", "transformers"], ["transformers", "ours"]]
        and bench.started.count("ours") == 1
    )


@pytest.mark.parametrize(("gib", "steps"), [(0.0014, 1), (0.0016, 5)])
def test_a_reference_whose_states_are_more_than_the_card_has_one_step_at_once(bench, gib, steps):
    """16 bytes of each of 100,000 weights."""
    bench.machine["memory_gib"] = gib
    row = bench.measure(rounds=0)
    references = [
        running.steps
        for running in bench.processes
        if running.name == "reference" and running.rounds
    ]
    assert (
        references == [steps]
        and bench.ran.count("reference") == 1
        and set(bench.started) == set(bench.ended)
    )
    assert any("the reference has one step" in note for note in row.notes) == (steps == 1)


def test_only_the_first_steps_of_a_process_have_a_reference(bench):
    bench.changes = {"liger": {"losses": [3.0] * 5, "first": False}}
    assert "liger" not in bench.measure(against=["liger"], rounds=1).refused


def test_order_turns(bench):
    row = bench.measure(variants=[{"lora_dropout": 0.1}, {"lora_dropout": 0.2}], rounds=4)
    forth = ["ours", "ours lora_dropout=0.1", "ours lora_dropout=0.2"]
    assert row.orders == [forth, forth[::-1], forth, forth[::-1]]


def test_variants_of_ours_stand_beside_it(bench):
    row = bench.measure(against=["liger"], variants=[{"lora_dropout": 0.1}], rounds=1)
    assert row.orders == [["ours", "ours lora_dropout=0.1", "liger"]]
    assert set(to_dict(row)["ratios"]) == {"ours lora_dropout=0.1", "liger"}


def test_a_missing_peer_is_named(bench):
    bench.absent = {"liger"}
    result = to_dict(bench.measure(against=PEERS, rounds=1))
    assert result["arms"]["liger"] == {"status": "absent", "reason": "not installed: liger"}
    assert "tokens_per_second" in result["arms"]["torch-compile"]


def test_peers_that_are_not_installed_here():
    for peer, packages in names.PEERS.items():
        assert set(names.missing_packages_of(peer, "full")) <= set(packages)


def test_a_crashed_peer_is_recorded_and_the_run_goes_on(bench):
    bench.crash = {"transformers"}
    result = to_dict(bench.measure(against=PEERS, rounds=1))
    assert result["arms"]["transformers"] == {
        "status": "failed",
        "reason": "OutOfMemoryError: CUDA out of memory",
    }
    assert result["arms"]["liger"]["rounds"] == 1


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"losses": [7.0, 6.5, 6.8, 6.7, 6.6]}, "step 2: loss"),
        ({"grad_norms": [1.0, 0.0, 1.0, 1.0, 1.0]}, "a gradient is zero"),
    ],
)
def test_a_wrong_arm_has_no_speed(bench, wrong, reason):
    bench.changes = {"liger": wrong}
    row = bench.measure(against=PEERS, rounds=1)
    assert row.orders == [["ours", "torch-compile", "transformers"]]
    arm = to_dict(row)["arms"]["liger"]
    assert arm["status"] == "refused" and reason in arm["reason"]
    assert not {"tokens_per_second", "samples", "mfu", "round_medians"} & set(arm)
    assert arm["losses"] and arm["parity"]["loss"]["reference"]


def test_ours_is_held_to_the_same(bench):
    bench.changes = {"ours": {"moved_share": 0.0}}
    result = to_dict(bench.measure(against=["liger"], rounds=1))
    assert result["arms"]["ours"]["status"] == "refused" and result["ratios"] == {}


def test_without_ours_there_is_nothing_to_decide(bench):
    bench.crash = {"ours"}
    row = bench.measure(against=["liger"], rounds=3)
    assert row.orders == [] and any("no decisive rounds" in note for note in row.notes)


def test_adapters_need_peft_for_their_reference(tmp_path, let_return):
    let_return(rounds, find_spec=None)
    with pytest.raises(ConfigurationError, match=r"chronicals\[peft\]"):
        measure_row(made.work(tmp_path, mode="lora"), Options())


def test_work_that_cannot_be_prepared_is_an_error_of_the_user(tmp_path, let_raise):
    let_raise(rounds, run_preparation=ArmFailed("DataError: nothing to train on"))
    with pytest.raises(ConfigurationError, match="model='tiny'.*nothing to train on"):
        measure_row(made.work(tmp_path), Options())


def test_without_a_reference_nobody_has_a_speed(bench):
    bench.crash = {"reference"}
    result = to_dict(bench.measure(against=["liger"], rounds=1))
    assert {arm["status"] for arm in result["arms"].values()} == {"refused"}
    assert any("reference" in note for note in result["notes"])


def test_an_arm_that_takes_other_documents_has_a_reference_of_its_own(bench):
    bench.changes = {"liger": {"own_batches": [[[1, 2, 3]]]}}
    row = bench.measure(against=["liger"], rounds=2)
    assert bench.ran.count("reference") == 2  # the second round takes what the first did
    assert json.loads((row.work.folder / "results" / "batches-liger-scout.json").read_text()) == [
        [[1, 2, 3]]
    ]


@pytest.mark.parametrize(
    ("count", "alike", "steps"),
    [(5, True, [5, 5]), (3, True, [5, 3]), (3, False, [5, 3]), (1, False, [5, 1]), (1, True, [5])],
)
def test_a_peer_is_compared_in_as_many_steps_as_the_rows_reference_has(count, alike, steps, bench):
    bench.changes = {
        "liger": {
            "own_batches": [[[1, 2, 3]]],
            "begins_alike": alike,
            "losses": [7.0, 9.0, 9.0, 9.0, 9.0],
        }
    }
    bench.changes["reference"] = {
        "losses": [7.0, 6.9, 6.8, 6.7, 6.6][:count],
        "grad_norms": [1.0, 1.1, 1.2, 1.3, 1.4][:count],
    }
    row = bench.measure(against=["liger"], rounds=0)
    assert [running.steps for running in bench.processes if running.name == "reference"] == steps
    assert ("liger" in row.refused) == (count > 1)


@pytest.mark.parametrize(("wrong_from", "refused"), [(3, set()), (2, {"ours", "liger"})])
def test_as_many_steps_are_compared_as_the_options_say(wrong_from, refused, bench):
    losses = [7.0, 6.9, 6.8, 6.7, 6.6]
    off = [loss + 1.0 * (step >= wrong_from) for step, loss in enumerate(losses, 1)]
    bench.changes = {"reference": {"losses": losses}, "ours": {"losses": off}}
    bench.changes["liger"] = {"losses": off, "own_batches": [[[1, 2, 3]]]}
    row = bench.measure(against=["liger"], rounds=0, reference_steps=2)
    assert [running.steps for running in bench.processes if running.name == "reference"] == [2, 2]
    assert row.refused.keys() == refused


def test_the_time_limit_ends_the_rounds_and_says_so(bench):
    row = bench.measure(against=["liger"], rounds=3, time_limit=0.0)
    assert row.runs == {} and row.orders == [] and bench.started == ["reference"] == bench.ended
    assert any("time limit" in note for note in row.notes)


@pytest.mark.parametrize("error", [ArmFailed("no room"), KeyboardInterrupt()])
def test_whatever_ends_the_preparation_ends_the_reference_that_was_started_beside_it(
    error, bench, let_raise
):
    let_raise(rounds, run_preparation=error)
    with pytest.raises((ConfigurationError, KeyboardInterrupt)):
        bench.measure()
    assert bench.started == ["reference"] == bench.ended


def test_the_time_limit_bounds_preparation_from_the_start(bench, let_raise, record_calls):
    let_raise(rounds, run_preparation=ArmFailed("took longer"))
    calls = record_calls(rounds, "run_preparation")
    with pytest.raises(
        ConfigurationError, match="^time_limit=30: it passed while .* were prepared.*--folder"
    ):
        bench.measure(time_limit=30.0, began=time.perf_counter() - 31)
    with pytest.raises(ConfigurationError, match="could not be prepared: took longer"):
        bench.measure(time_limit=30.0, began=time.perf_counter() - 21)
    timeouts = [timeout for _, timeout in calls]
    assert timeouts[0] == 0 and timeouts[1] == pytest.approx(9, abs=0.5)


def test_the_time_limit_bounds_every_arm(bench, monkeypatch):
    """The last one runs into it: it has no figures, and no other is begun."""
    given = []
    measured = rounds.RunningArm.measure

    def measure(running, timeout):
        given.append(timeout)
        if running.name == "liger":
            monkeypatch.setattr(rounds.Options, "left", lambda *_: -1.0)
            raise ArmFailed("took longer")
        return measured(running, timeout)

    monkeypatch.setattr(rounds.RunningArm, "measure", measure)
    row = bench.measure(
        against=["liger", "transformers"], rounds=3, time_limit=100.0, arm_timeout=80.0
    )
    assert given[0] == 80.0 and [*row.runs] == ["ours"] and not row.failed and row.orders == []
    assert "liger: not measured in the scouting, the time limit was reached" in row.notes


def test_an_arm_that_failed_takes_no_more_of_the_time(bench):
    """The others' rounds go on, though it would not fit any more."""

    class Durations(dict):
        def get(self, name, default):
            return 1e9 if name in self.failed else 0.0

    class WithCrash(PeerSession):
        def decide(self, arms):
            bench.crash.add("liger")
            self.durations = Durations()
            self.durations.failed = self.row.failed
            super().decide(arms)

    row = bench.measure(
        session_class=WithCrash, against=["liger", "transformers"], rounds=3, time_limit=1e6
    )
    assert (
        "liger" in row.failed
        and len(row.orders) == 3
        and not any("time limit" in note for note in row.notes)
    )


def test_the_record_holds_everything_with_the_raw_samples(bench, tmp_path):
    result = json.loads(
        json.dumps(to_dict(bench.measure(against=["liger"], rounds=2), commit="abc"))
    )
    assert result["commit"] == "abc" and result["versions"]["torch"]
    assert {name: result["floor"][name] for name in FLOOR} == pytest.approx(FLOOR)
    arm = result["arms"]["ours"]
    rates = [t / s for run in arm["samples"][1:] for t, s in zip(run["tokens"], run["seconds"])]
    assert (
        len(rates) == 2 * 3
    )  # the scouting run is kept but counts only for arms that were in no round
    assert sorted(rates)[2] <= arm["tokens_per_second"]["median"] <= sorted(rates)[3]
    assert arm["share_of_floor"] == pytest.approx(arm["tokens_per_second"]["median"] / 2500)
    assert arm["padding_share"] == pytest.approx(0.2) and arm["trained_share"] == 1.0
    assert arm["first_step_seconds"] > 0 and arm["profile"] == {"share": {"gaps": 0.1}}
    assert result["ratios"]["liger"]["median"] == pytest.approx(2000 / 1500, rel=0.02)
    draw_row(result, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000


def floor_of(products):
    """Of a tenth of a second's step: this and ten milliseconds for the rest."""
    parts = {
        "products": products,
        "attention": 0.005,
        "elementwise": 0.003,
        "loss": 0.001,
        "optimizer": 0.001,
    }
    return {
        **parts,
        "seconds": products + 0.01,
        "tokens_per_second": 100 / (products + 0.01),
        "tokens": 100,
    }


def test_the_reference_step_has_no_part_that_takes_longer_than_in_our_step(bench):
    bench.rates["floor"] = floor_of(0.05)  # slower than the whole step of ours
    traced = {
        "products": 35.0,
        "attention": 6.0,
        "elementwise": 3.0,
        "loss": 1.0,
        "optimizer": 1.0,
        "gaps": 3.0,
    }
    bench.changes = {"ours": {"profile": {"milliseconds_a_step": traced}}}
    result = to_dict(bench.measure(against=["liger"], rounds=1))
    assert (
        result["floor"]["products"] == pytest.approx(0.035)
        and result["floor"]["attention"] == 0.005
    )
    assert result["floor"]["by_itself"]["products"] == 0.05 and not result["notes"]
    assert result["arms"]["ours"]["share_of_floor"] == pytest.approx(0.9, rel=0.01)


@pytest.mark.parametrize(("products", "fp8"), [(0.0390, False), (0.0405, False), (0.0405, True)])
def test_a_reference_step_that_an_arm_passes_is_none(bench, products, fp8):
    bench.rates["floor"] = floor_of(products)
    bench.changes = {"ours": {"extra": {"fp8": fp8}}}
    result = to_dict(bench.measure(against=["liger"], rounds=1))
    believed = products == 0.0390 or fp8
    assert (result["floor"] is not None) == believed
    assert any("no reference step: ours ran at 10" in note for note in result["notes"]) == (
        not believed
    )
    assert (result["arms"]["liger"]["share_of_floor"] is not None) == believed


@pytest.mark.parametrize("right", [True, False])
def test_a_variant_with_other_adapters_has_a_reference_with_these(bench, right):
    own = [9.0 - 0.1 * n for n in range(5)]
    bench.changes = {
        "ours use_dora=True": {"losses": own},
        "reference use_dora=True": {"losses": own} if right else {},
    }
    row = bench.measure(variants=[{"use_dora": True}], rounds=2)
    assert bench.started.count("reference use_dora=True") == bench.started.count("reference") == 1
    assert ("ours use_dora=True" in row.refused) == (not right) and "ours" not in row.refused
    arm = to_dict(row)["arms"]["ours use_dora=True"]
    assert arm["parity"]["loss"]["reference"] == (
        own if right else [7.0 - 0.1 * n for n in range(5)]
    )


def test_a_variant_whose_reference_fails_has_no_speed(bench):
    bench.crash = {"reference use_dora=True"}
    row = bench.measure(variants=[{"use_dora": True}], rounds=1)
    assert row.refused["ours use_dora=True"].startswith(
        "no reference with its own adapters: OutOfMemoryError"
    )


def test_a_variant_that_does_less_than_the_step_has_no_share(bench):
    bench.rates["floor"] = floor_of(0.0390)
    bench.changes = {"ours lora_dropout=0.1": {"seconds": [0.04] * 5}}
    result = to_dict(bench.measure(variants=[{"lora_dropout": 0.1}], rounds=1))
    assert result["floor"] and result["arms"]["ours"]["share_of_floor"] == pytest.approx(
        0.98, rel=0.01
    )
    assert result["arms"]["ours lora_dropout=0.1"]["share_of_floor"] is None
    assert any(note.startswith("ours lora_dropout=0.1 ran at 12") for note in result["notes"])


@pytest.mark.parametrize("fp8", [False, True])
def test_an_arm_in_fp8_has_no_mfu_over_the_peak_of_bf16(bench, let_return, fp8):
    let_return(record, mfu=0.5)
    row = bench.measure(rounds=1)
    let_return(type(row.work), config=SimpleNamespace(mixed_precision="bf16"))
    row.runs["ours"][0].extra["fp8"] = fp8
    assert to_dict(row)["arms"]["ours"]["mfu"] == (None if fp8 else 0.5)


def test_a_real_process_that_fails_says_its_last_words(tmp_path):
    with pytest.raises(ArmFailed, match="invalid choice"):
        processes.RunningArm(made.work(tmp_path), Arm("nonsense"), 1).measure(60)


def test_a_process_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(ArmFailed, match="longer than"):
        processes.run_preparation(made.work(tmp_path), 0.05)


def waiting_process(tmp_path, script):
    log = tmp_path / "log"
    log.write_text("Traceback\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    command = [sys.executable, "-c", script]
    return ArmProcess(
        subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True), log
    )


def test_a_process_waits_for_its_first_round_and_can_be_let_go(tmp_path):
    work = made.work(tmp_path)
    running = processes.RunningArm(work, "ours", 1)
    assert running.process.running and not running.waits
    running.end()
    assert not running.process.running and not running.out.with_name("ours.0.json").exists()


@pytest.mark.slow
def test_an_arm_ends_with_a_benchmark_that_is_killed(tmp_path):
    program = (
        "import sys, time; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "import made\n"
        "from chronicals.benchmark.processes import RunningArm\n"
        "running = RunningArm(made.work(Path(sys.argv[1])), 'ours', 1)\n"
        "print(running.process.process.pid, flush=True); time.sleep(60)\n"
    )
    paths = [str(Path(made.__file__).parent), str(Path(processes.__file__).parents[2])]
    command = [sys.executable, "-c", program, str(tmp_path), *paths]
    benchmark = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    group = int(benchmark.stdout.readline())
    assert wait_until(lambda: len(members(group)) > 1, 30)
    benchmark.kill()
    benchmark.wait()
    assert wait_until(lambda: not members(group), 5), members(group)


def test_a_process_that_dies_while_it_waits_is_seen(tmp_path):
    process = waiting_process(
        tmp_path, "import sys; sys.exit(3 if sys.stdin.readline() == 'again\\n' else 0)"
    )
    process.say("again")
    with pytest.raises(ArmFailed, match="OutOfMemoryError"):
        process.wait_for(lambda: False, 60)
    process.say("again")
    process.end()


def test_a_process_does_not_outlive_an_interrupt(tmp_path):
    process = waiting_process(tmp_path, "import time; time.sleep(600)")

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.wait_for(interrupted, 60)
    assert not process.running


def test_a_process_that_does_not_end_is_ended(tmp_path, set_constants):
    set_constants(processes, ENDING_SECONDS=0.1)
    process = waiting_process(tmp_path, "import time; time.sleep(600)")
    assert process.running
    process.end()
    assert not process.running


def test_last_words_are_those_of_the_error():
    log = (
        "Traceback (most recent call last):\n  File\ntorch.OutOfMemoryError: CUDA out of "
        "memory.\n[rank0]: bye\n"
    )
    assert processes.last_words(log, 1) == "torch.OutOfMemoryError: CUDA out of memory."
    refused = "DataError: breaks 1 rule:\n  masked_row: 3 rows\n"
    assert processes.last_words(f"Traceback\n  File x\n{refused}more\n", 1) == refused.strip()
    assert processes.last_words("", -9) == "exit code -9"
