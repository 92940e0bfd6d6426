"""Which checkpoint a run goes on from, and that nobody's files are replaced or mixed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import runs
import tiny
from chronicals.training import CheckpointError
from chronicals.training.run import resume
from chronicals.training.run.lock import LOCK_FILE, FolderInUse, locked
from chronicals.training.run.resume import holds_a_run, sole_writer
from comparison import equal

STEADY = {"lr_scheduler": "constant", "warmup_steps": 0, "save_steps": 2, "save_total_limit": 9}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    runs.train(folder, max_steps=4, **STEADY)
    return folder


@pytest.fixture
def run_folder(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


HOLDER = """
import sys, time
from pathlib import Path
from chronicals.training.run.resume import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(tmp_path):
    """And the lock of a process that was killed is nobody's."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert holder.stdout.readline() == "held\n"
    try:
        with pytest.raises(
            CheckpointError,
            match=r"output_dir='.*run': another run is writing there.*another output_dir",
        ):
            runs.train(tmp_path, max_steps=1)
        assert not list((tmp_path / "run").iterdir())
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with sole_writer(tmp_path / "run"):
        pass


def test_a_folder_in_which_nothing_was_written_is_gone(tmp_path):
    with sole_writer(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a" / "b").exists()


def test_where_folders_cannot_be_locked_a_file_is(tmp_path, monkeypatch, let_raise, caplog):
    import fcntl

    usual = fcntl.flock

    def nfs(handle, operation):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(9, "Bad file descriptor")
        usual(handle, operation)

    monkeypatch.setattr(fcntl, "flock", nfs)
    with locked(tmp_path), pytest.raises(FolderInUse), locked(tmp_path):
        pass
    assert (tmp_path / LOCK_FILE).exists() and not caplog.text
    let_raise(fcntl, flock=OSError(37, "No locks available"))
    with locked(tmp_path):
        assert "cannot be locked" in caplog.text


@pytest.mark.parametrize("resumed", [False, True])
def test_a_finished_model_is_not_replaced(run_folder, resumed):
    """Also where its checkpoints were deleted."""
    shutil.rmtree(run_folder / "run" / "checkpoints")
    before = runs.weights(run_folder)
    assert holds_a_run(run_folder / "run")
    with pytest.raises(
        CheckpointError, match=r"holds model/, which a run that begins anew would replace"
    ):
        runs.train(run_folder, max_steps=1, resume=resumed)
    assert all(equal(weight, before[name]) for name, weight in runs.weights(run_folder).items())


def test_nothing_to_resume_is_said(tmp_path, caplog):
    assert runs.train(tmp_path, max_steps=1, resume=True).steps == 1
    assert "holds no checkpoint to go on from: the run begins at step 0" in caplog.text


@pytest.mark.slow
def test_a_checkpoint_that_is_named_is_gone_on_from(run_folder, tmp_path_factory):
    """In another folder, as the run itself goes on; named as a run, from its newest."""
    runs.train(run_folder, max_steps=6, resume=True, **STEADY)
    for named in ("checkpoints/step-00000002", "."):
        branch = tmp_path_factory.mktemp("branch")
        runs.train(
            branch,
            max_steps=6,
            resume=run_folder / "run" / named,
            cache_dir=run_folder / "tokens",
            **STEADY,
        )
        first = 3 if named != "." else 7
        assert runs.trajectory(branch) == [
            line for line in runs.trajectory(run_folder) if line[0] >= first
        ]
        ours = runs.weights(branch)
        theirs = runs.weights(run_folder)
        assert all(equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_what_is_named_must_be_whole_and_the_last(run_folder, tmp_path):
    checkpoints = run_folder / "run" / "checkpoints"
    with pytest.raises(CheckpointError, match="nothing: there is no such folder"):
        runs.train(tmp_path, resume=tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is no checkpoint to go on from, and no run"):
        runs.train(tmp_path, resume=tmp_path / "tokens")
    with pytest.raises(
        CheckpointError,
        match=r"a later checkpoint than step-00000002 \(step-00000004\).*another output_dir",
    ):
        runs.train(run_folder, resume=checkpoints / "step-00000002", max_steps=6)
    with pytest.raises(CheckpointError, match="holds a run"):
        other = shutil.copytree(
            checkpoints / "step-00000004", tmp_path / "elsewhere" / "step-00000004"
        )
        runs.train(run_folder, resume=other, max_steps=6)
    (checkpoints / "step-00000004" / "state.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"step-00000004: state.json is damaged.*name another"
    ):
        runs.train(run_folder, resume=checkpoints / "step-00000004", max_steps=6)
    assert (
        runs.train(
            run_folder, resume=str(checkpoints / "step-00000002"), max_steps=6, **STEADY
        ).steps
        == 6
    )


@pytest.mark.slow
def test_the_command_branches_off(run_folder, tmp_path):
    """By the recipe of the run that is named; without a run it says so."""
    from typer.testing import CliRunner

    from chronicals.cli.app import app

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in tiny.chat_rows()))
    base = tmp_path / "base"
    tiny.llama().save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)

    def train(*arguments):
        result = CliRunner().invoke(app, ["train", *map(str, arguments)])
        return result.exit_code, str(result.exception or "")

    options = [
        "--batch-size",
        2,
        "--max-seq-length",
        128,
        "--mixed-precision",
        "fp32",
        "--trackers",
        "none",
        "--save-steps",
        1,
    ]
    assert train(
        "--model", base, "--data", rows, "--max-steps", 2, "--output-dir", tmp_path / "a", *options
    ) == (0, "")
    assert train(
        "--resume-from", tmp_path / "a/checkpoints/step-00000001", "--output-dir", tmp_path / "b"
    ) == (0, "")
    assert train("--resume-from", tmp_path / "a", "--max-steps", 3) == (0, "")
    assert [step for step, _, _ in steps(tmp_path / "b")] == [2] and [
        step for step, _, _ in steps(tmp_path / "a")
    ] == [1, 2, 3]
    assert (tmp_path / "b" / "resume.yaml").exists()
    code, message = train("--resume", "--output-dir", tmp_path / "none")
    assert (
        code == 1
        and "none' holds no run to go on with" in message
        and not (tmp_path / "none").exists()
    )


def steps(folder: Path):
    link = folder.parent / f"{folder.name}-as-run"
    link.mkdir()
    (link / "run").symlink_to(folder)
    return runs.trajectory(link)


def test_the_module_says_how_to_go_on():
    assert (
        resume.how_to_resume(Path("a b"))
        == "go on with train(..., resume=True) and output_dir='a b'"
    )
