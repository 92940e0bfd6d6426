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
(``addmm``). With dropout, g A is masked and added in either case. ``x`` is ``[T, in]``, adapters
are fp32 (Hu et al., 2022, section 4.1). Operations: those of the frozen layers with ``in + R`` and
``out + R`` in place of ``in`` and ``out``, and four products as wide as R, the sum of the ranks
rounded up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.adapter_gradients import adapter_gradients
from chronicals.kernels.column_scaling import scale_columns, scaled_columns_gradient
from chronicals.kernels.dropped_products import (
    add_dropped_product_,
    draw_seed,
    dropped_down,
    dropped_gradient_of_down,
)
from chronicals.kernels.fp8 import Amax, Scaled
from chronicals.kernels.launch import differentiable_once, in_rows, with_padding
from chronicals.kernels.linear_head import Adapter
from chronicals.kernels.products import add_product_, product, product_into
from chronicals.lora.magnitude import SHORTEST, RowNorms
from chronicals.quantization import (
    AdapterPadding,
    Base,
    Dense,
    Operand,
    PackedWeight,
    Storage,
    columns_for,
)

ProductFormat = Callable[[Dense, torch.device], Base]
"""Makes the base that multiplies in place of a dense weight, on a device."""


@dataclass(frozen=True)
class MergedWeights:
    """The weights of some linear layers of one input, as one.

    Attributes:
        storage: memory of the parameters' data; host memory for some formats.
        base: the weight that multiplies: ``storage`` itself, or one made of it in another format.
        padding: buffers of the adapters.
        biases: bias of each layer, or None.
        bias: all biases in one tensor, ``[out]``, or None.
        norms: norms of the rows of the weights with the adapters added (DoRA).
    """

    storage: Storage
    base: Base
    padding: AdapterPadding
    biases: tuple[Tensor | None, ...]
    bias: Tensor | None
    norms: RowNorms = field(default_factory=RowNorms, compare=False)

    @classmethod
    def in_place(
        cls, weight: Tensor, bias: Tensor | None, product_format: ProductFormat | None = None
    ) -> MergedWeights:
        """Take one layer without an adapter; its data are not moved."""
        storage = Dense(weight.detach(), (weight,))
        padding = AdapterPadding.beside(storage, (len(weight),), (0,))
        base = storage if product_format is None else product_format(storage, weight.device)
        return cls(storage, base, padding, (bias,), None if bias is None else bias.detach())

    @classmethod
    def side_by_side(
        cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> MergedWeights:
        """Take several layers without adapters whose weights and biases are adjacent already.

        Nothing is moved.
        """
        sizes = tuple(map(len, weights))
        first = weights[0].detach()
        width = weights[0].shape[1]
        storage = Dense(first.as_strided((sum(sizes), width), (width, 1)), weights)
        bias = None if biases[0] is None else biases[0].detach().as_strided((sum(sizes),), (1,))
        return cls(
            storage,
            storage,
            AdapterPadding.beside(storage, sizes, (0,) * len(sizes)),
            tuple(biases),
            bias,
        )

    @classmethod
    def fused(
        cls,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        ranks: Sequence[int],
        product_format: ProductFormat | None = None,
        device: torch.device | None = None,
    ) -> MergedWeights:
        """Copy the weights and biases into one storage, with padding for adapters of these ranks.

        Args:
            weights: weight of each layer, ``[out, in]``.
            biases: bias of each layer, or None.
            ranks: rank of each layer's adapter, 0 if it has none.
            product_format: format of the products; by default that of the weights.
            device: device of the products if the weights are to be in host memory.

        Raises:
            ValueError: some layers have a bias and some have none.
        """
        sizes = tuple(map(len, weights))
        bias = _as_one(biases)
        if device is None:
            storage = Dense.fused(weights, columns_for(ranks))
            padding = AdapterPadding.beside(storage, sizes, ranks)
            device = weights[0].device
        else:
            # A weight in host memory has no padding; that on the device is in buffers of its own.
            storage = Dense.fused(weights, device="cpu")
            columns = columns_for(ranks)
            down = storage.matrix.new_zeros((columns, storage.width), device=device)
            up = storage.matrix.new_zeros((storage.outputs, columns), device=device)
            padding = AdapterPadding(down, up, sizes, tuple(ranks))
        return cls(
            storage,
            storage if product_format is None else product_format(storage, device),
            padding,
            tuple(biases),
            bias,
        )

    @classmethod
    def packed(
        cls, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None], ranks: Sequence[int]
    ) -> MergedWeights:
        """Take packed weights of one format, which are not moved, and copies of the biases.

        The padding for adapters of these ranks is in the buffer of the dense values.

        Raises:
            ValueError: some layers have a bias and some have none.
        """
        base = weights[0].base(weights, columns_for(ranks), ranks)
        padding = AdapterPadding.beside(base.buffer, [weight.shape[0] for weight in weights], ranks)
        return cls(base, base, padding, tuple(biases), _as_one(biases))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of outputs of each layer."""
        return self.padding.sizes

    def holds(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
        """Return whether this was made of these parameters and their data have not moved since."""
        places = [None] * len(biases) if self.bias is None else self.bias.split(self.sizes)
        parts = zip(
            (*self.storage.parts, *self.biases),
            (*weights, *biases),
            (*self.storage.places, *places),
        )
        for known, current, place in parts:
            if known is not current:
                return False
            if current is not None and (
                place is None
                or current.data_ptr() != place.data_ptr()
                or current.dtype != place.dtype
                or current.shape != place.shape
                or current.stride() != place.stride()
            ):
                return False
        return True

    def of_rows(self, ranges: Sequence[Sequence[slice]]) -> MergedWeights:
        """Return copies of some outputs of each layer.

        They are for products without gradients, and do not see later changes of the weights.

        Args:
            ranges: of each layer its rows, ascending.
        """
        dense = self.base.of_rows(ranges, self.padding.columns)
        sizes = tuple(len(part) for part in dense.parts)
        biases = tuple(
            None if bias is None else torch.cat([bias.detach()[rows] for rows in own])
            for bias, own in zip(self.biases, ranges)
        )
        return replace(
            self,
            storage=dense,
            base=dense,
            padding=AdapterPadding.beside(dense, sizes, self.padding.ranks),
            biases=biases,
            bias=_as_one(biases),
            norms=RowNorms(),
        )

    def in_format(self, product_format: ProductFormat) -> MergedWeights:
        """Return a copy whose products run in another format than its dense weight."""
        base = product_format(self.storage.plain_weight, self.padding.up.device)
        return replace(self, base=base)

    def densely(self) -> MergedWeights:
        """Return a copy that multiplies by dense values of its packed weights, in their own memory."""
        dense = self.storage.copied()
        padding = AdapterPadding.beside(dense, self.sizes, self.padding.ranks)
        return replace(self, base=dense, padding=padding)

    def in_16_bit(self) -> MergedWeights:
        """Return a copy whose products run in the format of the storage.

        A storage in host memory is copied to the device.
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
            padding=AdapterPadding.beside(padded, self.sizes, self.padding.ranks),
        )


def _as_one(biases: Sequence[Tensor | None]) -> Tensor | None:
    """Return copies of the biases in one tensor, or None if no layer has one.

    Raises:
        ValueError: some layers have a bias and some have none.
    """
    tensors = [bias.detach() for bias in biases if bias is not None]
    if not tensors:
        return None
    if len(tensors) < len(biases):
        raise ValueError("some of the layers have a bias and some have none")
    return torch.cat(tensors)


def _extended(x: Tensor, columns: int, made_with_padding: bool) -> Tensor:
    """Return ``[T, width + columns]`` whose first columns are ``x``.

    It shares the memory of x if x was made with padding columns; else x is copied.
    """
    rows, width = x.shape
    if made_with_padding and x.stride() == (width + columns, 1):
        # Taken from x.data, whose version autograd does not track: writing behind the rows changes
        # nothing of x. The view gets a version of its own, since a saved copy of x (offload) does
        # not contain the columns.
        extended = x.data.as_strided((rows, width + columns), x.stride())
        torch.autograd.graph.increment_version(extended)
        return extended
    extended = x.new_empty((rows, width + columns))
    extended[:, :width].copy_(x)
    return extended


@dataclass(frozen=True)
class Remake:
    """The recomputation of x in the backward pass: ``make(source)``, which is saved for x.

    Attributes:
        make: function of the source.
        source: a tensor that is kept anyway.
    """

    make: Callable[[Tensor], Tensor]
    source: Tensor


@dataclass(frozen=True)
class ProductOptions:
    """The options of ``_MergedLinear``: all its arguments but tensors and the remake of x.

    Attributes:
        merged: the weights.
        padding: buffers that the adapters are written to; None without adapters.
        scales: s of each layer's adapter.
        dropout: probability with which the adapters drop an element of x.
        x_padded, gradient_padded: whether x, and the gradient of the outputs, were made with the
            padding's columns behind each row.
        skip_output: leave the outputs uninitialised; only the backward pass is wanted.
        x_amax, gradient_amax: cells with the largest absolute value of x and of the gradient of the
            outputs, or None.
        saves_columns: save the quantised columns of x for the weight gradient instead of x.
        output_is_saved: the caller saves the outputs unmodified.
        dtype: dtype of the outputs; None for that of x.
    """

    merged: MergedWeights
    padding: AdapterPadding | None
    scales: list[float]
    dropout: float
    x_padded: bool
    gradient_padded: bool
    skip_output: bool
    x_amax: Amax | None
    gradient_amax: Amax | None
    saves_columns: bool
    output_is_saved: bool
    dtype: torch.dtype | None


_Value = TypeVar("_Value")


class LayerValues(NamedTuple, Generic[_Value]):
    """A value for each tensor of each layer: the tensor, its gradient or whether that is needed."""

    weights: Sequence[_Value]
    biases: Sequence[_Value]
    downs: Sequence[_Value]
    ups: Sequence[_Value]
    magnitudes: Sequence[_Value]

    @classmethod
    def split(cls, values: Sequence[_Value]) -> LayerValues[_Value]:
        """Take the values from one list: those of all weights, of all biases, of all A and so on."""
        count = len(values) // len(cls._fields)
        return cls(*(values[start : start + count] for start in range(0, len(values), count)))


class _MergedLinear(torch.autograd.Function):
    """The product with its backward pass. ``tensors`` are those of ``LayerValues`` in a row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        options: ProductOptions,
        remake: Remake | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        merged = options.merged
        padding = options.padding
        base = merged.base
        layers = LayerValues.split(tensors)
        has_magnitudes = any(magnitude is not None for magnitude in layers.magnitudes)
        ctx.options = options

        rows = x  # with adapters [T, in + R]: u stands behind each row of x
        seed = None
        ctx.written = None
        if padding is not None:
            ctx.written = padding.write(layers.downs, layers.ups, options.scales)
            rows = _extended(x, padding.columns, options.x_padded)
            seed = draw_seed(x) if options.dropout else None
            _down(padding, x, seed, options.dropout, rows[:, base.width :])

        multiplied = rows if base.padded or padding is None else rows[:, : base.width]
        amax = None
        if options.x_amax is not None and (options.saves_columns or not options.skip_output):
            amax = options.x_amax.take(x)
        operand = base.operand(multiplied, not options.skip_output, options.saves_columns, amax)
        if options.skip_output:
            y = rows.new_empty((len(rows), base.outputs))
        else:
            y = base.forward(operand, None if has_magnitudes else merged.bias, options.dtype)
            if padding is not None and not base.padded:
                add_product_(y, rows[:, base.width :], padding.up.t())
        scaling: Sequence[Tensor | None] = (None, None, None)
        if has_magnitudes:
            y, *scaling = _with_magnitudes(options, y, layers.magnitudes)

        source = rows if remake is None else remake.source
        columns = operand.columns if options.saves_columns else None
        if columns is not None:
            source = columns.values
        ctx.keeps_columns = columns is not None
        ctx.scale_of_x = operand.scale
        _, _, _, *needed = ctx.needs_input_grad
        needs = LayerValues.split(needed)
        # the gradients of x, biases and magnitudes need the gradient of the outputs only
        needs_x_again = any(needs.weights) or any(needs.downs) or any(needs.ups)
        ctx.make = remake.make if remake is not None and needs_x_again else None
        ctx.save_for_backward(
            source if needs_x_again else None, seed, *scaling, *layers.downs, *layers.ups
        )
        adapters = (*layers.downs, *layers.ups, *layers.magnitudes)
        ctx.adapter_dtype = next((x.dtype for x in adapters if x is not None), None)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        options: ProductOptions = ctx.options
        merged = options.merged
        padding = options.padding
        base = merged.base
        count = len(merged.sizes)

        rows, seed, outputs, factor, lengths, *adapters = ctx.saved_tensors
        if padding is not None and not padding.holds(ctx.written):
            # another forward pass has written its adapters there since
            padding.write(adapters[:count], adapters[count:], options.scales)
        if ctx.make is not None:
            rows = _made_again(ctx, rows, seed)

        needs_x, _, _, *needed = ctx.needs_input_grad
        needs = LayerValues.split(needed)
        needs_adapters = any(needs.downs) or any(needs.ups)
        none: Sequence[Tensor | None] = [None] * count
        of_weights = of_biases = of_downs = of_ups = of_magnitudes = none

        dz = in_rows(upstream)
        dy = dz
        if factor is not None:
            dy, of_magnitudes = _of_magnitudes(ctx, dz, outputs, factor, lengths)
        extended = dy
        if padding is not None:
            extended = _extended(dy, padding.columns, options.gradient_padded or factor is not None)

        g = extended[:, base.outputs :]
        if needs_adapters and rows is not None:
            assert padding is not None
            of_ups = adapter_gradients(
                dy,
                padding.up,
                rows[:, base.width :],
                g,
                merged.sizes,
                padding.ranks,
                options.scales,
                ctx.adapter_dtype,
            )
        elif padding is not None:
            product_into(g, dy, padding.up)

        x = None if rows is None else _x_again(ctx, rows)
        needs_weights = any(needs.weights) and x is not None
        amax = None if options.gradient_amax is None else options.gradient_amax.take(upstream)
        operand = base.operand(dy, needs_x, needs_weights, amax)
        dx = _input_gradient(options, operand, extended, seed) if needs_x else None
        if needs_weights and x is not None:
            weight_gradient = base.weight_gradient(operand, x)
            if weight_gradient is not None:
                of_weights = weight_gradient.split(merged.sizes)
        if any(needs.biases):
            of_biases = _bias_gradient(dz).split(merged.sizes)
        if needs_adapters and x is not None:
            of_downs = _down_gradients(ctx, x.dense, g, seed)

        gradients = (*of_weights, *of_biases, *of_downs, *of_ups, *of_magnitudes)
        wanted = (gradient if need else None for gradient, need in zip(gradients, needed))
        return dx, None, None, *wanted


def _with_magnitudes(
    options: ProductOptions, y: Tensor, magnitudes: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``f ⊙ y + b``, and what the gradient of the magnitudes needs.

    That is the outputs, f, and the divisor of the sum over the outputs. The saved outputs are y, or
    the result if the caller saves that anyway and it has no bias, from which y would not be exact.
    """
    merged = options.merged
    assert options.padding is not None
    norms = merged.norms.of(merged.base, options.padding)
    parts = zip(magnitudes, norms.split(list(merged.sizes)), strict=True)
    factor = torch.cat([torch.ones_like(n) if m is None else m / n for m, n in parts])
    saves_result = options.output_is_saved and merged.bias is None
    z = scale_columns(y, factor, merged.bias, y if saves_result else None)
    if saves_result:
        return z, z, factor, factor * norms
    return z, y, factor, norms.clone()  # other adapters may overwrite the norms


def _of_magnitudes(
    ctx: Any, dz: Tensor, outputs: Tensor, factor: Tensor, lengths: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradient of y, and the gradients of the magnitudes.

    The former has the padding's columns behind its rows.
    """
    options: ProductOptions = ctx.options
    assert options.padding is not None
    sizes = options.merged.sizes
    _, _, _, *needed = ctx.needs_input_grad
    trained = any(LayerValues.split(needed).magnitudes)
    dy = with_padding(dz, dz.shape, options.padding.columns)
    sums = scaled_columns_gradient(dz, factor, dy, outputs if trained else None)
    if sums is None:
        return dy, [None] * len(sizes)
    gradient = torch.where(lengths.abs() <= SHORTEST, 0, sums / lengths)
    return dy, list(gradient.split(sizes))


def _x_again(ctx: Any, saved: Tensor) -> Operand:
    """Return x as ``Base.weight_gradient`` takes it: its quantised columns, or without padding."""
    if ctx.keeps_columns:
        return Operand(None, columns=Scaled(saved, ctx.scale_of_x))
    return Operand(saved[:, : ctx.options.merged.base.width], scale=ctx.scale_of_x)


def _made_again(ctx: Any, source: Tensor, seed: Tensor | None) -> Tensor:
    """Return x, with u behind its rows, as in the forward pass."""
    options: ProductOptions = ctx.options
    x: Tensor = ctx.make(source)
    if options.padding is None:
        return x
    rows = _extended(x, options.padding.columns, True)
    _down(options.padding, x, seed, options.dropout, rows[:, options.merged.base.width :])
    return rows


def _down(
    padding: AdapterPadding, x: Tensor, seed: Tensor | None, dropout: float, out: Tensor
) -> None:
    """Write u = dropout(x) Aᵀ to ``out``."""
    if seed is None:
        product_into(out, x, padding.down.t())
    else:
        dropped_down(x, padding.down[: padding.used], seed, dropout, out)


def _input_gradient(
    options: ProductOptions, dy: Operand, extended: Tensor, seed: Tensor | None
) -> Tensor:
    base = options.merged.base
    padding = options.padding
    if padding is None:
        return base.input_gradient(dy)
    if base.padded and seed is None:
        return base.input_gradient(Operand(extended))
    dx = base.input_gradient(dy)
    g = extended[:, base.outputs :][:, : padding.used]
    down = padding.down[: padding.used]
    if seed is None:
        return dx.addmm_(g, down)
    return add_dropped_product_(dx, g, down, seed, options.dropout)


def _bias_gradient(dy: Tensor) -> Tensor:
    """Return the sum of the rows of dy."""
    if dy.is_cuda and dy.element_size() == 2:
        # as a product in half the time of a sum; in fp32 a product would be less exact
        return torch.mm(dy.new_ones(1, len(dy)), dy)[0]
    return dy.sum(0)


def _down_gradients(ctx: Any, x: Tensor, g: Tensor, seed: Tensor | None) -> list[Tensor]:
    """Return the gradients of all A."""
    options: ProductOptions = ctx.options
    assert options.padding is not None
    g = g[:, : options.padding.used]
    if seed is None:  # no dropout
        gradient = product(g.t(), x, ctx.adapter_dtype)
    else:
        gradient = dropped_gradient_of_down(g, x, seed, options.dropout).to(ctx.adapter_dtype)
    return list(gradient.split(options.padding.ranks))


def merged_linear(
    x: Tensor,
    merged: MergedWeights,
    adapters: Sequence[Adapter | None],
    padded: bool = False,
    gradient_padded: bool = False,
    remake: Remake | None = None,
    skip_output: bool = False,
    amaxes: tuple[Amax | None, Amax | None] = (None, None),
    x_is_saved: bool = False,
    output_is_saved: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute the outputs of all layers side by side, ``[T, out]``.

    The function is differentiable in x, weights, biases and adapters. Dropout is drawn once for all
    layers.

    Args:
        x: ``[T, in]``.
        merged: the weights.
        adapters: adapter of each layer, with the ranks that ``merged`` has padding for, or None.
            Without any adapter the padding is not written to.
        padded: x was made with the padding's columns behind each row; they are overwritten.
        gradient_padded: the gradient of the outputs will be made with them, likewise.
        remake: computes x again in the backward pass; x is not saved then.
        skip_output: recomputation for the backward pass only; the returned tensor is uninitialised.
        amaxes: cells with the largest absolute value of x and of the gradient of the outputs, which
            the kernels that made these may have filled.
        x_is_saved: the caller saves x for the backward pass anyway, so that saving its quantised
            columns would take more memory.
        output_is_saved: the caller saves the outputs unmodified, so they are saved here in place of
            y.
        dtype: dtype of the outputs, that of x (the default) or fp32, which has no gradient.

    Raises:
        ValueError: adapters differ in dropout or have other ranks than the padding, the base cannot
            multiply so many rows, or outputs of another dtype than x would need a gradient.
    """
    present = [adapter for adapter in adapters if adapter is not None]
    dropouts = {adapter.dropout for adapter in present}
    if len(dropouts) > 1:
        raise ValueError(f"adapters of one input have dropouts {sorted(dropouts)}: give them one")
    if dtype not in (None, x.dtype) and torch.is_grad_enabled():
        raise ValueError(
            f"outputs in {dtype} of x in {x.dtype} have no gradient: use torch.no_grad"
        )
    reason = merged.base.why_not(len(x))
    if reason:
        raise ValueError(f"x has {len(x)} rows: {reason}")
    ranks = tuple(0 if adapter is None else len(adapter.a) for adapter in adapters)
    if present and ranks != merged.padding.ranks:
        raise ValueError(
            f"adapters have ranks {ranks}, the padding is for {merged.padding.ranks}: fuse the "
            "weights for these"
        )
    x_amax, gradient_amax = amaxes
    if any(adapter.magnitude is not None for adapter in present):
        # the gradients of magnitudes are computed from the outputs
        skip_output = False
        output_is_saved = output_is_saved or not torch.is_grad_enabled()
        gradient_amax = None
    options = ProductOptions(
        merged=merged,
        padding=merged.padding if present else None,
        scales=[0.0 if adapter is None else adapter.scale for adapter in adapters],
        dropout=dropouts.pop() if dropouts else 0.0,
        x_padded=padded,
        gradient_padded=gradient_padded,
        skip_output=skip_output,
        x_amax=x_amax,
        gradient_amax=gradient_amax,
        saves_columns=(
            torch.is_grad_enabled()
            and merged.base.trained
            and remake is None
            and not (x_is_saved or present)
        ),
        output_is_saved=output_is_saved,
        dtype=None if dtype == x.dtype else dtype,
    )
    layers: LayerValues[Tensor | None] = LayerValues(
        weights=merged.storage.parts,
        biases=merged.biases,
        downs=[None if adapter is None else adapter.a for adapter in adapters],
        ups=[None if adapter is None else adapter.b for adapter in adapters],
        magnitudes=[None if adapter is None else adapter.magnitude for adapter in adapters],
    )
    tensors = [tensor for kind in layers for tensor in kind]
    return _MergedLinear.apply(x, options, remake, *tensors)


def merged_linear_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    adapters: Sequence[Adapter | None],
) -> Tensor:
    """Return what ``merged_linear`` computes, ``[T, out]``, layer by layer in plain torch."""
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
