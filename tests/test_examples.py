"""Every recipe of examples/ trains as it stands, two steps of a tiny model; each objective has one."""

import math
import sys
from pathlib import Path

import pytest
import yaml

import tiny
from chronicals.cli import main
from chronicals.config import Recipe
from chronicals.objectives import OBJECTIVES
from chronicals.training.callbacks import read_metrics
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


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_trains(name, base, mixed, tmp_path, monkeypatch):
    recipe = Recipe.read_yaml(FOLDER / name)
    base = mixed if "router" in recipe.get("sections", {}) else base
    flags = {
        "model": base, "data": FOLDER / recipe["data"], "output-dir": tmp_path / "run", "cache-dir": tmp_path / "tokens",
        "max-steps": 2, "max-seq-length": 256, "mixed-precision": "fp32", "report-samples": 0,
    }  # fmt: skip
    flags |= {"teacher": base} if recipe["objective"] == "distill" else {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["chronicals", "train", str(FOLDER / name), *given(flags), "--no-use-torch-compile"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (0, None)
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 2 and all(map(math.isfinite, losses))


def given(flags):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.mark.parametrize("name", RECIPES)
def test_its_paths_exist_and_its_comment_names_it(name):
    text = (FOLDER / name).read_text()
    recipe = yaml.safe_load(text)
    assert (FOLDER / recipe["data"]).exists() and recipe["output_dir"] == f"{Path(name).stem}-output"
    comment, command, *_ = text.splitlines()
    assert comment.startswith("# ") and f"chronicals train {name}" in command
    page = comment.rpartition("(")[2].rstrip(").")
    assert (FOLDER.parent / page).exists()


def test_every_objective_has_a_recipe():
    ours = {name for name, cls in OBJECTIVES.items() if cls.__module__.startswith("chronicals.")}
    assert ours <= {yaml.safe_load((FOLDER / name).read_text())["objective"] for name in RECIPES}
