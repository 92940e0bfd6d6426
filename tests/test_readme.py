"""The Python example of the README runs as it stands, and its figures are those of the result
files.
"""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

import tiny

ROOT = Path(__file__).parent.parent


def examples(page):
    """Return the blocks of Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.fixture
def beside_a_model(tmp_path, monkeypatch):
    """Work in a folder with a small model, ``base``, and rows of chats, ``data.jsonl``."""
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    lines = [json.dumps(row) + "\n" for row in tiny.chat_rows()]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_is_patched_as_the_readme_says(capsys):
    (example,) = examples("README.md")
    exec(compile(example, "README.md", "exec"), {"model": tiny.llama()})
    assert "RMSNorm" in capsys.readouterr().out


@pytest.mark.slow
def test_the_trainer_is_used_as_the_page_says(beside_a_model, capsys):
    example = next(text for text in examples("docs/training.md") if "ChronicalsTrainer(" in text)
    exec(compile(example, "docs/training.md", "exec"), {})
    loss, _, folder = capsys.readouterr().out.strip().splitlines()[-1].partition(" ")
    assert 0 < float(loss) < 7
    assert (beside_a_model / folder / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_no_command_trains_where_an_earlier_one_did(page):
    """Of a block that is pasted command by command, the second run into a folder would be
    refused.
    """
    for block in re.findall(r"```\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        commands = [
            shlex.split(line, comments=True)
            for line in block.splitlines()
            if line.startswith("chronicals train ")
        ]
        trains = [
            words for words in commands if not {"--check", "--overwrite", "--resume"} & set(words)
        ]
        folders = [
            words[words.index("--output-dir") + 1] if "--output-dir" in words else ""
            for words in trains
        ]
        assert len(folders) == len(set(folders)), block


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/measured.md"])
def test_the_figures_are_those_of_the_results(page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("figures")
    made = script.written(page)
    assert "tokens/s" in made
    assert made == (ROOT / page).read_text(), "run python benchmarks/figures.py"
