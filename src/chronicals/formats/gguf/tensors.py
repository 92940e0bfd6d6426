"""Tensors of a GGUF file as they are made of the model's tensors, and back.

A ``TensorPiece`` is a tensor of the file. The function that makes it of the model's tensors has an
inverse, by which a file is read into the model's own names and layout. So a written file can be
compared with the model without trusting the way it was written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chronicals.formats.gguf.families import Family
from chronicals.formats.gguf.reader import NotExpressible
from chronicals.formats.gguf.rotation import head_dim
from chronicals.formats.tensor_names import DOWN, EXPERT_NAME, EXPERT_ROLES, GATE, STACK_NAME, UP

TensorPart = tuple[str, Any, Tensor]
"""The name of a tensor of the model, an index into it, and the values there."""

EXPERT_TENSORS = {GATE: "FFN_GATE_EXP", UP: "FFN_UP_EXP", DOWN: "FFN_DOWN_EXP"}
"""Names of experts' matrices in ``gguf.MODEL_TENSOR``."""

CACHED_TENSORS = 2
"""Tensors of a file that stay in memory: stacked experts and their halves are read again for each
tensor of the model that is a part of them.
"""


@dataclass(frozen=True)
class TensorPiece:
    """A tensor of the file.

    Attributes:
        name: in the file.
        shape: in torch's order; the file has it reversed.
        sources: names of the model's tensors that it is made of.
        forward: makes what is written, fp32, of those tensors.
        backward: returns the parts of the model's tensors that a tensor of the file holds.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    forward: Callable[[list[Tensor]], Tensor]
    backward: Callable[[Tensor], list[TensorPart]]


def pieces_of(
    shapes: Mapping[str, tuple[int, ...]], config: Any, family: Family
) -> list[TensorPiece]:
    """Return the tensors of the file of a model.

    Every tensor of the model is in exactly one piece, or its two halves are in two.

    Args:
        shapes: of the model's tensors, by name.
        config: of the language model (transformers).
        family: its family in GGUF.

    Raises:
        NotExpressible: the architecture has no place for one.
    """
    import gguf

    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.architecture], config.num_hidden_layers)
    pieces: list[TensorPiece] = []
    experts: dict[str, dict[int, str]] = {}
    for name, shape in shapes.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # the file has the embedding alone
        single = EXPERT_NAME.fullmatch(name)
        stacked = STACK_NAME.fullmatch(name)
        if single:
            target = _expert_name(role=single[3], block=int(single[1]))
            experts.setdefault(target, {})[int(single[2])] = name
        elif stacked:
            suffix = "bias" if stacked[3] else "weight"
            pieces += _pieces_of_stack(name, shape, int(stacked[1]), stacked[2], suffix, family)
        else:
            pieces.append(_piece_of(name, shape, table, config, family))
    for target, numbered in experts.items():
        names = tuple(numbered[number] for number in sorted(numbered))
        if sorted(numbered) != list(range(len(names))):
            raise NotExpressible(f"{target}: experts {sorted(numbered)} are there, not all from 0")
        shape = (len(names), *shapes[names[0]])
        pieces.append(
            TensorPiece(
                target,
                shape,
                names,
                torch.stack,
                lambda stack, names=names: [  # type: ignore[misc]
                    (name, ..., tensor) for name, tensor in zip(names, stack, strict=True)
                ],
            )
        )
    return pieces


def _expert_name(role: str, block: int, suffix: str = "weight") -> str:
    import gguf

    if role not in EXPERT_ROLES:
        raise NotExpressible(f"experts have {role!r}, which GGUF has no place for")
    tensor = gguf.MODEL_TENSOR[EXPERT_TENSORS[EXPERT_ROLES[role]]]
    return f"{gguf.TENSOR_NAMES[tensor].format(bid=block)}.{suffix}"


def _piece_of(
    name: str, shape: tuple[int, ...], table: Any, config: Any, family: Family
) -> TensorPiece:
    """Return the piece of a tensor that is a tensor of the file by itself."""
    target = table.get_name(name, try_suffixes=(".weight", ".bias"))
    if target is None:
        raise NotExpressible(f"{name}: {family.architecture} has no such tensor in GGUF")
    if target.endswith("attn_sinks"):
        target += ".weight"
    offset = family.norm_offset if name.endswith("norm.weight") else 0.0
    reordered = family.reorders_heads and name.endswith(
        ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")
    )
    half = head_dim(config) // 2

    def changed(x: Tensor, added: float, head: tuple[int, int]) -> Tensor:
        if added:
            return x + added
        if reordered:
            return x.view(-1, *head, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
        return x

    # A head's rows are two halves in the model, and pairs of neighbours in the file.
    return TensorPiece(
        target,
        shape,
        (name,),
        lambda sources: changed(sources[0], offset, (2, half)),
        lambda written: [(name, ..., changed(written, -offset, (half, 2)))],
    )


def _pieces_of_stack(
    name: str, shape: tuple[int, ...], block: int, role: str, suffix: str, family: Family
) -> Iterable[TensorPiece]:
    """Yield the pieces of experts that the model has stacked.

    Their tensor is ``[E, out, in]``, or ``[E, in, out]`` with gate and up alternating. The file
    has ``[E, out, in]``, and gate and up each in a tensor of their own.
    """
    transposed = family.interleaves_experts and suffix == "weight"

    def upright(x: Tensor) -> Tensor:
        return x.transpose(-1, -2) if transposed else x

    upright_shape = (shape[0], shape[2], shape[1]) if transposed else tuple(shape)
    if role == "down_proj":
        yield TensorPiece(
            _expert_name(role, block, suffix),
            upright_shape,
            (name,),
            lambda sources: upright(sources[0]),
            lambda written: [(name, ..., upright(written))],
        )
        return
    half_rows = upright_shape[1] // 2
    for number, half in enumerate((GATE, UP)):
        begin = number * half_rows
        interleaved = slice(number, None, 2)
        rows = interleaved if family.interleaves_experts else slice(begin, begin + half_rows)
        place = (slice(None), slice(None), rows) if transposed else (slice(None), rows)
        yield TensorPiece(
            _expert_name(half, block, suffix),
            (upright_shape[0], half_rows, *upright_shape[2:]),
            (name,),
            lambda sources, rows=rows: upright(sources[0])[:, rows],  # type: ignore[misc]
            lambda written, place=place: [(name, place, upright(written))],  # type: ignore[misc]
        )


class RestoredTensors:
    """The model's tensors out of those of a file, one at a time, fp32.

    Args:
        pieces: of the file.
        shapes: of the model's tensors, by name.
        read: returns a tensor of the file by its name, fp32.
    """

    def __init__(
        self,
        pieces: Iterable[TensorPiece],
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], Tensor],
    ):
        self.shapes = shapes
        self._read = functools.lru_cache(CACHED_TENSORS)(read)
        self.pieces: dict[str, list[TensorPiece]] = {}
        for piece in pieces:
            for name in piece.sources:
                self.pieces.setdefault(name, []).append(piece)

    def __iter__(self) -> Iterator[str]:
        return iter(self.pieces)

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor of the model; raises ValueError if the file lacks a part of it."""
        whole = torch.full(self.shapes[name], torch.nan)
        filled = 0
        for piece in self.pieces[name]:
            for source, place, part in piece.backward(self._read(piece.name)):
                if source == name:
                    whole[place] = part
                    filled += part.numel()
        if filled != whole.numel():
            raise ValueError(f"{name}: the file holds {filled} of its {whole.numel()} values")
        return whole
