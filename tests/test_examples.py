"""Every recipe of examples/ trains as it stands, two steps of a tiny model; each objective has
one.
"""

import dataclasses
import math
import os
import subprocess
from pathlib import Path

import pytest
import yaml

import tiny
from chronicals.cli import main
from chronicals.config import ChronicalsConfig, Recipe
from chronicals.objectives import OBJECTIVES
from chronicals.training.run.callbacks import read_metrics
from mixtures import mixture

FOLDER = Path(__file__).parent.parent / "examples"
RECIPES = sorted(path.name for path in FOLDER.glob("*.yaml"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A mixture of experts, for recipes with losses of routers."""
    folder = tmp_path_factory.mktemp("mixed")
    mixture(random=False, vocab_size=300).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_trains(name, base, mixed, tmp_path, monkeypatch):
    recipe = Recipe.read_yaml(FOLDER / name)
    base = mixed if "router" in recipe.get("sections", {}) else base
    flags = {
        "model": base,
        "data": FOLDER / recipe["data"],
        "output-dir": tmp_path / "run",
        "cache-dir": tmp_path / "tokens",
        "max-steps": 2,
        "max-seq-length": 256,
        "mixed-precision": "fp32",
        "report-samples": 0,
    }
    flags |= {"teacher": base} if recipe["objective"] == "distill" else {}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["train", str(FOLDER / name), *given(flags), "--no-use-torch-compile"])
    assert done.value.code in (0, None)
    losses = [
        line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line
    ]
    assert len(losses) == 2 and all(map(math.isfinite, losses))


def given(flags):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.mark.parametrize("name", RECIPES)
def test_its_paths_exist_and_its_comment_names_it(name):
    text = (FOLDER / name).read_text()
    recipe = yaml.safe_load(text)
    assert (FOLDER / recipe["data"]).exists() and recipe[
        "output_dir"
    ] == f"{Path(name).stem}-output"
    comment, command, *_ = text.splitlines()
    assert comment.startswith("# ") and f"chronicals train {name}" in command
    page = comment.rpartition("(")[2].rstrip(").")
    assert (FOLDER.parent / page).exists()


def test_every_objective_has_a_recipe():
    ours = {name for name, cls in OBJECTIVES.items() if cls.__module__.startswith("chronicals.")}
    there = {yaml.safe_load((FOLDER / name).read_text())["objective"] for name in RECIPES}
    assert ours - there == set(), "no recipe in examples/ has this objective"


def test_the_job_starts_one_torchrun_on_each_machine(tmp_path):
    """With commands in the place of Slurm's and torchrun that write what they are given."""
    commands = {"scontrol": "printf 'node7\\nnode9\\n'", "srun": 'printf "%s\\n" "$@"'}
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    slurm = {
        "SLURM_JOB_NODELIST": "node[7,9]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "123456",
        "SLURM_CPUS_PER_TASK": "64",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    job = FOLDER / "two-machines.sbatch"
    done = subprocess.run(
        ["bash", str(job), "--output-dir", "out"],
        env=slurm,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.split()
    assert said[:2] == ["--kill-on-bad-exit=1", "torchrun"] and said[-2:] == ["--output-dir", "out"]
    assert {
        "--nnodes=2",
        "--nproc-per-node=8",
        "--rdzv-endpoint=node7:23456",
        "--rdzv-id=123456",
    } <= set(said)
    asked = {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8"}
    assert asked <= set(job.read_text().splitlines())
    command = said[said.index("chronicals.cli") + 1 :]
    assert command[0] == "train" and command[1] in RECIPES and "--resume" in command
    known = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(ChronicalsConfig)}
    assert {word for word in command if word.startswith("--")} <= known | {"--resume"}
