"""Checkpoints are written beside the training: what they hold, what waits for them, and how
their errors end a run.
"""

import threading
import time

import pytest
import torch

import runs
from chronicals.objectives import NextToken
from chronicals.optimizers import FusedAdamW
from chronicals.saving import staging
from chronicals.training import Callback, CheckpointError
from chronicals.training.run import checkpoint, run_checkpoints
from chronicals.training.run.checkpoint import checkpoints

OPTIONS = {"save_steps": 1, "save_total_limit": 10, "max_steps": 3}


class Steps(Callback):
    """How many were done, and what is to happen after each."""

    def __init__(self, after=lambda step: None):
        self.done = 0
        self.after = after

    def step_done(self, metrics):
        self.done = metrics.step
        self.after(metrics.step)


def writing(monkeypatch, around):
    """Lets ``around(step, write)`` stand in for the writing of each checkpoint."""
    inner = checkpoint.save_checkpoint

    def save(output_dir, step, *given, **named):
        return around(step, lambda: inner(output_dir, step, *given, **named))

    monkeypatch.setattr(checkpoint, "save_checkpoint", save)


@pytest.mark.slow
def test_training_goes_on_and_the_checkpoint_holds_its_own_step(tmp_path, monkeypatch):
    """That of step 1 is written after step 2 was done."""
    constant = {"lr_scheduler": "constant", "warmup_steps": 0}
    runs.train(tmp_path / "short", **{**OPTIONS, **constant, "max_steps": 1})
    gone_on = threading.Event()
    order = []

    def slowly(step, write):
        if step == 1:
            assert gone_on.wait(60)
        order.append(step)
        write()

    writing(monkeypatch, slowly)

    def after(step):
        if step == 2:
            gone_on.set()

    runs.train(tmp_path, callbacks=[Steps(after)], **OPTIONS, **constant)
    assert order == [1, 2, 3]
    short, own = (checkpoints(folder / "run")[-1] for folder in (tmp_path / "short", tmp_path))
    assert short.name == own.name == "step-00000001"
    for file in ("model/model.safetensors", "optimizer.safetensors", "rng.safetensors"):
        assert (short / file).read_bytes() == (own / file).read_bytes(), file


@pytest.mark.slow
def test_one_at_a_time_and_the_end_waits(tmp_path, monkeypatch):
    under_way = []
    most = []

    def watched(step, write):
        under_way.append(step)
        most.append(len(under_way))
        write()
        under_way.remove(step)

    writing(monkeypatch, watched)
    runs.train(tmp_path, **OPTIONS)
    assert most == [1, 1, 1] and [path.name[-1] for path in checkpoints(tmp_path / "run")] == [
        "3",
        "2",
        "1",
    ]


@pytest.mark.parametrize(
    "error", [CheckpointError("the disk went away"), ValueError("no such thing")], ids=repr
)
def test_an_error_ends_the_run_with_its_own_words(tmp_path, monkeypatch, error):
    failed = threading.Event()

    def fail(step, write):
        failed.set()
        raise error

    writing(monkeypatch, fail)
    steps = Steps(lambda step: step > 2 and failed.wait(60))
    with pytest.raises(type(error), match=str(error)):
        runs.train(tmp_path, callbacks=[steps], **{**OPTIONS, "save_steps": 2, "max_steps": 50})
    assert 2 <= steps.done <= 4
    assert not checkpoints(tmp_path / "run")


def test_a_checkpoint_that_was_begun_is_finished_where_training_fails(tmp_path, monkeypatch):
    begun = threading.Event()

    def watched(step, write):
        begun.set()
        write()

    writing(monkeypatch, watched)

    def after(step):
        if step == 2:
            assert begun.wait(60)
            raise KeyError("in a callback")

    with pytest.raises(KeyError):
        runs.train(tmp_path, callbacks=[Steps(after)], **OPTIONS)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000001"]
    assert checkpoint.check_checkpoint(checkpoints(tmp_path / "run")[0]) is None


IN_BACKWARD = {
    "memory": ["optimizer_in_backward"],
    "gradient_accumulation_steps": 1,
    "max_grad_norm": None,
}


def noted(events, name, inner):
    def wrapped(*given, **named):
        events.append(name)
        return inner(*given, **named)

    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, IN_BACKWARD], ids=["after", "in backward"])
def test_weights_change_only_after_the_copies(tmp_path, monkeypatch, options):
    """The wait stands between the backward pass and the update; before the backward pass, where
    that updates.
    """
    events = []
    monkeypatch.setattr(staging.Staging, "hold_update", lambda self: events.append("hold"))
    for name in ("step", "step_of"):
        monkeypatch.setattr(FusedAdamW, name, noted(events, "update", getattr(FusedAdamW, name)))
    monkeypatch.setattr(NextToken, "__call__", noted(events, "forward", NextToken.__call__))
    runs.train(tmp_path, **{**OPTIONS, "max_steps": 1, **options})
    update = events.index("update")
    assert "hold" in events[:update]
    if not options:
        assert events[:update] == ["forward"] * events[:update].count("forward") + ["hold"]


@pytest.mark.slow
def test_without_room_for_copies_training_waits(tmp_path, monkeypatch, let_return, caplog):
    events = []
    monkeypatch.setattr(NextToken, "__call__", noted(events, "forward", NextToken.__call__))

    def slowly(step, write):
        before = len(events)
        time.sleep(0.3)
        assert len(events) == before
        return write()

    writing(monkeypatch, slowly)
    let_return(run_checkpoints.Staging, fits=False)
    runs.train(tmp_path, **OPTIONS)
    assert "host memory is too small" in caplog.text
    assert len(checkpoints(tmp_path / "run")) == 3


@pytest.mark.slow
def test_frozen_weights_are_not_copied(tmp_path, monkeypatch):
    copied = []
    inner = staging.Staging.copy

    def copy(self, tensors):
        copied.append(dict(tensors))
        return inner(self, tensors)

    monkeypatch.setattr(staging.Staging, "copy", copy)
    runs.train(tmp_path, use_lora=True, lora_rank=4, save_steps=1, max_steps=2)
    (tensors,) = copied
    weights = [
        name
        for place, name in tensors
        if place == "weights" and isinstance(tensors[place, name], torch.nn.Parameter)
    ]
    assert weights and all("lora_" in name for name in weights)


@pytest.mark.slow
def test_that_of_the_last_step_is_written_without_a_copy(tmp_path, monkeypatch):
    """A copy would cost its memory and time, and nothing goes on beside it."""
    copied = []
    inner = staging.Staging.copy
    monkeypatch.setattr(
        staging.Staging,
        "copy",
        lambda self, tensors: copied.append(len(tensors)) or inner(self, tensors),
    )
    runs.train(tmp_path, **OPTIONS)
    assert (
        len(copied) == OPTIONS["max_steps"] - 1
        and len(checkpoints(tmp_path / "run")) == OPTIONS["max_steps"]
    )
