"""Shared parts of the losses that take a linear head one chunk of rows at a time.

An adapter (A, B, α) on the head is appended as columns to the hidden states and to the head, so
that logits are one product: ``h Wᵀ + α (h Aᵀ) Bᵀ = [h, α h Aᵀ] [W, B]ᵀ``.

``Adapter`` and ``Rows``, trained additions to a frozen weight, serve all linear layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from chronicals.kernels.logit_rows import IGNORE_INDEX, LossOptions, shaped_reference


class Adapter(NamedTuple):
    """A low-rank addition to a linear layer (LoRA, Hu et al., 2022): ``y += s · (dropout(x) Aᵀ) Bᵀ``.

    With a magnitude (DoRA): ``y = m / ‖W + s B A‖ ⊙ (x Wᵀ + s · (dropout(x) Aᵀ) Bᵀ)``.

    Attributes:
        a: A, ``[r, in]``.
        b: B, ``[out, r]``.
        scale: s.
        dropout: probability with which an element of x is dropped.
        magnitude: m, ``[out]``, or None.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0
    magnitude: Tensor | None = None

    def of_rows(self, ranges: Sequence[slice]) -> Adapter:
        """Return the adapter of some of the layer's outputs, in copies without a graph.

        Args:
            ranges: the outputs, ascending.
        """
        b = torch.cat([self.b.detach()[rows] for rows in ranges])
        if self.magnitude is None:
            return self._replace(b=b)
        magnitude = torch.cat([self.magnitude.detach()[rows] for rows in ranges])
        return self._replace(b=b, magnitude=magnitude)


class Rows(NamedTuple):
    """Trained rows of an otherwise frozen weight W: ``W[ids] = values`` in a copy of W.

    Attributes:
        ids: int64 ``[n]``, the numbers of the rows; none occurs twice.
        values: ``[n, in]``.
    """

    ids: Tensor
    values: Tensor

    def within(self, weight: Tensor) -> Tensor:
        """Return a copy of ``weight`` ``[V, in]`` with the values put in, differentiable in them."""
        return weight.index_copy(0, self.ids, self.values.to(weight.dtype))


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head and its rows, on which the working bytes of a loss depend.

    Attributes:
        tokens: rows of hidden states.
        rows: rows of logits that exist at a time.
        width: width of the hidden states.
        vocabulary: rows of the head.
        element: bytes of an element of states and logits.
        trained: True if the head is trained.
    """

    tokens: int
    rows: int
    width: int
    vocabulary: int
    element: int
    trained: bool

    @property
    def logits(self) -> int:
        """Bytes of a chunk of logits."""
        return self.rows * self.vocabulary * self.element

    @property
    def states(self) -> int:
        """Bytes of the hidden states."""
        return self.tokens * self.width * self.element

    @property
    def weights(self) -> int:
        """Number of the head's weights if it is trained, else 0."""
        return self.vocabulary * self.width * self.trained


@dataclass(frozen=True)
class HeadWork:
    """Work of a loss beside the products that make gradients.

    Attributes:
        logits: times that it computes the logits; 0 if it has none.
        moved: bytes that it moves for a logit in 16 bits.
    """

    logits: int
    moved: int


NO_LOGITS = HeadWork(0, 0)


class HeadBytes(NamedTuple):
    """Bytes that a loss needs at most at a time.

    Attributes:
        logits: of chunks of logits.
        states: of hidden states, their gradient, and copies of both.
        gradient: of sums and products of the head's gradient, without the gradient that stays.
        returned: of the head's gradient after the logits, when autograd takes it: in the head's dtype,
            and of the sum that it was made of, if that still exists.
    """

    logits: int
    states: int
    gradient: int
    returned: int = 0


class LinearHead(NamedTuple):
    """Hidden states and the linear head that turns them into logits.

    Attributes:
        hidden: ``[T, D]``.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        adapter: a low-rank addition, or None.
        scale, softcap: applied to the logits, in this order.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    adapter: Adapter | None = None
    scale: float = 1.0
    softcap: float | None = None

    def of_rows(self, vocabulary: int) -> LinearHead:
        """Return the same with the first ``vocabulary`` rows of the head only."""
        if vocabulary == len(self.weight):
            return self
        bias = None if self.bias is None else self.bias[:vocabulary]
        adapter = (
            None if self.adapter is None else self.adapter._replace(b=self.adapter.b[:vocabulary])
        )
        return self._replace(weight=self.weight[:vocabulary], bias=bias, adapter=adapter)

    def logits(self) -> Tensor:
        """Return all logits ``[T, V]`` in plain torch, fp32 or wider."""
        x = torch.nn.functional.linear(self.hidden, self.weight, self.bias)
        if self.adapter is not None:
            down = (
                torch.nn.functional.dropout(self.hidden, self.adapter.dropout) @ self.adapter.a.t()
            )
            x = x + self.adapter.scale * down @ self.adapter.b.t()
        return shaped_reference(x, LossOptions(self.scale, self.softcap))


def chunks(rows: int, size: int) -> list[slice]:
    """Return consecutive slices of at most ``size`` that cover ``rows``."""
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Write the raw logits of a chunk to the first rows of ``buffer`` and return these rows."""
    out = buffer[: len(hidden)]
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias.to(hidden.dtype), hidden, weight.t(), out=out)


def product_type(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the products: autocast's if it is on, else that of ``hidden``."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def check_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    chunk_size: int,
    softcap: float | None,
) -> None:
    """Raise ValueError unless shapes, dtypes and numbers of a loss over a linear head fit.

    hidden is ``[T, D]``, weight ``[V, D]``, targets int64 or int32 ``[T]``, bias ``[V]`` or None,
    ``chunk_size`` at least 1 and ``softcap`` positive or None.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: must be at least 1")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap}: must be a positive number, or None for no bound")
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets are {targets.dtype}: expected torch.int64; give targets.long()")
    if (
        hidden.ndim != 2
        or weight.ndim != 2
        or hidden.shape[1] != weight.shape[1]
        or targets.shape != hidden.shape[:1]
    ):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets "
            f"{tuple(targets.shape)}: expected "
            "[T, D], [V, D] and [T]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}: expected [{len(weight)}]")


def side_by_side(weight: Tensor, more: Tensor | None, kind: torch.dtype) -> Tensor:
    """Return a head ``[V, D]`` in dtype ``kind`` with the columns ``more`` ``[V, r]`` appended."""
    return weight.to(kind) if more is None else torch.cat((weight.to(kind), more.to(kind)), 1)


def with_adapter(
    hidden: Tensor, weight: Tensor, adapter: Adapter | None
) -> tuple[Tensor, Tensor | None]:
    """Append an adapter's thin product to the hidden states.

    Returns:
        ``[h, α h Aᵀ]`` ``[T, D + r]``, and B ``[V, r]``, to be appended to ``weight``; without an
        adapter ``hidden`` and None.

    Raises:
        ValueError: the adapter's shapes do not fit.
    """
    if adapter is None:
        return hidden, None
    a = adapter.a
    more = adapter.b
    if a.ndim != 2 or a.shape[1] != hidden.shape[1] or more.shape != (len(weight), len(a)):
        raise ValueError(
            f"adapter is {tuple(a.shape)}, {tuple(more.shape)}: expected [r, {hidden.shape[1]}] "
            "and [V, r]"
        )
    down = torch.nn.functional.dropout(hidden, adapter.dropout) @ a.t().to(hidden.dtype)
    return torch.cat((hidden, (adapter.scale * down).to(hidden.dtype)), 1), more


def trained_rows(targets: Tensor, count: int | None) -> Tensor | None:
    """Return the row numbers of targets that are not ignored, without a host synchronisation.

    Args:
        targets: ``[T]``.
        count: upper bound on the number of such targets; None if unknown.

    Returns:
        int64 row numbers: on the CPU exactly those rows, on a card ``count`` rows, filled up with
        ignored ones. None if all rows have to be taken.
    """
    counted = targets != IGNORE_INDEX
    if targets.device.type == "cpu":
        return counted.nonzero().squeeze(1)
    return None if count is None or count >= len(targets) else true_places_first(counted, count)


def true_places_first(mask: Tensor, count: int) -> Tensor:
    """Return ``count`` places of a bool mask ``[T]``: those of its true entries, then others.

    Unlike ``nonzero()`` it does not make the host wait for the device.
    """
    before = mask.cumsum(0)
    # The slot of each place: true entries first, then the others, both in their order.
    slot = torch.where(mask, before - 1, before[-1] - 1 + (~mask).cumsum(0))
    places = torch.arange(len(mask), device=mask.device)
    return torch.empty_like(slot).scatter_(0, slot, places)[:count]
