"""Linear layers of one input as one product, with their adapters inside it.

    y_i = x W_iᵀ + b_i + s_i · u_i B_iᵀ,   u_i = dropout(x) A_iᵀ          for the layers i, one beside the other
    dW = dyᵀ x,   dA = gᵀ dropout(x),   dB = s · dyᵀ u,   g = s · dy B

W, the weights of all layers, is a ``Base``: it multiplies in its own format. A dense one has
padding that holds the adapters, so that no sum passes over y or dx by itself:

    M = | W    s·B |       [y] = [x  u] · [W  s·B]ᵀ        u is in padding columns behind the rows of x
        | A     ·  |       [dx] = [dy  g] · [W ; A]        g is in padding columns behind the rows of dy

With magnitudes m of the rows of W + s B A (DoRA, ``magnitude.py``), whose norms n count as
constants:

    z_i = f_i ⊙ (y_i − b_i) + b_i,   f = m / n,   dy = f ⊙ dz,   dm = Σₜ dz ⊙ (y − b) / n

Other bases multiply without the padding; then the adapters' products are added to y and dx
(``addmm``). With dropout g A is masked and added in any case. ``x`` is ``[T, in]``, adapters are
fp32 (Hu et al., 2022, section 4.1). Operations: those of the frozen layers with ``in + R`` and
``out + R`` in place of ``in`` and ``out``, and four products as wide as R, the sum of the ranks
rounded up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.adapter import Adapter
from chronicals.kernels.adapter_gradients import adapter_gradients
from chronicals.kernels.amax import Amax
from chronicals.kernels.column_scaling import scale_columns, scaled_columns_gradient
from chronicals.kernels.dropped_products import (
    add_dropped_product_,
    draw_seed,
    dropped_down,
    dropped_gradient_of_down,
)
from chronicals.kernels.fp8 import Scaled
from chronicals.kernels.launch import differentiable_once, in_rows, with_padding
from chronicals.kernels.products import product, product_into
from chronicals.lora.magnitude import SHORTEST, RowNorms, factors_of
from chronicals.lora.padding import Padding, columns_for
from chronicals.quantization import Base, Dense, Operand, PackedWeight, Storage

Format = Callable[[Dense, torch.device], Base]
"""Makes the base that multiplies in place of a dense weight, on a device."""


@dataclass(frozen=True)
class Merged:
    """The weights of some linear layers of one input, as one.

    Attributes:
        storage: where the parameters' data are; in host memory for some formats.
        base: what multiplies: ``storage`` itself, or what stands for it.
        padding: for the adapters.
        biases: of each layer, or None.
        bias: the biases in one, ``[out]``, or None.
        norms: of the rows of the weights with the adapters in the padding.
    """

    storage: Storage
    base: Base
    padding: Padding
    biases: tuple[Tensor | None, ...]
    bias: Tensor | None
    norms: RowNorms = field(default_factory=RowNorms, compare=False)

    @classmethod
    def in_place(cls, weight: Tensor, bias: Tensor | None, stands: Format | None = None) -> Merged:
        """One layer without an adapter, whose data are not moved."""
        storage = Dense(weight.detach(), (weight,))
        padding = Padding.beside(storage, (len(weight),), (0,))
        base = storage if stands is None else stands(storage, weight.device)
        return cls(storage, base, padding, (bias,), None if bias is None else bias.detach())

    @classmethod
    def side_by_side(cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Merged:
        """Several layers without adapters whose weights, and biases if any, lie one behind the
        other already.
        """
        sizes = tuple(map(len, weights))
        first = weights[0].detach()
        width = weights[0].shape[1]
        storage = Dense(first.as_strided((sum(sizes), width), (width, 1)), weights)
        bias = None if biases[0] is None else biases[0].detach().as_strided((sum(sizes),), (1,))
        return cls(
            storage, storage, Padding.beside(storage, sizes, (0,) * len(sizes)), tuple(biases), bias
        )

    @classmethod
    def fused(
        cls,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        ranks: Sequence[int],
        stands: Format | None = None,
        device: torch.device | None = None,
    ) -> Merged:
        """Copies of the weights and biases in one storage, with padding for adapters of these
        ranks.

        Args:
            stands: the format of the products; without it, that of the weights.
            device: of the products, if the weights are to be in host memory.

        Raises:
            ValueError: some layers have a bias and some have none.
        """
        sizes = tuple(map(len, weights))
        bias = _as_one(biases)
        if device is None:
            storage = Dense.fused(weights, columns_for(ranks))
            padding = Padding.beside(storage, sizes, ranks)
            device = weights[0].device
        else:
            storage = Dense.fused(weights, device="cpu")
            padding = Padding.apart(storage.matrix, sizes, ranks, device)
        return cls(
            storage,
            storage if stands is None else stands(storage, device),
            padding,
            tuple(biases),
            bias,
        )

    @classmethod
    def packed(
        cls, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None], ranks: Sequence[int]
    ) -> Merged:
        """Packed weights of one format, which stay where they are, and copies of the biases, with
        padding for adapters of these ranks in the buffer of the dense values.

        Raises:
            ValueError: some layers have a bias and some have none.
        """
        base = weights[0].base(weights, columns_for(ranks), ranks)
        padding = Padding.beside(base.buffer, [weight.shape[0] for weight in weights], ranks)
        return cls(base, base, padding, tuple(biases), _as_one(biases))

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.padding.sizes

    @property
    def is_fused(self) -> bool:
        """Whether the storage is more than the data of one parameter."""
        return len(self.sizes) > 1 or self.storage.padded

    def holds(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
        """Whether it was made of these very parameters, and their data are where it left them."""
        places = [None] * len(biases) if self.bias is None else self.bias.split(self.sizes)
        parts = zip(
            (*self.storage.parts, *self.biases),
            (*weights, *biases),
            (*self.storage.places, *places),
        )
        return all(made is now and (now is None or _lies(now, place)) for made, now, place in parts)

    def in_format(self, stands: Format) -> Merged:
        """The same with another base in place of a dense weight."""
        return replace(self, base=stands(self.storage.plain_weight, self.padding.up.device))

    def in_16_bit(self) -> Merged:
        """The same with products in the format of the storage, which is copied from host memory
        if it is there.
        """
        storage = self.storage.plain_weight
        device = self.padding.up.device
        if storage.columns == self.padding.columns and storage.matrix.device == device:
            return replace(self, base=storage)
        padded = Dense.fused([storage.matrix.to(device)], self.padding.columns)
        padded.parts = self.storage.parts
        return replace(
            self,
            storage=padded,
            base=padded,
            padding=Padding.beside(padded, self.sizes, self.padding.ranks),
        )


def _as_one(biases: Sequence[Tensor | None]) -> Tensor | None:
    """Copies one after the other; raises ValueError where some layers have a bias and some have
    none.
    """
    if len({bias is None for bias in biases}) > 1:
        raise ValueError("some of the layers have a bias and some have none")
    return (
        None
        if biases[0] is None
        else torch.cat([bias.detach() for bias in biases if bias is not None])
    )


def _lies(parameter: Tensor, place: Tensor | None) -> bool:
    if place is None or parameter.data_ptr() != place.data_ptr() or parameter.dtype != place.dtype:
        return False
    return parameter.shape == place.shape and parameter.stride() == place.stride()


def _extended(x: Tensor, columns: int, made_with_padding: bool) -> Tensor:
    """``[T, width + columns]`` that begins with ``x``: its own memory, where it was made with
    padding columns.

    Taken from ``x.data``, whose version autograd does not follow: what is written behind the rows
        is nothing of x. It is of
    another version, since whoever has copied x has not copied that.
    """
    rows, width = x.shape
    if made_with_padding and x.stride() == (width + columns, 1):
        extended = x.data.as_strided((rows, width + columns), x.stride())
        torch.autograd.graph.increment_version(extended)
        return extended
    extended = x.new_empty((rows, width + columns))
    extended[:, :width].copy_(x)
    return extended


@dataclass(frozen=True)
class Remake:
    """How the backward pass makes x again, ``make(source)``; ``source`` is kept in place of x."""

    make: Callable[[Tensor], Tensor]
    source: Tensor


OPTIONS = 11
"""Arguments of the function below that come before the tensors of the layers; x is one of them."""


class _MergedLinear(torch.autograd.Function):
    """After the options: the weights, biases, A, B and magnitudes of all layers, each list as
    long as there are layers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        merged: Merged,
        padding: Padding | None,
        scales: list[float],
        dropout: float,
        padded: tuple[bool, bool],
        remake: Remake | None,
        unread: bool,
        amaxes: tuple[Amax | None, Amax | None],
        wants_columns: bool,
        stays: bool,
        *tensors: Tensor | None,
    ) -> Tensor:
        base = merged.base
        count = len(merged.sizes)
        (amax, ctx.amax) = amaxes
        ctx.scaled = any(magnitude is not None for magnitude in tensors[4 * count :])
        ctx.merged = merged
        ctx.padding = padding
        ctx.scales = scales
        ctx.dropout = dropout
        ctx.padded = padded[1]
        rows = x
        seed = None
        ctx.written = None
        if padding is not None:
            ctx.written = padding.write(
                tensors[2 * count : 3 * count], tensors[3 * count : 4 * count], scales
            )
            rows = _extended(x, padding.columns, padded[0])
            seed = draw_seed(x) if dropout else None
            _down(padding, x, seed, dropout, rows[:, base.width :])
        read = rows if base.padded or padding is None else rows[:, : base.width]
        known = amax.take(x) if amax is not None and (wants_columns or not unread) else None
        operand = base.operand(read, not unread, wants_columns, known)
        if unread:
            y = rows.new_empty((len(rows), base.outputs))
        else:
            y = base.forward(operand, None if ctx.scaled else merged.bias)
            if padding is not None and not base.padded:
                y.addmm_(rows[:, base.width :], padding.up.t())
        y, *scaling = (
            _with_magnitudes(ctx, y, tensors[4 * count :], stays)
            if ctx.scaled
            else (y, None, None, None)
        )
        source = rows if remake is None else remake.source
        columns = operand.columns if wants_columns else None
        ctx.keeps_columns = columns is not None
        ctx.scale_of_x = operand.scale
        if columns is not None:
            source = columns.values
        needs = ctx.needs_input_grad
        kept = any(needs[OPTIONS : OPTIONS + count]) or any(
            needs[OPTIONS + 2 * count :][: 2 * count]
        )  # others want dy alone
        ctx.make = remake.make if remake is not None and kept else None
        ctx.save_for_backward(
            source if kept else None, seed, *scaling, *tensors[2 * count : 4 * count]
        )
        ctx.adapter_dtype = next((x.dtype for x in tensors[2 * count :] if x is not None), None)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        merged = ctx.merged
        base = ctx.merged.base
        padding = ctx.padding
        rows, seed, outputs, factor, lengths, *adapters = ctx.saved_tensors
        if padding is not None and not padding.holds(
            ctx.written
        ):  # another pass has written others
            half = len(adapters) // 2
            padding.write(adapters[:half], adapters[half:], ctx.scales)
        if ctx.make is not None:
            rows = _made_again(ctx, rows, seed)
        dz = in_rows(upstream)
        needs = ctx.needs_input_grad
        count = len(merged.sizes)
        dy, of_magnitudes = (
            (dz, [None] * count)
            if factor is None
            else _of_magnitudes(ctx, dz, outputs, factor, lengths)
        )
        extended = (
            dy
            if padding is None
            else _extended(dy, padding.columns, ctx.padded or factor is not None)
        )
        g = extended[:, base.outputs :]
        of_adapters: list[Tensor | None] = [None for _ in range(2 * count)]
        adapting = any(needs[OPTIONS + 2 * count :][: 2 * count])
        if adapting and rows is not None:
            assert padding is not None
            of_adapters[count:] = adapter_gradients(
                dy,
                padding.up,
                rows[:, base.width :],
                g,
                merged.sizes,
                padding.ranks,
                ctx.scales,
                ctx.adapter_dtype,
            )
        elif padding is not None:
            product_into(g, dy, padding.up)
        x = None if rows is None else _x_again(ctx, rows)
        trained = any(needs[OPTIONS : OPTIONS + count]) and x is not None
        operand = base.operand(
            dy, needs[0], trained, None if ctx.amax is None else ctx.amax.take(upstream)
        )
        dx = _input_gradient(ctx, operand, extended, seed) if needs[0] else None
        of_weights: list[Tensor | None] = [None for _ in range(2 * count)]
        if (
            trained
            and x is not None
            and (of_weight := base.weight_gradient(operand, x)) is not None
        ):
            of_weights[:count] = of_weight.split(merged.sizes)
        if any(needs[OPTIONS + count : OPTIONS + 2 * count]):
            of_weights[count:] = _of_biases(dz).split(merged.sizes)
        if adapting and x is not None:
            of_adapters[:count] = _of_downs(ctx, x.dense, g, seed)
        wanted = zip([*of_weights, *of_adapters, *of_magnitudes], needs[OPTIONS:])
        return (
            dx,
            *(None,) * (OPTIONS - 1),
            *(gradient if needed else None for gradient, needed in wanted),
        )


def _with_magnitudes(
    ctx: Any, y: Tensor, magnitudes: Sequence[Tensor | None], stays: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``f ⊙ y + b``; what is kept of the outputs, f, and what the sum over them is divided by.

    Args:
        stays: what is returned is not written into, so that it can be kept in place of y; with a
            bias it says too little of y.
    """
    merged: Merged = ctx.merged
    norms = merged.norms.of(merged.base, ctx.padding)
    factor = factors_of(magnitudes, norms, merged.sizes)
    stays = stays and merged.bias is None
    z = scale_columns(y, factor, merged.bias, y if stays else None)
    return (
        z,
        z if stays else y,
        factor,
        factor * norms if stays else norms.clone(),
    )  # which other adapters may overwrite


def _of_magnitudes(
    ctx: Any, dz: Tensor, outputs: Tensor, factor: Tensor, lengths: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradient of y, with the padding's columns behind its rows, and those of the
    magnitudes.
    """
    count = len(ctx.merged.sizes)
    wanted = ctx.needs_input_grad[OPTIONS:]
    trained = any(wanted[4 * count :])
    dy = with_padding(dz, dz.shape, ctx.padding.columns)
    sums = scaled_columns_gradient(dz, factor, dy, outputs if trained else None)
    if sums is None:
        return dy, [None] * count
    return dy, list(
        torch.where(lengths.abs() <= SHORTEST, 0, sums / lengths).split(ctx.merged.sizes)
    )


def _x_again(ctx: Any, saved: Tensor) -> Operand:
    """x as ``Base.weight_gradient`` takes it: its quantised columns, or itself without the
    padding behind its rows.
    """
    if ctx.keeps_columns:
        return Operand(None, columns=Scaled(saved, ctx.scale_of_x))
    return Operand(saved[:, : ctx.merged.base.width], scale=ctx.scale_of_x)


def _made_again(ctx: Any, source: Tensor, seed: Tensor | None) -> Tensor:
    """x, and u behind it, as they were in the forward pass."""
    x: Tensor = ctx.make(source)
    if ctx.padding is None:
        return x
    rows = _extended(x, ctx.padding.columns, True)
    _down(ctx.padding, x, seed, ctx.dropout, rows[:, ctx.merged.base.width :])
    return rows


def _down(padding: Padding, x: Tensor, seed: Tensor | None, dropout: float, out: Tensor) -> None:
    """``out = dropout(x) Aᵀ``."""
    if seed is None:
        product_into(out, x, padding.down.t())
    else:
        dropped_down(x, padding.down[: padding.used], seed, dropout, out)


def _input_gradient(ctx: Any, dy: Operand, extended: Tensor, seed: Tensor | None) -> Tensor:
    base = ctx.merged.base
    padding = ctx.padding
    if padding is None:
        return base.input_gradient(dy)
    if base.padded and seed is None:
        return base.input_gradient(Operand(extended))
    dx = base.input_gradient(dy)
    g = extended[:, base.outputs :][:, : padding.used]
    down = padding.down[: padding.used]
    return (
        dx.addmm_(g, down) if seed is None else add_dropped_product_(dx, g, down, seed, ctx.dropout)
    )


def _of_biases(dy: Tensor) -> Tensor:
    """The sum of its rows: in 16 bit on a card as a product, in half the time; one of fp32 would
    be less exact.
    """
    return (
        torch.mm(dy.new_ones(1, len(dy)), dy)[0]
        if dy.is_cuda and dy.element_size() == 2
        else dy.sum(0)
    )


def _of_downs(ctx: Any, x: Tensor, g: Tensor, seed: Tensor | None) -> list[Tensor]:
    """Gradients of all A."""
    g = g[:, : ctx.padding.used]
    if seed is None:  # no dropout
        found = product(g.t(), x, ctx.adapter_dtype)
    else:
        found = dropped_gradient_of_down(g, x, seed, ctx.dropout).to(ctx.adapter_dtype)
    return list(found.split(ctx.padding.ranks))


def merged_linear(
    x: Tensor,
    merged: Merged,
    adapters: Sequence[Adapter | None],
    padded: bool = False,
    gradient_padded: bool = False,
    remake: Remake | None = None,
    unread: bool = False,
    amaxes: tuple[Amax | None, Amax | None] = (None, None),
    kept: bool = False,
    stays: bool = False,
) -> Tensor:
    """The outputs of all layers side by side, ``[T, out]``; differentiable in x, weights, biases
    and adapters.

    Dropout is drawn once for all layers.

    Args:
        x: ``[T, in]``.
        adapters: of each layer, of the ranks that ``merged`` has padding for, or None; none at all
            leaves the padding as it is.
        padded, gradient_padded: x, and the gradient of what is returned, were made with the
            padding's columns behind each row, which are written to here.
        remake: makes x again for the backward pass, in which case x is not kept.
        unread: nobody reads the outputs, which are left as they are found: only the backward pass
            is wanted.
        amaxes: of x, and of the gradient of what is returned, which those who made them may have
            been told.
        kept: others keep x for the backward pass anyway, so that its quantised columns would only
            be more.
        stays: others keep what is returned for the backward pass, too, and nobody writes into it.

    Raises:
        ValueError: adapters differ in dropout or are of other ranks than the padding, or the base
            does not take so many rows.
    """
    there = [adapter for adapter in adapters if adapter is not None]
    dropouts = {adapter.dropout for adapter in there}
    if len(dropouts) > 1:
        raise ValueError(f"adapters of one input have dropouts {sorted(dropouts)}: give them one")
    if reason := merged.base.why_not(len(x)):
        raise ValueError(f"x has {len(x)} rows: {reason}")
    ranks = tuple(0 if adapter is None else len(adapter.a) for adapter in adapters)
    if there and ranks != merged.padding.ranks:
        raise ValueError(
            f"adapters have ranks {ranks}, the padding is for {merged.padding.ranks}: fuse the "
            "weights for these"
        )
    scales = [0.0 if adapter is None else adapter.scale for adapter in adapters]
    matrices = [
        *(x and x.a for x in adapters),
        *(x and x.b for x in adapters),
        *(x and x.magnitude for x in adapters),
    ]
    padding = merged.padding if there else None
    dropout = dropouts.pop() if dropouts else 0.0
    wants_columns = (
        torch.is_grad_enabled() and merged.base.trained and remake is None and not (kept or there)
    )
    if any(
        adapter.magnitude is not None for adapter in there
    ):  # whose gradients are made of the outputs
        unread = False
        stays = stays or not torch.is_grad_enabled()
        amaxes = (amaxes[0], None)
    options = (
        merged,
        padding,
        scales,
        dropout,
        (padded, gradient_padded),
        remake,
        unread,
        amaxes,
        wants_columns,
        stays,
    )
    return _MergedLinear.apply(x, *options, *merged.storage.parts, *merged.biases, *matrices)


def merged_linear_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    adapters: Sequence[Adapter | None],
) -> Tensor:
    dropped = F.dropout(
        x, max((adapter.dropout for adapter in adapters if adapter is not None), default=0.0)
    )
    outputs = []
    for weight, bias, adapter in zip(weights, biases, adapters):
        y = F.linear(x, weight, bias if adapter is None or adapter.magnitude is None else None)
        if adapter is not None:
            down = F.linear(dropped, adapter.a.to(x.dtype))
            y = y + adapter.scale * F.linear(down, adapter.b.to(x.dtype))
        if adapter is not None and adapter.magnitude is not None:
            norms = (weight + adapter.scale * adapter.b @ adapter.a).detach().norm(dim=1)
            y = (y * (adapter.magnitude / norms) + (0 if bias is None else bias)).to(x.dtype)
        outputs.append(y)
    return torch.cat(outputs, 1)
