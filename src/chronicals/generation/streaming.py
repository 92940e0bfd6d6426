"""An answer handed on while it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"
"""What a decoder shows for the first bytes of a character whose others are still to come."""


class Stream:
    """Hands on the parts of a text that grows; the parts, joined, are the text.

    Args:
        say: is given each part.
        stop_strings: end the text and are no part of it, so that what may be the beginning of one waits.
    """

    def __init__(self, say: Callable[[str], None], stop_strings: Sequence[str] = ()):
        self.say, self.stop_strings, self.said = say, stop_strings, 0

    def __call__(self, text: str) -> None:
        """The text so far, without white space at its ends."""
        held = max((_overlap(text, stop) for stop in self.stop_strings), default=0)
        self._hand_on(text[: len(text) - held].rstrip().rstrip(INCOMPLETE).rstrip())

    def end(self, text: str) -> None:
        """The whole text."""
        self._hand_on(text)

    def _hand_on(self, text: str) -> None:
        if len(text) > self.said:
            self.say(text[self.said :])
            self.said = len(text)


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` with which ``stop`` begins."""
    return next((length for length in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:length])), 0)
