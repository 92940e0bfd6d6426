"""Frozen weights of which every rank holds some rows: gathered as bytes for each decoder layer,
read by its products.

QLoRA over ZeRO stage 3. A layer's weights, of whatever format, are one row of bytes a rank; they
are gathered into one of two buffers when the first product of the layer asks for them, and those of
the layer that follows, in the direction of the pass, beside it. A product writes the rows of all
ranks into the dense buffer that its adapters are in, by a launch for each rank: nothing else is
copied. Bytes of a pass, of N weights over W ranks: N (W − 1) / W times 2 in 16 bit, 0.516 in NF4.

Weights are cut at whole rows, in NF4 at whole blocks of scales (256 · 64 values), so that rows need
nothing of other ranks; what cannot be cut so stays whole on every rank.

A training pass begins and ends with nothing held (``Gathers.passing``): what it gathers, and in
which order, depends on the pass alone. So ranks that replay a captured pass send what others send,
whatever they did before, and a replayed pass reads nothing that it did not gather.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.distributed.mesh import Mesh, group_of
from chronicals.distributed.weight_shards import CODES
from chronicals.models.rows import PART
from chronicals.quantization import Linear4bit, Packed, PackedBase, PackedLinear

logger = logging.getLogger(__name__)

ALIGNED = 16
"""Bytes that tensors begin at multiples of, as vectorised loads want it."""


class Form(Protocol):
    """How some rows of a weight lie in bytes.

    Attributes:
        shape: ``(n, K)`` of these rows.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    def parts(self) -> dict[str, Tensor]:
        """What is gathered, by name."""
        ...

    def write(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        """The values of rows whose parts are these, to ``out`` ``[n, K]``, rows dense."""
        ...


@dataclass(frozen=True)
class DenseRows:
    """In 16 or 32 bit."""

    rows: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.rows.shape[1]

    def parts(self) -> dict[str, Tensor]:
        return {"rows": self.rows}

    def write(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        out.copy_(parts["rows"])

    @staticmethod
    def divides(weight: Tensor, count: int) -> bool:
        """Whether so many ranks can have as many rows each."""
        return len(weight) % count == 0

    @classmethod
    def of(cls, weight: Tensor, rank: int, count: int) -> Self | None:
        """A rank's rows; None where they cannot be divided evenly."""
        return cls(weight.chunk(count)[rank].contiguous()) if cls.divides(weight, count) else None


@dataclass(frozen=True)
class PackedRows:
    """In NF4."""

    packed: Packed

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape

    def parts(self) -> dict[str, Tensor]:
        scales = self.packed.scales
        found = {"codes": self.packed.codes.view(-1), "absmax": scales.absmax.view(-1)}
        return found if scales.absmax2 is None else {**found, "absmax2": scales.absmax2.view(-1)}

    def write(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        scales = replace(self.packed.scales, absmax=parts["absmax"], absmax2=parts.get("absmax2"))
        replace(self.packed, codes=parts["codes"], scales=scales, dtype=out.dtype).into(out)

    @staticmethod
    def divides(packed: Packed, count: int) -> bool:
        """Whether so many ranks can have as many rows each, which begin at a block of scales."""
        (rows, width) = packed.shape
        scales = packed.scales
        whole = packed.block * (scales.block2 if scales.nested else 1)
        return rows % count == 0 and rows // count * width % whole == 0

    @classmethod
    def of(cls, packed: Packed, rank: int, count: int) -> Self | None:
        """A rank's rows; None where they would not begin at a block of scales."""
        if not cls.divides(packed, count):
            return None
        (rows, width) = packed.shape
        scales = packed.scales
        own = replace(
            scales,
            absmax=scales.absmax.view(-1).chunk(count)[rank].clone(),
            absmax2=None
            if scales.absmax2 is None
            else scales.absmax2.view(-1).chunk(count)[rank].clone(),
        )
        codes = packed.codes.detach().view(-1).chunk(count)[rank].clone()
        return cls(replace(packed, codes=codes, scales=own, shape=(rows // count, width)))


class Gathers:
    """The units of a model in the order of its forward pass, and two buffers that they are gathered
    into by turns.

    Args:
        group: ranks that hold the parts of one copy, all of them by default.
        rank, count: this one among them.
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

    def unit(self) -> Unit:
        self.units.append(Unit(len(self.units), self))
        return self.units[-1]

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within: a forward and a backward pass that gather all that they read, and wait for all
        that they began to gather.

        A pass is captured within it. ``forget`` comes before the first, outside of a capture.
        """
        self._hold_none()
        try:
            yield
            self.forget()
        finally:
            self._hold_none()

    def forget(self) -> None:
        """Wait for what another pass, an evaluation or one that was broken off, began to gather,
        and hold nothing of it.
        """
        for flying in self._flying:
            if flying is not None:
                flying.wait()
        self._hold_none()

    def _hold_none(self) -> None:
        """Of a capture that failed nothing was gathered, and nothing can be waited for.
        Elsewhere a card gathers in the order in which the host asked for it, as later gathers
        into the same buffer must; the host does not."""
        for flying, buffer in zip(self._flying, self._buffers):
            if flying is not None and not buffer.is_cuda:
                flying.wait()
        self._holds = [None, None]
        self._flying = [None, None]
        self._now = None

    def of(self, unit: Unit) -> Tensor:
        """The bytes of all ranks, uint8 ``[ranks, bytes]``, valid until the layer after the next
        is asked for. All ranks ask in one order. The host does not wait for a card."""
        backward = torch._C._current_graph_task_id() != -1
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
        return self._place(unit)

    def _begin(self, unit: Unit) -> None:
        """Unless it is there or on its way: gather it into the buffer of the unit before the
        last, which was read already.
        """
        slot = unit.number % 2
        if self._holds[slot] is unit:
            return
        if self._flying[slot] is not None:  # asked for beside another, and never read
            self._flying[slot].wait()
        self._holds[slot] = unit
        there = self._place(unit).view(-1)
        self._flying[slot] = dist.all_gather_into_tensor(
            there, unit.own, group=self.group, async_op=True
        )

    def lay(self) -> None:
        """The buffers, which stay where they are: captured passes write to them."""
        size = max(len(unit.own) for unit in self.units) * self.count
        with torch.inference_mode(False):
            self._buffers = [
                torch.empty(size, dtype=torch.uint8, device=self.units[0].own.device)
                for _ in range(2)
            ]

    def _place(self, unit: Unit) -> Tensor:
        if not self._buffers:
            self.lay()
        size = len(unit.own)
        return self._buffers[unit.number % 2][: size * self.count].view(self.count, size)


@dataclass(eq=False)
class Unit:
    """The frozen weights of a decoder layer.

    Attributes:
        own: this rank's bytes.
    """

    number: int
    gathers: Gathers
    own: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    _size: int = 0

    def place(self, form: Form) -> dict[str, tuple[int, int, torch.dtype, torch.Size]]:
        """Room for some rows: of each part where it begins, its bytes, dtype and shape."""
        found = {}
        for name, tensor in form.parts().items():
            found[name] = self._size, tensor.nbytes, tensor.dtype, tensor.shape
            self._size += -(-tensor.nbytes // ALIGNED) * ALIGNED
        return found

    def close(self, device: torch.device) -> None:
        """No more rows follow."""
        self.own = torch.zeros(self._size, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class FrozenRows:
    """A ``PackedWeight`` whose rows are on all ranks.

    Attributes:
        codes: this rank's bytes, the layer's parameter.
        shape: of the whole weight.
        places: of ``Unit.place``.
    """

    codes: Tensor
    form: Form
    unit: Unit
    places: Mapping[str, tuple[int, int, torch.dtype, torch.Size]]
    shape: tuple[int, int]
    dtype: torch.dtype

    def detached(self) -> FrozenRows:
        return replace(self, codes=self.codes.detach())

    def to(self, dtype: torch.dtype) -> FrozenRows:
        return replace(self, dtype=dtype)

    def into(self, out: Tensor) -> Tensor:
        """Write the values to ``out``, ``[n, K]``, rows dense; by a launch for each rank."""
        gathered = self.unit.gathers.of(self.unit)
        for row, place in zip(gathered, out.chunk(self.unit.gathers.count)):
            self.form.write(self._read(row), place)
        return out

    def _read(self, row: Tensor) -> dict[str, Tensor]:
        return {
            name: row[begin : begin + size].view(dtype).view(shape)
            for name, (begin, size, dtype, shape) in self.places.items()
        }

    def dense(self) -> Tensor:
        return self.into(torch.empty(self.shape, dtype=self.dtype, device=self.codes.device))

    @property
    def bytes(self) -> int:
        return self.codes.nbytes

    @classmethod
    def base(
        cls, packed: Sequence[FrozenRows], columns: int = 0, ranks: Sequence[int] = ()
    ) -> FrozenBase:
        return FrozenBase(packed, columns, ranks)


class FrozenBase(PackedBase):
    """Multiplies by weights whose rows are on all ranks."""

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        """Of a dense weight that no other rank has a part of: the most; the gathered bytes are
        beside it.
        """
        return float(itemsize)


class LinearInShards(PackedLinear):
    """``x Wᵀ + b`` over rows of which this rank holds some. All ranks call it alike. Nothing of W
    is in a state dict: adapters are saved, their base is where it was loaded from.

    Args:
        form: of this rank's rows.
        unit: of the decoder layer.
        outputs: of the whole weight.
    """

    def __init__(
        self, form: Form, unit: Unit, outputs: int, dtype: torch.dtype, bias: Tensor | None
    ):
        super().__init__(torch.empty(0, dtype=torch.uint8), (outputs, form.shape[1]), dtype, bias)
        self.form = form
        self.unit = unit
        self.places = unit.place(form)
        self.in_4_bits = isinstance(form, PackedRows)

    @torch.no_grad()
    def settle(self) -> None:
        """Once the unit is closed: put the rows where they are gathered from."""
        for name, tensor in self.form.parts().items():
            begin, size, _, _ = self.places[name]
            self.unit.own[begin : begin + size].copy_(
                tensor.contiguous().view(-1).view(torch.uint8)
            )
        first = min(begin for begin, *_ in self.places.values())
        (last, size, _, _) = max(self.places.values(), key=_begins)
        self.weight = nn.Parameter(self.unit.own[first : last + size], requires_grad=False)
        setattr(self.weight, PART, self.unit.gathers.count)
        setattr(self.weight, CODES, next(iter(self.places.values()))[1])
        self.form = _without_data(self.form, self.unit.own.device)

    @property
    def packed(self) -> FrozenRows:
        shape = self.out_features, self.in_features
        return FrozenRows(self.weight, self.form, self.unit, self.places, shape, self.dtype)

    @property
    def four_bits(self) -> Packed | None:
        return self.form.packed if isinstance(self.form, PackedRows) else None

    @torch.no_grad()
    def squared_norms(self) -> Tensor:
        dense = self.packed.dense()
        return torch.linalg.vector_norm(
            dense, dim=1, dtype=torch.promote_types(self.dtype, torch.float32)
        ).square_()

    def _product(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self.packed)
        return y

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Rows stay where they are gathered from; the dtype of products and the bias follow."""
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
        """What it computes with was read already."""

    @property
    def format(self) -> str:
        kind = "NF4" if isinstance(self.form, PackedRows) else "16 or 32 bit"
        return f"{kind}, 1/{self.unit.gathers.count} of the rows here"


def _begins(place: tuple[int, int, torch.dtype, torch.Size]) -> int:
    return place[0]


def _without_data(form: Form, device: torch.device) -> Form:
    """The same without tensors that are gathered; those that every rank has whole on the device
    where rows are gathered.
    """
    if isinstance(form, DenseRows):
        return replace(form, rows=form.rows.to("meta"))
    assert isinstance(form, PackedRows)
    packed = form.packed
    scales = form.packed.scales
    absmax2, code2, offset = (
        None if tensor is None else tensor.to(place)
        for tensor, place in (
            (scales.absmax2, "meta"),
            (scales.code2, device),
            (scales.offset, device),
        )
    )
    empty = replace(
        scales, absmax=scales.absmax.to("meta"), absmax2=absmax2, code2=code2, offset=offset
    )
    return PackedRows(replace(packed, codes=packed.codes.to("meta"), scales=empty))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenRows) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dense().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dy @ ctx.weight.dense().to(dy.dtype), None


def gathers_of(model: nn.Module) -> Gathers | None:
    """Of a model whose frozen weights are divided among ranks; else None."""
    return next(
        (module.unit.gathers for module in model.modules() if isinstance(module, LinearInShards)),
        None,
    )


FormOf = Callable[[nn.Module, int, int, torch.dtype], Form | None]


class RowsRead(nn.Module):
    """In the place of a linear layer, while a model is read: this rank's rows of it, or all
    where it cannot be cut.
    """

    def __init__(self, linear: nn.Linear, form: Form | None, whole: nn.Linear | PackedLinear):
        super().__init__()
        self.form = form
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        first = whole.weight if form is None else next(iter(form.parts().values()))
        self.weight = nn.Parameter(first.detach(), requires_grad=False)
        self.whole = [whole] if form is None else []

    @classmethod
    def reading(
        cls, ranks: Mesh, sharing: int, device: torch.device, dtype: torch.dtype, nf4: bool
    ) -> Callable[[nn.Linear, Tensor], RowsRead]:
        """What makes it of a weight that was read, quantised first if asked, on the device; no
        more than one weight is there whole."""

        def take(linear: nn.Linear, weight: Tensor) -> RowsRead:
            plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
            plain.weight = nn.Parameter(weight.to(device), requires_grad=False)
            layer: nn.Linear | PackedLinear = Linear4bit.of(plain) if nf4 else plain
            form = rows_of_layer(layer, ranks.rank % sharing, sharing, dtype)
            return cls(linear, form, layer)

        return take


def put_whole(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Layers that could not be cut while they were read, as they are."""
    for layer in layers:
        for path, child in list(layer.named_modules()):
            if isinstance(child, RowsRead) and child.form is None:
                (whole,) = child.whole
                if child.bias is not None:
                    whole.bias = nn.Parameter(child.bias.detach().to(device), requires_grad=False)
                layer.set_submodule(path, whole)


def rows_of_layer(layer: nn.Module, rank: int, count: int, dtype: torch.dtype) -> Form | None:
    """A rank's rows of a linear layer, or None where its weight cannot be cut."""
    if isinstance(layer, RowsRead):
        return layer.form
    if isinstance(layer, Linear4bit):
        return PackedRows.of(layer.packed.detached(), rank, count)
    if type(layer) is nn.Linear:
        return DenseRows.of(layer.weight.detach().to(dtype), rank, count)
    return None


def can_be_cut(layer: nn.Module, count: int) -> bool:
    """Whether ``rows_of_layer`` finds rows for each of so many ranks; True where they have them
    already.
    """
    if isinstance(layer, RowsRead):
        return layer.form is not None
    if isinstance(layer, Linear4bit):
        return PackedRows.divides(layer.packed, count)
    if type(layer) is nn.Linear:
        return DenseRows.divides(layer.weight, count)
    return isinstance(layer, LinearInShards)


def frozen_linears(layers: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The linear layers, by their paths in the decoder layer that they are in, of which nothing
    is trained.
    """
    for layer in layers:
        for path, child in list(layer.named_modules()):
            linear = isinstance(child, (nn.Linear, PackedLinear, RowsRead))
            if linear and not any(p.requires_grad for p in child.parameters()):
                yield path, child


@torch.no_grad()
def shard_frozen(
    layers: Sequence[nn.Module],
    ranks: Mesh,
    sharing: int,
    device: torch.device,
    dtype: torch.dtype,
    form_of: FormOf | None = None,
) -> Gathers:
    """Divide the frozen linear layers of decoder layers among ranks, in place, a layer after the
    other.

    Args:
        sharing: neighbours that hold one copy.
        device: where parts stay.
        dtype: of weights that are not packed, and of products.
        form_of: makes a rank's rows of a layer, which may have no weight as yet; by default they
            are cut out of its weight.

    Raises:
        ValueError: none can be divided.
    """
    group = _group_of(ranks, sharing)
    form_of = form_of or rows_of_layer
    gathers = Gathers(ranks.rank % sharing, sharing, group)
    whole = list[str]()
    cut = 0
    for layer in layers:
        unit = gathers.unit()
        replaced = list[LinearInShards]()
        for path, child in frozen_linears([layer]):
            form = form_of(child, gathers.rank, sharing, dtype)
            if form is None:
                whole.append(path)
                continue
            bias = None if child.bias is None else child.bias.detach().to(device)
            replaced.append(
                LinearInShards(form, unit, child.out_features, dtype, bias).train(child.training)
            )
            layer.set_submodule(path, replaced[-1])
        if not replaced:
            gathers.units.pop()
            continue
        unit.close(device)
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


def _group_of(ranks: Mesh, sharing: int) -> Any:
    """The process group of this rank's copy; all ranks call it alike."""
    if sharing == ranks.count:
        return None
    groups = [group_of(range(first, first + sharing)) for first in range(0, ranks.count, sharing)]
    return groups[ranks.rank // sharing]
