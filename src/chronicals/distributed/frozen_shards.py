"""Frozen weights divided among ranks by rows and gathered as bytes for each decoder layer.

QLoRA with ZeRO stage 3. On each rank all frozen weights of a decoder layer, of any format, are one
row of bytes. The first product of a layer gathers the rows of all ranks into one of two buffers and
starts to gather the next layer (in the direction of the pass) into the other. A product then writes
the rows of all ranks into the dense buffer that its adapters use, one launch for each rank, with no
further copy. Bytes gathered in a pass, for N weights on W ranks: N (W − 1) / W times 2 in 16 bit,
times 0.516 in NF4.

Weights are cut at whole rows, and in NF4 at whole blocks of scales (256 · 64 values), so that a
rank's rows need nothing from other ranks. A weight that cannot be cut so stays whole on every rank.

A training pass begins and ends with empty buffers (``Gathers.passing``), so what it gathers, and in
which order, depends on the pass alone. Ranks that replay a captured CUDA graph therefore send what
the others send, and a replay reads only what it gathered itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.distributed.mesh import Mesh, group_of
from chronicals.distributed.weight_shards import CODES
from chronicals.models.rows import SHARING_RANKS
from chronicals.quantization import (
    RECIPES,
    PackedLinear,
    PackedStorage,
    PackedWeight,
    PlainWeight,
    frozen_weight,
    is_linear,
    packed_weight,
)

logger = logging.getLogger(__name__)

_ALIGNMENT = 16
"""Alignment of tensors in bytes, as vectorised loads need it."""

Place = tuple[int, int, torch.dtype]
"""Location of a tensor among the bytes of a unit: first byte, number of bytes, dtype."""


class Gathers:
    """The units of a model in order of the forward pass, and two buffers to gather them in turn.

    Args:
        rank, count: this rank among those that share a copy of the model, and their number.
        group: process group of these ranks, by default all ranks.
    """

    def __init__(self, rank: int, count: int, group: Any = None):
        self.rank = rank
        self.count = count
        self.group = group
        self.units: list[Unit] = []
        self._buffers: list[Tensor] = []
        self._holds: list[Unit | None] = [None, None]
        self._flying: list[Any] = [None, None]
        self._now: tuple[Unit, bool] | None = None

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Context manager around a forward and a backward pass; buffers are empty before and after.

        The pass gathers all that it reads and waits for every gather that it started. A CUDA graph
        is captured inside this context. Call ``forget`` once before the first pass, outside of a
        capture.
        """
        self._hold_none()
        try:
            yield
            self.forget()
        finally:
            self._hold_none()

    def forget(self) -> None:
        """Empty the buffers, after gathers that an evaluation or an interrupted pass started."""
        for flying in self._flying:
            if flying is not None:
                flying.wait()
        self._hold_none()

    def _hold_none(self) -> None:
        # A capture that failed gathered nothing, so nothing can be waited for. Elsewhere a card
        # gathers in the order in which the host asked for it, as later gathers into the same
        # buffer must; the host does not.
        for flying, buffer in zip(self._flying, self._buffers):
            if flying is not None and not buffer.is_cuda:
                flying.wait()
        self._holds = [None, None]
        self._flying = [None, None]
        self._now = None

    def of(self, unit: Unit) -> Tensor:
        """Return the bytes of a unit of all ranks, uint8 ``[ranks, bytes]``.

        They are valid until the unit after the next is asked for. All ranks must ask in the same
        order. The host does not wait for the GPU.
        """
        backward = torch._C._current_graph_task_id() != -1  # autograd is running
        slot = unit.number % 2
        self._begin(unit)
        if self._flying[slot] is not None:
            self._flying[slot].wait()
            self._flying[slot] = None
        if self._now != (unit, backward):
            self._now = unit, backward
            following = unit.number + (-1 if backward else 1)
            if 0 <= following < len(self.units):
                self._begin(self.units[following])
        size = len(unit.own)
        return self._buffers[slot][: size * self.count].view(self.count, size)

    def _begin(self, unit: Unit) -> None:
        """Start to gather a unit, unless its buffer holds it already.

        The buffer held the unit before the last, which is no longer read.
        """
        slot = unit.number % 2
        if self._holds[slot] is unit:
            return
        if self._flying[slot] is not None:  # prefetched, but never read
            self._flying[slot].wait()
        self._holds[slot] = unit
        if not self._buffers:
            self.lay()
        self._flying[slot] = dist.all_gather_into_tensor(
            self._buffers[slot][: len(unit.own) * self.count],
            unit.own,
            group=self.group,
            async_op=True,
        )

    def lay(self) -> None:
        """Allocate the buffers. They keep their addresses, since captured graphs write to them."""
        size = max(len(unit.own) for unit in self.units) * self.count
        with torch.inference_mode(False):
            self._buffers = [
                torch.empty(size, dtype=torch.uint8, device=self.units[0].own.device)
                for _ in range(2)
            ]


@dataclass(eq=False)
class Unit:
    """The frozen weights of one decoder layer.

    Attributes:
        number: index of the unit in the order of the forward pass.
        gathers: the units of the model.
        own: this rank's bytes, uint8; empty until all rows have a place.
        size: bytes of all rows that have a place.
    """

    number: int
    gathers: Gathers
    own: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    size: int = 0


@dataclass(frozen=True)
class FrozenRows(PackedWeight):
    """A frozen weight whose rows are divided among the ranks.

    Attributes:
        codes: this rank's bytes, the layer's parameter.
        here: this rank's rows, without the tensors that are gathered.
        unit: unit of the decoder layer.
        places: place of each tensor of the rows among the unit's bytes, by name.
        shape: shape of the whole weight.
        dtype: dtype of the dense values.
    """

    codes: Tensor
    here: PackedWeight
    unit: Unit
    places: Mapping[str, Place]
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """The bytes of this rank, which are the layer's parameter."""
        return {"codes": self.codes}

    # Such a weight is no operand of a custom operator, since its products gather.
    settings = ""

    # Nothing of it is in a state dict.
    why_not_saved = None

    def with_tensors(
        self,
        tensors: Mapping[str, Tensor | None],
        shape: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return this weight with other bytes, and with another shape or dtype if one is given."""
        codes = tensors["codes"]
        assert codes is not None
        return replace(self, codes=codes, shape=shape or self.shape, dtype=dtype or self.dtype)

    def into(self, out: Tensor) -> Tensor:
        """Gather the rows and write the values to ``out``, ``[n, K]``, rows dense; return ``out``.

        One launch for each rank.
        """
        gathered = self.unit.gathers.of(self.unit)
        for row, place in zip(gathered, out.chunk(self.unit.gathers.count)):
            divided = {
                name: row[begin : begin + size].view(dtype)
                for name, (begin, size, dtype) in self.places.items()
            }
            self.here.with_tensors({**self.here.tensors, **divided}).into(place)
        return out

    @property
    def recipe(self) -> Any:
        """The recipe of the rows, which other ranks have in the same format."""
        return self.here.to(self.dtype).recipe

    @property
    def label(self) -> str:
        """The format of the rows and this rank's share, for ``print(model)``."""
        return f"{self.here.label}, 1/{self.unit.gathers.count} of the rows here"

    @classmethod
    def base(
        cls, packed: Sequence[FrozenRows], columns: int = 0, ranks: Sequence[int] = ()
    ) -> FrozenBase:
        """Return the products of merged layers with these weights."""
        return FrozenBase(packed, columns, ranks)


class FrozenBase(PackedStorage):
    """Products with weights whose rows are divided among the ranks.

    ``bytes_a_value`` counts the dense weight, which exists during a product. The gathered bytes
    come on top and are counted elsewhere.
    """


class LinearInShards(PackedLinear):
    """Linear layer ``x Wᵀ + b`` of whose frozen weight this rank holds some rows.

    All ranks must call these layers in the same order. The weight is not in the state dict:
    adapters are saved, the base model is loaded from its own files.

    Args:
        rows: this rank's rows.
        unit: unit of the decoder layer.
        outputs: number of rows of the whole weight.
        dtype: dtype of the products.
    """

    def __init__(
        self,
        rows: PackedWeight,
        unit: Unit,
        outputs: int,
        dtype: torch.dtype,
        bias: Tensor | None,
    ):
        places: dict[str, Place] = {}
        for name, tensor in rows.divided.items():
            places[name] = (unit.size, tensor.nbytes, tensor.dtype)
            unit.size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        nothing = torch.empty(0, dtype=torch.uint8)
        shape = outputs, rows.shape[1]
        super().__init__(FrozenRows(nothing, rows, unit, places, shape, dtype), bias)
        self.rows = rows
        self.unit = unit
        self.places = places

    @torch.no_grad()
    def settle(self) -> None:
        """Copy the rows into the unit's bytes. Call it once, after ``Unit.own`` is allocated."""
        for name, tensor in self.rows.divided.items():
            begin, size, _ = self.places[name]
            self.unit.own[begin : begin + size].copy_(tensor.contiguous().view(torch.uint8))
        first = min(begin for begin, _, _ in self.places.values())
        end = max(begin + size for begin, size, _ in self.places.values())
        self.weight = nn.Parameter(self.unit.own[first:end], requires_grad=False)
        setattr(self.weight, SHARING_RANKS, self.unit.gathers.count)
        setattr(self.weight, CODES, next(iter(self.places.values()))[1])  # codes come first
        self.rows = self.rows.moved(self.unit.own.device, rows="meta")

    @property
    def packed(self) -> FrozenRows:
        """The weight, of which this rank holds some rows."""
        shape = self.out_features, self.in_features
        return FrozenRows(self.weight, self.rows, self.unit, self.places, shape, self.dtype)

    @torch.no_grad()
    def squared_norms(self) -> Tensor:
        """Return the squared norm of each row of the whole weight, in fp32 or wider; gathers."""
        exact = torch.promote_types(self.dtype, torch.float32)
        return torch.linalg.vector_norm(self.packed.dense(), dim=1, dtype=exact).square_()

    def _product(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self.packed)
        return y

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Apply ``fn`` to the bias and to the dtype of products; rows stay in the unit's bytes."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        if self.bias is not None:
            self.bias.data = fn(self.bias.data)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, *_: Any) -> None:
        """Load nothing: the rows were read already."""


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenRows) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dense().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dy @ ctx.weight.dense().to(dy.dtype), None


def gathers_of(model: nn.Module) -> Gathers | None:
    """Return the ``Gathers`` of a model whose frozen weights are divided among ranks, else None."""
    return next(
        (module.unit.gathers for module in model.modules() if isinstance(module, LinearInShards)),
        None,
    )


RowsOf = Callable[[nn.Module, int, int, torch.dtype], PackedWeight | None]
"""Function of a linear layer, a rank, the number of ranks and the dtype of plain weights.

It returns the rank's rows, or None if the layer cannot be cut.
"""


class RowsRead(nn.Module):
    """Placeholder of a linear layer while a model is loaded.

    It holds this rank's rows, or the whole layer if its weight cannot be cut.
    """

    def __init__(
        self, linear: nn.Linear, rows: PackedWeight | None, whole: nn.Linear | PackedLinear
    ):
        super().__init__()
        self.rows = rows
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        first = whole.weight if rows is None else rows.codes
        self.weight = nn.Parameter(first.detach(), requires_grad=False)
        self.whole = [whole] if rows is None else []

    @classmethod
    def read(
        cls,
        ranks: Mesh,
        sharing: int,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str | None,
        linear: nn.Linear,
        weight: Tensor,
    ) -> Self:
        """Make the placeholder of a linear layer from its weight in a file.

        The weight is moved to ``device`` and quantised there if asked. Only one weight is whole at
        a time.

        Args:
            ranks: the ranks of the run.
            sharing: number of neighbouring ranks that share a copy.
            device: device of this rank's rows.
            dtype: dtype of weights that are not packed.
            quantization: name of a recipe in ``RECIPES``, or None.
            linear: the layer, whose weight is not loaded.
            weight: its weight.
        """
        weight = weight.to(device)
        layer: nn.Linear | PackedLinear
        if quantization is None:
            layer = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
            layer.weight = nn.Parameter(weight, requires_grad=False)
        else:
            layer = RECIPES[quantization].quantise(weight).layer()
        rows = rows_of_layer(layer, ranks.rank % sharing, sharing, dtype)
        return cls(linear, rows, layer)


def put_whole(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Replace placeholders whose weight could not be cut by their whole layers."""
    for layer in layers:
        for path, child in list(layer.named_modules()):
            if isinstance(child, RowsRead) and child.rows is None:
                (whole,) = child.whole
                if child.bias is not None:
                    whole.bias = nn.Parameter(child.bias.detach().to(device), requires_grad=False)
                layer.set_submodule(path, whole)


def rows_of_layer(
    layer: nn.Module, rank: int, count: int, dtype: torch.dtype
) -> PackedWeight | None:
    """Return a rank's rows of a linear layer, or None if its weight cannot be cut."""
    if isinstance(layer, RowsRead):
        return layer.rows
    weight = frozen_weight(layer, dtype)
    return None if weight is None else weight.rows(rank, count)


def can_be_cut(layer: nn.Module, count: int) -> bool:
    """Return True if a layer can be cut into ``count`` parts of rows, or already is."""
    if isinstance(layer, LinearInShards):
        return True
    if isinstance(layer, RowsRead):
        return layer.rows is not None
    weight = PlainWeight(layer.weight) if type(layer) is nn.Linear else packed_weight(layer)
    return weight is not None and weight.divides(count)


def frozen_linears(layers: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield each linear layer without trained parameters, with its path in its decoder layer."""
    for layer in layers:
        for path, child in list(layer.named_modules()):
            linear = is_linear(child) or isinstance(child, RowsRead)
            if linear and not any(p.requires_grad for p in child.parameters()):
                yield path, child


@torch.no_grad()
def shard_frozen(
    layers: Sequence[nn.Module],
    ranks: Mesh,
    sharing: int,
    device: torch.device,
    dtype: torch.dtype,
    rows_of: RowsOf | None = None,
) -> Gathers:
    """Divide the frozen linear layers of decoder layers among ranks, in place, layer by layer.

    Args:
        layers: decoder layers, in the order of the forward pass.
        ranks: the ranks of the run.
        sharing: number of neighbouring ranks that share a copy.
        device: device of this rank's rows.
        dtype: dtype of weights that are not packed, and of products.
        rows_of: makes a rank's rows of a layer, whose weight may not be loaded yet; by default it
            cuts them out of the layer's weight.

    Raises:
        ValueError: no layer can be divided.
    """
    group = None  # of all ranks
    if sharing != ranks.count:
        firsts = range(0, ranks.count, sharing)
        # All ranks take part in making every group.
        groups = [group_of(range(first, first + sharing)) for first in firsts]
        group = groups[ranks.rank // sharing]
    rows_of = rows_of or rows_of_layer
    gathers = Gathers(ranks.rank % sharing, sharing, group)
    whole = list[str]()
    cut = 0
    for layer in layers:
        unit = Unit(len(gathers.units), gathers)
        replaced = list[LinearInShards]()
        for path, child in frozen_linears([layer]):
            rows = rows_of(child, gathers.rank, sharing, dtype)
            if rows is None:
                whole.append(path)
                continue
            bias = None if child.bias is None else child.bias.detach().to(device)
            replaced.append(
                LinearInShards(rows, unit, child.out_features, dtype, bias).train(child.training)
            )
            layer.set_submodule(path, replaced[-1])
        if not replaced:
            continue
        gathers.units.append(unit)
        unit.own = torch.zeros(unit.size, dtype=torch.uint8, device=device)
        for linear in replaced:
            linear.settle()
        cut += len(replaced)
    if not cut:
        raise ValueError(
            "sharding='weights': no frozen linear layer of its decoder layers can be divided; "
            "leave it out"
        )
    if whole and ranks.writer:
        some = ", ".join(sorted(set(whole))[:5])
        logger.warning(
            "sharding: %d linear layers stay whole on every process, their rows cannot be divided "
            "by %d at whole blocks of "
            "scales (%s)",
            len(whole),
            sharing,
            some,
        )
    gathers.lay()
    return gathers
