"""The text of an answer, its end, and its parts as they are generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

REPLACEMENT_CHARACTER = "\ufffd"
"""Output of a decoder for an incomplete character, whose last bytes are in the next token."""


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
        """Return the text of token ids up to the first stop token or stop string, stripped."""
        stops = (place for place, token in enumerate(produced) if token in self.tokens)
        last = next(stops, len(produced))
        text = self.tokenizer.decode(produced[:last], skip_special_tokens=True)
        end = min(
            (text.find(string) for string in self.strings if string in text), default=len(text)
        )
        return text[:end].strip()

    def has_string(self, produced: list[int]) -> bool:
        """Return whether the last tokens contain a stop string, perhaps one of special tokens."""
        if not self.strings:
            return False
        # a character has at most 4 bytes, a token at least one
        count = 4 * max(map(len, self.strings)) + 8
        text = self.tokenizer.decode(produced[-count:], skip_special_tokens=False)
        return any(string in text for string in self.strings)


class Stream:
    """Pass on the new part of a growing text at each call; the parts, joined, are the text.

    Args:
        say: called with each part.
        stop_strings: strings that end the text and are not part of it. An end of the text that may
            begin one is held back.
    """

    def __init__(self, say: Callable[[str], None], stop_strings: Sequence[str] = ()):
        self.say = say
        self.stop_strings = stop_strings
        self.said = 0

    def __call__(self, text: str) -> None:
        """Pass on the new part of ``text``, the text so far without white space at its ends."""
        held = 0  # characters at the end of the text that are the beginning of a stop string
        for stop in self.stop_strings:
            for length in range(held + 1, min(len(stop), len(text)) + 1):
                if text.endswith(stop[:length]):
                    held = length
        self.end(text[: len(text) - held].rstrip().rstrip(REPLACEMENT_CHARACTER).rstrip())

    def end(self, text: str) -> None:
        """Pass on all of ``text`` that was not passed on yet, if there is any."""
        if len(text) > self.said:
            self.say(text[self.said :])
            self.said = len(text)
