"""Batch: the one thing that travels from data to kernel."""

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


@dataclass(frozen=True)
class SharedKeys:
    """What documents attend to where some stand behind a prompt that they share: the keys and
    values of document n are those of the tokens ``index[cu_seqlens[n]:cu_seqlens[n + 1]]``, the
    prompt's first.

    Attributes:
        index: int64 ``[K]``, tokens of the Batch; entries behind the last bound are of no document.
        cu_seqlens: int32 ``[N + 1]``.
        places: int64 ``[S + 1, T]``, where each token stands in ``index``: as a document's own, and
            for each of S answers as part of its prompt; -1 where it does not.
        max_seqlen: bound on the keys of a document; on the host, bucketed.
    """

    index: Tensor
    cu_seqlens: Tensor
    places: Tensor
    max_seqlen: int

    def map(self, move: Callable[[Tensor], Tensor]) -> SharedKeys:
        return replace(
            self, index=move(self.index), cu_seqlens=move(self.cu_seqlens), places=move(self.places)
        )


@dataclass(frozen=True)
class Context:
    """Ranks that share each micro-batch: every one has some of its documents, and a part of those
    that are too long for one.

    Neighbours exchange heads, so that each attends with some of them for all these neighbours; from
    others keys are gathered.

    Attributes:
        rank, count: the place of this rank among them.
        inner: how many neighbours exchange heads; 1 where none do, ``count`` where no keys are
            gathered.
        inner_group, outer_group: of ``torch.distributed``: those neighbours, and the ranks in the
            same place among theirs.
    """

    rank: int
    count: int
    inner: int
    inner_group: Any = None
    outer_group: Any = None

    @property
    def outer(self) -> int:
        """From how many keys are gathered."""
        return self.count // self.inner

    def chunks(self, rank: int) -> tuple[int, int]:
        """Which two of the ``2 * count`` chunks of a split document that rank has: neighbours
        where heads alone are exchanged; where keys are gathered one from the front and one from
        the back, so that all see as many keys."""
        if self.outer == 1:
            return 2 * rank, 2 * rank + 1
        outer, inner = divmod(rank, self.inner)
        return outer * self.inner + inner, (2 * self.outer - 1 - outer) * self.inner + inner


@dataclass(frozen=True)
class SplitDocuments:
    """Documents that several ranks have parts of, at the beginning of each one's Batch.

    Each is filled up to a multiple of 2 c tokens, of c ranks, and cut into 2 c chunks, of which a
    rank has two.

    Attributes:
        context: the ranks.
        tokens: of them on each rank, n; on the host.
        cu_seqlens: int32, bounds of what queries are, among the tokens of the ranks that exchange
            heads: of the documents, or where keys are gathered of two pieces of each that these
            ranks have, one from its front and one from its back.
        max_seqlen: bound on their lengths; on the host.
        whole: int32, bounds of the rank's other documents, counted from its token n on.
        max_whole: bound on their lengths; on the host.
        order: int64 ``[inner · n]``, where the tokens of those ranks, document after document, lie
            among what they send, rank after rank; None where that is the same.
        back: int64 ``[inner · n]``, the inverse of ``order``.
        keys: what the queries attend to, among the tokens that are gathered; None where none are.
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
    """Documents laid end to end in ``batch_size`` packs of ``max_seq_length`` tokens, T tokens in
    all.

    Attributes:
        input_ids: int64 ``[T]``.
        targets: int64 ``[T]``, already shifted: ``targets[t]`` is what position t must predict;
            ``IGNORED`` where nothing is, always so at a document's last token.
        position_ids: int64 ``[T]``, from zero in each document.
        cu_seqlens: int32 ``[N + 1]``: document n is ``cu_seqlens[n]:cu_seqlens[n + 1]``. The tail
            of a pack is made of filler documents without targets, unused entries repeat T: of N
            there are few values in a run.
        max_seqlen: bound on the length of any document, filler included; on the host, bucketed.
        trained: at least so many as targets that are not ``IGNORED``, where it is known; on the
            host.
        weights: optional float32 ``[T]``, what each target's loss is multiplied by.
        segments: further columns of the documents by name, ``[N]`` each, of which entry n is
            document n's; -1 for filler. ``side`` is a document's place in its item (0 chosen, 1
            rejected), ``group`` numbers the items of the Batch; a reference model's
            log-probabilities are another. Empty where every document is an item of its own.
        tokens: further columns of the tokens by name, ``[T, ...]`` each, zero where there is no
            target: what was stored of a teacher's predictions.
        keys: what documents attend to, where that is more than their own tokens. ``position_ids``
            go on from the prompt's then.
        split: documents of which this rank has a part, where there are some. They come first, and
            in ``cu_seqlens`` such a part is a document.
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
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
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
