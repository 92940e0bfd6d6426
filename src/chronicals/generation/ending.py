"""The end of generated tokens, and the text of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ending:
    """Tokens and strings that end an answer.

    Attributes:
        tokenizer: tokenizer of transformers.
        tokens: ids of stop tokens, special or not.
        strings: stop strings.
    """

    tokenizer: Any
    tokens: list[int]
    strings: list[str]

    def text(self, produced: list[int]) -> str:
        """Return the text of generated token ids up to the first stop token or stop string, without
        white space around it.
        """
        stops = (place for place, token in enumerate(produced) if token in self.tokens)
        last = next(stops, len(produced))
        text = self.tokenizer.decode(produced[:last], skip_special_tokens=True)
        end = min(
            (text.find(string) for string in self.strings if string in text), default=len(text)
        )
        return text[:end].strip()

    def has_string(self, produced: list[int]) -> bool:
        """Return whether the last tokens contain a stop string, which may consist of special
        tokens.
        """
        if not self.strings:
            return False
        # a character has at most 4 bytes, a token at least one
        count = 4 * max(map(len, self.strings)) + 8
        text = self.tokenizer.decode(produced[-count:], skip_special_tokens=False)
        return any(string in text for string in self.strings)
