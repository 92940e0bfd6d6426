"""Sharded updates of trained weights: gradients are reduce-scattered, updated shares gathered.

ZeRO (Rajbhandari et al., 2020), section 5: every rank holds all weights, but only 1/W of the summed
gradients and optimizer states, for W ranks. Rank r holds the r-th of W equal ranges of each weight,
in whole blocks of 256 elements (``share_bounds``), so that 8-bit states have the same blocks for any
number of ranks. Bytes a step and rank, for N weights: 4 N (W − 1) / W for gradients in fp32, plus
the weights' own size times (W − 1) / W. An all-reduce sends 8 N.

Small weights travel in buckets, with the shares of a rank one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chronicals.distributed.mesh import BUCKET, IN_FLIGHT, Mesh, buckets
from chronicals.kernels.adamw_8bit import MOMENT_BLOCK
from chronicals.kernels.gradient_norm import gradient_norm

ROWS = 16
"""Maximum number of ranks for which shares are copied row by row (``_spread``)."""


def share_bounds(elements: int, rank: int, count: int) -> tuple[int, int]:
    """Return begin and end of a rank's share of a weight; equal if the share is empty."""
    most = width_of(elements, count)
    return min(rank * most, elements), min((rank + 1) * most, elements)


def width_of(elements: int, count: int) -> int:
    """Return the largest number of elements of a share, which rank 0 has."""
    # Whole blocks, so that 8-bit states have the same blocks for any number of ranks.
    return -(-elements // (MOMENT_BLOCK * count)) * MOMENT_BLOCK


@dataclass(frozen=True)
class Bucket:
    """Weights whose shares travel in one collective.

    Attributes:
        weights: weights of one dtype.
        widths: ``width_of`` each weight.
        own: ``[sum(widths)]``, this rank's shares one after the other, in the weights' dtype.
        gradients: ``[sum(widths)]``, summed gradients of these shares, fp32.
    """

    weights: list[Tensor]
    widths: list[int]
    own: Tensor
    gradients: Tensor


class RankShares:
    """Base of a rank's shares of trained weights, for ``Shards`` and ``WeightShards``.

    Args:
        ranks: the ranks of the run.
        weights: the trained weights; the same number, order, shapes and dtypes on all ranks.

    Attributes:
        keeps: True if this rank's shares are written to checkpoints.
    """

    keeps = True

    def __init__(self, ranks: Mesh, weights: Sequence[Tensor]):
        self.ranks = ranks
        self.weights = list(weights)
        self._norm: Tensor | None = None

    def shape_of(self, weight: Tensor, unit: int = 1) -> torch.Size:
        """Return the shape of a whole state with one element for ``unit`` elements of a weight.

        That is the weight's shape for ``unit`` 1, else ``[n]``.
        """
        return weight.shape if unit == 1 else torch.Size([-(-weight.numel() // unit)])

    def add_up(self, square: Tensor, scalars: Sequence[Tensor], held: tuple[bool, ...]) -> Tensor:
        """Sum scalars over the ranks in place, together with the squared norm of the gradients.

        Args:
            square: squared norm of the gradients of this rank's shares, fp32.
            scalars: scalars on a device of the collectives.
            held: for each parameter, whether it had a gradient on this rank.

        Returns:
            fp32 ``[len(held)]``: the number of ranks that had a gradient of each parameter.
        """
        numbers = torch.stack(
            [*(scalar.float() for scalar in scalars), square.to(scalars[0].device)]
        )
        beside = torch.cat([numbers, self.ranks.held_by(held, numbers.device)])
        dist.all_reduce(beside)
        for scalar, total in zip(scalars, beside):
            scalar.copy_(total)
        self._norm = beside[len(scalars)].sqrt()
        return beside[len(scalars) + 1 :]

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of the gradients of the last ``reduce``, an fp32 scalar.

        Nothing is communicated.
        """
        assert self._norm is not None, "reduce comes first"
        return self._norm


class Shards(RankShares):
    """This rank's shares of the trained weights, and their communication.

    Args:
        weights: the trained weights; the same number, order, shapes and dtypes on all ranks.
        size: maximum bytes of a bucket's gradients.

    Attributes:
        shares: weight → share, ``[1, n]`` for a matrix and ``[n]`` for a vector; n may be 0.
    """

    def __init__(self, ranks: Mesh, weights: Sequence[Tensor], size: int = BUCKET):
        super().__init__(ranks, weights)
        self.size = size
        self.shares = {
            weight: _as(weight, self.own_part(weight)).clone() for weight in self.weights
        }
        self.buckets: list[Bucket] = []
        self._flying = deque[tuple[Any, Tensor, Tensor, Bucket]]()
        self._stamps: dict[Tensor, tuple[int, int]] = {}

    def own_part(self, weight: Tensor, value: Tensor | None = None, unit: int = 1) -> Tensor:
        """Return this rank's share of ``value``, ``[n]``; of the weight itself if None.

        Args:
            weight: a trained weight.
            value: a whole tensor of the weight, or of a state of it.
            unit: number of weight elements for each element of ``value``.
        """
        begin, end = share_bounds(weight.numel(), self.ranks.rank, self.ranks.count)
        return (
            (weight if value is None else value)
            .detach()
            .reshape(-1)[-(-begin // unit) : -(-end // unit)]
        )

    def begin(self, weight: Tensor) -> int:
        """Return the index of the first element of this rank's share."""
        return share_bounds(weight.numel(), self.ranks.rank, self.ranks.count)[0]

    def settle(self) -> None:
        """Note that the weights were moved or written; the first call makes the buckets."""
        self.remember() if self.buckets else self.lay()

    def drop_gradients(self) -> None:
        """Set the weights' gradients to None; the next ``reduce`` overwrites those of shares."""
        for weight in self.weights:
            weight.grad = None

    def lay(self) -> None:
        """Make buckets for the weights' current dtypes and devices.

        A share keeps its values, unless its weight has another dtype or device than before; it is
        then taken from the weight.
        """
        for weight, share in self.shares.items():
            if share.dtype != weight.dtype or share.device != weight.device:
                share.data = _as(weight, self.own_part(weight)).clone()
        # Gradients travel in fp32, 4 bytes each, with the shares of all ranks at their full width.
        count = self.ranks.count
        sent = [4 * count * width_of(weight.numel(), count) for weight in self.weights]
        self.buckets = []
        for weights in buckets(self.weights, sent, self.size):
            widths = [width_of(weight.numel(), self.ranks.count) for weight in weights]
            own = weights[0].new_zeros(sum(widths), requires_grad=False)
            gradients = torch.zeros(len(own), dtype=torch.float32, device=own.device)
            # Shares become views of their bucket's memory.
            for weight, mine, gradient in zip(weights, own.split(widths), gradients.split(widths)):
                share = self.shares[weight]
                mine[: share.numel()].copy_(share.reshape(-1))
                share.data = _as(weight, mine[: share.numel()])
                share.grad_dtype = torch.float32
                share.grad = _as(weight, gradient[: share.numel()]) if share.numel() else None
            self.buckets.append(Bucket(weights, widths, own, gradients))
        self.remember()

    @torch.no_grad()
    def reduce(self, parameters: Sequence[Tensor], scalars: Sequence[Tensor]) -> Tensor:
        """Sum gradients and scalars over the ranks, the gradients only into this rank's shares.

        It is like ``Mesh.reduce``. The sums are the ``grad`` of the shares. The gradients of the weights are not changed.
        """
        for bucket in self.buckets:
            self.scatter(bucket)
        return self.finish(
            parameters,
            scalars,
            {parameter for parameter in parameters if parameter.grad is not None},
        )

    @torch.no_grad()
    def finish(
        self, parameters: Sequence[Tensor], scalars: Sequence[Tensor], held: Collection[Tensor]
    ) -> Tensor:
        """Do the rest of ``reduce`` once ``scatter`` was called for all buckets.

        Args:
            parameters: the trained weights.
            scalars: scalars to sum, in place.
            held: the parameters that had a gradient on this rank.
        """
        self._land(0)
        # Shares are disjoint, so squared norms add up over the ranks.
        square = gradient_norm(
            [share.grad for share in self.shares.values() if share.grad is not None]
        ).square()
        return self.add_up(square, scalars, tuple(parameter in held for parameter in parameters))

    @torch.no_grad()
    def scatter(self, bucket: Bucket, add: bool = False) -> None:
        """Start to sum a bucket's gradients over the ranks, which all use one order of buckets.

        Args:
            bucket: one of ``buckets``.
            add: add to the bucket's sums of earlier micro-batches instead of replacing them.
        """
        self._land(IN_FLIGHT - 1)
        sent = torch.zeros(
            self.ranks.count, sum(bucket.widths), dtype=torch.float32, device=bucket.own.device
        )
        there = list[Tensor]()
        given = list[Tensor]()
        for weight, place in zip(bucket.weights, sent.split(bucket.widths, dim=1)):
            if weight.grad is not None:
                places, parts = _spread(place, weight.grad)
                there += places
                given += parts
        if there:
            torch._foreach_copy_(there, given)
        sums = torch.empty_like(bucket.gradients) if add else bucket.gradients
        self._flying.append(
            (dist.reduce_scatter_tensor(sums, sent.view(-1), async_op=True), sent, sums, bucket)
        )

    def _land(self, left: int) -> None:
        """Wait, in stream order, until at most ``left`` reduce-scatters are in flight."""
        while len(self._flying) > left:
            work, _, sums, bucket = self._flying.popleft()
            work.wait()
            if sums is not bucket.gradients:
                bucket.gradients.add_(sums)

    @torch.no_grad()
    def bring_gradients(self) -> Iterator[None]:
        """Gather the summed gradients into the weights' ``grad``, one bucket for each iteration.

        This is for code that inspects gradients. Each bucket's gradients are dropped before the
        next bucket, since all of them may not fit in memory.
        """
        for bucket in self.buckets:
            for weight, sums in zip(bucket.weights, self._gathered(bucket, bucket.gradients)):
                weight.grad = sums.view(weight.shape).to(weight.grad_dtype or weight.dtype)
            yield
            for weight in bucket.weights:
                weight.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the updated shares of all ranks into the weights of every rank."""
        for bucket in self.buckets:
            values = self._gathered(bucket, bucket.own)
            torch._foreach_copy_(
                bucket.weights, [v.view(w.shape) for v, w in zip(values, bucket.weights)]
            )
        self.remember()

    def _gathered(self, bucket: Bucket, own: Tensor) -> list[Tensor]:
        """Gather ``own`` of all ranks; return one flat tensor for each weight of the bucket."""
        found = own.new_empty(self.ranks.count, len(own))
        dist.all_gather_into_tensor(
            found.view(-1).view(torch.uint8), own.view(torch.uint8)
        )  # as bytes, since the backends do not support every dtype
        places = zip(bucket.weights, found.split(bucket.widths, dim=1))
        return [place.reshape(-1)[: weight.numel()] for weight, place in places]

    def remember(self) -> None:
        """Record that weights and shares agree now."""
        self._stamps = {weight: _stamp(weight) for weight in self.weights}

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy weights that other code has written since ``remember`` into the shares."""
        for weight in self.weights:
            if self._stamps.get(weight) != _stamp(weight):
                self.take_over(weight)

    @torch.no_grad()
    def take_over(self, weight: Tensor) -> None:
        """Copy this rank's part of a weight into its share."""
        self.shares[weight].copy_(_as(weight, self.own_part(weight)))
        self._stamps[weight] = _stamp(weight)


def _as(weight: Tensor, part: Tensor) -> Tensor:
    """Return a share as ``[1, n]`` for a matrix and ``[n]`` for a vector.

    The optimizer tells matrices from vectors by their dimensions.
    """
    return part.view(1, -1) if weight.ndim > 1 else part


def _spread(place: Tensor, gradient: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return destinations in ``place [ranks, width]`` and the parts of a gradient to copy there.

    For up to ``ROWS`` ranks these are single rows, which one launch copies for many weights. For
    more ranks they are all whole rows at once, then the rest.
    """
    flat = gradient.detach().reshape(-1)
    width = place.shape[1]
    if len(place) <= ROWS:
        parts = flat.split(width)
        return [row[: len(part)] for row, part in zip(place, parts)], list(parts)
    whole, rest = divmod(len(flat), width)
    there = [place[:whole]]
    given = [flat[: whole * width].view(whole, width)]
    if rest:
        there.append(place[whole, :rest])
        given.append(flat[whole * width :])
    return there, given


def _stamp(weight: Tensor) -> tuple[int, int]:
    """Return a value that changes when a weight is written in place or gets another storage."""
    return weight._version, weight.data_ptr()
