"""Where generated tokens end, and the text of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ending:
    """What ends an answer.

    Attributes:
        tokenizer: of transformers.
        tokens: stop token ids, of special tokens or others.
        strings: stop strings.
    """

    tokenizer: Any
    tokens: list[int]
    strings: list[str]

    def text(self, produced: list[int]) -> str:
        """The text of generated token ids, up to the first stop token or stop string, without
        white space around it.
        """
        end = next(
            (place for place, token in enumerate(produced) if token in self.tokens), len(produced)
        )
        text = self.tokenizer.decode(produced[:end], skip_special_tokens=True)
        return text[
            : min(
                (text.find(string) for string in self.strings if string in text), default=len(text)
            )
        ].strip()

    def has_string(self, produced: list[int]) -> bool:
        """Whether the last tokens contain a stop string, which may consist of special tokens."""
        if not self.strings:
            return False
        enough = (
            4 * max(map(len, self.strings)) + 8
        )  # a character has at most 4 bytes, a token at least one
        text = self.tokenizer.decode(produced[-enough:], skip_special_tokens=False)
        return any(string in text for string in self.strings)
