"""Plain texts: checked, tokenised together, with one beginning and no end, and behind prompts.

Some tokenizers put a blank before every text (those of Llama 2 and Mistral, others with
SentencePiece's prefix, byte-level ones with ``add_prefix_space``). A completion tokenised by itself
would begin with a blank that its row does not hold. So under such a tokenizer it is tokenised
behind a mark, a short text whose own ids stay the same in front of it, and these are taken off.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from chronicals.data.reading.gate import DataError
from chronicals.data.tokens.added_tokens import AddedTokens
from chronicals.data.tokens.byte_pairs import Encode, HasIds

CONTINUATION_MARKS = ("\n", "0", ".", ")", "é")
"""Marks of several kinds, for a mark must not merge with the text behind it."""

CONTINUED_TEXTS = ("a", "7", "the")
"""Texts that show whether a tokenizer puts anything before a text."""

TextPlace = tuple[bool, int]
"""Place of a text: whether special tokens are put around it, and its number among such texts."""

_Ids = TypeVar("_Ids", Sequence[int], list[int], np.ndarray)


def check_text(value: Any, name: str, where: str) -> str:
    """Return ``value``, which must be text that a tokenizer takes.

    Raises:
        DataError: it is not.
    """
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} must be text, this is {type(value).__name__}")
    if not is_unicode(value):
        raise DataError(f"{where}: {name} holds half of a surrogate pair, which is no text")
    return value


def is_unicode(text: str) -> bool:
    """Return whether the text is free of halves of surrogate pairs, which JSON may bring."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def without_double_beginning(ids: _Ids, beginning: int | None) -> _Ids:
    """Return ids with one beginning of text, also if the text brought one of its own."""
    doubled = beginning is not None and len(ids) > 1 and ids[0] == ids[1] == beginning
    return ids[1:] if doubled else ids


def without_end(ids: _Ids, end: int | None) -> _Ids:
    """Return the ids without the ends of text that close them."""
    length = len(ids)
    while length and ids[length - 1] == end:
        length -= 1
    return ids[:length]


class TokenisedTexts:
    """Texts to tokenise together, with and without the tokenizer's special tokens around a text.

    Args:
        added_tokens: those whose places among the ids are asked for.
    """

    def __init__(self, added_tokens: AddedTokens | None = None) -> None:
        self._added_tokens = added_tokens
        self._texts: dict[bool, list[str]] = {True: [], False: []}
        self._whole: dict[bool, list[bool]] = {True: [], False: []}
        self._encodings: dict[bool, Sequence[HasIds]] = {}
        self._ids: dict[bool, _JoinedIds] = {}

    def add(self, text: str, special: bool, whole: bool = False) -> TextPlace:
        """Return the place at which the text's ids will be found.

        Args:
            text: what is tokenised.
            special: put the tokenizer's special tokens around it.
            whole: let it begin once and end with the end of text.
        """
        self._texts[special].append(text)
        self._whole[special].append(whole)
        return special, len(self._texts[special]) - 1

    def tokenise(self, encode: Encode) -> None:
        """Tokenise all texts; other threads may run meanwhile."""
        for special, texts in self._texts.items():
            if texts:
                self._encodings[special] = encode(texts, special)

    def collect(self, beginning: int | None, ending: int | None) -> None:
        """Copy the ids into arrays: the part in Python, for which the next batch need not wait."""
        for special, encodings in self._encodings.items():
            lists = []
            for encoding, whole in zip(encodings, self._whole[special], strict=True):
                ids = encoding.ids
                if whole:
                    # one beginning of text, also if the text brought one of its own, and one end
                    if special and beginning is not None and ids[:2] == [beginning, beginning]:
                        del ids[0]
                    while ids and ids[-1] == ending:
                        ids.pop()
                    if ending is not None:
                        ids.append(ending)
                lists.append(ids)
            bounds = [0, *itertools.accumulate(map(len, lists))]
            joined = np.fromiter(itertools.chain.from_iterable(lists), np.int32, bounds[-1])
            ones = np.ones(len(joined), np.uint8)
            ones.flags.writeable = False
            added = np.zeros(0, np.int64)
            if self._added_tokens is not None:
                added = np.flatnonzero(self._added_tokens.is_added[joined])
            first_added = np.searchsorted(added, bounds).tolist()
            self._ids[special] = _JoinedIds(joined, bounds, ones, added, first_added)
        self._encodings.clear()

    def __getitem__(self, place: TextPlace) -> np.ndarray:
        special, number = place
        joined = self._ids[special]
        return joined.ids[joined.bounds[number] : joined.bounds[number + 1]]

    def all_trained(self, place: TextPlace) -> np.ndarray:
        """Return a mask of ones for a text, which cannot be written to."""
        special, number = place
        joined = self._ids[special]
        return joined.ones[joined.bounds[number] : joined.bounds[number + 1]]

    def added(self, place: TextPlace) -> list[int]:
        """Return the places of added tokens among the text's ids."""
        special, number = place
        joined = self._ids[special]
        first, last = joined.first_added[number : number + 2]
        return (joined.added[first:last] - joined.bounds[number]).tolist()


@dataclass(frozen=True)
class _JoinedIds:
    """The ids of many texts in one array: many small arrays would take longer to make.

    Attributes:
        ids: int32, text ``n`` from ``bounds[n]`` to ``bounds[n + 1]``.
        ones: as long, for masks.
        added: places in ``ids`` of added tokens, those of text ``n`` from ``first_added[n]`` on.
    """

    ids: np.ndarray
    bounds: list[int]
    ones: np.ndarray
    added: np.ndarray
    first_added: list[int]


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
        # The tokenizer puts something before texts if one has other ids behind a mark.
        differs = False
        for mark in self._marks:
            for text in CONTINUED_TEXTS:
                behind = self._behind(mark, text)
                differs = differs or (behind is not None and behind != self._ids(text))
        if not differs:
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

    def _behind(self, mark: str, text: str) -> list[int] | None:
        """Return the ids of a text behind a mark; None if it merges with the mark."""
        ids = self._ids(mark + text)
        count = len(self._marks[mark])
        return ids[count:] if ids[:count] == self._marks[mark] else None

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
