"""Queries, keys and values of a layer by groups of heads, made from the layer's input in tiles of rows.

``HeadsByGroup`` makes a group when it is asked for, by the group's rows of the weights, so that only one
group is in memory. ``HeadsTogether`` makes all groups at once: where heads are normed together, come from
latents or are made in another format than that of their weights (``divides_heads``), and where there is
only one group.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chronicals.memory import heads_at_a_time, tiles_of
from chronicals.patching.halves import HEAD_NORMS, KEY_VALUE_UP_PROJECTION, AttentionHalf


class HeadRange(NamedTuple):
    """Some heads of a layer.

    Attributes:
        heads: which of the query heads.
        key_heads: which of the key heads; they are those that these query heads read.
    """

    heads: slice
    key_heads: slice


class HeadGroup(NamedTuple):
    """Queries, keys and values of some heads, ``[T, ..., W]``, or their gradients.

    Attributes:
        heads: which of the query heads they are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    heads: slice

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return self.q, self.k, self.v

    @classmethod
    def empty(cls, like: Sequence[Tensor], tokens: int, heads: slice) -> HeadGroup:
        """Return uninitialised memory for a group.

        Args:
            like: q, k and v of some rows of these heads.
            tokens: number of all rows.
            heads: which of the query heads they are.
        """
        q, k, v = (part.new_empty((tokens, *part.shape[1:])) for part in like)
        return cls(q, k, v, heads)

    def write(self, rows: slice, parts: Sequence[Tensor]) -> None:
        """Write q, k and v of some rows."""
        for place, part in zip(self.tensors, parts, strict=True):
            place[rows] = part


def ranges_of_heads(tokens: int, heads: int, key_heads: int, together: int = 1) -> list[HeadRange]:
    """Return the heads of each call of attention, in order.

    Args:
        tokens: number of rows.
        heads: number of query heads.
        key_heads: number of key heads.
        together: number of key heads that must attend in one call, or a divisor of it.
    """
    repeats = heads // key_heads
    step = heads_at_a_time(tokens, heads, key_heads, together)
    ranges = []
    for start in range(0, key_heads, step):
        end = min(start + step, key_heads)
        ranges.append(HeadRange(slice(start * repeats, end * repeats), slice(start, end)))
    return ranges


def heads_stand_alone(attention: Any) -> bool:
    """Return whether queries, keys and values of some heads can be made without those of the others.

    They cannot if all heads are normed together (OLMo 2), or come from latents.

    Args:
        attention: an attention module.
    """
    if hasattr(attention, KEY_VALUE_UP_PROJECTION[0]):
        return False
    norms = [getattr(attention, name, None) for name in HEAD_NORMS]
    weights = [getattr(norm, "weight", None) for norm in norms if norm is not None]
    head_dim = getattr(attention, "head_dim", None)
    return all(weight is not None and len(weight) == head_dim for weight in weights)


def divides_heads(half: AttentionHalf) -> bool:
    """Return whether ``share_of`` is possible: heads stand alone, and their product reads dense values."""
    return heads_stand_alone(half.attention) and half.first.merged.base.gives_rows


def share_of(half: AttentionHalf, chosen: HeadRange) -> AttentionHalf:
    """Return an attention half whose method ``heads`` makes some heads alone, without a graph.

    Its first product is made of copies of their rows of the weights, [Wq; Wk; Wv]; adapters keep all
    of A. By its tiles a product of one key head with its queries, 768 columns of an 8B and 4096 rows,
    fills 96 of an H200's 132 multiprocessors.

    Args:
        half: the half of all heads.
        chosen: the heads.
    """
    width = half.attention.head_dim
    queries, keys = half.counts
    heads, key_heads = chosen
    share = copy.copy(half)
    share.first = half.first.of_rows(
        [
            _columns(heads, 0, width),
            _columns(key_heads, queries, width),
            _columns(key_heads, queries + keys, width),
        ]
    )
    share.counts = (heads.stop - heads.start, key_heads.stop - key_heads.start)
    return share


def _columns(heads: slice, before: int, width: int) -> slice:
    """Return the columns of heads of a width, with ``before`` heads before the first of all."""
    return slice((before + heads.start) * width, (before + heads.stop) * width)


HeadsOfRows = Callable[[AttentionHalf, slice], Sequence[Tensor]]
"""A function that returns q, k and v of some rows of the layer's input, ``[n, ..., W]``, by an attention
half or by its share of some heads.
"""


class LayerHeads(ABC):
    """Queries, keys and values of all rows, for one pass through a layer.

    Args:
        attention: the attention half.
        ranges: the heads of each group.
        of_rows: makes the heads of some rows.
        tokens: number of rows.
        tile: most rows at a time.
    """

    def __init__(
        self,
        attention: AttentionHalf,
        ranges: Sequence[HeadRange],
        of_rows: HeadsOfRows,
        tokens: int,
        tile: int,
    ):
        self.attention = attention
        self.ranges = ranges
        self.of_rows = of_rows
        self.rows = tiles_of(tokens, tile)
        self.tokens = tokens

    @staticmethod
    def of(
        attention: AttentionHalf,
        ranges: Sequence[HeadRange],
        of_rows: HeadsOfRows,
        tokens: int,
        tile: int,
    ) -> LayerHeads:
        """Return the heads of a layer, made group by group where that can be and saves memory."""
        by_group = len(ranges) > 1 and divides_heads(attention)
        kind = HeadsByGroup if by_group else HeadsTogether
        return kind(attention, ranges, of_rows, tokens, tile)

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.ranges)

    @abstractmethod
    def look(self, place: int) -> HeadGroup:
        """Return a group that will be asked for again in this pass."""

    @abstractmethod
    def take(self, place: int) -> HeadGroup:
        """Return a group that will not be asked for again."""


class HeadsByGroup(LayerHeads):
    """A group is made each time that it is asked for."""

    def look(self, place: int) -> HeadGroup:
        """Make a group."""
        return self.take(place)

    @torch.no_grad()
    def take(self, place: int) -> HeadGroup:
        """Make a group."""
        chosen = self.ranges[place]
        share = share_of(self.attention, chosen)
        group: HeadGroup | None = None
        for rows in self.rows:
            parts = self.of_rows(share, rows)
            if group is None:
                group = HeadGroup.empty(parts, self.tokens, chosen.heads)
            group.write(rows, parts)
        assert group is not None
        return group


class HeadsTogether(LayerHeads):
    """All groups are made when the first one is asked for, and each is freed once it was taken."""

    _groups: list[HeadGroup | None] | None = None

    def look(self, place: int) -> HeadGroup:
        """Return a group, and keep it."""
        if self._groups is None:
            self._groups = [*self._made()]
        group = self._groups[place]
        assert group is not None
        return group

    def take(self, place: int) -> HeadGroup:
        """Return a group, and let go of it."""
        group = self.look(place)
        assert self._groups is not None
        self._groups[place] = None
        return group

    @torch.no_grad()
    def _made(self) -> list[HeadGroup]:
        groups: list[HeadGroup] = []
        for rows in self.rows:
            q, k, v = self.of_rows(self.attention, rows)
            shares = [(q[:, heads], k[:, keys], v[:, keys]) for heads, keys in self.ranges]
            if not groups:
                groups = [
                    HeadGroup.empty(share, self.tokens, heads)
                    for share, (heads, _) in zip(shares, self.ranges)
                ]
            for group, share in zip(groups, shares):
                group.write(rows, share)
        return groups
