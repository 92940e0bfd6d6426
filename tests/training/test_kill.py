"""Killed anywhere and resumed, a run ends bit-equal to the one that was never touched."""

import random
import sys
from pathlib import Path

import pytest

import runs

sys.path.insert(0, str(Path(__file__).parent))
from killed_run import CHANGES, in_a_process

SHORT = 4
LONG = 20


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    made = {}

    def of(variant):
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            assert in_a_process(str(folder), variant, False, None, str(folder / "events")) == 0
            made[variant] = folder, (folder / "events").read_text().split("\n")
        return made[variant]

    return of


def assert_goes_on_after_a_kill(folder, variant, kill_at, uninterrupted):
    whole, events = uninterrupted(variant)
    what = f"{variant}, killed at event {kill_at} of {len(events)} ({events[kill_at - 1]})"
    code = in_a_process(str(folder), variant, False, kill_at, None)
    assert code == -9, what
    assert in_a_process(str(folder), variant, True, None, None) == 0, what
    runs.assert_same_bits(folder, whole, what)
    leftovers = [path.name for path in (folder / "run").rglob(".*")]
    assert not leftovers, f"{what}: {leftovers}"


@pytest.mark.slow
def test_the_events_cover_what_can_be_interrupted(uninterrupted):
    _, events = uninterrupted("full")
    assert {"micro-batch", "sync", "rename", "replace", "remove"} <= set(events)
    assert events.count("micro-batch") > 20


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(SHORT))
def test_killed_at_a_random_moment(tmp_path, seed, number, uninterrupted):
    variant = list(CHANGES)[number % len(CHANGES)]
    _, events = uninterrupted(variant)
    kill_at = random.Random(seed).randrange(2, len(events) + 1)
    assert_goes_on_after_a_kill(tmp_path, variant, kill_at, uninterrupted)


@pytest.mark.slow
def test_killed_between_manifest_and_rename(tmp_path, uninterrupted):
    _, events = uninterrupted("full")
    renames = [number for number, kind in enumerate(events, 1) if kind == "rename"]
    assert_goes_on_after_a_kill(tmp_path, "full", renames[1], uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize("number", range(LONG))
def test_killed_at_many_random_moments(tmp_path, seed, number, uninterrupted):
    variant = list(CHANGES)[number % len(CHANGES)]
    _, events = uninterrupted(variant)
    # Every kind of event gets its turn, at a random one of its occurrences.
    kind = sorted(set(events))[number % len(set(events))]
    choices = [n for n, event in enumerate(events, 1) if event == kind and n > 1]
    assert_goes_on_after_a_kill(
        tmp_path, variant, random.Random(seed).choice(choices), uninterrupted
    )
