"""Many texts that are tokenised together, and their ids in one array."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chronicals.data.tokens.added_tokens import AddedTokens
from chronicals.data.tokens.byte_pairs import Encode, HasIds
from chronicals.data.tokens.texts import closed

TextPlace = tuple[bool, int]
"""Place of a text: whether special tokens are put around it, and its number among such texts."""


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
                lists.append(closed(ids, beginning if special else None, ending) if whole else ids)
            self._ids[special] = _JoinedIds.of(lists, self._added_tokens)
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

    @classmethod
    def of(cls, lists: list[list[int]], added_tokens: AddedTokens | None) -> _JoinedIds:
        bounds = [0, *itertools.accumulate(map(len, lists))]
        ids = np.fromiter(itertools.chain.from_iterable(lists), np.int32, bounds[-1])
        ones = np.ones(len(ids), np.uint8)
        ones.flags.writeable = False
        added = np.zeros(0, np.int64)
        if added_tokens is not None:
            added = np.flatnonzero(added_tokens.is_added[ids])
        return cls(ids, bounds, ones, added, np.searchsorted(added, bounds).tolist())
