"""Words of the page, a file for each language: text by name, with ``{places}`` for values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import yaml

LANGUAGES = {"en": "English", "zh": "中文", "ja": "日本語"}
"""Languages by the names of their files, each in its own words."""

Say = Callable[..., str]


@functools.cache
def texts(language: str) -> dict[str, str]:
    """Return the texts of a language by name; English for a language that is not there."""
    known = language if language in LANGUAGES else "en"
    file = Path(__file__).parent / f"{known}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def words_of(language: str) -> Say:
    """Return a function from the name of a text, and its values, to the text."""
    found = texts(language)

    def say(name: str, /, **values: object) -> str:
        return found[name].format(**values) if values else found[name]

    return say
