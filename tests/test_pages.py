"""Pages for users: links lead somewhere, the index names every page, commands and recipes are
accepted, and cheap ones run.
"""

import dataclasses
import importlib
import re

import pytest
from typer.testing import CliRunner

from chronicals.cli.app import app
from chronicals.cli.benchmark import find_peers
from chronicals.cli.options import SETTING_FLAG, SHORT_FLAGS, values_of, without_option
from chronicals.config import Recipe
from chronicals.data.kinds.rows import DOCUMENT_KINDS
from chronicals.export import FORMATS
from chronicals.objectives import OBJECTIVES, build_objective
from chronicals.objectives.registry import BESIDE
from page_commands import (
    PAGES,
    ROOT,
    Place,
    all_commands,
    command_of,
    named_commands,
    recipe_of,
    shown_commands,
    shown_recipes,
)

find_peers()
peer_names = importlib.import_module("peers.names")
moe_commands = importlib.import_module("chronicals.cli.moe")
plan_command = importlib.import_module("chronicals.cli.plan")

LINK = re.compile(r"\]\(([^)\s]+)\)")


IN_TREE = {
    name: cls for name, cls in OBJECTIVES.items() if cls.__module__.startswith("chronicals.")
}


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
    assert text.count("\n") <= 90
    assert "make test" in text


COMMANDS = [*shown_commands()]


def test_the_commands_of_the_pages_are_found():
    lines = {line for _, line in COMMANDS}
    assert (
        "chronicals quickstart" in lines and "chronicals train recipe.yaml" in lines
    )  # the last of a torchrun
    assert len(COMMANDS) > 40 and {"README.md", "docs/moe.md", "docs/training.md"} <= {
        page for page, _ in COMMANDS
    }


@pytest.mark.parametrize("shown", named_commands(), ids=str)
def test_commands_and_flags_exist(shown):
    """Of a command in a line of text, where values may be left out."""
    name = shown.words[0]
    if name.isupper():
        return
    assert name in all_commands().commands
    if hasattr(all_commands().commands[name], "commands") and len(shown.words) == 1:
        return
    command, _, rest = command_of(shown.words)
    known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    flags = {
        SHORT_FLAGS.get(word, word)
        for word in (word.partition("=")[0] for word in rest)
        if word.startswith("--")
    }
    settings = {word for word in flags if SETTING_FLAG.match(word)}
    for word in settings:
        section, _, setting = word.removeprefix("--").partition(".")
        if section not in OBJECTIVES and section not in BESIDE:  # one that the page itself adds
            page = (ROOT / shown.page).read_text()
            assert f'@register("{section}")' in page and f"{setting}: float = Field(" in page
            continue
        known_settings = BESIDE[section] if section in BESIDE else OBJECTIVES[section].Settings
        assert setting.replace("-", "_") in {
            field.name for field in dataclasses.fields(known_settings)
        }, word
    assert flags - settings <= known | {"--help"}


CHECKED_FURTHER = {
    "benchmark": lambda values: peer_names.chosen_peers(
        values_of("against", values["against"] or []),
        str(values["data"]),
        values["mode"] != "full",
        values["objective"],
    ),
    "export": lambda values: [FORMATS[name] for name in values_of("to", values["to"])],
    "plan": lambda values: plan_command._counts(values["gpus"]),
    "moe new": lambda values: moe_commands._sizes(values_of("set", values["set_"] or [])),
}
"""Commands some of whose values are no fields of a recipe and are read by the command itself."""


@pytest.mark.parametrize("shown", COMMANDS, ids=str)
def test_every_command_is_accepted(shown, tmp_path, monkeypatch):
    """By the command line itself, values and fields, without anything being begun."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: MODEL\ndata: your.jsonl\n")
    command, name, rest = command_of(shown.words)
    with command.make_context(name, rest) as context:
        values = context.params
    config = recipe_of(values).config()
    assert type(build_objective(config)) is OBJECTIVES[config.objective]
    CHECKED_FURTHER.get(name, lambda values: None)(values)


@pytest.mark.parametrize(("page", "text"), shown_recipes(), ids=lambda text: text.splitlines()[0])
def test_every_recipe_is_accepted(page, text, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    given = Recipe.read_yaml(tmp_path / "recipe.yaml")
    recipe = Recipe(**{"model": "m", "data": "d", **given})
    config = recipe.config()
    assert config.objective == given.get("objective", "sft")
    assert type(build_objective(config)) is OBJECTIVES[config.objective]
    set_on_the_page = {name for name, value in given.items() if value not in ("auto", ["auto"])}
    assert set_on_the_page <= recipe.explicit


RUN = {
    "train": ["--check"],
    "data show": [],
    "plan": [],
    "evaluate": [],
    "generate": [],
}
"""Commands that run for real on a tiny model, and what is given beside; of ``train`` all but the
training itself.
"""

ELSEWHERE = {
    "quickstart": "test_quickstart_small of cli/test_app.py: it takes minutes as it stands",
    "verify": "cli/test_verify_command.py: it trains three times",
    "benchmark": "benchmark/test_benchmark.py: its arms are processes, its models of real size",
    "export": "the tests of export/: it wants llama.cpp",
    "merge": "cli/test_app.py",
    "push": "export/test_hub.py, before a stand-in of the hub",
    "doctor": "test_first_hour.py",
    "convert": "convert/test_conversion.py: it wants a file of another tool",
    "tune": "tuning/test_tune_command.py: its trials are processes",
    "ui": "ui/test_browser.py: it serves until it is ended",
    "moe new": "cli/test_moe_commands.py: sizes of a real model",
    "moe trace": "cli/test_moe_commands.py",
    "moe predict-train": "cli/test_moe_commands.py",
}
"""Commands that do not, and where they do."""

LEFT_OUT = {
    "--nproc": "starts processes: cli/test_train.py",
    "--gpus": "many take long to count: planning/test_plan.py",
}
"""Options that are not given here."""


def test_every_command_of_a_page_has_its_place():
    names = {command_of(shown.words)[1] for shown in COMMANDS}
    assert names <= {*RUN, *ELSEWHERE} and not set(RUN) & set(ELSEWHERE)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with stand-ins, among them ``chronicals-output``, a run of a step."""
    place = Place(tmp_path_factory.mktemp("pages"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.folder)
        place.provide(Recipe(model="MODEL", data="your.jsonl"))
        flags = [
            "--use-lora",
            "--max-steps=1",
            "--max-seq-length=128",
            "--mixed-precision=fp32",
            "--report-samples=0",
        ]
        ran = CliRunner().invoke(app, ["train", "--model", "MODEL", "--data", "your.jsonl", *flags])
        assert ran.exit_code == 0, ran.output
    return place


def distinct():
    """Commands that run, each once, however many pages have it; GGUF files are those of
    models/test_gguf_loading.py.
    """
    found = {}
    for shown in COMMANDS:
        name = command_of(shown.words)[1]
        if name in RUN and ".gguf" not in shown.line:
            found.setdefault(tuple(shown.words), shown)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("shown", distinct(), ids=str)
def test_cheap_commands_run(shown, place, monkeypatch):
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    command, name, rest = command_of(shown.words)
    with command.make_context(name, list(rest)) as context:
        place.provide(recipe_of(context.params))
        if context.params.get("model"):
            place.model(context.params["model"])
    if name == "data show":
        place.provide(Recipe(model="MODEL", data=context.params["file"]))
    words = list(shown.words)
    for option in LEFT_OUT:
        words = without_option(words, option)
    given = [] if "--check" in words else RUN[name]
    ran = CliRunner().invoke(app, [*words, *given], input="", env={"COLUMNS": "200"})
    assert ran.exit_code == 0, f"{ran.output}\n{ran.exception!r}"


def test_the_tree_names_every_room():
    tree = (ROOT / "docs" / "design.md").read_text()
    rooms = {path.parent.name for path in ROOT.glob("src/chronicals/*/__init__.py")}
    assert rooms <= set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))


# --- tables of objectives
# ------------------------------------------------------------------------------------------------------


def table_rows(page):
    """The cells of each line of a page's tables."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in cells]


def test_papers_of_objectives_are_those_that_they_declare():
    """``papers`` of a class beside the rows of docs/papers.md that name its file."""
    documented = {}
    for method, citation, files, *_ in table_rows("papers.md"):
        for file in re.findall(r"`objectives/(\w+)\.py`", files):
            documented.setdefault(file, set()).add((method, citation))
    declared = {}
    for cls in IN_TREE.values():
        papers = {(paper.method, paper.citation) for paper in cls.papers}
        declared[cls.__module__.rpartition(".")[2]] = papers
    assert declared == documented, "docs/papers.md, or papers of a class"


def test_settings_of_objectives_over_answers_are_documented():
    """Every setting with its default, in a table of the page of its objective."""
    documented = {}
    objectives = []
    for first, *others in table_rows("preference.md"):
        objectives = re.findall(r"`(\w+)`", first) or objectives
        if len(others) == 2:
            setting = others[0].partition(":")[0]
            for name in re.findall(r"`(\w+)`", setting):
                documented |= {(objective, name): others[1] for objective in objectives}
    for setting, _, default in (row for row in table_rows("reward.md") if len(row) == 3):
        documented["reward", setting.strip("`")] = default
    for first, *others in table_rows("grpo.md"):
        objectives = re.findall(r"`(\w+)`", first) or objectives
        if len(others) == 3:
            documented |= {(objective, others[0].strip("`")): others[2] for objective in objectives}
    answers = [
        name for name, cls in IN_TREE.items() if not set(cls.row_kinds) <= set(DOCUMENT_KINDS)
    ]
    assert answers
    for objective in answers:
        for field in dataclasses.fields(OBJECTIVES[objective].Settings):
            assert (objective, field.name) in documented, (
                "the tables of docs/preference.md, docs/reward.md and docs/grpo.md lack "
                f"{objective}.{field.name}"
            )
            if isinstance(field.default.default, float):
                assert float(documented[objective, field.name]) == field.default.default
