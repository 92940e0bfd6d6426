"""The weights of several linear layers in one storage, so that one product serves them all.

Parameters keep names, shapes and identity; only their data move into the storage. Each call checks
their addresses, because ``.to()``, a load with ``assign=True`` or a new adapter moves the data
again; then they are fused anew, with one warning. Data that FSDP or DeepSpeed place are borrowed:
they are never moved, and several such layers run as one product only if they are adjacent already.

A product can run in another format than that of its weights (``quantization/``). If FP8 replaces
frozen weights, these can be moved to host memory; a layer that is called by itself then copies its
weight to the device for the call.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.kernels.fp8 import Amax
from chronicals.kernels.linear_head import Adapter
from chronicals.log_once import log_once
from chronicals.lora.magnitude import RowNorms
from chronicals.lora.merged_linear import MergedWeights, ProductFormat, Remake, merged_linear
from chronicals.models.linear import UnknownLinear, read_linear
from chronicals.patching.fp8_experts import IN_FP8
from chronicals.quantization import (
    FP8Experts,
    FP8InHost,
    PackedLinear,
    PackedProduct,
    packed_weight,
    product_dtype,
)

logger = logging.getLogger(__name__)

MERGED = "_chronicals_merged"
"""Attribute of a module: ``MergedWeights`` of groups of its children, by their names."""

PRODUCT_FORMATS = "_chronicals_formats"
"""Attribute of a module: formats of the products of groups of its children, by their names."""

DEVICES = "_chronicals_devices"
"""Attribute of a module: devices of the products of groups of its children, by their names.

Those are in it whose weights are in host memory.
"""


class Unmerged(ValueError):
    """Some layers cannot run as one product; the message says why."""


class Group:
    """Linear layers of one input, read as they are now.

    Args:
        owner: the module whose children they are; their ``MergedWeights`` is cached on it.
        names: names of the children.

    Attributes:
        linears: the plain layers.
        adapters: adapter of each layer, or None.
        merged: their weights as one.
        dtype: dtype of x and of the outputs.
        padding: number of padding columns that x and the gradient of the outputs should be made
            with.
        amax, gradient_amax: cells for the largest absolute value of x and of the outputs' gradient,
            if the product runs in a format that asks for them; else None.

    Raises:
        Unmerged: one of them is not a plain linear layer, with an adapter or without, or they do
            not fit each other.
    """

    def __init__(self, owner: nn.Module, names: tuple[str, ...]):
        self.linears: list[nn.Linear | PackedLinear] = []
        self.adapters: list[Adapter | None] = []
        ranks_on_or_off: list[int] = []
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
            ranks_on_or_off.append(rank)
        if len({id(linear.weight) for linear in self.linears}) < len(names):
            raise Unmerged("layers of one input share a weight")
        if len({adapter.dropout for adapter in self.adapters if adapter is not None}) > 1:
            raise Unmerged("adapters of one input differ in dropout")
        if (
            len(
                {(type(x), product_dtype(x), x.weight.device, x.bias is None) for x in self.linears}
            )
            > 1
        ):
            raise Unmerged("layers of one input differ in type, device or bias")
        ranks = [0 if adapter is None else len(adapter.a) for adapter in self.adapters]
        if not any(ranks):
            ranks = ranks_on_or_off  # adapters that are off keep their padding
        self.merged = _merged(owner, names, self.linears, tuple(ranks))
        self.dtype: torch.dtype = self.merged.base.dtype
        self.padding = self.merged.padding.columns if any(self.adapters) else 0
        wants_amax = self.merged.base.wants_amax
        self.amax = Amax() if wants_amax else None
        self.gradient_amax = Amax() if wants_amax else None

    def of_rows(self, rows: Sequence[slice]) -> Group:
        """Return the group with some of its outputs alone, whose product has no gradient.

        Args:
            rows: ascending ranges of the outputs of all layers side by side, with some of each layer.
        """
        within = ranges_within(rows, self.merged.sizes)
        group = copy.copy(self)
        group.merged = self.merged.of_rows(within)
        group.adapters = [
            None if adapter is None else adapter.of_rows(own)
            for adapter, own in zip(self.adapters, within)
        ]
        group.amax = group.gradient_amax = None
        return group

    def amaxes(self, rows: int) -> tuple[Amax | None, Amax | None]:
        """Return the cells for x ``[rows, in]`` and for the gradient, for kernels that make these.

        They are None if the product does not ask for them.
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
        dtype: torch.dtype | None = None,
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
            dtype: dtype of the outputs; see ``merged_linear``.
        """
        merged = self.merged
        reason = merged.base.why_not(len(x))
        if reason:
            log_once(logger.warning, f"a batch of {len(x)} rows runs in 16 bit: {reason}")
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
            dtype=dtype,
        )


def ranges_within(ranges: Sequence[slice], sizes: Sequence[int]) -> list[list[slice]]:
    """Return what ascending ranges cover of each part, counted from the part's own beginning.

    Args:
        ranges: the ranges.
        sizes: sizes of the parts, which lie side by side.
    """
    found = []
    begin = 0
    for size in sizes:
        end = begin + size
        shares = [slice(max(r.start, begin) - begin, min(r.stop, end) - begin) for r in ranges]
        found.append([share for share in shares if share.start < share.stop])
        begin = end
    return found


class GroupProduct(PackedProduct):
    """The product of a group of packed layers.

    Args:
        owner: the module whose children they are.
        names: names of the children.
    """

    def __init__(self, owner: nn.Module, names: tuple[str, ...]):
        layers = (packed_weight(layer) for layer in Group(owner, names).linears)
        self.weights = [weight for weight in layers if weight is not None]
        self._cache: dict[tuple[str, ...], MergedWeights] = vars(owner)[MERGED]
        self._names = names
        self._packed = self._cache[names]

    def hold_copy(self) -> None:
        """Let the group multiply by the dense values."""
        self._cache[self._names] = self._packed.densely()

    def drop_copy(self) -> None:
        """Let it multiply by the codes again."""
        self._cache[self._names] = self._packed


def is_hooked(module: Any) -> bool:
    """Return whether a call of the module does more than its class's forward.

    Copying the weight from host memory does not count.
    """
    forward = vars(module).get("forward")
    return bool(
        (forward is not None and getattr(forward, "func", None) is not _with_weight_on_device)
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
) -> MergedWeights:
    """Return the cached weights of these layers, fused anew if their data have moved."""
    product_format: ProductFormat | None = vars(owner).get(PRODUCT_FORMATS, {}).get(names)
    weights = [x.weight for x in linears]
    biases = [x.bias for x in linears]
    packed = [weight for weight in map(packed_weight, linears) if weight is not None]
    stays_in_place = (
        len(linears) == 1
        and not any(ranks)
        and not packed
        and names not in vars(owner).get(DEVICES, {})
    )
    if stays_in_place and product_format is None:
        return MergedWeights.in_place(weights[0], biases[0])
    cache: dict[tuple[str, ...], MergedWeights] = vars(owner).setdefault(MERGED, {})
    # FSDP and DeepSpeed's ZeRO gather shards into their own memory for each forward pass; a copy
    # elsewhere would keep the weights of the first step.
    if any(
        getattr(linear, "_is_fsdp_managed_module", False) or hasattr(linear.weight, "ds_id")
        for linear in linears
    ):
        merged = cache.pop(names, None)
        are_adjacent = are_side_by_side(weights) and (biases[0] is None or are_side_by_side(biases))
        if any(ranks) or packed or not are_adjacent:
            raise Unmerged(
                f"{', '.join(names)} cannot be fused: a sharded weight's storage is not moved"
            )
        if merged is None or not merged.holds(weights, biases):
            merged = MergedWeights.side_by_side(weights, biases)
        cache[names] = merged
        return merged
    merged = cache.get(names)
    if (
        merged is not None
        and merged.padding.ranks == ranks
        and merged.base.dtype == product_dtype(linears[0])
        and merged.holds(weights, biases)
    ):
        return merged
    if merged is not None and not stays_in_place:
        log_once(
            logger.warning,
            f"{type(owner).__name__}: {', '.join(names)} were moved or changed; they are fused "
            "anew",
        )
    device = vars(owner).get(DEVICES, {}).get(names)
    with torch.no_grad():
        if stays_in_place:
            merged = MergedWeights.in_place(weights[0], biases[0], product_format)
        elif packed:
            merged = MergedWeights.packed(packed, biases, ranks)
        else:
            merged = MergedWeights.fused(weights, biases, ranks, product_format, device)
        if not stays_in_place:
            _move_into(merged, weights, biases)
    cache[names] = merged
    return merged


def _move_into(
    merged: MergedWeights, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> None:
    """Give the parameters of layers their data in the storage of merged weights."""
    for weight, place in zip(weights, merged.storage.places):
        weight.data = place
    if merged.bias is not None:
        for bias, place in zip(biases, merged.bias.split(merged.sizes)):
            assert bias is not None  # a merged bias is made where all layers have one
            bias.data = place


def are_side_by_side(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether each tensor begins where the one before it ends, in one storage."""
    present = [tensor for tensor in tensors if tensor is not None]
    ends = [tensor.storage_offset() + tensor.numel() for tensor in present]
    return (
        len(present) == len(tensors)
        and all(x.is_contiguous() and x.shape[1:] == present[0].shape[1:] for x in present)
        and len({tensor.untyped_storage().data_ptr() for tensor in present}) == 1
        and ends[:-1] == [tensor.storage_offset() for tensor in present[1:]]
    )


def use_format(owner: nn.Module, names: tuple[str, ...], product_format: ProductFormat) -> None:
    """Let the product of some children run in another format, such as ``FP8``.

    ``use_16_bit`` undoes it.

    Args:
        owner: the module.
        names: names of the children.
        product_format: makes the base that multiplies in place of the dense weight.
    """
    vars(owner).setdefault(PRODUCT_FORMATS, {})[names] = product_format
    cache: dict[tuple[str, ...], MergedWeights] = vars(owner).get(MERGED, {})
    if names in cache:
        cache[names] = cache[names].in_format(product_format)


def move_to_host(owner: nn.Module, names: tuple[str, ...], device: torch.device) -> None:
    """Move the weights of some children to host memory; ``bring_back`` undoes it.

    They must be frozen, and their product run in FP8.

    Args:
        owner: the module.
        names: names of the children.
        device: device of the product.
    """
    vars(owner).setdefault(DEVICES, {})[names] = device
    vars(owner).get(MERGED, {}).pop(names, None)
    use_format(owner, names, FP8InHost)
    for linear in Group(owner, names).linears:
        assert isinstance(linear, nn.Linear)
        linear.forward = partial(_with_weight_on_device, linear)  # type: ignore[method-assign]


def _with_weight_on_device(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight.to(x.device), linear.bias)


@torch.no_grad()
def bring_back(model: nn.Module) -> None:
    """Move weights from host memory back to their device.

    If memory runs out, a later call moves the rest.
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
    """Let every product run in the format of its weights again, on their device."""
    # first free the memory of the formats: the weights in host memory must fit on the device
    for owner in model.modules():
        cache = vars(owner).get(MERGED, {})
        for names in vars(owner).pop(PRODUCT_FORMATS, {}):
            merged = cache.pop(names, None)
            if merged is None or names in vars(owner).get(DEVICES, {}):
                continue
            # one parameter's own data need no record
            if len(merged.sizes) > 1 or merged.storage.padded:
                cache[names] = merged.in_16_bit()
    for module in model.modules():
        formats: dict[str, FP8Experts] = vars(module).pop(IN_FP8, {})
        in_host = [
            (experts.weight, experts.device)
            for experts in formats.values()
            if experts.waits_for is not None
        ]
        formats.clear()  # frees memory of the device for the weights
        for weight, device in in_host:
            weight.data = weight.data.to(device, copy=True)
    bring_back(model)


@torch.no_grad()
def unfuse_weights(model: nn.Module) -> None:
    """Copy every weight that was fused into a storage with padding to memory of its own.

    Storages and formats are forgotten.
    """
    use_16_bit(model)
    for owner in model.modules():
        if vars(owner).pop(MERGED, None) is not None:
            for linear in (child for child in owner.modules() if type(child) is nn.Linear):
                if not linear.weight.is_contiguous():
                    linear.weight.data = linear.weight.data.contiguous()


def forget_row_norms(model: nn.Module) -> None:
    """Discard the cached row norms of adapters with magnitudes.

    A caller that changes adapters without raising their version, as the replay of a CUDA graph
    does, must call this.
    """
    for norms in row_norms(model):
        norms.forget()


def row_norms(model: nn.Module) -> Iterator[RowNorms]:
    """Yield the cached row norms of all fused weights."""
    for owner in model.modules():
        for merged in vars(owner).get(MERGED, {}).values():
            yield merged.norms
