"""PackedWeight: a frozen weight in any packed format, dequantised for each product.

A weight implements everything that depends on its format: its products, its rows on a rank, its
plain values, an update merged into it, its tensors in files, its memory and its text in logs. Code
outside this package calls the weight and does not know the format; a new format is a new subclass.

The dense values of linear layers with the same input (``PackedStorage``) are written to a buffer
with padding columns for adapters. All bases of one shape and device share it. The forward pass
always writes it, unless the format multiplies so few rows without dense values. The backward pass
reads it if it still holds this weight, as it does after the layer was recomputed, and otherwise
writes it again.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from chronicals.kernels.expert_stacks import ExpertStack
from chronicals.kernels.products import add_product_, linear
from chronicals.quantization.base import Operand, Storage
from chronicals.quantization.dense import Dense, copied_rows

if TYPE_CHECKING:
    from chronicals.quantization.packed_linear import PackedLinear


class _SharedBuffer(Dense):
    """Buffer for the dense values of one weight at a time.

    It is freed with the last base that uses it.

    Attributes:
        mark: the mark of the base whose values are in the buffer; None before the first.
    """

    mark: object = None


_BUFFERS: weakref.WeakValueDictionary[tuple, _SharedBuffer] = weakref.WeakValueDictionary()
"""Buffers by the sizes, ranks, dtype and device of the weights that share them."""


class PackedStorage(Storage):
    """Linear layers with a common input whose weights are packed one by one.

    A format that does not say its ``packed_bytes`` is counted with the bytes of the dense values,
    an upper bound.

    Args:
        packed: weight of each layer; its codes are the layer's parameter.
        columns: R, padding columns and rows for adapters, as in ``Dense``.
        ranks: adapter ranks of the layers. They are part of the buffer's key, so that bases that
            share a buffer place their adapters at the same columns.

    Attributes:
        places: the codes of each layer.
        buffer: the dense buffer that products read; its padding holds the adapters.
    """

    gives_rows = True

    def __init__(self, packed: Sequence[PackedWeight], columns: int = 0, ranks: Sequence[int] = ()):
        sizes = tuple(part.shape[0] for part in packed)
        outputs = sum(sizes)
        width = packed[0].shape[1]
        dtype = packed[0].dtype
        device = packed[0].codes.device

        super().__init__((outputs, width), dtype, [part.codes for part in packed])
        self.packed = [part.detached() for part in packed]
        self.places = tuple(part.codes for part in self.packed)
        self.padded = columns > 0
        self._mark = object()
        self._fills_once = False

        key = sizes, width, columns, tuple(ranks), dtype, device
        buffer = _BUFFERS.get(key)
        if buffer is None:
            buffer = _SharedBuffer(self._room(columns), (), columns)
            _BUFFERS[key] = buffer
        self.buffer = buffer

    def _room(self, columns: int) -> Tensor:
        """Return memory for W, ``[N, K]``, with so many columns and rows of zeros around it."""
        device = self.packed[0].codes.device
        shape = self.outputs + columns, self.width + columns
        # A tensor made in inference mode could not be written to after it.
        with torch.inference_mode(False):
            memory = torch.zeros(shape, dtype=self.dtype, device=device)
        return memory[: self.outputs, : self.width]

    def forward(
        self, x: Operand, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return ``x Wᵀ + bias``; the buffer is written first, unless the rows need none."""
        rows = x.dense[:, : self.width]
        if any(part.reads_dense(rows) for part in self.packed):
            if self._fills_once:
                self.filled()
            else:
                self._fill()
            return self.buffer.forward(x, bias, dtype)
        self.buffer.mark = None  # other codes may have been loaded since it was written
        y = self.products(rows, dtype)
        behind = x.dense[:, self.width :]
        if behind.shape[1]:
            add_product_(y, behind, self.buffer.up.t())
        return y if bias is None else y.add_(bias)

    @contextmanager
    def made_once(self) -> Iterator[None]:
        """Context in which the buffer is written once, as long as no other weight is."""
        self.buffer.mark = None  # other codes may have been loaded since it was written
        self._fills_once = True
        try:
            yield
        finally:
            self._fills_once = False

    def products(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return ``x Wᵀ``, ``[T, N]``, of rows that need no dense values; dtypes as of ``forward``."""
        return torch.cat([part.product(x, dtype) for part in self.packed], 1)

    def input_gradient(self, dy: Operand) -> Tensor:
        """Return ``dy W``; the buffer is written if it holds another weight by now."""
        self.filled()
        return self.buffer.input_gradient(dy)

    def filled(self) -> Tensor:
        """Return W in the shared buffer, ``[N, K]``, valid until another weight is written."""
        if self.buffer.mark is not self._mark:
            self._fill()
        return self.buffer.matrix

    def _fill(self) -> None:
        self.into(self.buffer.matrix)
        self.buffer.mark = self._mark

    def weight_gradient(self, dy: Operand, x: Operand) -> Tensor | None:
        """Return None, since the codes are frozen."""
        return None

    def into(self, out: Tensor) -> Tensor:
        """Write W to ``out``, ``[N, K]`` with dense rows, in one launch per layer; return it."""
        places = out.split([part.shape[0] for part in self.packed])
        for part, place in zip(self.packed, places):
            part.into(place)
        return out

    def dense(self) -> Tensor:
        """Return W in memory of its own."""
        device = self.packed[0].codes.device
        return self.into(torch.empty((self.outputs, self.width), dtype=self.dtype, device=device))

    def of_rows(self, ranges: Sequence[Sequence[slice]], columns: int) -> Dense:
        """Return dense copies of some rows of each part; see ``Base``."""
        sizes = [part.shape[0] for part in self.packed]
        return copied_rows(self.filled(), sizes, ranges, columns)

    def copied(self) -> Dense:
        """Return W as a dense weight in memory of its own, with padding as the buffer has."""
        columns = self.buffer.columns
        return Dense(self.into(self._room(columns)), self.parts, columns)

    @property
    def bytes(self) -> int:
        """Bytes of the packed weights, without the shared buffer."""
        return sum(part.bytes for part in self.packed)


PACKED_FORMATS: dict[str, type[PackedWeight]] = {}
"""Subclasses of ``PackedWeight`` by class name; the operators look a format up here."""


class PackedWeight(ABC):
    """The frozen weight ``[n, K]`` of one linear layer. Formats are frozen dataclasses.

    A format must define ``into``; and ``options``, ``tensors`` and ``of_tensors`` if its fields are
    not the codes, the ``PARTS``, shape and dtype, and these options, in this order. The other
    methods follow from these, unless files use other tensor names (``stored``, ``read_stored``).

    Nothing asks ``isinstance`` of a weight, so that the class may be abstract without a break in a
    compiled graph.

    Attributes:
        codes: the layer's parameter; uint8 ``[...]`` in any shape.
        shape: ``(n, K)``.
        dtype: dtype of the values that products read.
        PARTS: names of the tensors next to the codes, in order; they are buffers of the layer.
        DIVIDED: names of the tensors that belong to rows, including codes; the other tensors are
            the same on all ranks.
        recipe: recipe by which a 16- or 32-bit weight was quantised (a ``FourBits``); None if the
            model's files hold these codes.
        why_whole: reason why rows are never divided among ranks; None if they are divided when
            possible.
        base: class of the products of several weights of this format; see ``PackedStorage``.
        linear: class of a layer with such a weight; ``PackedLinear`` if None.
    """

    codes: Any
    shape: Any
    dtype: Any

    recipe: ClassVar[Any] = None
    why_whole: ClassVar[Any] = None
    base: ClassVar[Any] = PackedStorage
    linear: ClassVar[Any] = None

    PARTS: ClassVar[tuple[str, ...]] = ()
    DIVIDED: ClassVar[tuple[str, ...]] = ("codes",)
    DESCRIBED_BY: ClassVar[tuple[str, Any] | None] = None
    """Field and value of the ``quantization_config`` of checkpoints in this format, if there are."""

    STACK_PARTS: ClassVar[tuple[str, ...]] = ()
    """Name suffixes of the tensors of a stacked weight in checkpoints.

    The matrices in these checkpoints are transposed relative to those of the class. It is empty if
    no checkpoint has stacks in this format.
    """

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        PACKED_FORMATS[cls.__name__] = cls

    # What a format is made of.

    @property
    def options(self) -> tuple[str, ...]:
        """Settings besides tensors, shape and dtype, as words without blanks."""
        return ()

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """``codes`` and ``PARTS`` by name; a missing part is None.

        Only the last parts may be missing.
        """
        return {name: getattr(self, name) for name in ("codes", *self.PARTS)}

    @classmethod
    def of_tensors(
        cls,
        options: tuple[str, ...],
        tensors: Sequence[Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Self:
        """Return the weight with these ``options`` and the present ones of ``tensors``."""
        return cls(*tensors, shape, dtype, *options)  # type: ignore[call-arg]

    @property
    def settings(self) -> str:
        """Format and options as one string, from which operators restore the weight."""
        return " ".join((type(self).__name__, *self.options))

    def with_tensors(
        self,
        tensors: Mapping[str, Tensor | None],
        shape: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return a weight of the same format over other tensors, given by name."""
        present = [tensor for tensor in tensors.values() if tensor is not None]
        return self.of_tensors(self.options, present, shape or self.shape, dtype or self.dtype)

    def detached(self) -> Self:
        """Return the same weight with codes that are not a parameter."""
        return self.with_tensors({**self.tensors, "codes": self.codes.detach()})

    def to(self, dtype: torch.dtype) -> Self:
        """Return the same weight with another dtype of the dequantised values."""
        return self.with_tensors(self.tensors, dtype=dtype)

    def moved(self, device: torch.device, rows: torch.device | str | None = None) -> Self:
        """Return the same weight on another device.

        Args:
            device: the device.
            rows: device of the tensors that belong to rows; by default ``device``. It is "meta"
                while ranks gather these tensors for each product.
        """
        tensors = self.tensors
        for name, tensor in tensors.items():
            if tensor is not None:
                tensors[name] = tensor.to(rows if rows and name in self.DIVIDED else device)
        return self.with_tensors(tensors)

    # Values and products.

    @abstractmethod
    def into(self, out: Tensor) -> Tensor:
        """Write the dequantised values to ``out``, ``[n, K]`` with dense rows, and return it.

        It is one launch. The values have the dtype of ``out``, whatever ``dtype`` is.
        """

    def dense(self) -> Tensor:
        """Return the dequantised values, ``[n, K]``."""
        return self.into(torch.empty(self.shape, dtype=self.dtype, device=self.codes.device))

    def reads_dense(self, x: Tensor) -> bool:
        """Return whether the product with x, ``[..., K]``, reads the dense values.

        A format may multiply few rows without them.
        """
        return True

    def is_faster_dense(self, x: Tensor) -> bool:
        """Return whether the product with x, ``[..., K]``, is faster where a dense copy is at hand."""
        return self.reads_dense(x)

    def product(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return ``x Wᵀ``, ``[..., n]``; without a gradient.

        Args:
            x: ``[..., K]``.
            dtype: of the result, that of x or fp32; by default that of x.
        """
        return linear(x, self.dense().to(x.dtype), dtype)

    def expert_stack(self, experts: int) -> ExpertStack | None:
        """Return the weights ``[E · n, K]`` of E experts as products of few tokens read them.

        It is None if they need the dense values, in this format or with rows of this length.
        """
        return None

    def dense_reference(self) -> Tensor:
        """Return the dequantised values in plain torch, by the definition of the format."""
        return self.dense()

    def with_update(self, update: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the dense weight with an update merged in, rounded to ``dtype`` once.

        Args:
            update: maps W, ``[n, K]`` in fp32 or wider, to the new weight, for example ``W + s B
                A``.
        """
        exact = torch.promote_types(self.dtype, torch.float32)
        updated = update(self.dense().to(exact))
        return updated.to(self.dtype)

    def layer(self, bias: Tensor | None = None) -> PackedLinear:
        """Return a frozen linear layer with this weight."""
        from chronicals.quantization.packed_linear import PackedLinear

        layer_class: type[PackedLinear] = self.linear or PackedLinear
        return layer_class(self, bias)

    # Memory and words.

    @property
    def bytes(self) -> int:
        """Bytes of the memory of this weight, without shared buffers."""
        tensors = self.tensors
        present = [tensors[name] for name in self.DIVIDED]
        return sum(tensor.nbytes for tensor in present if tensor is not None)

    @property
    def label(self) -> str:
        """Name of the format for logs."""
        return type(self).__name__

    # Rows of a rank.

    def divides(self, count: int) -> bool:
        """Return whether the rows can be split evenly among ``count`` ranks."""
        return self.why_whole is None and bool(self.shape[0] % count == 0)

    def rows(self, rank: int, count: int) -> Self | None:
        """Return a copy of a rank's rows, ``[n / count, K]``; None if they cannot be split."""
        if not self.divides(count):
            return None

        tensors = self.tensors
        for name in self.DIVIDED:
            whole = tensors[name]
            if whole is not None:
                tensors[name] = whole.detach().reshape(-1).chunk(count)[rank].clone()

        rows, width = self.shape
        return self.with_tensors(tensors, (rows // count, width))

    @property
    def divided(self) -> dict[str, Tensor]:
        """The tensors that belong to rows, by name, as 1-d tensors; ranks gather these."""
        tensors = self.tensors
        present = {name: tensors[name] for name in self.DIVIDED}
        return {name: tensor.view(-1) for name, tensor in present.items() if tensor is not None}

    # Experts of a stacked weight.

    def by_expert(self, count: int) -> tuple[Self, dict[str, Tensor]]:
        """Return the tensors of each of the ``count`` experts of a weight ``[E · N, K]``.

        Returns:
            A weight of the same format whose tensors that experts share are right, and by name the
            others, ``[E, n]``, which belong to the weight of one expert, ``[N, K]``.

        Raises:
            ValueError: a tensor belongs to parts of two experts.
        """
        rows, width = self.shape
        if not self.divides(count):
            raise ValueError(
                f"{self.label}: experts of {rows // count} x {width} values share a block of scales"
            )
        tensors = {name: self.tensors[name] for name in self.DIVIDED}
        divided = {
            name: tensor.detach().reshape(count, -1)
            for name, tensor in tensors.items()
            if tensor is not None
        }
        return self, divided

    # Files.

    @property
    def why_not_saved(self) -> str | None:
        """Reason why transformers' files cannot hold the weight, or None.

        It continues a sentence that begins with "has layers …".
        """
        return f"in {self.label}, which no file but that it was loaded from holds"

    def stored(self, name: str) -> dict[str, Tensor]:
        """Return the weight's tensors in a state dict, by name.

        Args:
            name: name of the weight, such as ``model.layers.0.mlp.up_proj.weight``.
        """
        tensors = {}
        for part, tensor in self.tensors.items():
            if tensor is not None:
                tensors[name if part == "codes" else f"{name}.{part}"] = tensor
        return tensors

    def read_stored(self, name: str, stored: Mapping[str, Tensor]) -> Self:
        """Return a weight of the same format from the tensors that ``stored`` returned.

        Raises:
            ValueError: a tensor is missing or does not fit.
        """
        tensors = self.tensors
        for part, tensor in tensors.items():
            key = name if part == "codes" else f"{name}.{part}"
            if tensor is None:
                continue
            if key not in stored:
                raise ValueError(f"{key}: not in the checkpoint; download it again")

            there = stored[key]
            if there.dtype != tensor.dtype or there.numel() != tensor.numel():
                raise ValueError(
                    f"{key}: is {there.dtype} {list(there.shape)}, not {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
            tensors[part] = there.view(tensor.shape)
        return self.with_tensors(tensors)

    @classmethod
    def stored_weights(cls, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return the weights of this format among the tensor names of a checkpoint.

        Returns:
            By name of each weight, the names of its tensors, with the codes first.
        """
        return {}

    @classmethod
    def stored_shape(
        cls, name: str, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype of the dense weight that a checkpoint's tensors represent.

        Args:
            name: name of the weight.
            shapes: shapes of its tensors in the checkpoint, by name.
            read: returns one of these tensors by its name.

        Raises:
            ValueError: weights of this format are not read from tensors of a checkpoint.
        """
        raise ValueError(f"{name}: {cls.__name__} is not read from tensors of a checkpoint")

    @classmethod
    def read(cls, name: str, stored: Mapping[str, Tensor]) -> Self:
        """Return a weight from the tensors of a checkpoint, sharing their memory.

        Raises:
            ValueError: a tensor is missing, is damaged, or does not fit the others; the message
                names it. Or weights of this format are not read from a checkpoint.
        """
        raise ValueError(f"{name}: {cls.__name__} is not read from tensors of a checkpoint")

    @classmethod
    def read_dense(cls, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the dense weight of ``read``, fp32, in the shape of ``stored_shape``."""
        return cls.read(name, stored).to(torch.float32).dense()

    def quantization_config(
        self, model: nn.Module, paths: Collection[str]
    ) -> dict[str, Any] | None:
        """Return the ``quantization_config`` of a model whose layers at ``paths`` are stored so.

        It is None if no files hold this format or they need no such field.
        """
        return None


def format_of_files(described: Mapping[str, Any]) -> type[PackedWeight] | None:
    """Return the packed format of a checkpoint with this ``quantization_config``, or None."""
    for known in PACKED_FORMATS.values():
        if known.DESCRIBED_BY is not None:
            field, value = known.DESCRIBED_BY
            if described.get(field) == value:
                return known
    return None


def weight_from(
    settings: str, tensors: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    """Return the weight that ``settings`` (``PackedWeight.settings``) describes.

    Args:
        settings: format and options.
        tensors: its present tensors, in order.
        shape: ``(n, K)``.
        dtype: dtype of the dequantised values.
    """
    name, *options = settings.split(" ")
    return PACKED_FORMATS[name].of_tensors(tuple(options), tensors, shape, dtype)
