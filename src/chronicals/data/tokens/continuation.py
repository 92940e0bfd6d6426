"""Token ids of a text that goes on after another one, as a completion does after its prompt.

Some tokenizers put a blank before every text (those of Llama 2 and Mistral, others with
SentencePiece's prefix, byte-level ones with ``add_prefix_space``). A completion tokenised by itself
would begin with a blank that its row does not hold. So under such a tokenizer it is tokenised
behind a mark, a short text whose own ids stay the same in front of it, and these are taken off.
"""

from __future__ import annotations

from typing import Any

from chronicals.data.reading.gate import DataError

CONTINUATION_MARKS = ("\n", "0", ".", ")", "é")
"""Marks of several kinds, for a mark must not merge with the text behind it."""

CONTINUED_TEXTS = ("a", "7", "the")
"""Texts that show whether a tokenizer puts anything before a text."""


class Continuation:
    """Tokenizer of texts that continue other texts.

    Attributes:
        mark: short text put before such a text; empty if the tokenizer puts nothing before a text.
        mark_ids: its token ids.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._marks = dict[str, list[int]]()
        for mark in CONTINUATION_MARKS:
            ids = self._ids(mark)
            if ids:
                self._marks[mark] = ids
        if not self._puts_something_before_texts():
            self._marks = {}
        self.mark = next(iter(self._marks), "")
        self.mark_ids = self._marks.get(self.mark, [])

    def ids(self, prompt: str, text: str, where: str) -> list[int]:
        """Return the ids of a text behind ``prompt``; behind an empty one it is a text by itself.

        Raises:
            DataError: the tokenizer merges its beginning with every mark.
        """
        if not self._marks or not prompt:
            return self._ids(text)
        for mark in self._marks:
            ids = self._behind(mark, text)
            if ids is not None:
                return ids
        raise DataError(
            f"{where}: the tokenizer cannot be made to tokenise {text[:20]!r} as the continuation "
            "of a prompt"
        )

    def _puts_something_before_texts(self) -> bool:
        """Return whether some text has other ids behind a mark than by itself."""
        for mark in self._marks:
            for text in CONTINUED_TEXTS:
                behind = self._behind(mark, text)
                if behind is not None and behind != self._ids(text):
                    return True
        return False

    def _behind(self, mark: str, text: str) -> list[int] | None:
        """Return the ids of a text behind a mark; None if it merges with the mark."""
        ids = self._ids(mark + text)
        count = len(self._marks[mark])
        return ids[count:] if ids[:count] == self._marks[mark] else None

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
