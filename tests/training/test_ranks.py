"""Two processes train what one does in twice as many micro-batches, and either goes on where the
other ended.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import runs
import tiny
import two_processes
from chronicals.config.config import laid_over
from chronicals.distributed import Mesh
from chronicals.training.run.callbacks import Callbacks
from chronicals.training.run.loop import Stop

sys.path.insert(0, str(Path(__file__).parent))
import two_ranks

pytestmark = [
    pytest.mark.of_file(6),
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="one process would compute on the card, two on the CPU"
    ),
]

SETTINGS = two_ranks.SETTINGS
PROGRAM = """
import pathlib, torch, test_ranks
torch.set_num_threads(1)
test_ranks.train(pathlib.Path({folder!r}), 2, **{changes})
"""


def train(folder, accumulation, resume=False, **changes):
    settings = laid_over(SETTINGS, changes)
    settings["gradient_accumulation_steps"] = accumulation
    return runs.train(folder, tiny.chat_rows(), resume=resume, **settings)


def train_by_two(folder, _accumulation, **changes):
    """``train`` in two processes, each of which makes half of the micro-batches."""
    started = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
    ]
    program = PROGRAM.format(folder=str(folder), changes=changes)
    done = subprocess.run(
        [*started, sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": two_processes.PATHS},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(folder, 4)
    return folder


@pytest.mark.sample(1)
@pytest.mark.parametrize(("first", "then"), [(train_by_two, train), (train, train_by_two)])
def test_two_train_what_one_does(tmp_path, whole, first, then):
    """To the end of the epoch, whose last step is not full."""
    first(tmp_path, 4, max_steps=4)
    then(tmp_path, 4, resume=True)
    steps = torch.tensor(runs.trajectory(whole), dtype=torch.float64)
    assert len(steps) > 4
    torch.testing.assert_close(
        torch.tensor(runs.trajectory(tmp_path), dtype=torch.float64), steps, rtol=1e-3, atol=0.0
    )
    ours = runs.weights(tmp_path)
    theirs = runs.weights(whole)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in theirs)


@pytest.mark.long
def test_two_train_what_one_does_where_each_has_all_states(tmp_path, whole):
    """And go on from where states were sharded."""
    train_by_two(tmp_path, 4, max_steps=2)
    train_by_two(tmp_path, 4, max_steps=4, sharding="none", resume=True)
    train_by_two(tmp_path, 4, resume=True)
    steps = torch.tensor(runs.trajectory(whole), dtype=torch.float64)
    torch.testing.assert_close(
        torch.tensor(runs.trajectory(tmp_path), dtype=torch.float64), steps, rtol=1e-3, atol=0.0
    )


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the first and the second of two processes saw, by promise; started as a job operator
    does, without torchrun.
    """
    folder = tmp_path_factory.mktemp("two")
    codes, words = two_processes.run(two_ranks.__file__, folder)
    assert codes == [0, 0], words

    def of(promise):
        return [json.loads((folder / f"{promise}.{rank}.json").read_text()) for rank in (0, 1)]

    of.folder = folder
    return of


def test_gradients_are_added_and_what_nobody_uses_stays(seen):
    """As one process that does the work of both: a weight without a gradient on any rank is
    neither decayed nor moved.
    """
    one = two_ranks.weights_used(Mesh(), of_rank=lambda _: [0, 1])
    first, second = seen("gradients")
    assert first == second
    for name in one:
        assert first[name] == pytest.approx(one[name], rel=1e-6), name
    torch.manual_seed(0)
    begun = {name: torch.randn(2, 3).flatten().tolist() for name in two_ranks.USED}
    assert first["never"] == begun["never"] and all(
        first[name] != begun[name] for name in begun if name != "never"
    )


def test_gradients_are_added_between_what_is_replayed(seen):
    """Also where a rank has no gradient of a weight, which only the update of that rank is not
    replayed for; and where each updates a share, which is never replayed."""
    for usual, *others in seen("replayed"):
        for found in others:
            assert found.keys() == usual.keys()
            for name in usual:
                assert found[name] == pytest.approx(usual[name], rel=1e-6), name
        assert usual["shown"] == [
            number + 2.5 for number in range(6)
        ]  # of all four batches of a step


def test_all_begin_with_the_weights_of_the_first(seen, tmp_path):
    """And score held-out data together."""
    first, second = seen("weights")
    assert first == second
    result = train(tmp_path, 4, max_steps=2)
    assert first["held out"] == pytest.approx(result.evaluation.to_dict(), rel=1e-4)


def test_all_stop_early_after_the_same_step(seen, tmp_path):
    """And leave the same best, as one process does: each has scored other rows of the held-out
    data.
    """
    first, second = seen("stopped_early")
    assert first == second
    assert (
        first["best"] + two_ranks.EARLY["early_stopping_patience"]
        == first["steps"]
        < two_ranks.EARLY["max_steps"]
    )
    alone = train(tmp_path, 4, **two_ranks.EARLY)
    assert (alone.steps, alone.model_step) == (first["steps"], first["best"])
    assert first["held out"] == pytest.approx(alone.evaluation.loss, rel=1e-3)


MICRO_BATCHES = two_ranks.SETTINGS["gradient_accumulation_steps"]
ASKED = {  # in each bucket's place 1
    "sums within the backward pass": {
        "reduce_scatter_tensor": MICRO_BATCHES,
        "all_gather_into_tensor": 1,
    },
    "sums after the backward pass": {"reduce_scatter_tensor": 1, "all_gather_into_tensor": 1},
}
"""Collectives of a step for each bucket of gradients, beside the small all-reduce."""

READ_ON_THE_CPU = {
    "attention/backends/per_document.py tolist",
    "kernels/adamw.py __bool__",
    "kernels/logit_rows.py __int__",
}
"""Documents one after the other, whether an update counts, and rows of logits in pieces: what stands
in for kernels.
"""


@pytest.mark.parametrize("case", two_ranks.COUNTED)
def test_a_step_asks_for_one_small_sum_and_waits_for_no_device(seen, case):
    """Loss, norm and who wants to stop travel together; counted from where a step begins to
    where the next does.
    """
    for found in seen("counted"):
        _, *steps, _ = found[case]["steps"]  # around them the audit, and the checkpoint at the end
        assert len(steps) == 2
        for step in steps:
            small = [size for name, size in step if name == "all_reduce" and size < 100]
            assert len(small) == 1, step
            if case in ASKED:
                counts = {
                    name: found[case]["buckets"] * count for name, count in ASKED[case].items()
                }
                assert Counter(name for name, _ in step) == {**counts, "all_reduce": 1}
            assert {name for name, _ in step}.isdisjoint(
                {"all_gather", "broadcast", "barrier", "gather", "scatter"}
            )
        assert found[case]["reads"].keys() <= READ_ON_THE_CPU


def test_two_distil_as_one_does(seen, tmp_path):
    """The teacher's predictions, which both compute half of, are those that one computes."""
    together = seen("distilled")[0]
    for name, stored in two_ranks.DISTILLED.items():
        alone = two_ranks.distil(
            tmp_path / name, 0, seen.folder / "teacher", stored, gradient_accumulation_steps=4
        )
        torch.testing.assert_close(
            torch.tensor(together[name]), torch.tensor(alone), rtol=1e-4, atol=0.0
        )
    assert not torch.allclose(
        torch.tensor(together["beside"]), torch.tensor(together["likeliest"]), rtol=1e-2
    )
    (kept,) = (seen.folder / "likeliest").rglob("*.teacher")
    assert {path.name for path in kept.iterdir()} == {"teacher_ids.npy", "teacher_log_p.npy"}


def test_each_draws_its_own_random_numbers(seen):
    first, second = seen("random_numbers")
    assert len(first) == 3 and first != second


def test_the_audit_of_each_sees_the_gradients_of_all(seen):
    for found in seen("audited"):
        assert found["idle"] == [] and found["with gradient"] == found["asked"]


def test_a_signal_to_one_stops_all_after_the_same_step(seen):
    """Which learn of it from the metrics of that step, that arrive during the next."""
    first, second = seen("stop")
    assert "stopped as asked on rank 1 after step 3" in first
    assert "stopped as asked after step 3" in second


def test_all_go_on_from_the_first_ones_checkpoint(seen, whole):
    """The folder of the second, on a machine of its own, holds none."""
    first, second = seen("resumed")
    assert first == second
    assert first["steps"] == len(runs.trajectory(whole))
    ours = torch.tensor(
        runs.trajectory(two_ranks.own_folder(seen.folder / "stopped", 0)), dtype=torch.float64
    )
    torch.testing.assert_close(
        ours, torch.tensor(runs.trajectory(whole), dtype=torch.float64), rtol=1e-3, atol=0.0
    )
    assert not (two_ranks.own_folder(seen.folder / "stopped", 1) / "run").exists()


def test_what_the_first_refuses_all_refuse(seen):
    first, second = seen("refused")
    assert "holds a run" in first and second == f"rank 0 stopped: CheckpointError: {first}"


@pytest.mark.parametrize(
    ("promise", "named"),
    [
        ("other_settings", "learning_rate is 0.001 on rank 0 and 0.002 on rank 1"),
        ("other_data", "training data is"),
        ("other_weights", "weights is"),
    ],
)
def test_ranks_that_do_not_train_the_same_are_refused(seen, promise, named):
    first, second = seen(promise)
    assert first == second and named in first and "the 2 processes do not train the same" in first


def test_a_signal_while_the_ranks_agree_counts_the_next_time():
    """Or this one would leave alone."""
    stop = Stop()

    def sum_of_none(told):
        stop.ask("stopped by SIGTERM")
        return told

    ranks = SimpleNamespace(count=2, sum=sum_of_none, gather_values=lambda own: [own, None])
    assert [
        stop.is_asked(ranks, torch.device("cpu"), Callbacks([], False, ranks), False)
        for _ in range(2)
    ] == [False, True]


@pytest.mark.parametrize("event", ["run_began", "step_done", "evaluated", "saved", "run_ended"])
def test_what_a_callback_raises_stops_all(seen, event):
    """Callbacks are the first rank's alone: it raises its error, the others are told."""
    first, second = seen("callbacks_fail")
    assert first[event] == f"ValueError: {event}"
    assert second[event] == (
        "" if event == "run_ended" else f"TrainingError: rank 0 stopped: ValueError: {event}"
    )
