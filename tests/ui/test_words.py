"""Languages: each has every text, with the same places for values."""

import ast
import re
from pathlib import Path

import pytest

import chronicals.ui
from chronicals.ui.frame import NAVIGATION
from chronicals.ui.words import LANGUAGES, texts, words_of

PLACES = re.compile(r"\{(\w+)\}")
FOLDER = Path(chronicals.ui.__file__).parent


@pytest.mark.parametrize("language", [name for name in LANGUAGES if name != "en"])
def test_a_language_has_every_text_with_its_places(language):
    english, other = texts("en"), texts(language)
    assert english.keys() == other.keys()
    for name, text in english.items():
        assert set(PLACES.findall(text)) == set(PLACES.findall(other[name])), name
        assert other[name].strip(), name


def test_every_text_that_the_code_names_exists():
    known = texts("en").keys()
    named = set()
    for file in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            called = getattr(node, "func", None)
            is_say = getattr(called, "id", getattr(called, "attr", "")) == "say"
            if is_say and node.args and isinstance(node.args[0], ast.Constant):
                named.add(node.args[0].value)
    assert len(named) > 50 and named <= known
    for entries in NAVIGATION.values():
        assert {f"nav.{name}" for name in entries} <= known


def test_an_unknown_language_is_english():
    assert words_of("xx")("runs.step", step=3) == "step 3"
