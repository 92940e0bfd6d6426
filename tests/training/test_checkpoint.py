import errno
import json
import logging
import os
import shutil

import pytest
import torch

import runs
import tiny
from chronicals.training import CheckpointError
from chronicals.training import checkpoint as module
from chronicals.training.checkpoint import check_folder, checkpoints, newest_valid, write_folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    runs.train(folder, save_steps=2, save_total_limit=3)
    return folder


@pytest.fixture
def run_folder(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_only_safetensors_and_json(finished):
    for folder in checkpoints(finished / "run"):
        names = {path.suffix for path in folder.rglob("*") if path.is_file()}
        assert names <= {".safetensors", ".json", ".jinja"}, names


def test_keeps_the_newest(finished):
    assert [path.name for path in checkpoints(finished / "run")] == ["step-00000006", "step-00000004", "step-00000002"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_damage_is_named_and_the_one_before_is_used(run_folder, caplog, damage):
    newest, before, _ = checkpoints(run_folder / "run")
    victim = newest / ("manifest.json" if damage == "manifest" else "optimizer.safetensors")
    if damage == "remove":
        victim.unlink()
    elif damage == "flip":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    else:
        victim.write_bytes(victim.read_bytes()[:-3])
    with caplog.at_level(logging.ERROR):
        assert newest_valid(run_folder / "run") == before
    assert victim.name in caplog.text
    assert str(newest) in caplog.text


def test_resume_from_the_one_before_gives_the_same_end(run_folder, finished):
    (checkpoints(run_folder / "run")[0] / "state.json").write_text("{")
    shutil.rmtree(run_folder / "run" / "model")
    runs.train(run_folder, save_steps=2, save_total_limit=3, resume=True)
    assert runs.trajectory(run_folder) == runs.trajectory(finished)
    left, right = runs.weights(run_folder), runs.weights(finished)
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_metrics_are_cut_back_to_the_checkpoint(run_folder):
    for folder in checkpoints(run_folder / "run")[:2]:
        shutil.rmtree(folder)
    with (run_folder / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0, "gra')
    runs.train(run_folder, save_steps=2, resume=True)
    assert [step for step, _, _ in runs.trajectory(run_folder)] == [1, 2, 3, 4, 5, 6]


def test_full_disk_leaves_the_old_checkpoint(run_folder, monkeypatch):
    folder = run_folder / "run"
    before = {path.name: check_folder(path) for path in checkpoints(folder)}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_sync", full)
    with pytest.raises(CheckpointError, match="disk is full.*intact"):
        runs.train(run_folder, max_steps=9, save_steps=2, resume=True)
    assert {path.name: check_folder(path) for path in checkpoints(folder)} == before
    assert not list((folder / "checkpoints").glob(".*"))


def test_full_disk_for_real(tmp_path):
    """On a file system of half a megabyte."""
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=512k tmpfs {small} 2>/dev/null") != 0:
        pytest.skip("cannot mount a small file system here")
    try:
        write_folder(small / "first", lambda aside: (aside / "file").write_bytes(b"x" * 1000))
        with pytest.raises(CheckpointError, match="disk is full"):
            runs.train(tmp_path, output_dir=small / "run")
        assert check_folder(small / "first") is None
    finally:
        os.system(f"umount {small}")


def test_failure_while_writing_leaves_nothing(tmp_path):
    def broken(aside):
        (aside / "half").write_text("half")
        raise KeyError("broken")

    with pytest.raises(KeyError):
        write_folder(tmp_path / "folder", broken)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten(run_folder):
    with pytest.raises(CheckpointError, match=r"output_dir.*resume=True.*another output_dir"):
        runs.train(run_folder)


def test_other_data_is_refused_on_resume(run_folder):
    with pytest.raises(CheckpointError, match="other data"):
        runs.train(run_folder, rows=tiny.chat_rows(7), resume=True, max_steps=9)


def test_another_model_is_refused_on_resume(run_folder):
    with pytest.raises(CheckpointError, match="does not belong to this model"):
        runs.train(run_folder, model=tiny.llama(num_hidden_layers=3), resume=True, max_steps=9)


def test_state_holds_what_was_consumed_not_prefetched(finished):
    for folder in checkpoints(finished / "run"):
        state = json.loads((folder / "state.json").read_text())
        assert state["position"] == state["step"] * 2 * 2
