"""Commands and recipes as the pages show them, and the files that they name, as small stand-ins."""

import functools
import json
import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

import typer

import tiny
from chronicals.cli.app import app
from chronicals.cli.options import fields_from_flags
from chronicals.config import Recipe
from mixtures import mixture

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks" / "NOTES.md"]
BLOCK = re.compile(r"^[ >]*```([^\n]*)\n(.*?)^[ >]*```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(chronicals [a-z][^`]*)`")
LAUNCHED = re.compile(r"^torchrun\b.* -m chronicals\.cli (?=[a-z])")
MODULE = re.compile(r"^python3? -m chronicals(?:\.cli)? ")


class Shown(NamedTuple):
    """A command on a page."""

    page: str
    line: str

    @property
    def words(self):
        return shlex.split(self.line)[1:]

    def __str__(self):
        return f"{self.page}: {self.line}"


def blocks():
    """Page, language and text of every block of code."""
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text()):
            yield (
                str(page.relative_to(ROOT)),
                language.strip(),
                textwrap.dedent(re.sub(r"^> ?", "", text, flags=re.MULTILINE)),
            )


def shown_commands():
    """Every command of ours in a block, without a prompt, with its continued lines, as the
    command line gets it.
    """
    for page, _, text in blocks():
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            bare = re.sub(r"^\s*[$%] | +#.*$", "", line)
            command = MODULE.sub("chronicals ", LAUNCHED.sub("chronicals ", bare))
            if re.match(r"chronicals\s", command):
                yield Shown(page, command)


def named_commands():
    """Every command in a line of text, of which parts may be left out."""
    found = {}
    for page in PAGES:
        for text in INLINE.findall(BLOCK.sub("", page.read_text())):
            line = " ".join(text.split())
            found.setdefault(line, Shown(str(page.relative_to(ROOT)), line))
    return list(found.values())


def shown_recipes():
    """Every recipe, or part of one."""
    return [(page, text) for page, language, text in blocks() if language in ("yaml", "yml")]


@functools.cache
def all_commands():
    return typer.main.get_command(app)


def command_of(words):
    """The command that words name, with its full name, and the words after it."""
    command = all_commands()
    names = []
    words = list(words)
    while hasattr(command, "commands"):
        names.append(words.pop(0))
        command = command.commands[names[-1]]
    return command, " ".join(names), words


def recipe_of(values):
    """The recipe that options of a command make, with stand-ins for a model and data that it
    does not name.
    """
    given = {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
    flags = {
        name: value
        for name, value in given.items()
        if name in Recipe.__dataclass_fields__ and value is not None
    }
    fields = {"model": "MODEL", "data": ["your.jsonl"]} if values.get("recipe") is None else {}
    return Recipe.given(
        values.get("preset"), values.get("recipe"), **{**fields, **fields_from_flags(flags)}
    )


class Place:
    """A folder with what commands name."""

    def __init__(self, folder):
        self.folder = folder
        tiny.llama().save_pretrained(folder / "tiny")
        mixture(random=False, vocab_size=300).save_pretrained(folder / "mixed")
        for name in ("tiny", "mixed"):
            tiny.tokenizer().save_pretrained(folder / name)
        chats = "".join(json.dumps(row) + "\n" for row in tiny.chat_rows(40))
        (folder / "recipe.yaml").write_text("model: MODEL\ndata: your.jsonl\nuse_lora: true\n")
        self.rows = {
            "chats": chats,
            "pairs": "".join(
                json.dumps({"prompt": f"what about {n}?", "chosen": f"it is {n}", "rejected": "no"})
                + "\n"
                for n in range(40)
            ),
            "prompts": "".join(
                json.dumps({"prompt": f"What is {n} + {n}?", "answer": f"{2 * n}"}) + "\n"
                for n in range(40)
            ),
            "table": "prompt,completion\n"
            + "".join(f"what is {n}?,it is {n}\n" for n in range(40)),
        }

    def provide(self, recipe):
        """Make the files that a recipe names, small."""
        self.model(recipe.model)
        for settings in recipe.sections.values():
            for name in ("teacher", "reference_model"):
                if name in settings:
                    self.model(settings[name])
        sources = [recipe.data, recipe.validation_data]
        for source in [
            one for each in sources if each for one in (each if isinstance(each, list) else [each])
        ]:
            path = self.folder / getattr(source, "path", source)
            named = (kind for kind in ("pairs", "prompts") if kind in path.name)
            kind = "table" if path.suffix == ".csv" else next(named, "chats")
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(self.rows[kind])

    def model(self, name):
        path = self.folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(self.folder / ("mixed" if re.search(r"A3B|native", name) else "tiny"))
