"""Sorting of token-expert pairs by expert on the device.

A counting sort keeps the order of pairs within an expert:

    bounds[e] = pairs of experts before e      places[s] = bounds[e_s] + pairs of e_s before s      order[places[s]] = s

A pair ``s = t · k + j`` is the j-th expert of token t. Products over the sorted pairs take them in
tiles of ``rows``, none of which holds rows of two experts. The number of tiles is known only on the
device, but never exceeds ``⌈S / rows⌉ + E``; with this bound every shape is static and the host
need not wait.

Four launches: counts by block of pairs, their sums along the blocks, bounds and tiles, places.
Pairs of a block are counted by comparing them with each other, without atomics, so the result is
reproducible. Bytes: 8 · S read twice, 8 · S written.

Shapes: T tokens, k experts of a token, S = T · k pairs, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from chronicals.kernels.launch import HAS_TRITON, next_power_of_2, operator, runs_triton, tl, triton

BLOCK_PAIRS = 128
"""Pairs that a program counts."""

COMPARE_WIDTH = 128
"""Experts, or tiles, that a program compares with at once."""

TALL_TILE_ROWS = 128
"""Rows of a tile, if experts have many."""

LOW_TILE_ROWS = 64
"""Rows of a tile, if experts have few; tall tiles would be mostly empty."""

TALL_TILE_MIN_MEAN = 96
"""Mean number of rows of an expert from which tiles are tall."""


class Dispatch(NamedTuple):
    """The pairs sorted by expert; a "place" is a position among the sorted pairs.

    Attributes:
        order_S: int32, the pair at each place.
        places_S: int32, the place of each pair.
        bounds: int32 ``[E + 1]``; pairs of expert e are at places ``bounds[e]:bounds[e + 1]``.
        tiles: int32 ``[2, n]``, expert and first place of each tile; unused tiles have expert E.
        each: k, experts of a token.
        rows: rows of a tile.
        tokens_of_whole: T, if the pairs are only a part of those of these tokens.
    """

    order_S: Tensor
    places_S: Tensor
    bounds: Tensor
    tiles: Tensor
    each: int
    rows: int
    tokens_of_whole: int | None = None

    @property
    def experts(self) -> int:
        """The number E of experts."""
        return len(self.bounds) - 1

    @property
    def tokens(self) -> int:
        """The number T of tokens."""
        if self.tokens_of_whole is not None:
            return self.tokens_of_whole
        return len(self.order_S) // self.each

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert that has pairs, and their places; the host waits for the bounds."""
        bounds = self.bounds.tolist()
        for expert, (begin, end) in enumerate(zip(bounds, bounds[1:])):
            if begin < end:
                yield expert, slice(begin, end)

    def part(self, first: int, end: int, bounds: Sequence[int]) -> Dispatch:
        """Return the dispatch of the pairs of experts ``first`` to ``end - 1`` alone.

        Experts are numbered from 0 in it, and its places begin at 0; its pairs are still those of
        all tokens. ``places_S`` is not those of its pairs and may not be used.

        Args:
            first: the first expert.
            end: the expert behind the last one.
            bounds: ``self.bounds`` on the host.
        """
        if (first, end) == (0, self.experts):
            return self
        heights = [-(-(bounds[e + 1] - bounds[e]) // self.rows) for e in range(end)]
        tile = sum(heights[:first])
        of_whole = self.tiles[:, tile : tile + sum(heights[first:])]
        tiles = of_whole.new_empty(of_whole.shape)
        # Two launches: numbers that are sent for one take the host three times as long.
        torch.sub(of_whole[0], first, out=tiles[0])
        torch.sub(of_whole[1], bounds[first], out=tiles[1])
        return self._replace(
            order_S=self.order_S[bounds[first] : bounds[end]],
            bounds=self.bounds[first : end + 1] - bounds[first],
            tiles=tiles,
            tokens_of_whole=self.tokens,
        )

    def received(self) -> Tensor:
        """Return the expert among whose rows each pair is, int64 ``[T, k]``; E for none."""
        pairs = len(self.order_S)
        at_place = self.order_S[self.places_S.clamp(0, pairs - 1)]
        expert = torch.searchsorted(self.bounds[1:], self.places_S, right=True)
        placed = at_place == torch.arange(pairs, device=at_place.device)
        return torch.where(placed, expert, self.experts).view(pairs // self.each, self.each)


_watcher: Callable[[Dispatch], None] | None = None


@contextmanager
def watching_dispatches(see: Callable[[Dispatch], None]) -> Iterator[None]:
    """Call ``see`` with every dispatch that is made inside the ``with`` block."""
    global _watcher
    before = _watcher
    _watcher = see
    try:
        yield
    finally:
        _watcher = before


@triton.jit
def _count_kernel(
    experts_ptr,
    counts_ptr,
    pairs,
    blocks,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    SPAN: tl.constexpr,
):
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    mine = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    for first in range(0, EXPERTS, SPAN):
        expert = first + tl.arange(0, SPAN)
        count = tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + expert * blocks + block, count, mask=expert < EXPERTS)


@triton.jit
def _sum_kernel(counts_ptr, totals_ptr, blocks, WIDE: tl.constexpr):
    """Replace an expert's counts by their exclusive sums along the blocks, and write its total."""
    expert = tl.program_id(0)
    before = 0
    for first in range(0, blocks, WIDE):
        block = first + tl.arange(0, WIDE)
        at = counts_ptr + expert * blocks + block
        count = tl.load(at, mask=block < blocks, other=0)
        tl.store(at, before + tl.cumsum(count, 0) - count, mask=block < blocks)
        before += tl.sum(count, 0)
    tl.store(totals_ptr + expert, before)


@triton.jit
def _schedule_kernel(
    totals_ptr,
    bounds_ptr,
    tiles_ptr,
    most,
    EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Compute the bounds and write ``SPAN`` tiles; the first program also writes the bounds."""
    expert = tl.arange(0, WIDE)
    total = tl.load(totals_ptr + expert, mask=expert < EXPERTS, other=0)
    end = tl.cumsum(total, 0)
    height = (total + ROWS - 1) // ROWS
    last = tl.cumsum(height, 0)
    if tl.program_id(0) == 0:
        tl.store(bounds_ptr + expert, end - total, mask=expert <= EXPERTS)
    tile = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    past = (last[None, :] <= tile[:, None]) & (expert < EXPERTS)[None, :]
    mine = tl.sum(past.to(tl.int32), 1)
    at = (expert[None, :] == mine[:, None]).to(tl.int32)
    first = (
        tl.sum(at * (end - total)[None, :], 1)
        + (tile - tl.sum(at * (last - height)[None, :], 1)) * ROWS
    )
    tl.store(tiles_ptr + tile, mine, mask=tile < most)
    tl.store(tiles_ptr + most + tile, first, mask=tile < most)


@triton.jit
def _place_kernel(
    experts_ptr, before_ptr, bounds_ptr, order_ptr, places_ptr, pairs, blocks, PAIRS: tl.constexpr
):
    block = tl.program_id(0)
    number = tl.arange(0, PAIRS)
    pair = block * PAIRS + number
    inside = pair < pairs
    mine = tl.load(experts_ptr + pair, mask=inside, other=0).to(tl.int32)
    others = tl.load(experts_ptr + pair, mask=inside, other=-1).to(tl.int32)
    earlier = (mine[:, None] == others[None, :]) & (number[None, :] < number[:, None])
    place = (
        tl.load(bounds_ptr + mine)
        + tl.load(before_ptr + mine * blocks + block)
        + tl.sum(earlier.to(tl.int32), 1)
    )
    tl.store(places_ptr + pair, place, mask=inside)
    tl.store(order_ptr + place, pair, mask=inside)


@operator("chronicals::expert_dispatch")
def _dispatch(experts_S: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order, places, bounds, tiles = _empty(experts_S, experts, rows)
    pairs = len(experts_S)
    blocks = triton.cdiv(pairs, BLOCK_PAIRS)
    most = tiles.shape[1]
    wide = next_power_of_2(experts + 1)
    counts, totals = (order.new_empty(size) for size in (experts * blocks, experts))
    _count_kernel[(blocks,)](experts_S, counts, pairs, blocks, experts, BLOCK_PAIRS, COMPARE_WIDTH)
    _sum_kernel[(experts,)](counts, totals, blocks, min(1024, next_power_of_2(blocks)))
    _schedule_kernel[(triton.cdiv(most, COMPARE_WIDTH),)](
        totals, bounds, tiles, most, experts, wide, rows, COMPARE_WIDTH, num_warps=8
    )
    _place_kernel[(blocks,)](experts_S, counts, bounds, order, places, pairs, blocks, BLOCK_PAIRS)
    return order, places, bounds, tiles


@torch.library.register_fake(_dispatch)
def _empty(experts_S: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate order, places, bounds and tiles of a ``Dispatch``."""
    pairs = len(experts_S)
    shapes: list[tuple[int, ...]] = [
        (pairs,),
        (pairs,),
        (experts + 1,),
        (2, -(-pairs // rows) + experts),
    ]
    order, places, bounds, tiles = (
        experts_S.new_empty(shape, dtype=torch.int32) for shape in shapes
    )
    return order, places, bounds, tiles


def dispatch_to_experts(experts_Tk: Tensor, experts: int) -> Dispatch:
    """Sort the pairs of ``experts_Tk`` by expert.

    Args:
        experts_Tk: int64 or int32 ``[T, k]`` with values below ``experts``.
        experts: E.

    Raises:
        ValueError: ``experts_Tk`` has another shape or dtype.
    """
    if experts_Tk.ndim != 2 or experts_Tk.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"experts_Tk is {tuple(experts_Tk.shape)} {experts_Tk.dtype}: expected [T, k], int32 "
            "or int64"
        )
    each = experts_Tk.shape[1]
    rows = LOW_TILE_ROWS if experts_Tk.numel() < TALL_TILE_MIN_MEAN * experts else TALL_TILE_ROWS
    experts_S = experts_Tk.reshape(-1).contiguous()
    on_card = HAS_TRITON and runs_triton(experts_S.new_empty(0, dtype=torch.float32))
    sort = _dispatch if on_card and len(experts_S) else dispatch_reference
    order, places, bounds, tiles = sort(experts_S, experts, rows)
    dispatch = Dispatch(order, places, bounds, tiles, each, rows)
    if _watcher is not None:
        _watcher(dispatch)
    return dispatch


def dispatch_reference(
    experts_S: Tensor, experts: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute order, places, bounds and tiles of a ``Dispatch`` in plain torch."""
    order, places, bounds, tiles = _empty(experts_S, experts, rows)
    order.copy_(experts_S.sort(stable=True).indices)
    places.scatter_(
        0, order.long(), torch.arange(len(order), dtype=torch.int32, device=order.device)
    )
    counts = (experts_S[:, None] == torch.arange(experts, device=order.device)).sum(0)
    bounds[0] = 0
    bounds[1:] = counts.cumsum(0)
    last = (-(-counts // rows)).cumsum(0)
    number = torch.arange(tiles.shape[1], device=order.device)
    tiles[0] = mine = torch.searchsorted(last, number, right=True)
    begins = torch.cat((last.new_zeros(1), last))[mine]
    tiles[1] = torch.where(mine < experts, bounds[mine] + (number - begins) * rows, 0)
    return order, places, bounds, tiles
