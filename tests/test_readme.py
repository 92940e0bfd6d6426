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


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL
    )
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in tiny.chat_rows())
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    loss, _, folder = capsys.readouterr().out.strip().splitlines()[-1].partition(" ")
    assert 0 < float(loss) < 7
    assert (tmp_path / folder / "adapter_model.safetensors").exists()


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


@pytest.mark.parametrize("page", ["README.md", "docs/measured.md"])
def test_the_figures_are_those_of_the_results(page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("figures")
    made = script.PAGES[page]()
    assert "tokens/s" in made
    text = (ROOT / page).read_text()
    assert script.with_figures(text, made) == text, "run python benchmarks/figures.py"
