"""Pages of keys and values: who has which, and the tensors of each attention layer.

A page holds ``page_size`` tokens of all layers. Answers to one prompt share its pages; each holder
counts, and a page is free again when its last holder has released it. A shared page is copied
before one of its holders writes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chronicals.kernels.paged_attention import gather_pages

SCRATCH_PAGE = 0
"""Page to which the empty slots of a decode step write; no sequence ever has it."""


class PagePool:
    """The holders of pages 1 to ``count - 1``.

    Attributes:
        free: pages without a holder.
        holders: number of holders of each page.
    """

    def __init__(self, count: int):
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
    """

    heads: int
    key: int
    value: int
    dtype: torch.dtype
    latent: int = 0

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
    """

    def __init__(self, sizes: LayerSizes, count: int, page_size: int, device: torch.device):
        shape = count, page_size, sizes.heads
        self.keys = torch.zeros(*shape, sizes.key, dtype=sizes.dtype, device=device)
        self.is_latent = bool(sizes.latent)
        if self.is_latent:
            self.values = self.keys[..., : sizes.latent]
        else:
            self.values = torch.zeros(*shape, sizes.value, dtype=sizes.dtype, device=device)

    def write(self, places: Tensor, k_TKD: Tensor, v_TKV: Tensor) -> None:
        """Write the keys and values of tokens; ``places`` are page · S + place within the page."""
        self.keys.flatten(0, 1).index_copy_(0, places, k_TKD)
        if not self.is_latent:
            self.values.flatten(0, 1).index_copy_(0, places, v_TKV)

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
