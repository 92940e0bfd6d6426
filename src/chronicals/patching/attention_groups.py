"""Attention of a layer in groups of heads, once in the forward pass and again, or not, in the backward.

``AttentionAgain`` computes it again when the backward pass begins. ``KeptAttention`` keeps what it gave
(``memory.attention_results``). Either holds, of a group's graph, what cannot be computed
from the layer's input: attention's output and, as an example, FlashAttention's log-sum-exp. Queries,
keys and values are made again for the group whose gradients are computed, and take the places of those
that the graph was made with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from chronicals.memory.attention_results import KeptResults, LayerResults
from chronicals.patching.head_groups import HeadGroup, LayerHeads

AttendGroup = Callable[[HeadGroup], Tensor]
"""A function that returns what attention gives for a group, ``[T, n, W]``."""

Gradients = Callable[[GradientEdge, Tensor, Sequence[Tensor]], list[Tensor]]
"""A function that returns gradients of some inputs.

Its arguments are the output's edge in the graph, the output's gradient, and the inputs.
"""


@dataclass(frozen=True)
class Attended:
    """Attention's output of a group, in the backward pass.

    Attributes:
        value: the output, ``[T, n, W]``, without a graph.
        graph: its graph.
        others: further tensors that the graph needs.
    """

    value: Tensor
    graph: AttentionGraph
    others: Sequence[Tensor]

    def gradients(self, of_output: Tensor, group: HeadGroup, find: Gradients) -> HeadGroup:
        """Return the gradients of queries, keys and values.

        Args:
            of_output: gradient of ``value``.
            group: queries, keys and values.
            find: computes gradients.
        """
        with self.graph.given(group.tensors, self.value, self.others):
            dq, dk, dv = find(self.graph.output, of_output, self.graph.inputs)
        return group._replace(q=dq, k=dk, v=dv)


class GroupAttention(ABC):
    """Attention of a layer's groups, for one forward pass and the backward passes through it.

    Args:
        attend: computes attention of a group.
    """

    def __init__(self, attend: AttendGroup):
        self._attend = attend

    @abstractmethod
    def forward(self, heads: LayerHeads) -> list[Tensor]:
        """Return what attention gives for each group, ``[T, n, W]``."""

    def to_save(self) -> list[Tensor]:
        """Return what autograd is to save of the forward pass; it is asked once."""
        return []

    @abstractmethod
    def attended(self, heads: LayerHeads, saved: Sequence[Tensor]) -> list[Attended]:
        """Return the groups for a backward pass, which takes the heads once more.

        Args:
            heads: queries, keys and values.
            saved: what autograd saved.
        """


class AttentionAgain(GroupAttention):
    """Attention that the backward pass computes again."""

    def forward(self, heads: LayerHeads) -> list[Tensor]:
        """Return what attention gives for each group."""
        return [self._value(heads.take(place)) for place in range(len(heads))]

    def attended(self, heads: LayerHeads, saved: Sequence[Tensor]) -> list[Attended]:
        """Compute attention of each group again."""
        found = []
        for place in range(len(heads)):
            graph, value, others = AttentionGraph.of(heads.look(place), self._attend)
            found.append(Attended(value, graph, others))
        return found

    def _value(self, group: HeadGroup) -> Tensor:
        """Return what attention gives for a group.

        It is computed with a graph, which nobody keeps: with it the backend is that of the
        recomputation. What the graph saves stays on the card, whatever hooks the caller has for saved
        tensors. A tensor that such hooks return as it is would keep its own graph alive.
        """
        for tensor in group.tensors:
            tensor.requires_grad_()
        with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, _as_it_is):
            return self._attend(group).detach()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class KeptAttention(GroupAttention):
    """Attention whose results are kept, with what their graphs need.

    Args:
        attend: computes attention of a group.
        results: keeps them.
    """

    def __init__(self, attend: AttendGroup, results: KeptResults):
        super().__init__(attend)
        self._results = results
        self._graphs: list[AttentionGraph] = []
        self._stored: LayerResults

    def forward(self, heads: LayerHeads) -> list[Tensor]:
        """Return what attention gives for each group, and keep that."""
        found = []
        kept: list[Tensor] = []
        for place in range(len(heads)):
            graph, value, others = AttentionGraph.of(heads.take(place), self._attend)
            self._graphs.append(graph)
            found.append(value)
            kept += [value, *others]
        self._stored = self._results.store(kept)
        return found

    def to_save(self) -> list[Tensor]:
        """Return the results that autograd is to save."""
        return self._stored.to_save()

    def attended(self, heads: LayerHeads, saved: Sequence[Tensor]) -> list[Attended]:
        """Return what was kept of the groups."""
        kept = iter(self._stored.tensors(saved))
        found: list[Attended] = []
        for graph in self._graphs:
            value = next(kept)
            others = [next(kept) for _ in range(graph.others)]
            found.append(Attended(value, graph, others))
        return found


class AttentionGraph:
    """The graph of a group's attention, without the tensors that it saved.

    Attributes:
        inputs: leaves of the shapes of queries, keys and values, by which it is differentiated.
        output: the edge of what attention gave.
        others: number of saved tensors that are none of queries, keys, values and output.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        output: GradientEdge,
        saved: _SavedElsewhere,
        others: int,
    ):
        self.inputs = tuple(inputs)
        self.output = output
        self.others = others
        self._saved = saved

    @classmethod
    def of(
        cls, group: HeadGroup, attend: AttendGroup
    ) -> tuple[AttentionGraph, Tensor, list[Tensor]]:
        """Run attention; return its graph, what it gives, and the other tensors that it saved."""
        own = [tensor.detach() for tensor in group.tensors]
        inputs = [tensor.new_zeros(()).expand(tensor.shape).requires_grad_() for tensor in own]
        saved = _SavedElsewhere()
        with torch.enable_grad():
            q, k, v = _InPlaceOf.apply(*inputs, *own)
            with saved_tensors_hooks(saved.pack, saved.unpack):
                output = attend(group._replace(q=q, k=k, v=v))
        value = output.detach()
        others = saved.settle([*own, value])
        return cls(inputs, get_gradient_edge(output), saved, len(others)), value, others

    @contextmanager
    def given(
        self, own: Sequence[Tensor], value: Tensor, others: Sequence[Tensor]
    ) -> Iterator[None]:
        """Context in which the graph reads these tensors.

        Args:
            own: queries, keys and values.
            value: what attention gave for them.
            others: as ``of`` returned them.
        """
        self._saved.given = [*own, value, *others]
        try:
            yield
        finally:
            self._saved.given = []


class _InPlaceOf(torch.autograd.Function):
    """Values for leaves that have a shape, but no memory: three leaves, then their values."""

    @staticmethod
    def forward(ctx: Any, *leaves_and_values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.view_as(value) for value in leaves_and_values[3:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *gradients, None, None, None


@dataclass(eq=False)
class _Place:
    """Stand-in for a tensor that a graph saved.

    Attributes:
        tensor: the tensor itself, until it is known where it comes from.
        source: place of the tensor that it is a view of, among those that are given.
        shape, stride, offset: of the view.
    """

    tensor: Tensor | None
    source: int = -1
    shape: torch.Size = field(default_factory=torch.Size)
    stride: tuple[int, ...] = ()
    offset: int = 0


@dataclass(eq=False)
class _SavedElsewhere:
    """Hooks for the tensors that a graph saves, which it gets again from ``given``.

    The graph holds this object, which therefore must not hold the graph.
    """

    places: list[_Place] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)

    def pack(self, tensor: Tensor) -> _Place:
        """Note a tensor that autograd saves."""
        place = _Place(tensor.detach())
        self.places.append(place)
        return place

    def unpack(self, place: _Place) -> Tensor:
        """Return the tensor."""
        if place.tensor is not None:
            return place.tensor
        return self.given[place.source].as_strided(place.shape, place.stride, place.offset)

    def settle(self, known: Sequence[Tensor]) -> list[Tensor]:
        """Let go of all tensors but small ones of whole numbers, such as the bounds of documents.

        Args:
            known: tensors that will be given first.

        Returns:
            The tensors that will have to be given behind them.
        """
        storages = {
            _storage_of(tensor): place for place, tensor in enumerate(known) if _is_whole(tensor)
        }
        others: list[Tensor] = []
        for place in self.places:
            tensor = place.tensor
            assert tensor is not None
            if not tensor.is_floating_point():
                continue
            storage = _storage_of(tensor)
            if storage not in storages:
                storages[storage] = len(known) + len(others)
                others.append(_whole(tensor))
            place.source = storages[storage]
            place.shape, place.stride = tensor.shape, tensor.stride()
            place.offset = int(tensor.storage_offset())
            place.tensor = None
        return others


def _storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is all of its memory, in order."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _whole(tensor: Tensor) -> Tensor:
    """Return all elements of the memory that a tensor lies in, in one dimension."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)
