"""The tensors of a GGUF file, each made of tensors of the model, and back.

A ``Piece`` is a tensor of the file. What makes it of the model's tensors has an inverse, by which
the file is read back into the model's own names and layout: so a written file is compared with the
model without believing in the way that it was written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chronicals.models.experts import DOWN, GATE, ONE, ROLES, STACKED, UP
from chronicals.models.gguf_families import Family, NotExpressible, head_dim

Part = tuple[str, Any, Tensor]
"""A tensor of the model, where in it a part lies (an index), and the part."""

IN_GGUF = {GATE: "FFN_GATE_EXP", UP: "FFN_UP_EXP", DOWN: "FFN_DOWN_EXP"}
"""What gguf calls the experts' matrices."""

KEPT = 2
"""Tensors of a file that stay in memory: stacked experts and their halves are read for many
tensors of the model.
"""

IN_FULL = ("ffn_gate_inp", "ffn_gate_inp_shexp", "attn_sinks")
"""Tensors that are fp32 in every file, as norms, biases and vectors are: routers and attention
sinks.
"""


@dataclass(frozen=True)
class Piece:
    """A tensor of the file.

    Attributes:
        name: in the file.
        shape: as of torch; the file has it reversed.
        sources: names of the model's tensors that it is made of.
        forward: from those to what is written, fp32.
        backward: from what was written to the parts of the model's tensors that it holds.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    forward: Callable[[list[Tensor]], Tensor]
    backward: Callable[[Tensor], list[Part]]

    @property
    def is_full(self) -> bool:
        """Whether it is fp32 in every file."""
        role = self.name.split(".")[-2] if "." in self.name else self.name
        return (
            len(self.shape) < 2 or self.name.endswith((".bias", "_norm.weight")) or role in IN_FULL
        )


def pieces_of(shapes: Mapping[str, tuple[int, ...]], config: Any, family: Family) -> list[Piece]:
    """Of all tensors of a model, by name; every one is in exactly one piece, or its two halves are
    in two.

    Raises:
        NotExpressible: the architecture has no place for one.
    """
    import gguf

    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.architecture], config.num_hidden_layers)
    found: list[Piece] = []
    experts: dict[str, dict[int, str]] = {}
    for name, shape in shapes.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # the file has the embedding alone
        if each := ONE.fullmatch(name):
            block = int(each[1])
            number = int(each[2])
            role = each[3]
            experts.setdefault(_expert_name(role, block), {})[number] = name
        elif both := STACKED.fullmatch(name):
            found += _of_stack(name, shape, int(both[1]), both[2], bool(both[3]), family)
        else:
            found.append(_of_one(name, shape, table, config, family))
    for target, numbered in experts.items():
        names = tuple(numbered[number] for number in sorted(numbered))
        if list(sorted(numbered)) != list(range(len(names))):
            raise NotExpressible(f"{target}: experts {sorted(numbered)} are there, not all from 0")
        found.append(
            Piece(target, (len(names), *shapes[names[0]]), names, torch.stack, _unstacked(names))
        )
    return found


def _expert_name(role: str, block: int, suffix: str = "weight") -> str:
    import gguf

    if role not in ROLES:
        raise NotExpressible(f"experts have {role!r}, which GGUF has no place for")
    return (
        f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[IN_GGUF[ROLES[role]]]].format(bid=block)}.{suffix}"
    )


def _unstacked(names: tuple[str, ...]) -> Callable[[Tensor], list[Part]]:
    return lambda stack: [(name, ..., tensor) for name, tensor in zip(names, stack, strict=True)]


def _of_one(name: str, shape: tuple[int, ...], table: Any, config: Any, family: Family) -> Piece:
    target = table.get_name(name, try_suffixes=(".weight", ".bias"))
    if target is None:
        raise NotExpressible(f"{name}: {family.architecture} has no such tensor in GGUF")
    if target.endswith("attn_sinks"):
        target += ".weight"
    there, back = _layout(name, config, family)
    return Piece(
        target,
        shape,
        (name,),
        lambda given: there(given[0]),
        lambda written: [(name, ..., back(written))],
    )


def _layout(
    name: str, config: Any, family: Family
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """How a tensor is laid out in the file, and back."""
    if family.norm_offset and name.endswith("norm.weight"):
        return lambda x: x + family.norm_offset, lambda x: x - family.norm_offset
    if family.reorders_heads and name.endswith(
        ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")
    ):
        half = head_dim(config) // 2
        return (
            lambda x: x.view(-1, 2, half, *x.shape[1:]).transpose(1, 2).reshape(x.shape),
            lambda x: x.view(-1, half, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape),
        )
    return lambda x: x, lambda x: x


def _of_stack(
    name: str, shape: tuple[int, ...], block: int, role: str, bias: bool, family: Family
) -> Iterable[Piece]:
    """Experts that the model has stacked: ``[E, out, in]``, or ``[E, in, out]`` with gate and up
    alternating.
    """
    suffix = "bias" if bias else "weight"
    turned = family.interleaves_experts and not bias

    def upright(x: Tensor) -> Tensor:
        return x.transpose(-1, -2) if turned else x

    stood = (shape[0], shape[2], shape[1]) if turned else tuple(shape)
    if role == "down_proj":
        yield Piece(
            _expert_name(role, block, suffix),
            stood,
            (name,),
            lambda given: upright(given[0]),
            lambda written: [(name, ..., upright(written))],
        )
        return
    halves = stood[1] // 2
    for number, half in enumerate((GATE, UP)):
        rows = (
            slice(number, None, 2)
            if family.interleaves_experts
            else slice(number * halves, (number + 1) * halves)
        )
        place = (slice(None), slice(None), rows) if turned else (slice(None), rows)
        yield Piece(
            _expert_name(half, block, suffix),
            (stood[0], halves, *stood[2:]),
            (name,),
            lambda given, rows=rows: upright(given[0])[:, rows],  # type: ignore[misc]
            lambda written, place=place: [(name, place, upright(written))],  # type: ignore[misc]
        )


class Restored:
    """The model's tensors out of what a file holds, one at a time.

    Args:
        pieces: of the file.
        shapes: of the model's tensors, by name.
        read: a tensor of the file by its name, fp32.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], Tensor],
    ):
        self.shapes = shapes
        self._read = functools.lru_cache(KEPT)(read)
        self.pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            for name in piece.sources:
                self.pieces.setdefault(name, []).append(piece)

    def __iter__(self) -> Iterator[str]:
        return iter(self.pieces)

    def __getitem__(self, name: str) -> Tensor:
        """Raises ValueError where a part of it is not there."""
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
