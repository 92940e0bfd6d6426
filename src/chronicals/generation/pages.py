"""Pages of keys and values: who has which, and the tensors of each attention layer.

A page holds ``page_size`` tokens of all layers. Answers to one prompt share its pages; each holder
counts, and a page is free again when its last holder has released it. A shared page is copied
before one of its holders writes to it.

Layers without a sliding window store page p at place p. The layers of one window have places of
their own, fewer than there are pages, and a page has one there only while a later token can see it:

    pages of an answer              7  2  9  4  5      of all its tokens
    places, layers of a window      -  -  -  1  3      the window's tokens lie in the last two pages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from chronicals.kernels.host_memory import sent
from chronicals.kernels.paged_attention import gather_pages, write_pages

SCRATCH_PAGE = 0
"""Page to which the empty slots of a decode step write; no sequence ever has it.

A page without a place in the layers of a window is at this place there.
"""


class Holder(Protocol):
    """A sequence that holds pages.

    Attributes:
        pages: its pages, in the order of its tokens.
        computed: number of its tokens whose keys and values are in the pages.
    """

    pages: list[int]
    computed: int


class WindowPool:
    """Places of pages in the layers whose attention has one sliding window.

    Each sequence holds the places of a run of its pages: those before the run are behind its window
    and given back, those after it are not computed yet. Answers that share a page hold its place
    each for itself, since some may be far beyond it while others have yet to begin.

    Args:
        window: a token attends to itself and the ``window - 1`` before it.
        count: number of places, the first of which is scratch.
        pages: number of pages.
        page_size: tokens of a page.
        device: device of the layers.

    Attributes:
        free: places without a page.
        table: int64 ``[P]`` on the device, the place of each page, as of the last ``send``.
    """

    def __init__(
        self, window: int, count: int, pages: int, page_size: int, device: torch.device | str
    ):
        self.window = window
        self.page_size = page_size
        self.free = list(range(count - 1, SCRATCH_PAGE, -1))
        self.table = torch.full((pages,), SCRATCH_PAGE, dtype=torch.int64, device=device)
        self._count = count
        self._places = [SCRATCH_PAGE] * pages
        self._holders = [0] * pages
        self._runs: dict[Holder, range] = {}
        self._unsent: dict[int, int] = {}

    def first_seen(self, tokens: int) -> int:
        """Return the first token that the one behind ``tokens`` tokens sees."""
        return max(tokens - self.window + 1, 0)

    def has_room(self, count: int) -> bool:
        """Return whether ``count`` places are free, or all that there are."""
        return len(self.free) >= min(count, self._count - 1)

    def reach(self, one: Holder) -> int:
        """Return for how many tokens of a sequence, from its beginning on, there are places."""
        return (self._run(one).stop + len(self.free)) * self.page_size

    def extend(self, one: Holder, tokens: int) -> None:
        """Give places to the pages of a sequence's first ``tokens`` tokens that had none yet."""
        run = self._run(one)
        end = max(run.stop, -(-tokens // self.page_size))
        for page in one.pages[run.stop : end]:
            self._holders[page] = 1
            self._put(page, self.free.pop())
        self._runs[one] = range(run.start, end)

    def leave(self, one: Holder) -> None:
        """Give back the places of pages of which no token that is yet to be computed sees any."""
        run = self._run(one)
        first = self.first_seen(one.computed) // self.page_size
        self._release(one.pages[run.start : first])
        self._runs[one] = range(max(run.start, first), run.stop)

    def share(self, one: Holder, other: Holder, count: int) -> None:
        """Let another sequence hold the places of those that a sequence's first ``count`` pages have."""
        run = self._run(one)
        for page in one.pages[run.start : count]:
            self._holders[page] += 1
        self._runs[other] = range(run.start, count)

    def hand_over(self, one: Holder, other: Holder) -> None:
        """Let another sequence hold all places of a sequence."""
        self._runs[other] = self._runs.pop(one)

    def forget(self, one: Holder) -> None:
        """Give up all places of a sequence."""
        run = self._runs.pop(one, range(0))
        self._release(one.pages[run.start : run.stop])

    def send(self) -> None:
        """Bring ``table`` up to date; its memory stays where it is, for graphs that read it."""
        if not self._unsent:
            return
        pages, places = (
            sent([*numbers], torch.int64, self.table.device)
            for numbers in (self._unsent.keys(), self._unsent.values())
        )
        self.table.index_copy_(0, pages, places)
        self._unsent.clear()

    def _run(self, one: Holder) -> range:
        return self._runs.get(one, range(0))

    def _put(self, page: int, place: int) -> None:
        self._places[page] = place
        self._unsent[page] = place

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self.free.append(self._places[page])
                self._put(page, SCRATCH_PAGE)


class PagePool:
    """The holders of pages 1 to ``count - 1``.

    Args:
        count: number of pages, the first of which is scratch.
        windows: places of the pages in the layers of each sliding window.

    Attributes:
        free: pages without a holder.
        holders: number of holders of each page.
    """

    def __init__(self, count: int, windows: Sequence[WindowPool] = ()):
        self.windows = windows
        self.free = list(range(count - 1, SCRATCH_PAGE, -1))
        self.holders = [0] * count

    def take(self, count: int) -> list[int]:
        """Return ``count`` free pages, which have one holder each from now on."""
        assert count <= len(self.free), f"{count} pages of {len(self.free)} free ones"
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.holders[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> list[int]:
        """Return the same pages for one more holder."""
        for page in pages:
            self.holders[page] += 1
        return [*pages]

    def release(self, pages: list[int]) -> None:
        """Give up all of a holder's ``pages``, and empty the list."""
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free.append(page)
        pages.clear()

    def send(self) -> None:
        """Bring the tables of all windows up to date on the device."""
        for window in self.windows:
            window.send()

    def in_layers(self, pages: Tensor) -> dict[int | None, Tensor]:
        """Return where pages are: in layers without a window (None), and in those of each one."""
        return {None: pages} | {one.window: one.table[pages] for one in self.windows}

    def tokens_in_layers(self, tokens: Tensor, page_size: int) -> dict[int | None, Tensor]:
        """Return the same of tokens, int64 page · S + place within the page."""
        found: dict[int | None, Tensor] = {None: tokens}
        for one in self.windows:
            found[one.window] = one.table[tokens // page_size] * page_size + tokens % page_size
        return found


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of what one token keeps in one attention layer.

    Attributes:
        heads: number of key heads.
        key, value: widths of a key and of a value.
        dtype: dtype of both.
        latent: width of the latent, if the layer stores a latent and a rotary key for all heads in
            the place of keys and values; else 0. Then ``heads`` is 1, ``key`` is the width of both
            together, and ``value`` is ``latent``.
        window: tokens that a token attends to, itself included; None for all before it.
        queries: number of query heads.
    """

    heads: int
    key: int
    value: int
    dtype: torch.dtype
    latent: int = 0
    window: int | None = None
    queries: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of a token."""
        width = self.key if self.latent else self.key + self.value
        return self.heads * width * self.dtype.itemsize


class LayerPages:
    """The pages of one attention layer.

    Attributes:
        keys: ``[P, S, K, D]``.
        values: ``[P, S, K, V]``; of latents the first channels of ``keys``.
        window: the layer's sliding window, or None.
    """

    def __init__(self, sizes: LayerSizes, count: int, page_size: int, device: torch.device):
        shape = count, page_size, sizes.heads
        self.keys = torch.zeros(*shape, sizes.key, dtype=sizes.dtype, device=device)
        self.window = sizes.window
        self.is_latent = bool(sizes.latent)
        if self.is_latent:
            self.values = self.keys[..., : sizes.latent]
        else:
            self.values = torch.zeros(*shape, sizes.value, dtype=sizes.dtype, device=device)

    def write(self, places: Tensor, k_TKD: Tensor, v_TKV: Tensor) -> None:
        """Write the keys and values of tokens; ``places`` are page · S + place within the page."""
        if self.is_latent:
            self.keys.flatten(0, 1).index_copy_(0, places, k_TKD)
        else:
            write_pages(k_TKD, v_TKV, self.keys, self.values, places)

    def read(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys ``[T, K, D]`` and values ``[T, K, V]`` of tokens."""
        keys = gather_pages(self.keys, places)
        if self.is_latent:
            return keys, keys[..., : self.values.shape[-1]]
        return keys, gather_pages(self.values, places)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages, int64 indices, to others."""
        for x in (self.keys,) if self.is_latent else (self.keys, self.values):
            x.index_copy_(0, targets, x.index_select(0, sources))
