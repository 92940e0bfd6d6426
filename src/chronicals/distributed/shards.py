"""Trained weights of which every rank updates a share: gradients are reduce-scattered, updated
shares are gathered.

Rajbhandari et al., 2020 (ZeRO), section 5: every rank holds all weights, and of gradients' sums and
optimizer states a share of 1 / W over W ranks. The rank r of W has of each weight, by itself, the
r-th of W equal ranges of whole blocks of 256 elements (``share_of``), so that a state in 8 bits has
the same blocks on any number of ranks. Bytes of a step and rank, of N weights: 4 N (W − 1) / W of
gradients in fp32, and the weights' own size times (W − 1) / W, where an all-reduce has 8 N.

Weights are sent in buckets: small ones by one collective, the shares of a rank one behind the
other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chronicals.distributed.buckets import BUCKET, IN_FLIGHT
from chronicals.distributed.mesh import Mesh
from chronicals.kernels.adamw_8bit import MOMENT_BLOCK
from chronicals.kernels.gradient_norm import gradient_norm

ROWS = 16
"""Shares of a weight that are copied one by one."""


def share_of(elements: int, rank: int, count: int) -> tuple[int, int]:
    """Begin and end of what a rank has of a weight with so many elements; equal where it has
    none.
    """
    most = width_of(elements, count)
    return min(rank * most, elements), min((rank + 1) * most, elements)


def width_of(elements: int, count: int) -> int:
    """Elements of a share, at most: that of the first rank."""
    return -(-elements // (MOMENT_BLOCK * count)) * MOMENT_BLOCK


@dataclass(frozen=True)
class Bucket:
    """Weights whose shares travel together.

    Attributes:
        weights: of one dtype.
        widths: of the share of each.
        own: ``[sum(widths)]``, this rank's shares one behind the other, in the weights' dtype.
        gradients: the same of their gradients' sums, fp32.
    """

    weights: list[Tensor]
    widths: list[int]
    own: Tensor
    gradients: Tensor


class Shards:
    """The shares of this rank, and how they come from all ranks and go to them.

    Args:
        weights: those that are trained, alike on all ranks and in the same order.
        size: bytes of a bucket of gradients at most.

    Attributes:
        shares: by weight; a matrix's is ``[1, n]``, a vector's ``[n]``, n may be 0.
    """

    def __init__(self, ranks: Mesh, weights: Sequence[Tensor], size: int = BUCKET):
        self.ranks = ranks
        self.weights = list(weights)
        self.size = size
        self.shares = {
            weight: _as(weight, self.own_part(weight)).clone() for weight in self.weights
        }
        self.buckets: list[Bucket] = []
        self._flying = deque[tuple[Any, Tensor, Tensor, Bucket]]()
        self._norm: Tensor | None = None
        self._stamps: dict[Tensor, tuple[int, int]] = {}

    def own_part(self, weight: Tensor, value: Tensor | None = None, unit: int = 1) -> Tensor:
        """``[n]``, this rank's share of ``value``, of which an element goes with ``unit`` of the
        weight's; of the weight itself where it is None."""
        begin, end = share_of(weight.numel(), self.ranks.rank, self.ranks.count)
        return (
            (weight if value is None else value)
            .detach()
            .reshape(-1)[-(-begin // unit) : -(-end // unit)]
        )

    def shape_of(self, weight: Tensor, unit: int = 1) -> torch.Size:
        """Of a whole tensor that goes with a weight, an element with ``unit`` of its own: the
        weight's, or ``[n]``.
        """
        return weight.shape if unit == 1 else torch.Size([-(-weight.numel() // unit)])

    @property
    def keeps(self) -> bool:
        """Whether this rank's shares go into checkpoints."""
        return True

    def begin(self, weight: Tensor) -> int:
        """The first element of this rank's share."""
        return share_of(weight.numel(), self.ranks.rank, self.ranks.count)[0]

    def settle(self) -> None:
        """Weights are where they stay for now; at first, make buckets of them."""
        self.remember() if self.buckets else self.lay()

    def drop_gradients(self) -> None:
        """Of the weights; the shares' are overwritten by the next sums."""
        for weight in self.weights:
            weight.grad = None

    def lay(self) -> None:
        """Make buckets of the weights as they are now; shares keep their values, but are of
        their weight's dtype.
        """
        for weight, share in self.shares.items():
            if share.dtype != weight.dtype or share.device != weight.device:
                share.data = _as(weight, self.own_part(weight)).clone()
        self.buckets = [self._bucket(weights) for weights in self._together()]
        self.remember()

    def _together(self) -> list[list[Tensor]]:
        """The weights in order, neighbours of one dtype in a bucket."""
        found = list[list[Tensor]]()
        room = 0
        for weight in self.weights:
            needed = 4 * self.ranks.count * width_of(weight.numel(), self.ranks.count)
            if not found or needed > room or weight.dtype != found[-1][0].dtype:
                found.append([])
                room = self.size
            found[-1].append(weight)
            room -= needed
        return found

    def _bucket(self, weights: list[Tensor]) -> Bucket:
        widths = [width_of(weight.numel(), self.ranks.count) for weight in weights]
        own = weights[0].new_zeros(sum(widths), requires_grad=False)
        gradients = torch.zeros(len(own), dtype=torch.float32, device=own.device)
        for weight, mine, gradient in zip(weights, own.split(widths), gradients.split(widths)):
            share = self.shares[weight]
            mine[: share.numel()].copy_(share.reshape(-1))
            share.data = _as(weight, mine[: share.numel()])
            share.grad_dtype = torch.float32
            share.grad = _as(weight, gradient[: share.numel()]) if share.numel() else None
        return Bucket(weights, widths, own, gradients)

    @torch.no_grad()
    def reduce(self, parameters: Sequence[Tensor], scalars: Sequence[Tensor]) -> Tensor:
        """As ``Mesh.reduce``, but the sums of gradients are those of this rank's shares alone,
        their ``grad``; what the weights themselves have as gradients is left as it was."""
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
        """``reduce`` from where all buckets are on their way.

        Args:
            held: the parameters that had a gradient on this rank.
        """
        self._land(0)
        square = gradient_norm(
            [share.grad for share in self.shares.values() if share.grad is not None]
        ).square()
        numbers = torch.stack(
            [*(scalar.float() for scalar in scalars), square.to(scalars[0].device)]
        )
        pattern = tuple(parameter in held for parameter in parameters)
        beside = torch.cat([numbers, self.ranks.held_by(pattern, numbers.device)])
        dist.all_reduce(beside)
        for scalar, total in zip(scalars, beside):
            scalar.copy_(total)
        self._norm = beside[len(scalars)].sqrt()
        return beside[len(scalars) + 1 :]

    @torch.no_grad()
    def scatter(self, bucket: Bucket, add: bool = False) -> None:
        """Begin to sum a bucket's gradients over the ranks; all ranks take the buckets in one
        order.

        Args:
            add: to the sums that the bucket has of earlier micro-batches.
        """
        self._land(IN_FLIGHT - 1)
        sent = torch.zeros(
            self.ranks.count, sum(bucket.widths), dtype=torch.float32, device=bucket.own.device
        )
        places = [
            (place, weight.grad)
            for weight, place in zip(bucket.weights, sent.split(bucket.widths, dim=1))
        ]
        _copy_each([_spread(place, gradient) for place, gradient in places if gradient is not None])
        sums = torch.empty_like(bucket.gradients) if add else bucket.gradients
        self._flying.append(
            (dist.reduce_scatter_tensor(sums, sent.view(-1), async_op=True), sent, sums, bucket)
        )

    def _land(self, left: int) -> None:
        """Wait, in the order of the device's work, until no more than so many buckets are on
        their way.
        """
        while len(self._flying) > left:
            work, _, sums, bucket = self._flying.popleft()
            work.wait()
            if sums is not bucket.gradients:
                bucket.gradients.add_(sums)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """As ``Mesh.norm``, of the gradients that ``reduce`` summed last; it has found their
        norm.
        """
        assert self._norm is not None, "reduce comes first"
        return self._norm

    @torch.no_grad()
    def bring_gradients(self) -> Iterator[None]:
        """Put the sums of the last ``reduce`` into the weights' own ``grad``, a bucket after the
        other, for whoever inspects them: there may be no room for all."""
        for bucket in self.buckets:
            for weight, sums in zip(bucket.weights, self._gathered(bucket, bucket.gradients)):
                weight.grad = sums.view(weight.shape).to(weight.grad_dtype or weight.dtype)
            yield
            for weight in bucket.weights:
                weight.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Give all ranks the shares, which were updated."""
        for bucket in self.buckets:
            values = self._gathered(bucket, bucket.own)
            torch._foreach_copy_(
                bucket.weights, [v.view(w.shape) for v, w in zip(values, bucket.weights)]
            )
        self.remember()

    def _gathered(self, bucket: Bucket, own: Tensor) -> list[Tensor]:
        """Of every weight of a bucket all that the ranks have in the place of ``own``."""
        found = own.new_empty(self.ranks.count, len(own))
        dist.all_gather_into_tensor(
            found.view(-1).view(torch.uint8), own.view(torch.uint8)
        )  # not every type can be sent
        places = zip(bucket.weights, found.split(bucket.widths, dim=1))
        return [place.reshape(-1)[: weight.numel()] for weight, place in places]

    def remember(self) -> None:
        """The weights are what the shares are, as they stand now."""
        self._stamps = {weight: _stamp(weight) for weight in self.weights}

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over weights that other code wrote since."""
        for weight in self.weights:
            if self._stamps.get(weight) != _stamp(weight):
                self.take_over(weight)

    @torch.no_grad()
    def take_over(self, weight: Tensor) -> None:
        """Make the share what the weight is."""
        self.shares[weight].copy_(_as(weight, self.own_part(weight)))
        self._stamps[weight] = _stamp(weight)


def _as(weight: Tensor, part: Tensor) -> Tensor:
    """A share with as many dimensions as tells a matrix from a vector."""
    return part.view(1, -1) if weight.ndim > 1 else part


def _spread(place: Tensor, gradient: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Where the shares of all ranks lie in a bucket, ``[ranks, width]``, and what is to be
    copied there: a row at a time, which one launch does for many weights, or, of many rows, all
    that are whole at once."""
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


def _copy_each(pairs: Sequence[tuple[list[Tensor], list[Tensor]]]) -> None:
    there, given = ([one for pair in pairs for one in pair[side]] for side in (0, 1))
    if there:
        torch._foreach_copy_(there, given)


def _stamp(weight: Tensor) -> tuple[int, int]:
    """Changes when a weight is written in place, or gets another storage."""
    return weight._version, weight.data_ptr()
