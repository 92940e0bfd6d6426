"""PackedWeight: a frozen weight that is dequantised for each product, whatever its format.

A weight owns its whole life: its products, its rows on a rank, its plain values, an update merged
into it, what files hold of it, its memory and its words for logs. Everything outside this package
asks the weight and knows no format; a new format is a new subclass.

Of the linear layers of one input (``PackedBase``) the dense values stand in a buffer, with padding
columns for adapters, that all bases of one shape and device share. The forward pass writes it
anew. The backward pass reads it where it still holds this weight, as it does after a layer was
recomputed, and writes it again where another layer came between.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from chronicals.quantization.base import Operand, Storage
from chronicals.quantization.dense import Dense

if TYPE_CHECKING:
    from chronicals.quantization.packed_linear import PackedLinear

PACKED_FORMATS: dict[str, type[PackedWeight]] = {}
"""Every subclass of ``PackedWeight`` by its name: what the operators find a format by."""


class PackedWeight:
    """The frozen weight ``[n, K]`` of one linear layer. Formats are frozen dataclasses.

    A format defines ``options``, ``tensors``, ``of_tensors``, ``divides``, ``into`` and ``base``.
    The rest follows, unless files hold it by names of their own (``stored``, ``read_stored``).

    Attributes:
        codes: the layer's parameter; uint8 ``[...]`` in any shape.
        shape: ``(n, K)``.
        dtype: of the values that products read.
        PARTS: names of the tensors beside the codes, in order; they are buffers of the layer.
        DIVIDED: names of the tensors that belong to rows, codes among them; the other tensors are
            the same on all ranks.
    """

    codes: Any
    shape: Any
    dtype: Any

    PARTS: ClassVar[tuple[str, ...]] = ()
    DIVIDED: ClassVar[tuple[str, ...]] = ("codes",)
    STACK_PARTS: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of the tensors that checkpoints hold of a stacked weight, whose matrices
    are transposed beside those of the class; empty where they hold no stacks in this format."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        PACKED_FORMATS[cls.__name__] = cls

    # What a format is made of.

    @property
    def options(self) -> tuple[str, ...]:
        """Settings beside tensors, shape and dtype, as words without blanks."""
        raise NotImplementedError

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """``codes`` and ``PARTS`` by name; None for a part that this weight lacks, which only the
        last ones may be."""
        raise NotImplementedError

    @classmethod
    def of_tensors(
        cls,
        options: tuple[str, ...],
        tensors: Sequence[Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Self:
        """Return the weight with these ``options`` and the present ones of ``tensors``."""
        raise NotImplementedError

    @property
    def settings(self) -> str:
        """Format and options as one string, by which operators know the weight."""
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

    def changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the weight whose tensors are what ``change`` returns for each."""
        tensors = {
            name: None if tensor is None else change(tensor)
            for name, tensor in self.tensors.items()
        }
        return self.with_tensors(tensors)

    def detached(self) -> Self:
        """Return the same weight, whose codes are no parameter."""
        return self.with_tensors({**self.tensors, "codes": self.codes.detach()})

    def to(self, dtype: torch.dtype) -> Self:
        """Return the same weight, dequantised to another dtype."""
        return self.with_tensors(self.tensors, dtype=dtype)

    def moved(self, device: torch.device) -> Self:
        """Return the same weight on another device."""
        return self.changed(lambda tensor: tensor.to(device))

    # Values and products.

    def into(self, out: Tensor) -> Tensor:
        """Write the values to ``out``, ``[n, K]``, rows dense, by one launch; return it."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """Return the values, ``[n, K]``."""
        return self.into(torch.empty(self.shape, dtype=self.dtype, device=self.codes.device))

    def dense_reference(self) -> Tensor:
        """Return the values by the definition of the format, in plain torch."""
        return self.dense()

    def with_update(self, update: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the dense weight with an update merged in, rounded to ``dtype`` once.

        Args:
            update: is given W, ``[n, K]``, in at least fp32 and returns, for example, ``W + s B A``.
        """
        exact = torch.promote_types(self.dtype, torch.float32)
        return update(self.dense().to(exact)).to(self.dtype)

    @classmethod
    def base(cls, packed: Sequence[Any], columns: int = 0, ranks: Sequence[int] = ()) -> PackedBase:
        """Return what multiplies by several weights of this format; see ``PackedBase``."""
        return PackedBase(packed, columns, ranks)

    def layer(self, bias: Tensor | None = None) -> PackedLinear:
        """Return a frozen linear layer with this weight."""
        from chronicals.quantization.packed_linear import PackedLinear

        return PackedLinear(self, bias)

    # Memory and words.

    @property
    def bytes(self) -> int:
        """Memory of what belongs to this weight alone."""
        tensors = self.tensors
        present = [tensors[name] for name in self.DIVIDED]
        return sum(tensor.nbytes for tensor in present if tensor is not None)

    @property
    def values(self) -> int:
        """Number of weights that the codes stand for."""
        return int(self.shape[0] * self.shape[1])

    @property
    def trained(self) -> bool:
        """True if a run trains the weight itself; packed codes get no gradient."""
        return False

    @property
    def label(self) -> str:
        """The format in words, for logs."""
        return type(self).__name__

    @property
    def short_label(self) -> str:
        """The format in one or two words, for logs."""
        return self.label

    @property
    def recipe(self) -> Any:
        """Recipe by which a weight of 16 or 32 bits was quantised to this one, a ``FourBits``; None
        where the files of the model hold these very codes."""
        return None

    # Rows of a rank.

    @property
    def why_whole(self) -> str | None:
        """Why rows are never divided among ranks, or None where they are if they can be cut."""
        return None

    def divides(self, count: int) -> bool:
        """Return True if ``count`` ranks can have as many rows each."""
        return bool(self.shape[0] % count == 0)

    def rows(self, rank: int, count: int) -> Self | None:
        """Return a copy of a rank's rows, ``[n / count, K]``, or None where they cannot be cut."""
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
        """The tensors that belong to rows, by name, each in one dimension: what ranks gather."""
        tensors = self.tensors
        present = {name: tensors[name] for name in self.DIVIDED}
        return {name: tensor.view(-1) for name, tensor in present.items() if tensor is not None}

    def with_divided(self, divided: Mapping[str, Tensor], dtype: torch.dtype) -> Self:
        """Return the weight with other tensors of rows, as ``divided`` names them."""
        return self.with_tensors({**self.tensors, **divided}, dtype=dtype)

    def without_rows(self, device: torch.device) -> Self:
        """Return the weight with the tensors of rows on the meta device, the others on ``device``:
        what ``with_divided`` needs once rows are gathered from elsewhere."""
        tensors = self.tensors
        for name, tensor in tensors.items():
            if tensor is not None:
                tensors[name] = tensor.to("meta" if name in self.DIVIDED else device)
        return self.with_tensors(tensors)

    # Files.

    @property
    def why_not_saved(self) -> str | None:
        """Why no files of transformers can hold the weight, continuing "has layers …"; None where
        they can."""
        return f"in {self.label}, which no file but that it was loaded from holds"

    def stored(self, name: str) -> dict[str, Tensor]:
        """Return the tensors that a state dict holds of the weight, by name.

        Args:
            name: of the weight, ``model.layers.0.mlp.up_proj.weight``.
        """
        tensors = {
            name if part == "codes" else f"{name}.{part}": tensor
            for part, tensor in self.tensors.items()
        }
        return {key: tensor for key, tensor in tensors.items() if tensor is not None}

    def read_stored(self, name: str, stored: Mapping[str, Tensor]) -> Self:
        """Return the weight that ``stored`` wrote, of the same format.

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
            if stored[key].dtype != tensor.dtype or stored[key].numel() != tensor.numel():
                raise ValueError(
                    f"{key}: is {stored[key].dtype} {list(stored[key].shape)}, not {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
            tensors[part] = stored[key].view(tensor.shape)
        return self.with_tensors(tensors)

    @classmethod
    def reads(cls, described: Mapping[str, Any]) -> bool:
        """Return True if a ``quantization_config`` says that a checkpoint is in this format."""
        return False

    @classmethod
    def stored_weights(cls, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return the weights of this format among the tensors of a checkpoint.

        Returns:
            by the name of each weight the names of its tensors, the codes first.
        """
        return {}

    @classmethod
    def stored_shape(
        cls, name: str, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of the dense weight that a checkpoint's weight stands for.

        Args:
            name: of the weight.
            shapes: of its tensors in the checkpoint, by name.
            read: gives such a tensor by its name.
        """
        raise NotImplementedError

    @classmethod
    def read(cls, name: str, stored: Mapping[str, Tensor]) -> Self:
        """Return a weight from the tensors of a checkpoint, whose memory it shares.

        Raises:
            ValueError: a tensor is missing, is damaged, or does not fit the others; the message
                names it.
        """
        raise NotImplementedError

    @classmethod
    def read_dense(cls, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the dense weight of ``read``, fp32, in the shape of ``stored_shape``."""
        return cls.read(name, stored).to(torch.float32).dense()

    def quantization_config(
        self, model: nn.Module, paths: Collection[str]
    ) -> dict[str, Any] | None:
        """Return ``quantization_config`` of a model whose layers at ``paths`` are stored so; None
        where no files hold this format or they need none."""
        return None


def format_of_files(described: Mapping[str, Any]) -> type[PackedWeight] | None:
    """Return the format of a checkpoint with this ``quantization_config``; None where no packed
    format is of that kind."""
    formats = [known for known in PACKED_FORMATS.values() if known.reads(described)]
    return formats[0] if formats else None


@functools.cache
def _parsed(settings: str) -> tuple[type[PackedWeight], tuple[str, ...]]:
    name, *options = settings.split(" ")
    return PACKED_FORMATS[name], tuple(options)


def weight_from(
    settings: str, tensors: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    """Return the weight that ``PackedWeight.settings`` describes, over its present tensors."""
    format_class, options = _parsed(settings)
    return format_class.of_tensors(options, tensors, shape, dtype)


class PackedBase(Storage):
    """Linear layers of one input whose weights are packed, each by itself, one below the other.

    Args:
        packed: weight of each layer; its codes are the layer's parameter.
        columns: R, padding columns and rows for adapters, as ``Dense`` has them.
        ranks: of the adapters of each layer: bases that share a buffer write theirs to the same
            places of it.
    """

    def __init__(self, packed: Sequence[PackedWeight], columns: int = 0, ranks: Sequence[int] = ()):
        sizes = [part.shape[0] for part in packed]
        width = packed[0].shape[1]
        dtype = packed[0].dtype
        super().__init__((sum(sizes), width), dtype, [part.codes for part in packed])
        self.packed = [part.detached() for part in packed]
        self.padded = columns > 0
        self._shared = _Buffer.of(
            (*sizes,), width, columns, (*ranks,), dtype, packed[0].codes.device
        )

    @property
    def places(self) -> tuple[Tensor, ...]:
        return tuple(part.codes for part in self.packed)

    @property
    def buffer(self) -> Dense:
        """The dense buffer that products read; its padding holds the adapters."""
        return self._shared.weight

    def forward(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        self._shared.fill(self)
        return self.buffer.forward(x, bias)

    def input_gradient(self, dy: Operand) -> Tensor:
        self.filled()
        return self.buffer.input_gradient(dy)

    def filled(self) -> Tensor:
        """Return W in the shared buffer, ``[N, K]``: valid until another weight is written there."""
        if not self._shared.holds(self):
            self._shared.fill(self)
        return self.buffer.matrix

    def weight_gradient(self, dy: Operand, x: Operand) -> Tensor | None:
        return None

    def into(self, out: Tensor) -> Tensor:
        """Write W to ``out``, ``[N, K]``, rows dense, by a launch for each layer; return it."""
        for part, place in zip(self.packed, out.split([part.shape[0] for part in self.packed])):
            part.into(place)
        return out

    def dense(self) -> Tensor:
        device = self.packed[0].codes.device
        return self.into(torch.empty((self.outputs, self.width), dtype=self.dtype, device=device))

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        """Most bytes that a packed value takes; the shared buffers are beside it."""
        return float(itemsize)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.packed)


class _Buffer:
    """Dense values of one weight after the other; freed with the last base that uses it."""

    _known: ClassVar[weakref.WeakValueDictionary[tuple, _Buffer]] = weakref.WeakValueDictionary()

    def __init__(self, weight: Dense):
        self.weight = weight
        self._holds: Any = None

    @classmethod
    def of(
        cls,
        sizes: tuple[int, ...],
        width: int,
        columns: int,
        ranks: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Buffer:
        key = sizes, width, columns, ranks, dtype, device
        buffer = cls._known.get(key)
        if buffer is None:
            # A tensor made in inference mode could not be written to after it.
            with torch.inference_mode(False):
                memory = torch.zeros(
                    (sum(sizes) + columns, width + columns), dtype=dtype, device=device
                )
            buffer = cls._known[key] = cls(Dense(memory[: sum(sizes), :width], (), columns))
        return buffer

    def holds(self, base: PackedBase) -> bool:
        return self._holds is not None and self._holds() is base

    def fill(self, base: PackedBase) -> None:
        base.into(self.weight.matrix)
        self._holds = weakref.ref(base)
