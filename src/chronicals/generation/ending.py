"""Where an answer ends, and what of it is text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ending:
    """What ends an answer.

    Attributes:
        tokenizer: of transformers.
        tokens: ids; need not be those of special tokens.
        strings: texts.
    """

    tokenizer: Any
    tokens: list[int]
    strings: list[str]

    def text(self, produced: list[int]) -> str:
        """The answer that token ids are, without what ended it and without white space around it."""
        end = next((place for place, token in enumerate(produced) if token in self.tokens), len(produced))
        text = self.tokenizer.decode(produced[:end], skip_special_tokens=True)
        return text[: min((text.find(string) for string in self.strings if string in text), default=len(text))].strip()

    def has_string(self, produced: list[int]) -> bool:
        """Whether one of the strings is in the last tokens, also one that is made of special tokens."""
        if not self.strings:
            return False
        enough = 4 * max(map(len, self.strings)) + 8  # of a character at most 4 bytes, of which a token holds at least one
        text = self.tokenizer.decode(produced[-enough:], skip_special_tokens=False)
        return any(string in text for string in self.strings)
