"""The page on sources is true: its files are written, its Python runs, its recipes and commands
are understood.
"""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from chronicals.config import DataSource, Recipe
from chronicals.data.reading.formats import COMPRESSED, READERS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "sources.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def blocks(language):
    return [text for kind, name, text in BLOCKS if kind == language and not name]


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _, name, text in BLOCKS:
        if name:
            Path(name).write_text(text)
    assert len(list(tmp_path.iterdir())) == 5
    space = {}
    for number, text in enumerate(blocks("python"), 1):
        exec(compile(text, f"sources.md, example {number}", "exec"), space)
    assert sum(text.count("assert") for text in blocks("python")) >= 8


def test_recipe_and_command_say_the_same():
    (recipe,) = blocks("yaml")
    (command,) = blocks("sh")
    data = Recipe(**yaml.safe_load(recipe)).data
    assert data[:2] == [DataSource("chats.jsonl"), DataSource("table.csv", weight=2.5)]
    assert data[2].columns == {"prompt": "question", "completion": "answer"}
    words = shlex.split(command)
    assert (
        Recipe(
            model="base", data=[word for flag, word in zip(words, words[1:]) if flag == "--data"]
        ).data
        == data[:2]
    )


@pytest.mark.parametrize("suffix", [*READERS, *COMPRESSED])
def test_every_ending_is_in_the_table(suffix):
    assert f"`{suffix}`" in PAGE
