"""Pages for users: links lead somewhere, the index names every page, commands and their flags exist."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import typer

from chronicals.cli.app import app
from chronicals.cli.options import SETTING, SHORT
from chronicals.objectives import OBJECTIVES
from chronicals.objectives.registry import BESIDE

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks" / "NOTES.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^(chronicals .*?)(?: +#.*)?$", re.MULTILINE)
BLOCK = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def names(pages):
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", names(PAGES))
def test_links_lead_somewhere(page):
    path = ROOT / page
    for link in LINK.findall(path.read_text()):
        if not link.startswith(("http://", "https://")):
            target, _, anchor = link.partition("#")
            found = (path.parent / target) if target else path
            assert found.exists(), link
            assert not anchor or anchor in anchors(found), link


def anchors(path):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    named = {(ROOT / "docs" / link).resolve() for link in LINK.findall(index)}
    assert {page.resolve() for page in PAGES} - named == {ROOT / "docs" / "README.md"}


def test_the_readme_is_one_page():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 120
    assert "make test" in text


def commands():
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            yield from ((str(page.relative_to(ROOT)), line) for line in COMMAND.findall(block))


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_and_flags_exist(page, line):
    _, name, *rest = shlex.split(line)
    command = typer.main.get_command(app).commands[name]
    if hasattr(command, "commands"):
        command = command.commands[rest[0]]
    known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    flags = {SHORT.get(word, word) for word in rest if word.startswith("--")}
    settings = {word for word in flags if SETTING.match(word)}
    for word in settings:
        section, _, setting = word.removeprefix("--").partition(".")
        known_settings = BESIDE[section] if section in BESIDE else OBJECTIVES[section].Settings
        assert setting.replace("-", "_") in {field.name for field in dataclasses.fields(known_settings)}, word
    assert flags - settings <= known | {"--help"}


def test_the_tree_names_every_room():
    tree = (ROOT / "docs" / "design.md").read_text()
    rooms = {path.parent.name for path in ROOT.glob("src/chronicals/*/__init__.py")}
    assert rooms <= set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))
