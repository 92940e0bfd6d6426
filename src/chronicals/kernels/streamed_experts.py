"""The frozen experts of a layer as one differentiable function, whose weights come in waves.

It computes what ``fused_experts`` does, to the bit, of weights that are not all on the device at
once:

    for each wave of experts e₀ … e₁ − 1:     their rows of h = up(x), unit(h) and z = down(unit)
    y_t = Σ_j p_tj · z of expert e_tj         in the order of ranks j, when all waves are done

Each row goes through the same products in the same order as if all weights were there, and the rows
of an expert are never divided. The backward pass asks for the waves again; adapters of experts are
on the device as a whole and learn, weights and biases do not. The host looks at the number of rows
of each expert once in a forward pass, and never in a backward pass. The kernels are those of
``fused_experts``, which reads records in place through ``slots``.

A pass that is captured as CUDA graphs is cut at the waves: the host asks for them at each replay, and
their products, launched one by one, read and write the memory that was captured. A decode step has
all experts of its tokens in one wave instead, whose products are captured too.

Shapes: T tokens, k experts of a token, S = T · k pairs, E experts, D model width, F inner width, R
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from chronicals.kernels.cuda_graphs import run_on_host
from chronicals.kernels.expert_combine import expert_combine
from chronicals.kernels.expert_dispatch import Dispatch, dispatch_to_experts
from chronicals.kernels.expert_glu import Gate, expert_glu, expert_glu_gradient
from chronicals.kernels.few_tokens_product import are_few_tokens
from chronicals.kernels.fp8 import fp8_quantize
from chronicals.kernels.fused_experts import (
    ExpertWeights,
    ProductInput,
    apply_product,
    input_gradient,
)
from chronicals.kernels.grouped_product import grouped_product
from chronicals.kernels.grouped_weight_gradient import (
    GATHER_FIRST,
    GATHER_SECOND,
    grouped_weight_gradient,
)
from chronicals.kernels.launch import differentiable_once
from chronicals.kernels.products import product


class Wave(NamedTuple):
    """Experts of consecutive numbers, of which those with rows are on the device.

    Attributes:
        first: the first expert.
        end: the expert behind the last one.
        gate_up: weights of the first product, of these experts.
        down: weights of the second product.
    """

    first: int
    end: int
    gate_up: ExpertWeights
    down: ExpertWeights


class Replacement(NamedTuple):
    """Outputs of the CPU in the place of those of a wave's products.

    Attributes:
        is_replaced: bool ``[S]``, the pairs whose rows are replaced.
        outputs: ``[S, D]``, the rows that replace them; any values for the other pairs.
    """

    is_replaced: Tensor
    outputs: Tensor

    def put_into(self, z: Tensor) -> Tensor:
        """Return ``z`` ``[S, D]`` with the rows replaced."""
        return torch.where(self.is_replaced[:, None], self.outputs, z)


class GraphWave(NamedTuple):
    """All experts in one wave, whose products a graph runs.

    Attributes:
        whole: the experts.
        by_cpu: outputs of those that the CPU computes when the graph runs; None if it never does.
    """

    whole: Wave
    by_cpu: Replacement | None


class HostExperts(Protocol):
    """Experts whose weights the CPU reads in its own memory."""

    @property
    def experts(self) -> list[int]:
        """Their numbers."""

    def outputs(self, x: Tensor, counts: Sequence[int], gate: Gate) -> Tensor:
        """Return their outputs ``[n, D]`` for rows ``x`` ``[n, D]`` on the CPU, sorted by expert.

        ``counts`` are the rows of each expert.
        """


class ExpertSource(Protocol):
    """The weights of a layer's experts."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes E, D and F."""

    @property
    def in_fp8(self) -> bool:
        """True if the products run in FP8."""

    @property
    def has_output_bias(self) -> bool:
        """True if the second product adds a bias."""

    def look(self, bounds: Tensor, x: Tensor) -> list[int]:
        """Return ``Dispatch.bounds`` on the host, the one time that it waits for the device.

        ``x`` ``[T, D]`` is the input of the experts.
        """

    def in_graph(self, to: Dispatch, x: Tensor, gate: Gate | None) -> GraphWave | None:
        """Return all experts as one wave if a pass of few tokens is being captured, else None.

        The capture is cut here: each replay lets the host bring the experts with rows into slots,
        whose numbers the wave's products read on the device.

        Args:
            to: the dispatch of all pairs.
            x: ``[T, D]``, the input of the experts.
            gate: the gated unit, if the CPU may compute some experts; None if it may not.
        """

    def on_host(self, bounds: Sequence[int], tokens: int) -> HostExperts | None:
        """Return experts that the CPU computes in a pass without gradients, or None.

        Waves then leave them out: what their rows get is replaced.
        """

    def waves(self, bounds: Sequence[int], backward: bool = False) -> Iterator[Wave]:
        """Yield waves in the order of experts, which together are all experts with rows.

        The weights of a wave are valid until the next one is asked for.
        """


class Adapter(NamedTuple):
    """Matrices of an adapter of one of the two products, A ``[E, R, K]`` and B ``[E, N, R]``."""

    down: Tensor | None = None
    up: Tensor | None = None
    scale: float = 1.0

    def beside(self, weights: ExpertWeights, wave: Wave) -> ExpertWeights:
        """Return weights with the adapter's matrices of the experts of a wave."""
        if self.down is None or self.up is None:
            return weights
        within = slice(wave.first, wave.end)
        return weights._replace(down=self.down[within], up=self.up[within], scale=self.scale)


class _Settings(NamedTuple):
    """Arguments of the function that are not differentiated.

    Attributes:
        source: the weights.
        gate: the gated unit.
        scales: scales of both adapters.
        in_training: gradients are recorded, so that a backward pass may follow.
    """

    source: ExpertSource
    gate: Gate
    scales: tuple[float, float]
    in_training: bool


class _Rows(NamedTuple):
    """The pairs of a wave.

    Attributes:
        within: its experts.
        at: places of its pairs among those of all experts.
        to: the dispatch of its pairs.
        up, down: weights of its products, with the adapters' matrices of its experts.
    """

    within: slice
    at: slice
    to: Dispatch
    up: ExpertWeights
    down: ExpertWeights

    @classmethod
    def of(
        cls, wave: Wave, to: Dispatch, bounds: Sequence[int], first: Adapter, second: Adapter
    ) -> _Rows:
        """Return the pairs of a wave; ``bounds`` are those of all experts, on the host."""
        return cls(
            slice(wave.first, wave.end),
            slice(bounds[wave.first], bounds[wave.end]),
            to.part(wave.first, wave.end, bounds),
            first.beside(wave.gate_up, wave),
            second.beside(wave.down, wave),
        )

    @classmethod
    def of_all(cls, wave: Wave, to: Dispatch, first: Adapter, second: Adapter) -> _Rows:
        """Return the pairs of a wave of all experts, of which the host knows nothing."""
        everything = slice(None)
        return cls(
            everything,
            everything,
            to,
            first.beside(wave.gate_up, wave),
            second.beside(wave.down, wave),
        )

    def outputs(
        self, of_x: ProductInput, gate: Gate, dense: bool, in_fp8: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the unit's input, the first adapter's thin product and the outputs of the pairs.

        Args:
            of_x: input of all tokens.
            gate: the gated unit.
            dense: the second product reads the unit's output in the dtype of x.
            in_fp8: it reads it in FP8.
            dtype: dtype of the results.
        """
        h, thin, _ = apply_product(of_x, self.up, self.to, True, dtype)
        unit = ProductInput(*expert_glu(h, gate, dense, in_fp8))
        return h, thin, apply_product(unit, self.down, self.to, False, dtype)[0]


class _HostRows(NamedTuple):
    """The rows of experts that the CPU computes.

    Attributes:
        experts: the experts.
        places: int64 ``[n]``, places of their pairs among those of all experts, on the device.
        x: ``[n, D]`` on the CPU, sorted by expert.
        counts: rows of each expert.
    """

    experts: HostExperts
    places: Tensor
    x: Tensor
    counts: list[int]

    @classmethod
    def of(cls, x: Tensor, experts: HostExperts, to: Dispatch, bounds: Sequence[int]) -> _HostRows:
        """Gather the rows from ``x`` ``[T, D]`` and copy them to the host, which waits for it."""
        spans = [(bounds[expert], bounds[expert + 1]) for expert in experts.experts]
        places = torch.cat([torch.arange(begin, end) for begin, end in spans]).to(x.device)
        rows = x[to.order_S[places].long() // to.each].cpu()
        return cls(experts, places, rows, [end - begin for begin, end in spans])

    def put_outputs(self, z: Tensor, gate: Gate) -> None:
        """Compute the outputs and put them at their places in ``z`` ``[S, D]``.

        Products of the device that were launched before run meanwhile.
        """
        found = self.experts.outputs(self.x, self.counts, gate)
        z[self.places] = found.to(z.device, non_blocking=True)


def _quantised(x: Tensor, in_fp8: bool) -> ProductInput:
    return ProductInput(x, fp8_quantize(x, "row")[0] if in_fp8 else None)


class _Outputs(NamedTuple):
    """Results of a forward pass for the pairs, in the order of places.

    Attributes:
        z: ``[S, D]``, outputs of the experts.
        h: ``[S, 2F]``, the unit's input; None if no backward pass follows.
        thin: ``[S, R]``, thin product of the first adapter; None unless a backward pass reads it.
    """

    z: Tensor
    h: Tensor | None
    thin: Tensor | None


class _Kept(NamedTuple):
    """Tensors of a forward pass that its backward pass reads.

    Attributes:
        x: ``[T, D]``; None unless A of the first adapter learns.
        h, thin: as in ``_Outputs``.
        shares_S: ``[S]``, factors of the outputs, in the order of places.
    """

    x: Tensor | None
    h: Tensor
    thin: Tensor | None
    shares_S: Tensor


class _Gradients(NamedTuple):
    """Results of a backward pass over all waves.

    Attributes:
        rows: ``[S, D]``, of the rows of x.
        shares_S: ``[S]``, of the shares, without what biases add.
        biases: ``[E, D]``, not a gradient: biases of the outputs; None if there are none.
        a1, u1, a2, u2: of the matrices of both adapters; None of those that do not learn. Zeros
            where an expert has no rows.
    """

    rows: Tensor
    shares_S: Tensor
    biases: Tensor | None
    a1: Tensor | None
    u1: Tensor | None
    a2: Tensor | None
    u2: Tensor | None


class _Waves:
    """The waves of a layer's experts in a forward pass and in the backward pass of it.

    The host asks for them, in a captured pass at each replay. So it keeps no tensor, and what the
    forward pass saw is here for the backward pass of the same replay.

    Args:
        settings: arguments of the function.

    Attributes:
        bounds: those of the dispatch, on the host, since the last forward pass.
    """

    def __init__(self, settings: _Settings):
        self.source = settings.source
        self.gate = settings.gate
        self.bounds: list[int] = []

    def put_outputs(
        self, of_x: ProductInput, to: Dispatch, adapters: tuple[Adapter, Adapter], outputs: _Outputs
    ) -> None:
        """Compute the forward pass of all pairs, and write it to ``outputs``.

        Args:
            of_x: input of all tokens; ``dense`` is there.
            to: the dispatch.
            adapters: those of both products.
            outputs: memory for the results.
        """
        x = of_x.dense
        assert x is not None
        in_fp8 = of_x.in_fp8 is not None
        dense = not in_fp8 or adapters[1].down is not None
        self.bounds = self.source.look(to.bounds, x)
        host_rows = None
        if outputs.h is None and all(adapter.down is None for adapter in adapters):
            on_host = self.source.on_host(self.bounds, to.tokens)
            # Before the waves: this copy to the host waits for all that was launched.
            if on_host is not None:
                host_rows = _HostRows.of(x, on_host, to, self.bounds)
        for wave in self.source.waves(self.bounds):
            rows = _Rows.of(wave, to, self.bounds, *adapters)
            h, thin, outputs.z[rows.at] = rows.outputs(of_x, self.gate, dense, in_fp8, x.dtype)
            if outputs.h is not None:
                outputs.h[rows.at] = h
            if outputs.thin is not None and thin is not None:
                outputs.thin[rows.at] = thin
        if host_rows is not None:
            host_rows.put_outputs(outputs.z, self.gate)

    def put_gradients(
        self,
        of_dy: ProductInput,
        to: Dispatch,
        adapters: tuple[Adapter, Adapter],
        kept: _Kept,
        gradients: _Gradients,
    ) -> None:
        """Compute the backward pass of all pairs, and write it to ``gradients``.

        Args:
            of_dy: gradient of all tokens' outputs; ``dense`` is there.
            to: the dispatch.
            adapters: those of both products.
            kept: what the forward pass kept.
            gradients: memory for the results.
        """
        dy = of_dy.dense
        assert dy is not None
        in_fp8 = self.source.in_fp8
        numbers_S = torch.arange(len(to.order_S), dtype=torch.int32, device=dy.device)
        has_unit = gradients.a2 is not None or gradients.u2 is not None
        dense = not in_fp8 or adapters[0].down is not None
        for wave in self.source.waves(self.bounds, backward=True):
            rows = _Rows.of(wave, to, self.bounds, *adapters)
            g, thin_dy = input_gradient(
                of_dy, rows.down, rows.to, True, _scale_of(rows.down), dy.dtype
            )
            gradient, scaled, unit, gradients.shares_S[rows.at] = expert_glu_gradient(
                g,
                kept.h[rows.at],
                kept.shares_S[rows.at],
                numbers_S[: len(g)],
                self.gate,
                has_unit,
                dense,
                in_fp8,
            )
            if unit is not None and thin_dy is not None:
                _put_of_second(gradients, rows, dy, thin_dy, unit)
            bias = rows.down.bias_of_experts
            if bias is not None:
                assert gradients.biases is not None
                gradients.biases[rows.within] = bias
            d_h = ProductInput(gradient, scaled)
            gradients.rows[rows.at], thin_dh = input_gradient(
                d_h, rows.up, rows.to, False, _scale_of(rows.up), dy.dtype
            )
            if gradient is not None and thin_dh is not None:
                _put_of_first(gradients, rows, gradient, thin_dh, kept)


class _StreamedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shares: Tensor,
        a1: Tensor | None,
        u1: Tensor | None,
        a2: Tensor | None,
        u2: Tensor | None,
        experts: Tensor,
        settings: _Settings,
    ) -> Tensor:
        source, gate, scales, in_training = settings
        adapters = Adapter(a1, u1, scales[0]), Adapter(a2, u2, scales[1])
        count, width, inner = source.sizes
        to = dispatch_to_experts(experts, count)
        keeps = in_training and any(ctx.needs_input_grad[:6])
        # Few tokens are multiplied by weights in FP8 without being quantised themselves.
        in_fp8 = source.in_fp8 and not are_few_tokens(x, to)
        of_x = _quantised(x, in_fp8)
        dense = not in_fp8 or a2 is not None
        has_adapters = a1 is not None or a2 is not None
        captured = None if keeps else source.in_graph(to, x, None if has_adapters else gate)
        if captured is not None:
            everything = _Rows.of_all(captured.whole, to, *adapters)
            z = everything.outputs(of_x, gate, dense, in_fp8, x.dtype)[2]
            if captured.by_cpu is not None:
                z = captured.by_cpu.put_into(z)
            return expert_combine(z, to.places_S, to.each, shares.reshape(-1))
        pairs = len(to.order_S)
        h = x.new_empty(pairs, 2 * inner) if keeps else None
        thin = x.new_empty(pairs, a1.shape[1]) if keeps and a1 is not None else None
        z = x.new_empty(pairs, width)
        waves = _Waves(settings)
        run_on_host(waves.put_outputs, of_x, to, adapters, _Outputs(z, h, thin))
        ctx.kept = settings
        ctx.waves = waves
        ctx.sizes = to.each, to.rows
        if keeps:
            read = x if ctx.needs_input_grad[2] else None
            ctx.save_for_backward(read, shares, h, thin, a1, u1, a2, u2, experts, *to[:4])
        return expert_combine(z, to.places_S, to.each, shares.reshape(-1))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, shares, h, thin, a1, u1, a2, u2, experts, *placed = ctx.saved_tensors
        source, _, scales, _ = ctx.kept
        adapters = Adapter(a1, u1, scales[0]), Adapter(a2, u2, scales[1])
        to = Dispatch(*placed, *ctx.sizes)
        wants_x, _, *wanted = ctx.needs_input_grad[:6]
        of_matrices = [
            torch.zeros_like(matrix, memory_format=torch.contiguous_format)
            if matrix is not None and is_wanted
            else None
            for matrix, is_wanted in zip((a1, u1, a2, u2), wanted)
        ]
        dy = dy.contiguous()
        # Of all waves at once, in the order of places; a wave has a part of them.
        kept = _Kept(x, h, thin, shares.reshape(-1)[to.order_S])
        pairs, width = len(to.order_S), dy.shape[1]
        gradients = _Gradients(
            dy.new_empty(pairs, width),
            dy.new_empty(pairs, dtype=torch.promote_types(dy.dtype, torch.float32)),
            dy.new_zeros(to.experts, width) if source.has_output_bias else None,
            *of_matrices,
        )
        of_dy = _quantised(dy, source.in_fp8)
        run_on_host(ctx.waves.put_gradients, of_dy, to, adapters, kept, gradients)
        d_shares = gradients.shares_S[to.places_S].view_as(shares)
        if gradients.biases is not None:
            # Of all experts in one product, as ``fused_experts`` does.
            of_biases = product(dy, gradients.biases.t(), d_shares.dtype)
            d_shares = d_shares + of_biases.gather(1, experts)
        d_x = expert_combine(gradients.rows, to.places_S, to.each) if wants_x else None
        return d_x, d_shares.to(shares.dtype), *of_matrices, None, None


def _scale_of(weights: ExpertWeights) -> Tensor | None:
    """Return the scales of weights in FP8, else None."""
    return None if weights.in_fp8 is None else weights.in_fp8.rows().scale


def _put_of_second(
    gradients: _Gradients, rows: _Rows, dy: Tensor, thin_dy: Tensor, unit: Tensor
) -> None:
    """Put a wave's gradients of the second adapter where those of its experts are."""
    down = rows.down.down
    assert down is not None
    if gradients.a2 is not None:
        gradients.a2[rows.within] = grouped_weight_gradient(
            thin_dy, unit, rows.to, dtype=down.dtype
        )
    if gradients.u2 is not None:
        thin_unit = grouped_product(unit, down, rows.to, factor=rows.down.scale)
        gradients.u2[rows.within] = grouped_weight_gradient(
            dy, thin_unit, rows.to, GATHER_FIRST, dtype=down.dtype
        )


def _put_of_first(
    gradients: _Gradients, rows: _Rows, d_h: Tensor, thin_dh: Tensor, kept: _Kept
) -> None:
    """Put a wave's gradients of the first adapter where those of its experts are."""
    if gradients.a1 is not None and kept.x is not None:
        gradients.a1[rows.within] = grouped_weight_gradient(
            thin_dh, kept.x, rows.to, GATHER_SECOND, dtype=d_h.dtype
        )
    if gradients.u1 is not None and kept.thin is not None:
        thin = kept.thin[rows.at]
        gradients.u1[rows.within] = grouped_weight_gradient(d_h, thin, rows.to, dtype=d_h.dtype)


def streamed_experts(
    x: Tensor,
    experts: Tensor,
    shares: Tensor,
    source: ExpertSource,
    first: Adapter | None = None,
    second: Adapter | None = None,
    gate: Gate | None = None,
) -> Tensor:
    """Run each token through its experts, whose weights come in waves, as ``fused_experts`` does.

    Differentiable in x, the shares and the matrices of both adapters.

    Args:
        x: ``[T, D]``, in the dtype of the weights.
        experts: int64 ``[T, k]``, below E.
        shares: ``[T, k]``, factors of the experts' outputs; any dtype.
        source: the weights.
        first: adapter of gate and up.
        second: adapter of down.
        gate: the gated unit; SwiGLU by default.

    Returns:
        ``[T, D]`` in the dtype of x.

    Raises:
        ValueError: shapes do not fit each other.
    """
    width = source.sizes[1]
    if x.ndim != 2 or x.shape[1] != width or experts.shape != shares.shape:
        raise ValueError(
            f"x is {tuple(x.shape)}, experts {tuple(experts.shape)}, shares "
            f"{tuple(shares.shape)}: expected [T, {width}], [T, k] and [T, k]"
        )
    one, two = first or Adapter(), second or Adapter()
    scales = one.scale, two.scale
    settings = _Settings(source, gate or Gate(), scales, torch.is_grad_enabled())
    y: Tensor = _StreamedExperts.apply(
        x.contiguous(), shares, one.down, one.up, two.down, two.up, experts, settings
    )
    return y
