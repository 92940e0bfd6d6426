"""Micro-steps over divided frozen weights as CUDA graphs: all ranks capture and replay alike, and
train what they do without.

On cards the graphs are real: one among one process, and with two cards those among two. On the CPU
they are emulated.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

import runs
import two_processes

sys.path.insert(0, str(Path(__file__).parent))
import graphed_ranks

pytestmark = [pytest.mark.of_file(3), pytest.mark.slow]

ON_CARD = torch.cuda.is_available()
LONG = pytest.mark.long
WAYS = [
    pytest.param(("NF4", 2), id="NF4 among two"),
    pytest.param(("NF4", 1), id="NF4 among one"),
    pytest.param(("dense", 2), id="dense among two", marks=LONG),
    pytest.param(("dense", 1), id="dense among one", marks=LONG),
]


@pytest.fixture(scope="module", params=WAYS)
def made(request, tmp_path_factory):
    """The folder of all runs, and what each rank saw."""
    base, count = request.param
    if ON_CARD and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} cards")
    folder = tmp_path_factory.mktemp("graphs")
    codes, words = two_processes.run(graphed_ranks.__file__, folder, base, seconds=550, count=count)
    assert codes == [0] * count, [said[-3500:] for said in words]
    found = {
        arm: [json.loads((folder / f"{arm}-{rank}.json").read_text()) for rank in range(count)]
        for arm in graphed_ranks.ARMS
    }
    return folder, found


def check_same_run(folder, ranks, arm):
    """The trajectory of the run without graphs, and its held-out loss."""
    within = 2e-3 if ON_CARD else 1e-5
    usual, found = (runs.trajectory(folder / name) for name in ("usual", arm))
    for (_, loss, norm), (_, ours, our_norm) in zip(usual, found, strict=True):
        assert ours == pytest.approx(loss, rel=within) and our_norm == pytest.approx(
            norm, rel=10 * within
        )
    assert [rank["loss"] for rank in ranks[arm]] == pytest.approx(
        [rank["loss"] for rank in ranks["usual"]], rel=within
    )
    weights, ours = (runs.weights(folder / name) for name in ("usual", arm))
    for name, weight in weights.items():
        error = (ours[name].float() - weight.float()).norm() / weight.float().norm().clamp(
            min=1e-12
        )
        assert error <= (2e-2 if ON_CARD else 1e-4), f"{name}: {error}"


@pytest.mark.parametrize("arm", ["graphs", "poisoned"])
def test_replayed_is_as_usual(made, arm):
    """Also where buffers hold nothing of use when a pass begins."""
    folder, ranks = made
    check_same_run(folder, ranks, arm)
    for rank in ranks[arm]:
        assert rank["runs"] and not ranks["usual"][0]["runs"], rank["why"]
        captured, failed, given_up = rank["graphs"][-1]
        assert captured and rank["replays"] > captured and not failed and not given_up


def test_ranks_agree_on_shapes_that_differ(made):
    """Each tells its own, which differ; all capture, replay and gather as often."""
    _, ranks = made
    first, *others = ranks["graphs"]
    for other in others:
        assert {**first, "loss": None} == {**other, "loss": None}
        assert any(one != two for one, two in first["told"])


@pytest.mark.parametrize("arm", ["one cannot capture", "one gives up"])
def test_where_one_rank_cannot_go_on_none_does(made, arm):
    folder, ranks = made
    check_same_run(folder, ranks, arm)
    first, *others = ranks[arm]
    (_, failed, given_up) = first["graphs"][-1]
    assert (
        failed
        and given_up == (arm == "one gives up")
        and 0 < first["replays"] < ranks["graphs"][0]["replays"]
    )
    for other in others:
        assert (first["replays"], first["graphs"], first["gathered"]) == (
            other["replays"],
            other["graphs"],
            other["gathered"],
        )
