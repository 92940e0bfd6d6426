"""Batch: packed documents, as all code between the data and the kernels takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""Target of a position that predicts nothing (the convention of
``torch.nn.functional.cross_entropy``).
"""


def document_at(places: Tensor, bounds: Tensor) -> Tensor:
    """Return the index of the document at each place, int64 in the shape of ``places``.

    Args:
        places: integer positions.
        bounds: ``[N + 1]`` document bounds.
    """
    return torch.searchsorted(bounds[1:], places.to(bounds.dtype), right=True)


@dataclass(frozen=True)
class SharedKeys:
    """Keys of documents, some of which share a prompt.

    The keys and values of document n are those of the tokens ``index[cu_seqlens[n]:cu_seqlens[n +
    1]]``, the prompt's first.

    Attributes:
        index: int64 ``[K]``, tokens of the Batch; entries after the last bound belong to no
            document.
        cu_seqlens: int32 ``[N + 1]``.
        places: int64 ``[S + 1, T]``, the position of each token in ``index``: as a token of its own
            document, and for each of S answers as a token of their prompt; -1 if there is none.
        max_seqlen: bound on the keys of a document; on the host, bucketed.
    """

    index: Tensor
    cu_seqlens: Tensor
    places: Tensor
    max_seqlen: int

    def map(self, move: Callable[[Tensor], Tensor]) -> SharedKeys:
        """Return the keys with ``move`` applied to every tensor."""
        return replace(
            self, index=move(self.index), cu_seqlens=move(self.cu_seqlens), places=move(self.places)
        )


@dataclass(frozen=True)
class Context:
    """Ranks that share each micro-batch.

    Each rank holds some of its documents, and a part of those that are too long for one rank.
    Neighbours exchange heads: each computes attention of some heads for all of them. Keys are
    gathered from the other ranks.

    Attributes:
        rank: index of this rank among them.
        count: number of ranks.
        inner: number of neighbours that exchange heads; 1 without an exchange, ``count`` if no keys
            are gathered.
        inner_group: ``torch.distributed`` group of those neighbours.
        outer_group: group of the ranks with the same index among their neighbours.
    """

    rank: int
    count: int
    inner: int
    inner_group: Any = None
    outer_group: Any = None

    @property
    def outer(self) -> int:
        """Number of ranks whose keys are gathered."""
        return self.count // self.inner

    def chunks(self, rank: int) -> tuple[int, int]:
        """Return the two of the ``2 * count`` chunks of a split document that a rank has.

        They are adjacent if only heads are exchanged. If keys are gathered, one is from the front
        and one from the back, so that causal attention costs all ranks the same.
        """
        if self.outer == 1:
            return 2 * rank, 2 * rank + 1
        outer, inner = divmod(rank, self.inner)
        return outer * self.inner + inner, (2 * self.outer - 1 - outer) * self.inner + inner


@dataclass(frozen=True)
class SplitDocuments:
    """Documents divided among ranks, at the beginning of each rank's Batch.

    Among c ranks each document is padded to a multiple of 2 c tokens and cut into 2 c chunks, of
    which a rank has two.

    Attributes:
        context: the ranks.
        tokens: n, tokens of these documents on each rank; on the host.
        cu_seqlens: int32, bounds of the queries' sequences among the tokens of the ranks that
            exchange heads. A sequence is a document, or if keys are gathered one of the two pieces
            of it that these ranks have, from its front and from its back.
        max_seqlen: bound on their lengths; on the host.
        whole: int32, bounds of the rank's other documents, counted from its token n on.
        max_whole: bound on their lengths; on the host.
        order: int64 ``[inner · n]``, for the tokens of those ranks in the order of documents, their
            positions in the order of ranks, as they are sent; None if both orders are the same.
        back: int64 ``[inner · n]``, the inverse of ``order``.
        keys: keys of the queries, among the gathered tokens; None if no keys are gathered.
    """

    context: Context
    tokens: int
    cu_seqlens: Tensor
    max_seqlen: int
    whole: Tensor
    max_whole: int
    order: Tensor | None = None
    back: Tensor | None = None
    keys: SharedKeys | None = None

    def map(self, move: Callable[[Tensor], Tensor]) -> SplitDocuments:
        """Return the documents with ``move`` applied to every tensor."""
        return replace(
            self,
            cu_seqlens=move(self.cu_seqlens),
            whole=move(self.whole),
            order=None if self.order is None else move(self.order),
            back=None if self.back is None else move(self.back),
            keys=None if self.keys is None else self.keys.map(move),
        )


@dataclass(frozen=True)
class Batch:
    """Documents laid end to end in packs: T = ``batch_size`` times ``max_seq_length`` tokens.

    Attributes:
        input_ids: int64 ``[T]``.
        targets: int64 ``[T]``, already shifted: ``targets[t]`` is what position t must predict;
            ``IGNORED`` if it predicts nothing, as at every document's last token.
        position_ids: int64 ``[T]``, from zero in each document.
        cu_seqlens: int32 ``[N + 1]``: document n is ``cu_seqlens[n]:cu_seqlens[n + 1]``. The tail
            of a pack is made of filler documents without targets, and unused entries repeat T, so
            that N has few values in a run.
        max_seqlen: bound on the length of any document, filler included; on the host, bucketed.
        trained: upper bound on the number of targets that are not ``IGNORED``, if it is known; on
            the host.
        weights: optional float32 ``[T]``, a factor for the loss of each target.
        segments: further columns of the documents by name, ``[N]`` each, with -1 for filler.
            ``side`` is the number of a document in its item (0 chosen, 1 rejected), ``group`` the
            number of the item; log-probabilities of a reference model are another. Empty if every
            document is an item of its own.
        tokens: further columns of the tokens by name, ``[T, ...]`` each, zero where there is no
            target: stored predictions of a teacher.
        keys: keys of the documents, if they attend to more than their own tokens. Their
            ``position_ids`` then continue the prompt's.
        split: documents of which this rank has a part, if there are any. They come first, and in
            ``cu_seqlens`` such a part is a document.
    """

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    trained: int | None = None
    weights: Tensor | None = None
    segments: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    keys: SharedKeys | None = None
    split: SplitDocuments | None = None

    def __len__(self) -> int:
        return self.input_ids.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the Batch with all tensors on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the Batch with all tensors in pinned memory, for copies to a GPU."""
        return self._map(Tensor.pin_memory)

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            input_ids=move(self.input_ids),
            targets=move(self.targets),
            position_ids=move(self.position_ids),
            cu_seqlens=move(self.cu_seqlens),
            weights=None if self.weights is None else move(self.weights),
            segments={name: move(tensor) for name, tensor in self.segments.items()},
            tokens={name: move(tensor) for name, tensor in self.tokens.items()},
            keys=None if self.keys is None else self.keys.map(move),
            split=None if self.split is None else self.split.map(move),
        )
