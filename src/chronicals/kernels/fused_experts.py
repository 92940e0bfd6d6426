"""The experts of a layer as one differentiable function.

It consists of dispatch, gate and up, gated unit, down, and the sum over the experts of a token:

    y_t = Σ_j p_tj · down(unit(up(x_t))) of expert e_tj        up(x) = x W₁ᵀ + b₁ + s₁ (x A₁ᵀ) B₁ᵀ,   down likewise

Saved for backward: the input of the unit ``[S, 2F]``, the thin sides of adapters, and x if the
first weight or its adapter learns. Rows of x are not copied to their experts, and down's outputs
are not saved (see ``expert_glu.py``). No product is made for the gradient of a frozen weight. Every
shape is static and the host never waits, so CUDA graphs can capture the function.

In FP8 (``fp8_grouped_product.py``) the products with W and with its transpose take e4m3. x and dy
are quantised once a token, before they go to k experts; the unit and dh are quantised by the
kernels that compute them. Adapters, biases and gradients of weights read 16 bit, and so do the
rows of few tokens, which multiply the weights in FP8 as they are (``few_tokens_product.py``).

FLOP: ``6 · S · D · F`` forward and twice that backward where both weights are trained.

Shapes: T tokens, k experts of a token, S = T · k pairs, E experts, D model width, F inner width, R
rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from chronicals.kernels.expert_combine import expert_combine
from chronicals.kernels.expert_dispatch import Dispatch, dispatch_to_experts
from chronicals.kernels.expert_glu import (
    Gate,
    expert_glu,
    expert_glu_gradient,
    expert_glu_reference,
)
from chronicals.kernels.expert_stacks import ExpertStack, StackIn16Bits, StackInFP8
from chronicals.kernels.few_tokens_product import are_few_tokens, few_tokens_product
from chronicals.kernels.fp8 import Scaled, fp8_quantize
from chronicals.kernels.fp8_grouped_product import fp8_grouped_product
from chronicals.kernels.grouped_product import grouped_product
from chronicals.kernels.grouped_weight_gradient import (
    GATHER_FIRST,
    GATHER_NONE,
    GATHER_SECOND,
    grouped_weight_gradient,
)
from chronicals.kernels.launch import differentiable_once
from chronicals.kernels.low_rank_term import LowRankTerm
from chronicals.kernels.products import product

MIN_PRODUCT_COLUMNS = 16
"""Columns of ones by which a bias's gradient is a grouped product, the fewest that one takes."""


class InFP8(Protocol):
    """The weights of all experts in e4m3, with one scale for each expert."""

    @property
    def column_slots(self) -> Tensor | None:
        """Place of each expert's matrix in ``columns``, int32 ``[E]``; None: as they are numbered."""

    def rows(self) -> Scaled:
        """Return ``[E, N, K]``, for ``y = x Wᵀ``."""

    def columns(self, scale: Tensor) -> Scaled:
        """Return ``[E, K, N]``, for ``dx = dy W``; ``scale`` is that of ``rows`` in the forward."""


class PackedStack(Protocol):
    """A frozen weight of all experts that is dequantised by a call, in forward and in backward."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        """Return the dense values."""

    def expert_stack(self, transposed: bool) -> ExpertStack | None:
        """Return the weight as products of few tokens read it, or None if they cannot.

        ``transposed`` says that the values are ``[E, K, N]``.
        """

    @property
    def dense_slots(self) -> Tensor | None:
        """Place of each expert in what a call returns, int32 ``[E]``; None: as they are numbered."""


def of_slots(values: Tensor, slots: Tensor) -> Tensor:
    """Return the values of experts, given those of slots; any for experts in no slot."""
    return values[slots.long().clamp(min=0)]


class ExpertWeights(NamedTuple):
    """The weights of one of the two products, of all experts.

    Attributes:
        weight: ``[E, N, K]``, or ``[E, K, N]`` if ``transposed``. A frozen weight may instead be a
            ``PackedStack``.
        bias: ``[E, N]``.
        down, up: A ``[E, R, K]`` and B ``[E, N, R]`` of an adapter.
        scale: scale s of the adapter.
        in_fp8: used for the products instead of ``weight``, which is then read only to train it.
        slots: int32 ``[E]``, the slot of each expert, if weight or rows of ``in_fp8``, and bias, are
            those of slots and not of experts; -1 for experts without rows.
    """

    weight: Any
    transposed: bool = False
    bias: Tensor | None = None
    down: Tensor | None = None
    up: Tensor | None = None
    scale: float = 1.0
    in_fp8: InFP8 | None = None
    slots: Tensor | None = None

    @property
    def weight_ENK(self) -> Tensor:
        """The weight as ``[E, N, K]``."""
        weight: Tensor = self.weight if isinstance(self.weight, Tensor) else self.weight()
        return weight.mT if self.transposed else weight

    @property
    def expert_stack(self) -> ExpertStack | None:
        """The weight as products of few tokens read it; None if they read dense values."""
        if isinstance(self.weight, Tensor):
            return StackIn16Bits(self.weight_ENK)
        stack: ExpertStack | None = self.weight.expert_stack(self.transposed)
        return stack

    @property
    def dense_slots(self) -> Tensor | None:
        """The place of each expert in ``weight_ENK``; None if they are in their order."""
        if self.weight is None or isinstance(self.weight, Tensor):
            return self.slots
        places: Tensor | None = self.weight.dense_slots
        return places

    @property
    def bias_of_experts(self) -> Tensor | None:
        """The bias ``[E, N]``, in the order of experts."""
        if self.bias is None or self.slots is None:
            return self.bias
        return of_slots(self.bias, self.slots)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes E, N and K."""
        count, narrow, wide = self.weight.shape
        return (count, wide, narrow) if self.transposed else (count, narrow, wide)

    @property
    def held(self) -> Tensor | None:
        """The weight if the backward pass reads it as a saved tensor, else None."""
        frozen = self.in_fp8 is not None and not getattr(self.weight, "requires_grad", False)
        return self.weight if isinstance(self.weight, Tensor) and not frozen else None

    def with_tensors(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        down: Tensor | None,
        up: Tensor | None,
    ) -> ExpertWeights:
        """Return the same with these tensors; ``weight`` is None if it is not ``held``."""
        chosen = self.weight if weight is None else weight
        return ExpertWeights(chosen, self.transposed, bias, down, up, self.scale, self.in_fp8)


class ProductInput(NamedTuple):
    """The input of a product.

    Attributes:
        dense: in the dtype of x, if something reads it.
        in_fp8: with scales of rows, if the product takes both operands in FP8.
    """

    dense: Tensor | None
    in_fp8: Scaled | None = None


def apply_product(
    x: ProductInput,
    of: ExpertWeights,
    to: Dispatch,
    of_tokens: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return ``y = x Wᵀ`` with adapter and bias.

    Also returns the adapter's thin product ``s · x Aᵀ``, ``[S, R]``, None without an adapter; and
    the weight's scales, None unless the product ran in FP8.
    """
    thin = adapted = None
    if of.down is not None and of.up is not None and x.dense is not None:
        thin = grouped_product(x.dense, of.down, to, of_tokens, factor=of.scale)
        adapted = LowRankTerm(thin, of.up)
    if of.in_fp8 is None:
        assert x.dense is not None
        return _product(x.dense, of, to, of_tokens, adapted), thin, None
    weight = of.in_fp8.rows()
    if x.in_fp8 is None:
        assert x.dense is not None
        stack = StackInFP8.of_experts(*weight)
        y = few_tokens_product(x.dense, stack, to, of_tokens, of.bias, adapted, of.slots)
        return y, thin, weight.scale
    if of.slots is not None:
        weight = Scaled(weight.values, of_slots(weight.scale, of.slots))
    y = fp8_grouped_product(
        x.in_fp8,
        weight,
        to,
        of_tokens,
        of.bias_of_experts,
        adapted,
        dtype,
        fast=True,
        slots=of.slots,
    )
    return y, thin, weight.scale


def _product(
    x: Tensor, of: ExpertWeights, to: Dispatch, of_tokens: bool, adapted: LowRankTerm | None
) -> Tensor:
    """Return ``x Wᵀ`` with adapter and bias, in 16 bit or more.

    The rows alone decide how, not whether a gradient is wanted: a pass that is recomputed with one
    gives the same values.
    """
    if are_few_tokens(x, to) and x.dtype == of.weight.dtype:
        stack = of.expert_stack
        if stack is not None and to.tokens <= stack.most_tokens:
            return few_tokens_product(x, stack, to, of_tokens, of.bias, adapted, of.slots)
    bias, slots = of.bias_of_experts, of.dense_slots
    return grouped_product(x, of.weight_ENK, to, of_tokens, bias, adapted, slots=slots)


def input_gradient(
    dy: ProductInput,
    of: ExpertWeights,
    to: Dispatch,
    of_tokens: bool,
    scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of a product's input, and the adapter's thin product ``s · dy B``.

    Args:
        dy: gradient of the product's output.
        of: the weights of the product.
        to: the dispatch of the rows.
        of_tokens: gather the rows of dy from tokens.
        scale: the weight's scales from ``apply_product``, in FP8.
        dtype: dtype of the gradient, in FP8.
    """
    thin = adapted = None
    if of.down is not None and of.up is not None:
        assert dy.dense is not None
        thin = grouped_product(dy.dense, of.up.mT, to, of_tokens, factor=of.scale)
        adapted = LowRankTerm(thin, of.down.mT)
    if of.in_fp8 is None:
        assert dy.dense is not None
        weight = of.weight_ENK.mT
        slots = of.dense_slots
        d_x = grouped_product(dy.dense, weight, to, of_tokens, adapted=adapted, slots=slots)
        return d_x, thin
    assert dy.in_fp8 is not None and scale is not None
    columns = of.in_fp8.columns(scale)
    slots = of.in_fp8.column_slots
    d_x = fp8_grouped_product(
        dy.in_fp8, columns, to, of_tokens, adapted=adapted, dtype=dtype, slots=slots
    )
    return d_x, thin


def _of_weight(dy: Tensor, x: Tensor, of: ExpertWeights, to: Dispatch, of_tokens: int) -> Tensor:
    """Return the weight's gradient ``dyᵀ x`` in its stored layout.

    ``of_tokens`` says which of dy and x is gathered from tokens (``GATHER_FIRST``: dy).
    """
    if not of.transposed:
        return grouped_weight_gradient(dy, x, to, of_tokens, dtype=of.weight.dtype)
    other = {GATHER_FIRST: GATHER_SECOND, GATHER_SECOND: GATHER_FIRST, GATHER_NONE: GATHER_NONE}[
        of_tokens
    ]
    return grouped_weight_gradient(x, dy, to, other, dtype=of.weight.dtype)


class _Settings(NamedTuple):
    """Arguments of the function that are no tensors or are not differentiated.

    Attributes:
        gate: the gated unit.
        first, second: both products without the tensors that the backward pass saves.
    """

    gate: Gate
    first: ExpertWeights
    second: ExpertWeights


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shares: Tensor,
        w1: Tensor | None,
        b1: Tensor | None,
        a1: Tensor | None,
        u1: Tensor | None,
        w2: Tensor | None,
        b2: Tensor | None,
        a2: Tensor | None,
        u2: Tensor | None,
        experts: Tensor,
        to: Dispatch,
        settings: _Settings,
    ) -> Tensor:
        first = settings.first.with_tensors(w1, b1, a1, u1)
        second = settings.second.with_tensors(w2, b2, a2, u2)
        in_fp8 = first.in_fp8 is not None and not are_few_tokens(x, to)
        of_x = ProductInput(x, fp8_quantize(x, "row")[0] if in_fp8 else None)
        h, thin, of_first = apply_product(of_x, first, to, True, x.dtype)
        del of_x  # in FP8 it holds a copy of x
        dense = not in_fp8 or a2 is not None
        unit = ProductInput(*expert_glu(h, settings.gate, dense, in_fp8))
        z, _, of_second = apply_product(unit, second, to, False, x.dtype)
        ctx.kept = settings
        ctx.sizes = (to.each, to.rows)
        read = x if ctx.needs_input_grad[2] or ctx.needs_input_grad[4] else None
        ctx.save_for_backward(
            read,
            shares,
            h,
            thin,
            w1,
            b1,
            a1,
            u1,
            w2,
            b2,
            a2,
            u2,
            of_first,
            of_second,
            experts,
            *to[:4],
        )
        return expert_combine(z, to.places_S, to.each, shares.reshape(-1))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (
            x,
            shares,
            h,
            thin,
            w1,
            b1,
            a1,
            u1,
            w2,
            b2,
            a2,
            u2,
            of_first,
            of_second,
            experts,
            *placed,
        ) = ctx.saved_tensors
        settings: _Settings = ctx.kept
        to = Dispatch(*placed, *ctx.sizes)
        first = settings.first.with_tensors(w1, b1, a1, u1)
        second = settings.second.with_tensors(w2, b2, a2, u2)
        wanted = dict(
            zip(
                ("x", "shares", "w1", "b1", "a1", "u1", "w2", "b2", "a2", "u2"),
                ctx.needs_input_grad,
            )
        )
        dy = dy.contiguous()
        of_dy = ProductInput(dy, None if second.in_fp8 is None else fp8_quantize(dy, "row")[0])
        g, thin_dy = input_gradient(of_dy, second, to, True, of_second, dy.dtype)
        del of_dy  # in FP8 it holds a copy of dy
        flat = shares.reshape(-1)
        has_unit = wanted["w2"] or wanted["a2"] or wanted["u2"]
        in_fp8 = first.in_fp8 is not None
        dense = not in_fp8 or wanted["w1"] or wanted["b1"] or a1 is not None
        gradient, scaled, unit, d_shares = expert_glu_gradient(
            g, h, flat, to.order_S, settings.gate, has_unit, dense, in_fp8
        )
        d_h = ProductInput(gradient, scaled)
        gradients: dict[str, Tensor] = {}
        if unit is not None and wanted["w2"]:
            gradients["w2"] = _of_weight(dy, unit, second, to, GATHER_FIRST)
        if unit is not None and thin_dy is not None and a2 is not None:
            gradients["a2"] = grouped_weight_gradient(thin_dy, unit, to, dtype=a2.dtype)
            thin_unit = grouped_product(unit, a2, to, factor=second.scale)
            gradients["u2"] = grouped_weight_gradient(
                dy, thin_unit, to, GATHER_FIRST, dtype=a2.dtype
            )
        del unit, g
        if b2 is not None:
            d_shares = d_shares.view_as(shares) + product(dy, b2.t(), d_shares.dtype).gather(
                1, experts
            )
            if wanted["b2"]:
                # The shares as [T, E], zero for experts that a token did not choose.
                of_tokens = shares.new_zeros(len(shares), len(b2), dtype=dy.dtype)
                of_tokens.scatter_add_(1, experts, shares.to(dy.dtype))
                gradients["b2"] = product(of_tokens.t(), dy, b2.dtype)
        gradients["shares"] = d_shares.view_as(shares).to(shares.dtype)
        d_x, thin_dh = input_gradient(d_h, first, to, False, of_first, dy.dtype)
        if gradient is not None:
            if wanted["w1"]:
                gradients["w1"] = _of_weight(gradient, x, first, to, GATHER_SECOND)
            if thin_dh is not None and wanted["a1"]:
                gradients["a1"] = grouped_weight_gradient(
                    thin_dh, x, to, GATHER_SECOND, dtype=dy.dtype
                )
            if thin is not None and wanted["u1"]:
                gradients["u1"] = grouped_weight_gradient(gradient, thin, to, dtype=dy.dtype)
            if b1 is not None and wanted["b1"]:
                ones = gradient.new_ones(len(gradient), MIN_PRODUCT_COLUMNS)
                gradients["b1"] = grouped_weight_gradient(ones, gradient, to, dtype=b1.dtype)[:, 0]
        if wanted["x"]:
            gradients["x"] = expert_combine(d_x, to.places_S, to.each)
        return tuple(gradients.get(name) if needed else None for name, needed in wanted.items())


def fused_experts(
    x: Tensor,
    experts: Tensor,
    shares: Tensor,
    first: ExpertWeights,
    second: ExpertWeights,
    gate: Gate | None = None,
) -> Tensor:
    """Run each token through its experts and sum their outputs, weighted by their shares.

    Differentiable in x, the shares and all tensors of both products that require a gradient.

    Args:
        x: ``[T, D]``, in the dtype of the weights.
        experts: int64 ``[T, k]``, below E.
        shares: ``[T, k]``, factors of the experts' outputs; any dtype.
        first: gate and up, ``[E, 2F, D]``.
        second: down, ``[E, D, F]``.
        gate: the gated unit; SwiGLU by default.

    Returns:
        ``[T, D]`` in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    gate = gate or Gate()
    count, inner, width = first.sizes
    if (
        x.ndim != 2
        or x.shape[1] != width
        or experts.shape != shares.shape
        or len(experts) != len(x)
    ):
        raise ValueError(
            f"x is {tuple(x.shape)}, experts {tuple(experts.shape)}, shares "
            f"{tuple(shares.shape)}: expected [T, {width}], "
            "[T, k] and [T, k]"
        )
    if second.sizes != (count, width, inner // 2):
        raise ValueError(
            f"down is {second.sizes}: gate and up are {first.sizes}, so it must be "
            f"{(count, width, inner // 2)}"
        )
    if not x.dtype == first.weight.dtype == second.weight.dtype:
        raise ValueError(
            f"x is {x.dtype}, the weights {first.weight.dtype} and {second.weight.dtype}: they "
            "must have one dtype"
        )
    if (first.in_fp8 is None) != (second.in_fp8 is None):
        raise ValueError("in_fp8: one of the two products has it; give it to both or to none")
    to = dispatch_to_experts(experts, first.sizes[0])
    of_first = first.held, first.bias, first.down, first.up
    of_second = second.held, second.bias, second.down, second.up
    bare = [
        ExpertWeights(
            of.weight if of.held is None else None,
            of.transposed,
            scale=of.scale,
            in_fp8=of.in_fp8,
        )
        for of in (first, second)
    ]
    settings = _Settings(gate, *bare)
    y: Tensor = _FusedExperts.apply(
        x.contiguous(), shares, *of_first, *of_second, experts, to, settings
    )
    return y


def fused_experts_reference(
    x: Tensor,
    experts: Tensor,
    shares: Tensor,
    first: ExpertWeights,
    second: ExpertWeights,
    gate: Gate | None = None,
) -> Tensor:
    """Compute ``fused_experts`` in plain torch, expert by expert; differentiable by autograd."""

    def through(rows: Tensor, of: ExpertWeights, expert: int) -> Tensor:
        y = rows @ of.weight_ENK[expert].t()
        if of.down is not None and of.up is not None:
            y = y + of.scale * (rows @ of.down[expert].t() @ of.up[expert].t())
        return y if of.bias is None else y + of.bias[expert]

    y = x.new_zeros(*experts.shape, x.shape[1])
    for expert in range(first.sizes[0]):
        token, rank = torch.where(experts == expert)
        if len(token):
            unit = expert_glu_reference(through(x[token], first, expert), gate or Gate())
            y = y.index_put(
                (token, rank), through(unit, second, expert) * shares[token, rank, None].to(x.dtype)
            )
    return y.sum(1)
