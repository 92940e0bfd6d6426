"""Stream an answer while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT_CHARACTER = "\ufffd"
"""Output of a decoder for an incomplete character, whose last bytes are in the next token."""


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
        held = max((_overlap(text, stop) for stop in self.stop_strings), default=0)
        self._hand_on(text[: len(text) - held].rstrip().rstrip(REPLACEMENT_CHARACTER).rstrip())

    def end(self, text: str) -> None:
        """Pass on the rest of ``text``, the whole text."""
        self._hand_on(text)

    def _hand_on(self, text: str) -> None:
        if len(text) > self.said:
            self.say(text[self.said :])
            self.said = len(text)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` are the beginning of ``stop``."""
    for length in range(min(len(stop), len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
