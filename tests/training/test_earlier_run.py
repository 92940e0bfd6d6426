"""A run that takes the place of an earlier one in its folder: what is kept until when, and what
is refused.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_resume import HOLDER

import runs
import tiny
from chronicals.cli.wording import Wording
from chronicals.config import ConfigurationError
from chronicals.saving import check_folder, write_folder
from chronicals.training import Callback, CheckpointError
from chronicals.training.run.earlier_run import EARLIER, EarlierRun, put_back

SAVES = {"save_steps": 2, "save_total_limit": 9, "trackers": []}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    runs.train(folder, max_steps=4, **SAVES)
    return folder


@pytest.fixture
def run_folder(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    """Of every file the hash, by its path."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


class Watching(Callback):
    """Records what the folder holds after the first step, and when the first checkpoint is there
    (a thread writes it).
    """

    def __init__(self, folder, fails_after=None):
        self.folder = folder
        self.fails_after = fails_after
        self.after_a_step = None
        self.after_a_checkpoint = None

    def state(self):
        return contents(self.folder / "run" / "model"), steps_in(self.folder)

    def step_done(self, metrics):
        self.after_a_step = self.after_a_step or self.state()
        if metrics.step == self.fails_after:
            raise RuntimeError("as planned")

    def saved(self, step, folder):
        self.after_a_checkpoint = self.after_a_checkpoint or self.state()


def test_the_earlier_run_is_replaced_at_the_first_checkpoint(run_folder, caplog):
    before = contents(run_folder / "run" / "model")
    watching = Watching(run_folder)
    runs.train(
        run_folder, tiny.chat_rows(40), max_steps=3, callbacks=[watching], overwrite=True, **SAVES
    )
    assert watching.after_a_step == (before, ["step-00000002", "step-00000004"])
    model, steps = watching.after_a_checkpoint
    assert model == {} and "step-00000002" in steps and "step-00000004" not in steps
    assert steps_in(run_folder) == ["step-00000002", "step-00000003"]
    assert [step for step, _, _ in runs.trajectory(run_folder)] == [1, 2, 3]
    assert contents(run_folder / "run" / "model") != before
    assert not list((run_folder / "run").glob(".*"))


def test_a_run_that_ends_before_its_first_checkpoint_leaves_the_earlier_one(run_folder, caplog):
    before = contents(run_folder / "run")
    with pytest.raises(RuntimeError, match="as planned"):
        runs.train(
            run_folder,
            max_steps=3,
            callbacks=[Watching(run_folder, fails_after=1)],
            overwrite=True,
            **SAVES,
        )
    assert contents(run_folder / "run") == before
    assert "holds the earlier run again" in caplog.text


class Killed(BaseException):
    """In the place of SIGKILL: nothing of ours catches it."""


def replace(folder: Path) -> None:
    """What a new run does to the files of its folder, until its first checkpoint is there."""
    earlier = EarlierRun(folder)
    earlier.begin()
    for name in ("metrics.jsonl", "samples.json"):
        (folder / name).write_text("new")
    target = folder / "checkpoints" / "step-00000002"
    write_folder(
        target,
        lambda aside: (aside / "new").write_text("new"),
        lambda: earlier.give_way_to(target.name),
    )
    earlier.discard()


def killed_at(number: int, monkeypatch, run_folder: Path, work) -> bool:
    """Whether ``work`` was killed: just before so many renames and removals were done."""
    done = 0

    def counted(usual):
        def wrapper(path, *others, **named):
            nonlocal done
            if Path(path).is_relative_to(run_folder):
                done += 1
                if done > number:
                    raise Killed
            return usual(path, *others, **named)

        return wrapper

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", counted(os.rename))
        patched.setattr(shutil, "rmtree", counted(shutil.rmtree))
        try:
            work()
        except Killed:
            return True
    return False


def test_killed_anywhere_nothing_is_lost(finished, tmp_path, monkeypatch):
    """Also where what puts the earlier run back is killed, at each of its steps."""
    before = contents(finished / "run")
    number = 0
    outcomes = set()
    while True:
        folder = tmp_path / str(number)
        shutil.copytree(finished / "run", folder)
        if not killed_at(number, monkeypatch, folder, lambda folder=folder: replace(folder)):
            break
        again = 0
        while killed_at(again, monkeypatch, folder, lambda folder=folder: put_back(folder)):
            again += 1
        new = folder / "checkpoints" / "step-00000002"
        replaced = (new / "new").exists()
        outcomes.add(replaced)
        there = {name: value for name, value in contents(folder).items() if "/.step" not in name}
        assert replaced or there == before, f"killed at rename {number}"
        assert not replaced or (
            check_folder(new) is None and steps_in_folder(folder) == ["step-00000002"]
        )
        assert not [path for path in folder.glob(".*")]
        number += 1
    assert number > 8 and outcomes == {False, True}


def steps_in_folder(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


KILLED = """
import os, signal, sys
from pathlib import Path
import runs
from chronicals.training import Callback

class Kill(Callback):
    def step_done(self, metrics):
        os.kill(os.getpid(), signal.SIGKILL)

runs.train(Path(sys.argv[1]), max_steps=3, callbacks=[Kill()], overwrite=True, save_steps=2, trackers=[])
"""


@pytest.mark.slow
def test_a_killed_run_loses_nothing(run_folder):
    """Its model and checkpoints are in their places at once, all else as soon as anybody claims
    the folder.
    """
    before = contents(run_folder / "run")
    path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", KILLED, str(run_folder)]
    assert (
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=200).returncode
        == -signal.SIGKILL
    )
    now = contents(run_folder / "run")
    assert all(
        now[name] == value
        for name, value in before.items()
        if name.startswith(("model/", "checkpoints/"))
    )
    assert (run_folder / "run" / EARLIER).exists()
    assert runs.train(run_folder, max_steps=6, resume=True, **SAVES).steps == 6
    assert [step for step, _, _ in runs.trajectory(run_folder)] == [1, 2, 3, 4, 5, 6]
    assert not list((run_folder / "run").glob(".*"))


@pytest.mark.parametrize(
    "place",
    [
        "notes.txt",
        "model/notes.txt",
        "checkpoints/step-00000002/notes.txt",
        "checkpoints/mine/x",
        "exported/m.gguf",
    ],
)
def test_files_that_no_run_wrote_are_never_replaced(place, run_folder):
    file = run_folder / "run" / place
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    before = contents(run_folder / "run")
    refused = r"cannot be replaced \(overwrite=True\): no run wrote '.*(notes.txt|mine|exported)'"
    with pytest.raises(CheckpointError, match=refused):
        runs.train(run_folder, max_steps=1, overwrite=True, **SAVES)
    assert contents(run_folder / "run") == before


def test_a_model_of_somebody_elses_is_never_replaced(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "run" / "model")
    with pytest.raises(CheckpointError, match="no run wrote '.*model'"):
        runs.train(tmp_path, max_steps=1, overwrite=True)


def test_what_the_new_run_reads_is_not_replaced(run_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run_folder / "run" / "model")
    with pytest.raises(CheckpointError, match=r"the new run itself reads '.*model'; copy that out"):
        runs.train(run_folder, model=model, max_steps=1, overwrite=True, **SAVES)
    reference = {"objective": "dpo", "dpo": {"reference_model": str(run_folder / "run")}}
    with pytest.raises(CheckpointError, match="the new run itself reads"):
        runs.train(run_folder, max_steps=1, overwrite=True, **reference, **SAVES)


@pytest.mark.slow
def test_a_folder_that_a_live_process_holds_is_refused(run_folder):
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_folder / "run")],
        stdout=subprocess.PIPE,
        text=True,
        env=path,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        before = contents(run_folder / "run")
        with pytest.raises(CheckpointError, match="another run is writing there"):
            runs.train(run_folder, max_steps=1, overwrite=True, **SAVES)
        assert contents(run_folder / "run") == before
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.slow
def test_to_resume_is_not_to_replace(run_folder, tmp_path_factory):
    checkpoint = run_folder / "run" / "checkpoints" / "step-00000004"
    for resume in (True, checkpoint):
        with pytest.raises(
            ConfigurationError,
            match=r"overwrite=True replaces the run in output_dir=.*leave out one",
        ):
            runs.train(run_folder, max_steps=6, resume=resume, overwrite=True, **SAVES)
    branch = tmp_path_factory.mktemp("branch")
    runs.train(branch, max_steps=1, **SAVES)
    runs.train(
        branch,
        max_steps=5,
        resume=checkpoint,
        overwrite=True,
        cache_dir=run_folder / "tokens",
        **SAVES,
    )
    assert steps_in(branch) == ["step-00000005"]


def test_the_refusal_names_the_flag(run_folder):
    with pytest.raises(CheckpointError, match="replace it with overwrite=True") as refused:
        runs.train(run_folder, max_steps=1, **SAVES)
    assert "replace it with --overwrite, or" in Wording({"overwrite": True, "output_dir": False})(
        str(refused.value)
    )
    shutil.rmtree(run_folder / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"holds model/.*overwrite=True"):
        runs.train(run_folder, max_steps=1, **SAVES)


def test_an_empty_folder_has_nothing_to_replace(tmp_path):
    assert runs.train(tmp_path, max_steps=1, overwrite=True, **SAVES).steps == 1


@pytest.mark.slow
def test_the_command_replaces_a_run_with_its_recipe(tmp_path):
    """The recipe that is kept is the new run's, and goes on with it."""
    from typer.testing import CliRunner

    from chronicals.cli.app import app

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in tiny.chat_rows()))
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    options = [
        "--max-seq-length",
        128,
        "--mixed-precision",
        "fp32",
        "--trackers",
        "none",
        "--report-samples",
        0,
    ]
    given = [
        "--model",
        tmp_path / "base",
        "--data",
        rows,
        "--output-dir",
        tmp_path / "run",
        "--batch-size",
        2,
        *options,
    ]

    def train(*arguments):
        result = CliRunner().invoke(app, ["train", *map(str, arguments)])
        return result.exit_code, str(result.exception or "")

    assert train(*given, "--max-steps", 2) == (0, "")
    assert train(*given, "--max-steps", 1, "--overwrite", "--learning-rate", 1e-3) == (0, "")
    assert steps_in(tmp_path) == ["step-00000001"]
    kept = (tmp_path / "run" / "resume.yaml").read_text()
    assert "learning_rate: 0.001" in kept and "overwrite: true" not in kept
    assert train("--resume", "--output-dir", tmp_path / "run", "--max-steps", 2) == (0, "")
