"""Languages: each has every text, with the same places for values."""

import ast
import re
from pathlib import Path

import pytest

import chronicals.ui
from chronicals.ui.fields import recipe_fields, section_fields
from chronicals.ui.frame import NAVIGATION
from chronicals.ui.services import OBJECTIVES
from chronicals.ui.settings import schemas
from chronicals.ui.words import LANGUAGES, texts, words_of

PLACES = re.compile(r"\{(\w+)\}")
FOLDER = Path(chronicals.ui.__file__).parent


@pytest.mark.parametrize("language", [name for name in LANGUAGES if name != "en"])
def test_a_language_has_every_text_with_its_places(language):
    english, other = texts("en"), texts(language)
    of_fields = {name for name in other if name.startswith(("field.", "heading."))}
    assert english.keys() == other.keys() - of_fields
    for name, text in english.items():
        assert set(PLACES.findall(text)) == set(PLACES.findall(other[name])), name
        assert other[name].strip(), name


@pytest.mark.parametrize("language", [name for name in LANGUAGES if name != "en"])
def test_a_language_has_the_help_of_every_field(language):
    """Also of the objectives' settings, and none of a field that is not there (any more)."""
    objectives = schemas()["objectives"]
    assert set(objectives) == set(OBJECTIVES)
    fields = dict(recipe_fields())
    for objective, schema in objectives.items():
        fields |= section_fields(objective, schema)
    headings = {field.heading for field in recipe_fields().values()}
    expected = {f"field.{name}" for name in fields} | {f"heading.{title}" for title in headings}
    other = texts(language)
    assert {name for name in other if name.startswith(("field.", "heading."))} == expected
    for name, field in fields.items():
        text = other[f"field.{name}"]
        assert text.strip() and text != field.help, name
        for number in re.findall(r"docs/[a-z]+\.md|\d+GB|\d+GiB|\d+MiB", field.help):
            assert number in text, name


def test_english_help_is_that_of_the_schema():
    field = recipe_fields()["learning_rate"]
    assert words_of("en").translated("field.learning_rate", field.help) == field.help
    assert words_of("zh").translated("field.learning_rate", field.help) == "学习率的峰值"


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
