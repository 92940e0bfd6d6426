"""Weights of several linear layers in one storage, so that one product serves them all.

Parameters keep names, shapes and identity: only their data lies elsewhere. Whether it still does is asked at every call by
its address, for ``.to()``, a load with ``assign=True`` or a new adapter move it; then it is laid anew, said once.

Frozen weights that FP8 stands in for can wait in host memory: only the margins of their adapters stay on the card then. Whoever
calls such a layer by itself is given the weight for the call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.kernels.fp8_linear import MULTIPLE, FP8Weight
from chronicals.kernels.linear_cross_entropy import Adapter
from chronicals.kernels.merged_linear import Merged, Remake, merged_linear, side_by_side
from chronicals.kernels.peak import Peak
from chronicals.models.linear import UnknownLinear, read_linear

logger = logging.getLogger(__name__)

MERGED = "_chronicals_merged"
FP8 = "_chronicals_fp8"
"""Attribute of a module: of the groups of its children whose products run in FP8, by their names, where they lie and how."""

HOMES = "_chronicals_homes"
"""Attribute of a module: the devices of the groups of its children, by their names, whose weights wait in host memory."""

_said: set[str] = set()


class Unmerged(ValueError):
    """These layers cannot be one product; the message says why."""


class Group:
    """Linear layers of one input, as they are now.

    Args:
        owner: the module whose children they are; it remembers where their weights lie.
        names: of the children.

    Attributes:
        peak, gradient_peak: where the product runs in FP8, told the amax of x and of the outputs' gradient by what makes them.

    Raises:
        Unmerged: one of them is not a plain linear layer, with an adapter or without, or they do not fit each other.
    """

    def __init__(self, owner: nn.Module, names: tuple[str, ...]):
        self.linears: list[nn.Linear] = []
        self.adapters: list[Adapter | None] = []
        for name in names:
            child = getattr(owner, name)
            try:
                linear, adapter = read_linear(child)
            except UnknownLinear as error:
                raise Unmerged(f"{name} {error}") from None
            if is_hooked(child) or is_hooked(linear) or type(linear.weight.data) is not Tensor:
                raise Unmerged(f"{name} has hooks, another forward or sharded weights")
            self.linears.append(linear)
            self.adapters.append(adapter)
        if len({id(linear.weight) for linear in self.linears}) < len(names):
            raise Unmerged("layers of one input share a weight")
        if len({adapter.dropout for adapter in self.adapters if adapter is not None}) > 1:
            raise Unmerged("adapters of one input differ in dropout")
        if len({(x.weight.dtype, x.weight.device, x.bias is None) for x in self.linears}) > 1:
            raise Unmerged("layers of one input differ in type, device or bias")
        self.merged = _merged(owner, names, self.linears, [0 if x is None else len(x.a) for x in self.adapters])
        self.fp8 = _in_fp8(owner, names, self.merged, self.linears)
        self.peak = None if self.fp8 is None else Peak()
        self.gradient_peak = None if self.fp8 is None else Peak()

    @property
    def room(self) -> int:
        return self.merged.room

    @property
    def dtype(self) -> torch.dtype:
        return self.merged.matrix.dtype

    def peaks(self, rows: int) -> tuple[Peak | None, Peak | None]:
        """Of x and of the gradient, for those who make them to tell; none where so many rows run in 16 bit."""
        return (None, None) if rows % MULTIPLE else (self.peak, self.gradient_peak)

    def __call__(
        self, x: Tensor, remake: Remake | None = None, roomy: bool = True, unread: bool = False, kept: bool = False
    ) -> Tensor:  # fmt: skip
        """The outputs side by side.

        Args:
            remake: how x is made again.
            unread: nobody reads what is returned.
            kept: what made x keeps it as well.
            roomy: x was made with ``room`` behind its rows, if its strides say so; so may be the gradient that comes back.
        """
        weights, biases, fp8 = [x.weight for x in self.linears], [x.bias for x in self.linears], self.fp8
        if fp8 is not None and len(x) % MULTIPLE:
            say_once(f"a batch of {len(x)} rows, no multiple of {MULTIPLE}, runs in 16 bit, not in FP8")
            fp8 = None
        peaks = self.peaks(len(x))
        return merged_linear(x, self.merged, weights, biases, self.adapters, roomy, True, remake, unread, fp8, peaks, kept)


def is_hooked(module: Any) -> bool:
    """Whether calling the module would do more than its class's forward, wherever that finds its weight."""
    own = vars(module).get("forward")
    return bool(
        (own is not None and getattr(own, "func", None) is not _with_its_weight)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _merged(owner: nn.Module, names: tuple[str, ...], linears: Sequence[nn.Linear], ranks: Sequence[int]) -> Merged:
    home: torch.device | None = vars(owner).get(HOMES, {}).get(names)
    if len(linears) == 1 and not any(ranks) and home is None:
        bias = linears[0].bias
        return Merged.of_one(linears[0].weight.detach(), None if bias is None else bias.detach())
    known: dict[tuple[str, ...], Merged] = vars(owner).setdefault(MERGED, {})
    merged = known.get(names)
    if merged is None or merged.ranks != tuple(ranks) or not _lie_in(merged, linears):
        if merged is not None:
            say_once(f"{type(owner).__name__}: {', '.join(names)} were moved or changed; they are laid side by side anew")
        merged = known[names] = _laid(linears, ranks, home)
    return merged


def _in_fp8(
    owner: nn.Module, names: tuple[str, ...], merged: Merged, linears: Sequence[nn.Linear]
) -> FP8Weight | None:  # fmt: skip
    """Made anew for other parameters, for others' memory, and where adapters came or went, which may have been merged."""
    known: dict[tuple[str, ...], tuple[tuple, FP8Weight] | None] = vars(owner).get(FP8, {})
    if names not in known:
        return None
    parts = [linear.weight for linear in linears]
    key = merged.matrix.data_ptr(), tuple(map(id, parts)), merged.ranks
    there = known[names]
    if there is None or there[0] != key:
        there = known[names] = key, FP8Weight(merged.matrix, parts, vars(owner).get(HOMES, {}).get(names))
    return there[1]


def _lie_in(merged: Merged, linears: Sequence[nn.Linear]) -> bool:
    biases = [None] * len(linears) if merged.bias is None else merged.bias.split(merged.sizes)
    return all(
        _is(linear.weight, place) and (bias is None) == (linear.bias is None) and (bias is None or _is(linear.bias, bias))
        for linear, place, bias in zip(linears, merged.weights, biases)
    )


def _is(parameter: Tensor, place: Tensor) -> bool:
    same = parameter.data_ptr() == place.data_ptr() and parameter.dtype == place.dtype
    return same and parameter.shape == place.shape and parameter.stride() == place.stride()


@torch.no_grad()
def _laid(linears: Sequence[nn.Linear], ranks: Sequence[int], home: torch.device | None) -> Merged:
    merged = side_by_side([x.weight for x in linears], [x.bias for x in linears], ranks, home)
    for linear, place in zip(linears, merged.weights):
        linear.weight.data = place
    if merged.bias is not None:
        for linear, bias in zip(linears, merged.bias.split(merged.sizes)):
            linear.bias.data = bias
    return merged


def leave(owner: nn.Module, names: tuple[str, ...], device: torch.device) -> None:
    """Let the weights of these children, frozen ones whose product runs in FP8, wait in host memory; ``bring_back`` undoes it.

    Args:
        device: where their products run.
    """
    vars(owner).setdefault(HOMES, {})[names] = device
    vars(owner).get(MERGED, {}).pop(names, None)
    for linear in Group(owner, names).linears:
        linear.forward = partial(_with_its_weight, linear)  # type: ignore[method-assign]


def _with_its_weight(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight.to(x.device), linear.bias)


@torch.no_grad()
def bring_back(model: nn.Module) -> None:
    """Weights that wait in host memory, to where they were; what did not fit there then can be brought later."""
    for owner in model.modules():
        homes: dict[tuple[str, ...], torch.device] = vars(owner).get(HOMES, {})
        for names, device in list(homes.items()):
            for name in names:
                linear = getattr(getattr(owner, name), "base_layer", getattr(owner, name))
                linear.weight.data = linear.weight.data.to(device, copy=True)
                vars(linear).pop("forward", None)
            vars(owner).get(MERGED, {}).pop(names, None)
            del homes[names]
        vars(owner).pop(HOMES, None)


def forget_fp8(model: nn.Module) -> None:
    """Let every product run in 16 bit again, and bring back what waits for it."""
    for owner in model.modules():
        vars(owner).pop(FP8, None)  # before there must be room for what it stands for
    bring_back(model)


@torch.no_grad()
def lay_apart(model: nn.Module) -> None:
    """Give every weight that was laid into a storage with margins one of its own again, and forget the storages and what was
    made of them in FP8."""
    forget_fp8(model)
    for owner in model.modules():
        if vars(owner).pop(MERGED, None) is not None:
            for linear in (child for child in owner.modules() if type(child) is nn.Linear):
                if not linear.weight.is_contiguous():
                    linear.weight.data = linear.weight.data.contiguous()


def say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning(message)
