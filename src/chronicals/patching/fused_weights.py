"""The weights of several linear layers in one storage, so that one product serves them all.

Parameters keep names, shapes and identity; only their data move into the storage. Each call checks
their addresses, because ``.to()``, a load with ``assign=True`` or a new adapter moves the data
again; then they are fused anew, with one warning. Data that others place, as FSDP does, are
borrowed: they are never moved, and several such layers are not fused.

A product can run in another format than that of its weights (``quantization/``). Where FP8 replaces
frozen weights, these can be moved to host memory; a layer that is called by itself then copies its
weight to the device for the call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.kernels.adapter import Adapter
from chronicals.kernels.amax import Amax
from chronicals.lora.magnitude import RowNorms
from chronicals.lora.merged_linear import Format, Merged, Remake, merged_linear
from chronicals.models.linear import UnknownLinear, read_linear
from chronicals.patching.fp8_experts import experts_in_16_bit
from chronicals.quantization import FP8InHost, PackedLinear

logger = logging.getLogger(__name__)

MERGED = "_chronicals_merged"
"""Attribute of a module: what is ``Merged`` of groups of its children, by their names."""

FORMATS = "_chronicals_formats"
"""Attribute of a module: the formats in which groups of its children multiply, by their names."""

DEVICES = "_chronicals_devices"
"""Attribute of a module: the devices of the products of groups of its children, by their names,
whose weights are in host memory."""

_said: set[str] = set()


class Unmerged(ValueError):
    """These layers cannot be one product; the message says why."""


class Group:
    """Linear layers of one input, as they are now.

    Args:
        owner: the module whose children they are; it remembers where their weights lie.
        names: of the children.

    Attributes:
        amax, gradient_amax: where the product runs in FP8, told the amax of x and of the outputs'
            gradient by what makes them.

    Raises:
        Unmerged: one of them is not a plain linear layer, with an adapter or without, or they do
            not fit each other.
    """

    def __init__(self, owner: nn.Module, names: tuple[str, ...]):
        self.linears: list[nn.Linear | PackedLinear] = []
        self.adapters: list[Adapter | None] = []
        there: list[int] = []
        for name in names:
            child = getattr(owner, name)
            try:
                linear, adapter, rank = read_linear(child)
            except UnknownLinear as error:
                raise Unmerged(f"{name} {error}") from None
            if is_hooked(child) or is_hooked(linear) or type(linear.weight.data) is not Tensor:
                raise Unmerged(f"{name} has hooks, another forward or a weight in shards")
            self.linears.append(linear)
            self.adapters.append(adapter)
            there.append(rank)
        if len({id(linear.weight) for linear in self.linears}) < len(names):
            raise Unmerged("layers of one input share a weight")
        if len({adapter.dropout for adapter in self.adapters if adapter is not None}) > 1:
            raise Unmerged("adapters of one input differ in dropout")
        if len({(type(x), _dtype(x), x.weight.device, x.bias is None) for x in self.linears}) > 1:
            raise Unmerged("layers of one input differ in type, device or bias")
        on = [0 if adapter is None else len(adapter.a) for adapter in self.adapters]
        ranks = tuple(on if any(on) else there)  # adapters that are off keep their padding
        self.merged = _merged(owner, names, self.linears, ranks)
        self.amax, self.gradient_amax = (
            Amax() if self.merged.base.wants_amax else None for _ in range(2)
        )

    @property
    def padding(self) -> int:
        """Padding columns that x and the gradient of the outputs should be made with."""
        return self.merged.padding.columns if any(self.adapters) else 0

    @property
    def dtype(self) -> torch.dtype:
        return self.merged.base.dtype

    def amaxes(self, rows: int) -> tuple[Amax | None, Amax | None]:
        """Of x and of the gradient, for the kernels that make them; none where the product does
        not ask for them.
        """
        return (None, None) if self.merged.base.why_not(rows) else (self.amax, self.gradient_amax)

    def __call__(
        self,
        x: Tensor,
        remake: Remake | None = None,
        padded: bool = True,
        skip_output: bool = False,
        x_is_saved: bool = False,
        output_is_saved: bool = False,
    ) -> Tensor:
        """Compute the outputs of all layers side by side, ``[T, out]``.

        Args:
            x: ``[T, in]``.
            remake: how x is computed again; it is not saved then.
            padded: x may have been made with ``padding`` columns behind its rows, which its
                strides tell; so may the gradient of the outputs.
            skip_output: see ``merged_linear``; so are the next two.
            x_is_saved: the maker of x saves it, too.
            output_is_saved: the caller saves the outputs unmodified.
        """
        merged = self.merged
        if reason := merged.base.why_not(len(x)):
            say_once(f"a batch of {len(x)} rows runs in 16 bit: {reason}")
            merged = merged.in_16_bit()
        return merged_linear(
            x,
            merged,
            self.adapters,
            padded=padded,
            gradient_padded=True,
            remake=remake,
            skip_output=skip_output,
            amaxes=self.amaxes(len(x)),
            x_is_saved=x_is_saved,
            output_is_saved=output_is_saved,
        )


def _dtype(linear: nn.Linear | PackedLinear) -> torch.dtype:
    """Of its weight as products read it."""
    return linear.dtype if isinstance(linear, PackedLinear) else linear.weight.dtype


def is_borrowed(linear: nn.Linear | PackedLinear) -> bool:
    """Whether others place the weight's data: FSDP, which gathers shards into its own memory for
    each forward pass, or DeepSpeed's ZeRO. A copy elsewhere would keep the weights of the first
    step."""
    return getattr(linear, "_is_fsdp_managed_module", False) or hasattr(linear.weight, "ds_id")


def is_hooked(module: Any) -> bool:
    """Whether calling the module would do more than its class's forward, wherever that finds its
    weight.
    """
    own = vars(module).get("forward")
    return bool(
        (own is not None and getattr(own, "func", None) is not _with_its_weight)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _merged(
    owner: nn.Module,
    names: tuple[str, ...],
    linears: Sequence[nn.Linear | PackedLinear],
    ranks: tuple[int, ...],
) -> Merged:
    """What is known of these layers, if it still holds; else they are fused anew."""
    stands: Format | None = vars(owner).get(FORMATS, {}).get(names)
    weights = [x.weight for x in linears]
    biases = [x.bias for x in linears]
    packed = [x.packed for x in linears if isinstance(x, PackedLinear)]
    alone = (
        len(linears) == 1
        and not any(ranks)
        and not packed
        and names not in vars(owner).get(DEVICES, {})
    )
    if alone and stands is None:
        return Merged.in_place(weights[0], biases[0])
    known: dict[tuple[str, ...], Merged] = vars(owner).setdefault(MERGED, {})
    if any(is_borrowed(linear) for linear in linears):
        merged = known.pop(names, None)
        if (
            any(ranks)
            or packed
            or not (are_side_by_side(weights) and (biases[0] is None or are_side_by_side(biases)))
        ):
            raise Unmerged(
                f"{', '.join(names)} cannot be fused: a sharded weight's storage is not moved"
            )
        if merged is None or not merged.holds(weights, biases):
            merged = Merged.side_by_side(weights, biases)
        known[names] = merged
        return merged
    merged = known.get(names)
    same = (
        merged is not None
        and merged.padding.ranks == ranks
        and merged.base.dtype == _dtype(linears[0])
    )
    if merged is None or not same or not merged.holds(weights, biases):
        if merged is not None and not alone:
            say_once(
                f"{type(owner).__name__}: {', '.join(names)} were moved or changed; they are "
                "fused anew"
            )
        device = vars(owner).get(DEVICES, {}).get(names)
        with torch.no_grad():
            if alone:
                merged = Merged.in_place(weights[0], biases[0], stands)
            elif packed:
                merged = _moved_in(Merged.packed(packed, biases, ranks), weights, biases)
            else:
                merged = _moved_in(
                    Merged.fused(weights, biases, ranks, stands, device), weights, biases
                )
        known[names] = merged
    return merged


def are_side_by_side(tensors: Sequence[Tensor | None]) -> bool:
    """Whether each begins where the one before it ends, in one storage."""
    found = [tensor for tensor in tensors if tensor is not None]
    ends = [one.storage_offset() + one.numel() for one in found]
    return (
        len(found) == len(tensors)
        and all(one.is_contiguous() and one.shape[1:] == found[0].shape[1:] for one in found)
        and len({one.untyped_storage().data_ptr() for one in found}) == 1
        and ends[:-1] == [one.storage_offset() for one in found[1:]]
    )


def _moved_in(merged: Merged, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Merged:
    """``merged``, in which the parameters now have their data."""
    for weight, place in zip(weights, merged.storage.places):
        weight.data = place
    if merged.bias is not None:
        for bias, place in zip(biases, merged.bias.split(merged.sizes)):
            assert bias is not None
            bias.data = place
    return merged


def use_format(owner: nn.Module, names: tuple[str, ...], stands: Format) -> None:
    """Let the product of these children run in another format, as ``FP8``; ``use_16_bit`` undoes
    it.

    Args:
        stands: makes the base that multiplies in place of the dense weight.
    """
    vars(owner).setdefault(FORMATS, {})[names] = stands
    known: dict[tuple[str, ...], Merged] = vars(owner).get(MERGED, {})
    if names in known:
        known[names] = known[names].in_format(stands)


def move_to_host(owner: nn.Module, names: tuple[str, ...], device: torch.device) -> None:
    """Let the weights of these children, frozen ones whose product runs in FP8, wait in host
    memory; ``bring_back`` undoes it.

    Args:
        device: where their products run.
    """
    vars(owner).setdefault(DEVICES, {})[names] = device
    vars(owner).get(MERGED, {}).pop(names, None)
    use_format(owner, names, FP8InHost)
    for linear in Group(owner, names).linears:
        assert isinstance(linear, nn.Linear)
        linear.forward = partial(_with_its_weight, linear)  # type: ignore[method-assign]


def _with_its_weight(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight.to(x.device), linear.bias)


@torch.no_grad()
def bring_back(model: nn.Module) -> None:
    """Weights that wait in host memory, to where they were; what did not fit there then can be
    brought later.
    """
    for owner in model.modules():
        devices: dict[tuple[str, ...], torch.device] = vars(owner).get(DEVICES, {})
        for names, device in list(devices.items()):
            for name in names:
                linear = getattr(getattr(owner, name), "base_layer", getattr(owner, name))
                linear.weight.data = linear.weight.data.to(device, copy=True)
                vars(linear).pop("forward", None)
            vars(owner).get(MERGED, {}).pop(names, None)
            del devices[names]
        vars(owner).pop(DEVICES, None)


def use_16_bit(model: nn.Module) -> None:
    """Let every product run in the format of its weights again, and bring back what is in host
    memory.
    """
    for owner in (
        model.modules()
    ):  # first free what the formats hold: the weights in host memory must fit on the device
        known = vars(owner).get(MERGED, {})
        for names in vars(owner).pop(FORMATS, {}):
            merged = known.pop(names, None)
            if merged is not None and merged.is_fused and names not in vars(owner).get(DEVICES, {}):
                known[names] = merged.in_16_bit()
    experts_in_16_bit(model)
    bring_back(model)


@torch.no_grad()
def unfuse_weights(model: nn.Module) -> None:
    """Give every weight that was fused into a storage with padding one of its own again, and
    forget the storages and the formats."""
    use_16_bit(model)
    for owner in model.modules():
        if vars(owner).pop(MERGED, None) is not None:
            for linear in (child for child in owner.modules() if type(child) is nn.Linear):
                if not linear.weight.is_contiguous():
                    linear.weight.data = linear.weight.data.contiguous()


def forget_row_norms(model: nn.Module) -> None:
    """Let the norms of rows, of adapters with magnitudes, be computed anew: for who changes
    adapters unseen, as the replay of a graph does."""
    for norms in row_norms(model):
        norms.forget()


def row_norms(model: nn.Module) -> Iterator[RowNorms]:
    """Those of the fused weights, of adapters with magnitudes."""
    for owner in model.modules():
        for merged in vars(owner).get(MERGED, {}).values():
            yield merged.norms


def say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning(message)
