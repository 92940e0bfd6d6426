"""What a run will write is known before its first step, and compared with what the disk has
left.
"""

import shutil

import pytest

import runs
import tiny
from chronicals.training import CheckpointError
from chronicals.training.run import disk
from chronicals.training.run.disk import DiskUse, check_disk, disk_use
from chronicals.training.run.run_state import Run

KINDS = {
    "full": {},
    "bf16": {"mixed_precision": "bf16"},
    "states in bf16": {"optimizer_state_dtype": "bf16"},
    "8-bit states": {"use_8bit_optimizer": True},
    "lora": {"use_lora": True, "lora_rank": 8},
    "lora and the embedding": {
        "use_lora": True,
        "lora_rank": 8,
        "lora_modules_to_save": ["embed_tokens"],
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_takes_what_was_said(kind, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        "chronicals.training.trainer.check_disk", lambda use, config: said.append(use)
    )
    model = tiny.llama(hidden_size=128, intermediate_size=256)
    runs.train(tmp_path, model=model, max_steps=1, trackers=[], **KINDS[kind])
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    weights = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    states = sum(path.stat().st_size for path in folder.glob("optimizer*.safetensors"))
    (use,) = said
    assert use.model == pytest.approx(weights, rel=0.05)
    assert use.checkpoint == pytest.approx(weights + states, rel=0.05)


def with_free(monkeypatch, free):
    monkeypatch.setattr(
        disk.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(1 << 40, 0, free)
    )


def test_a_first_checkpoint_that_does_not_fit_is_an_error_before_the_first_step(
    tmp_path, monkeypatch
):
    with_free(monkeypatch, 1 << 20)
    with pytest.raises(
        CheckpointError,
        match=r"output_dir='.*run': its disk is full.*takes 1\.15 MiB, and 1\.00 MiB are free",
    ):
        runs.train(tmp_path)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_checkpoints_that_may_not_all_fit_are_warned_of(tmp_path, monkeypatch, caplog):
    with_free(monkeypatch, 30 << 30)
    config = runs.config(tmp_path, save_total_limit=3)
    check_disk(DiskUse(model=1 << 30, checkpoint=7 << 30, at_a_time=4), config)
    assert not caplog.text
    check_disk(DiskUse(model=3 << 30, checkpoint=7 << 30, at_a_time=4), config)
    assert (
        "4 checkpoints at a time and the model take 31.00 GiB, and its disk has 30.00 GiB free"
        in caplog.text
    )
    assert "lower save_total_limit=3" in caplog.text


@pytest.mark.parametrize(
    "changes, done, at_a_time",
    [
        ({"save_steps": None}, 0, 1),
        ({"save_steps": 500, "max_steps": 600}, 0, 2),
        ({"save_steps": 100, "max_steps": 600}, 0, 3),
        ({"save_steps": 100, "max_steps": 600, "save_total_limit": 1}, 0, 2),
        ({"save_steps": 100, "max_steps": 600}, 550, 1),
        ({"save_steps": None, "max_steps": 600, "eval_steps": 10}, 0, 3),
    ],
)
def test_how_many_are_there_at_a_time(changes, done, at_a_time, tmp_path):
    config = runs.config(tmp_path, **changes)
    run = Run(config.max_steps, config.output_dir, step=done)
    assert (
        disk_use(tiny.llama(), config, run, keeps_best="eval_steps" in changes).at_a_time
        == at_a_time
    )
