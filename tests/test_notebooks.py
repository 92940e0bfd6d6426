"""The notebooks of examples/ run on the CPU as they stand: their cells one by one, a tiny model and
few steps in the place of their parameters, and no download.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.training import quickstart
from chronicals.training.preparation import fit_precision

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))

PARAMETERS = {
    "quickstart.ipynb": {"FOLDER": "quick"},
    "lora.ipynb": {"MODEL": "base", "STEPS": 2},
    "preference.ipynb": {"MODEL": "base", "STEPS": 2},
    "export.ipynb": {"RUN": "lora-output", "FORMATS": ["merged"]},
}


def cells(name, tag=None):
    book = json.loads((EXAMPLES / name).read_text())
    for cell in book["cells"]:
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] == "code" and (tag is None or tag in tags):
            yield "".join(cell["source"]), tags


def run(name):
    """Execute the cells of a notebook in one namespace, as a kernel does."""
    namespace = {"__name__": "__main__"}
    for source, tags in cells(name):
        if "install" in tags:
            continue
        exec(compile(source, f"{name}", "exec"), namespace)
        if "parameters" in tags:
            namespace |= PARAMETERS[name]
    return namespace


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("chats.jsonl", "pairs.jsonl"):
        shutil.copy(EXAMPLES / name, tmp_path)
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.slow
def test_a_model_is_trained_and_exported_cell_by_cell(folder, capsys):
    assert run("lora.ipynb")["result"].steps == 2
    card = (folder / "lora-output" / "model" / "README.md").read_text()
    assert "use_lora | True" in card and str(folder) not in card
    assert run("export.ipynb")["written"]
    assert "2 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_pairs_are_trained_on_cell_by_cell(folder):
    assert len(run("preference.ipynb")["accuracies"]) == 2


@pytest.mark.long
def test_the_quickstart_learns_cell_by_cell(folder):
    assert run("quickstart.ipynb")["done"].answers


def test_every_notebook_is_run_and_has_no_outputs():
    assert set(PARAMETERS) == set(NOTEBOOKS) and callable(quickstart.run_quickstart)
    for name in NOTEBOOKS:
        book = json.loads((EXAMPLES / name).read_text())
        assert not any(cell.get("outputs") for cell in book["cells"])
        (parameters, _) = next(cells(name, "parameters"))
        set_there = {line.partition(" =")[0] for line in parameters.splitlines()}
        assert set(PARAMETERS[name]) <= set_there
        assert [tags for _, tags in cells(name, "install")] == [["install"]]


def test_a_card_without_bf16_takes_fp16_unless_bf16_is_asked_for(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    card = torch.device("cuda")
    fitted = fit_precision(ChronicalsConfig(), card)
    assert fitted.mixed_precision == "fp16" and "mixed_precision" not in fitted.explicit
    assert "this card has no bf16" in caplog.text
    for asked in ({"mixed_precision": "bf16"}, {"master_weights": False}):
        with pytest.raises(ConfigurationError, match="no bf16"):
            fit_precision(ChronicalsConfig(**asked), card)
    assert fit_precision(ChronicalsConfig(), torch.device("cpu")).mixed_precision == "bf16"
