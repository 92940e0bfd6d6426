"""Killed within a rollout and resumed, a run ends bit-equal to the one that was never touched."""

import json
import random
import sys
from pathlib import Path

import pytest

import runs

sys.path.insert(0, str(Path(__file__).parent))
from killed_rollouts import VARIANTS, run
from killed_run import in_a_process


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    made = {}

    def of(variant):
        if variant not in made:
            folder = tmp_path_factory.mktemp("whole")
            events = folder / "events"
            assert in_a_process(str(folder), variant, False, None, str(events), run=run) == 0
            made[variant] = folder, events.read_text().split("\n")
        return made[variant]

    return of


def assert_goes_on_after_a_kill(folder, variant, kill_at, uninterrupted):
    whole, events = uninterrupted(variant)
    what = f"{variant}, killed at event {kill_at} of {len(events)} ({events[kill_at - 1]})"
    assert in_a_process(str(folder), variant, False, kill_at, None, run=run) == -9, what
    assert in_a_process(str(folder), variant, True, None, None, run=run) == 0, what
    runs.assert_same_bits(folder, whole, what)
    assert samples(folder) == samples(whole), what


def samples(folder):
    return [json.loads(line) for line in (folder / "run" / "samples.jsonl").open()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["token", "rewards", "samples", "micro-batch", "rename"])
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.sample(5)
def test_killed_within_a_rollout(variant, kind, tmp_path, seed, uninterrupted):
    _, events = uninterrupted(variant)
    # After the first step, so that there is a checkpoint to go on from.
    first = events.index("rename") + 1
    places = [n for n, event in enumerate(events, 1) if event == kind and n > first]
    assert_goes_on_after_a_kill(
        tmp_path, variant, random.Random(seed).choice(places), uninterrupted
    )


@pytest.mark.slow
def test_killed_before_the_first_checkpoint(tmp_path, uninterrupted):
    variant = "several updates"
    _, events = uninterrupted(variant)
    assert_goes_on_after_a_kill(tmp_path, variant, events.index("rewards") + 1, uninterrupted)
