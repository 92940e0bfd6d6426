"""Optimizer states in several files: read as they were written, and no file of them can be
missing unnoticed.
"""

import pytest
import torch

import runs
from chronicals.saving import CheckpointError, optimizer_states
from chronicals.training.run import checkpoint
from comparison import equal


@pytest.fixture
def small_files(set_constants):
    set_constants(optimizer_states, MAX_FILE_BYTES=10_000)


def test_states_are_read_as_they_were_written(tmp_path, small_files):
    sizes = [1, 700, 2500, 2501, 5000, 3, 2499]
    states = {f"weight {n}:exp_avg": torch.randn(size) for n, size in enumerate(sizes)}
    states["transposed:low"] = torch.arange(12, dtype=torch.int16).view(3, 4).T
    optimizer_states.write_optimizer(states, tmp_path)
    files = optimizer_states.optimizer_files(tmp_path)
    expected = [
        f"optimizer-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert [file.name for file in files] == expected
    assert len(files) == 7
    read = optimizer_states.read_optimizer(tmp_path)
    assert read.keys() == states.keys() and all(equal(read[name], states[name]) for name in states)


def test_states_are_staged_piece_by_piece():
    stage = torch.empty(64, dtype=torch.uint8)
    for state in (
        torch.randn(37),
        torch.randn(5, 7).T,
        torch.tensor(3.0),
        torch.arange(33, dtype=torch.int16),
        torch.empty(0),
    ):
        copy = optimizer_states._in_host_memory(state, stage)
        assert equal(copy, state) and copy.is_contiguous() and copy.dtype == state.dtype


def test_little_is_one_file_as_before(tmp_path):
    optimizer_states.write_optimizer({"weight:exp_avg": torch.ones(3)}, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["optimizer.safetensors"]
    with pytest.raises(FileNotFoundError, match="no optimizer states"):
        optimizer_states.read_optimizer(tmp_path / "elsewhere")


@pytest.mark.slow
def test_a_run_in_several_files_resumes_bit_equal(tmp_path, small_files):
    options = {"max_steps": 6, "save_steps": 3, "lr_scheduler": "constant", "warmup_steps": 0}
    runs.train(tmp_path / "whole", **options)
    runs.train(tmp_path / "part", **{**options, "max_steps": 3})
    (folder,) = checkpoint.checkpoints(tmp_path / "part" / "run")
    assert len(optimizer_states.optimizer_files(folder)) > 1
    runs.train(tmp_path / "part", **options, resume=True)
    whole = runs.weights(tmp_path / "whole")
    part = runs.weights(tmp_path / "part")
    assert all(equal(whole[name], part[name]) for name in whole)


def test_a_file_that_is_missing_or_changed_is_named(tmp_path, small_files):
    runs.train(tmp_path, max_steps=2)
    (folder,) = checkpoint.checkpoints(tmp_path / "run")
    first, second, *_ = optimizer_states.optimizer_files(folder)
    whole = second.read_bytes()
    second.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert checkpoint.check_checkpoint(folder) == f"{second.name} is damaged"
    first.unlink()
    assert checkpoint.check_checkpoint(folder) == f"{first.name} is missing"


def test_a_full_disk_under_one_of_the_files_leaves_nothing(tmp_path, small_files, monkeypatch):
    inner = optimizer_states.save_file

    def save_file(tensors, path, header=None):
        if "optimizer-00002" in path.name:
            raise OSError(28, "No space left on device", str(path))
        inner(tensors, path, header)

    monkeypatch.setattr(optimizer_states, "save_file", save_file)
    with pytest.raises(CheckpointError, match="disk is full"):
        runs.train(tmp_path, max_steps=2)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
