"""How long a run is, and the batch that is fitted to little data."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import runs
import tiny
from chronicals.config import ChronicalsConfig
from chronicals.data.packs.packing import PackPlan
from chronicals.distributed import Mesh
from chronicals.training import Callback, ChronicalsTrainer
from chronicals.training.run.length import Length, fit_batch
from chronicals.training.step.training_step import rate_factor


def plan(packs: int) -> PackPlan:
    return PackPlan(np.arange(packs), np.arange(packs + 1), 100 * packs, 128)


def fitted(packs: int, ranks: int = 1, **fields) -> tuple[int, int, int]:
    """batch_size, gradient_accumulation_steps, steps of an epoch."""
    several = SimpleNamespace(
        count=ranks, data_count=ranks, writer=True, gather=lambda tensor: [tensor]
    )
    config = fit_batch(ChronicalsConfig(**fields), plan(packs), several)
    length = Length.of(config, plan(packs), ranks)
    return config.batch_size, config.gradient_accumulation_steps, length.steps_an_epoch


@pytest.mark.parametrize(
    "packs, fields, expected",
    [
        (1000, {}, (4, 4, 63)),
        (465, {}, (4, 4, 30)),
        (464, {}, (4, 3, 39)),
        (240, {}, (4, 2, 30)),
        (120, {}, (4, 1, 30)),
        (116, {}, (3, 1, 39)),
        (59, {}, (2, 1, 30)),
        (58, {}, (1, 1, 58)),
        (6, {}, (1, 1, 6)),
        (1, {"num_epochs": 10}, (1, 1, 1)),
        (6, {"max_steps": 500}, (1, 1, 6)),
        (6, {"batch_size": 4}, (4, 1, 2)),
        (6, {"gradient_accumulation_steps": 4}, (1, 4, 2)),
        (6, {"gradient_accumulation_steps": 4, "batch_size": 4}, (4, 4, 1)),
        (200, {"batch_size": 8}, (8, 1, 25)),
    ],
)
def test_a_default_batch_shrinks_and_one_that_was_set_stays(packs, fields, expected):
    assert fitted(packs, **fields) == expected


def test_ranks_share_the_packs():
    assert fitted(464, ranks=4) == (3, 1, 39)
    assert fitted(240) == (4, 2, 30) and fitted(240, ranks=2) == (4, 1, 30)


def test_every_rank_takes_the_batch_of_the_first():
    first = SimpleNamespace(
        count=2, data_count=2, writer=False, gather=lambda tensor: [torch.tensor([3, 2]), tensor]
    )
    config = fit_batch(ChronicalsConfig(), plan(6), first)
    assert (config.gradient_accumulation_steps, config.batch_size) == (3, 2)


@pytest.mark.parametrize(
    "packs, fields, said, warned",
    [
        (
            6,
            {},
            "4 x 4 shrinks to 1 x 1, so that an epoch is 6 steps (1 before)",
            "1 epoch is 6 steps; raise num_epochs",
        ),
        (6, {"num_epochs": 10}, "shrinks to 1 x 1", None),
        (240, {}, "4 x 4 shrinks to 4 x 2, so that an epoch is 30 steps (15 before)", None),
        (1000, {}, "training: 63 steps, 1 epoch, 100,000 tokens; an epoch is 1,000 packs", None),
        (6, {"max_steps": 9}, "training: 9 steps, 1.5 epochs, 900 tokens", None),
        (
            5,
            {"batch_size": 4, "gradient_accumulation_steps": 4, "num_epochs": 10},
            "training: 4 steps, 10 epochs",
            "a step takes 16 packs, more than the 5 of an epoch: 10 epochs are 4 steps; lower "
            "gradient_accumulation_steps or b",
        ),
        (
            40,
            {"batch_size": 2},
            "2 x 4 shrinks to 2 x 1",
            "batch_size=2: 1 epoch is 20 steps; lower batch_size for",
        ),
        (40, {"batch_size": 2, "max_steps": 100}, "training: 100 steps", None),
        (
            6,
            {"batch_size": 8, "max_steps": 100},
            "training: 100 steps",
            "more than the 6 of an epoch",
        ),
    ],
)
def test_what_is_said(packs, fields, said, warned, caplog):
    with caplog.at_level(logging.INFO):
        fitted(packs, **fields)
    told = "\n".join(record.message for record in caplog.records if record.levelno == logging.INFO)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said in told
    assert len(warnings) == (warned is not None) and (warned or "") in "".join(warnings)


def usual(folder: Path, **changes) -> ChronicalsConfig:
    """A batch that is left to its default."""
    left = ("batch_size", "gradient_accumulation_steps", "max_steps")
    given = {
        name: value
        for name, value in vars(runs.config(folder)).items()
        if name in runs.config(folder).explicit
    }
    return ChronicalsConfig(
        **{name: value for name, value in given.items() if name not in left} | changes
    )


def steps_of(folder: Path) -> int:
    return len(runs.trajectory(folder))


@pytest.mark.slow
def test_ten_epochs_are_ten_times_the_steps_of_one(tmp_path):
    for epochs in (1, 10):
        config = usual(tmp_path / str(epochs), num_epochs=epochs, max_seq_length=512)
        ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), config).train(tiny.chat_rows(8))
        assert (config.batch_size, config.explicit & {"batch_size"}) == (4, set())
    assert steps_of(tmp_path / "10") == 10 * steps_of(tmp_path / "1") > 0


def test_a_trainer_has_the_fitted_batch_while_it_runs(tmp_path):
    seen = []

    class Look(Callback):
        def step_done(self, metrics):
            seen.append(trainer.config.batch_size)

    config = usual(tmp_path, max_steps=1)
    trainer = ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), config, [Look()])
    trainer.train(tiny.chat_rows(8))
    assert seen == [1] and trainer.config.batch_size == 4


def test_a_resumed_run_keeps_the_batch_it_had(tmp_path):
    """Though other code, or other data, would shrink it otherwise; unless it is set now."""
    rows = tiny.chat_rows(30)
    ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), usual(tmp_path, max_steps=2)).train(rows)
    state = tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json"
    kept = json.loads(state.read_text())["config"]
    assert (kept["batch_size"], kept["gradient_accumulation_steps"]) == (1, 1)
    changed = json.loads(state.read_text())
    changed["config"].update(batch_size=3, gradient_accumulation_steps=2)
    state.write_text(json.dumps(changed))
    config = fit_batch(usual(tmp_path), plan(6), Mesh(), state.parent)
    assert (config.batch_size, config.gradient_accumulation_steps) == (3, 2)
    config = fit_batch(usual(tmp_path, batch_size=5), plan(6), Mesh(), state.parent)
    assert (config.batch_size, config.gradient_accumulation_steps) == (5, 2)
    state.write_text("{")
    config = fit_batch(usual(tmp_path), plan(6), Mesh(), state.parent)
    assert (config.batch_size, config.gradient_accumulation_steps) == (1, 1)


@pytest.mark.parametrize(
    ("processes", "now", "batch", "warned"),
    [
        (2, {}, (2, 6), None),
        (1, {}, (2, 12), None),
        (4, {}, (2, 3), None),
        (
            8,
            {},
            (2, 6),
            "resuming on 8 processes: a step takes 96 packs (before: 24); 2 processes keep as many",
        ),
        (
            4,
            {"gradient_accumulation_steps": 6},
            (2, 6),
            "resuming on 4 processes: a step takes 48 packs (before: 24); "
            "gradient_accumulation_steps=3 keeps as many",
        ),
        (4, {"gradient_accumulation_steps": 3}, (2, 3), None),
        (2, {"gradient_accumulation_steps": 5}, (2, 5), None),
    ],
)
def test_a_run_that_goes_on_with_other_processes_takes_as_many_packs_a_step(
    processes, now, batch, warned, tmp_path, caplog
):
    """Where forward passes were not set and can make up for them; else it is said, with what
    does.
    """
    rows = tiny.chat_rows(30)
    ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), usual(tmp_path, max_steps=2)).train(rows)
    state = tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json"
    kept = json.loads(state.read_text())
    assert kept["processes"] == 1
    kept["config"].update(batch_size=2, gradient_accumulation_steps=6)
    state.write_text(json.dumps({**kept, "processes": 2}))
    several = SimpleNamespace(
        count=processes, data_count=processes, writer=True, gather=lambda tensor: [tensor]
    )
    caplog.clear()
    config = fit_batch(usual(tmp_path, **now), plan(1000), several, state.parent)
    assert (config.batch_size, config.gradient_accumulation_steps) == batch
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == (
        [warned] if warned else []
    )


def test_a_checkpoint_says_how_many_processes_took_packs_of_their_own(tmp_path, monkeypatch):
    """Those that share packs count as one: the packs of a step, by which a resumed run fits its
    passes, are so many times.
    """

    class Shared(Callback):
        def run_began(self, run):
            monkeypatch.setattr(Mesh, "data_count", 3)

    trainer = ChronicalsTrainer(
        tiny.llama(), tiny.tokenizer(), usual(tmp_path, max_steps=1), callbacks=[Shared()]
    )
    trainer.train(tiny.chat_rows(30))
    state = json.loads(
        (tmp_path / "run" / "checkpoints" / "step-00000001" / "state.json").read_text()
    )
    assert state["processes"] == 3


@pytest.mark.parametrize(
    ("before", "now", "taken"),
    [
        ({"max_steps": 1000, "num_epochs": None}, {}, (1000, None)),
        ({"max_steps": 1000, "num_epochs": 3}, {}, (None, 3)),  # as 1000 was the default once
        ({"max_steps": None, "num_epochs": None}, {}, (None, None)),
        ({"max_steps": 1000, "num_epochs": None}, {"num_epochs": 2}, (None, 2)),
        ({"max_steps": None, "num_epochs": 3}, {"max_steps": 5}, (5, None)),
    ],
)
def test_a_resumed_run_keeps_its_length_where_none_is_set(tmp_path, caplog, before, now, taken):
    batch = {"batch_size": 1, "gradient_accumulation_steps": 1}
    (tmp_path / "state.json").write_text(json.dumps({"config": before | batch}))
    with caplog.at_level(logging.INFO):
        config = fit_batch(ChronicalsConfig(**now), plan(60), Mesh(), tmp_path)
    assert (config.max_steps, config.num_epochs) == taken
    assert ("neither max_steps nor num_epochs is set" in caplog.text) == (not now and any(taken))


@pytest.mark.slow
def test_resumed_with_the_default_batch_it_ends_as_uninterrupted(tmp_path):
    rows = tiny.chat_rows(30)
    for folder, parts in (("whole", (8,)), ("parts", (3, 8))):
        for number, steps in enumerate(parts):
            config = usual(
                tmp_path / folder, max_steps=steps, lr_scheduler="constant", save_steps=3
            )
            ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), config).train(rows, resume=number > 0)
    assert runs.trajectory(tmp_path / "whole") == runs.trajectory(tmp_path / "parts")


@pytest.mark.parametrize("total, rising", [(6, 0), (40, 4), (5000, 100)])
def test_a_warm_up_that_was_not_set_is_at_most_a_tenth(total, rising):
    rates = [
        rate_factor(ChronicalsConfig(lr_scheduler="constant"), number, total)
        for number in range(total)
    ]
    assert sum(rate < 1 for rate in rates) == max(rising - 1, 0)


def test_the_words_tell_processes():
    words = Length.of(ChronicalsConfig(batch_size=2), plan(64), 2).words(
        ChronicalsConfig(batch_size=2)
    )
    assert re.search(
        r"a step takes 16 \(batch_size 2 x gradient_accumulation_steps 4 x 2 processes\)$", words
    )
