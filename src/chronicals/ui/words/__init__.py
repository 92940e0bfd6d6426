"""Words of the page, a file for each language: text by name, with ``{places}`` for values.

Help and headings of a recipe's fields are English in the schema of the recipe; the other languages
have them as ``field.NAME`` and ``heading.TITLE``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

LANGUAGES = {"en": "English", "zh": "中文", "ja": "日本語"}
"""Languages by the names of their files, each in its own words."""


@dataclass(frozen=True)
class Say:
    """The texts of a language by name; called with a name, and values for its places.

    Attributes:
        found: the texts.
    """

    found: Mapping[str, str]

    def __call__(self, name: str, /, **values: object) -> str:
        """Return a text with its values."""
        return self.found[name].format(**values) if values else self.found[name]

    def translated(self, name: str, english: str) -> str:
        """Return the text of a name that English has elsewhere: as given where there is no other."""
        return self.found.get(name, english)


@functools.cache
def texts(language: str) -> dict[str, str]:
    """Return the texts of a language by name; English for a language that is not there."""
    known = language if language in LANGUAGES else "en"
    file = Path(__file__).parent / f"{known}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def words_of(language: str) -> Say:
    """Return the texts of a language; English for a language that is not there."""
    return Say(texts(language))
