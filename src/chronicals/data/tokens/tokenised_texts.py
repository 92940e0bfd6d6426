"""Many texts that are tokenised together, and their ids in one array."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chronicals.data.tokens.added_tokens import Cuts
from chronicals.data.tokens.byte_pairs import Encode, HasIds
from chronicals.data.tokens.texts import closed


class Texts:
    """Texts to tokenise together, with and without the special tokens that the tokenizer puts
    around a text.

    Args:
        cuts: the added tokens whose places are to be told.
    """

    def __init__(self, cuts: Cuts | None = None) -> None:
        self._cuts = cuts
        self._texts: dict[bool, list[str]] = {True: [], False: []}
        self._whole: dict[bool, list[bool]] = {True: [], False: []}
        self._encodings: dict[bool, Sequence[HasIds]] = {}
        self._ids: dict[bool, _Joined] = {}

    def add(self, text: str, special: bool, whole: bool = False) -> tuple[bool, int]:
        """Where the text's ids will be found; one that is ``whole`` begins once and ends with
        the end of text.
        """
        self._texts[special].append(text)
        self._whole[special].append(whole)
        return special, len(self._texts[special]) - 1

    def tokenise(self, encode: Encode) -> None:
        for special, texts in self._texts.items():
            if texts:
                self._encodings[special] = encode(texts, special)

    def collect(self, beginning: int | None, ending: int | None) -> None:
        """Take the ids over: Python's part, for which tokenising the next batch need not wait."""
        for special, encodings in self._encodings.items():
            lists = [
                closed(encoding.ids, beginning if special else None, ending)
                if whole
                else encoding.ids
                for encoding, whole in zip(encodings, self._whole[special], strict=True)
            ]
            self._ids[special] = _Joined.of(lists, self._cuts)
        self._encodings.clear()

    def __getitem__(self, place: tuple[bool, int]) -> np.ndarray:
        special, number = place
        joined = self._ids[special]
        return joined.ids[joined.bounds[number] : joined.bounds[number + 1]]

    def all_trained(self, place: tuple[bool, int]) -> np.ndarray:
        """A mask of nothing but ones, which cannot be written to."""
        special, number = place
        joined = self._ids[special]
        return joined.ones[joined.bounds[number] : joined.bounds[number + 1]]

    def added(self, place: tuple[bool, int]) -> list[int]:
        """Which of the text's ids are added tokens."""
        special, number = place
        joined = self._ids[special]
        first, last = joined.first_added[number : number + 2]
        return (joined.added[first:last] - joined.bounds[number]).tolist()


@dataclass(frozen=True)
class _Joined:
    """The ids of many texts in one array: making many is what takes time.

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
    def of(cls, lists: list[list[int]], cuts: Cuts | None) -> _Joined:
        bounds = [0, *itertools.accumulate(map(len, lists))]
        ids = np.fromiter(itertools.chain.from_iterable(lists), np.int32, bounds[-1])
        ones = np.ones(len(ids), np.uint8)
        ones.flags.writeable = False
        added = np.zeros(0, np.int64) if cuts is None else np.flatnonzero(cuts.among[ids])
        return cls(ids, bounds, ones, added, np.searchsorted(added, bounds).tolist())
