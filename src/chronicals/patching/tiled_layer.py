"""A fused decoder layer in tiles of rows and groups of heads, recomputed in the backward pass.

Everything but attention works row by row: norms, products with their adapters, rotation, the gated
unit. It runs on a tile of rows at a time in both passes (``memory.rows_of_tile``; sequence tiling,
Bekman et al., 2025). Attention runs on a few key heads with their queries at a time, which are made
just before it (``head_groups``). A layer keeps its input. The backward pass is, for the gradient dy of
the output:

    for each group of heads                           unless a was kept
        q, k, v = heads(x)                            by tiles
        a = attend(q, k, v)
    dr, da = gradients of outputs(x, a) at dy         by tiles; r is the residual, x
    for each group of heads
        q, k, v = heads(x)                            by tiles
        dq, dk, dv = gradients of a at da             the group's q, k, v, a and da are freed then
    dx = gradient of heads(x) at dq, dk, dv, dr       by tiles, for all heads

Gradients of weights and adapters are summed over the tiles in fp32. All other sums are those of the
layer in one piece. Weights that are dequantised are dequantised once a pass, for all tiles and groups.

For each token the backward pass holds at most x, dy and dr, and the larger one of attention's output
with its gradient, and the gradients of queries, keys and values: 3 D + max(2 H, H + 2 K) W elements,
beside those of a tile and of a group. Where heads are not made by groups, queries, keys and values of
all are there, too (``memory.tiled_layers``).

Shapes: T tokens of a pack, D model width, H query heads, K key/value heads, W head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from chronicals.kernels.dropped_products import RepeatedSeeds
from chronicals.kernels.launch import differentiable_once, with_padding
from chronicals.memory import recomputation, rows_of_tile, tiles_of
from chronicals.memory.attention_results import RESULTS, KeptResults
from chronicals.patching.attention_groups import AttentionAgain, GroupAttention, KeptAttention
from chronicals.patching.halves import AttentionHalf, GradientRequest, MLPHalf, PackedTokens
from chronicals.patching.head_groups import HeadGroup, LayerHeads, ranges_of_heads

TILES_LAYER = "_chronicals_tiles_layer"
"""Attribute of a layer that runs in tiles as a whole."""


@dataclass(frozen=True)
class TiledLayer:
    """The computation of a layer, for one forward pass and the backward passes through it.

    Attributes:
        attention: the attention half.
        mlp: the MLP half.
        tokens: positions of the rows, and how they attend.
        tile: rows of a tile.
        results: keeps what attention gives for the backward pass; None to compute it again.
        seeds: of the adapters' dropout, the same in each pass.
    """

    attention: AttentionHalf
    mlp: MLPHalf
    tokens: PackedTokens
    tile: int
    results: KeptResults | None = None
    seeds: RepeatedSeeds = field(default_factory=RepeatedSeeds)

    @cached_property
    def attention_of_groups(self) -> GroupAttention:
        """Attention of the groups of heads."""
        if self.results is None:
            return AttentionAgain(self._attend)
        return KeptAttention(self._attend, self.results)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, ``[T, D]``, for its input x."""
        y = torch.empty_like(x)
        with self._weights_made_once():
            attended = self.attention_of_groups.forward(self._heads(x))
            for rows in tiles_of(len(x), self.tile):
                y[rows] = self._outputs(rows, x[rows], self._rows_of(attended, rows))
        return y

    def backward(
        self,
        x: Tensor,
        dy: Tensor,
        saved: Sequence[Tensor],
        trained: Sequence[Tensor],
        needs_x: bool,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of x and of the trained parameters; None for what has none.

        Args:
            x: ``[T, D]``.
            dy: gradient of the output, ``[T, D]``.
            saved: what autograd saved of attention.
            trained: trained parameters of the layer.
            needs_x: x has a gradient.
        """
        sums = GradientSums(trained)
        with self._weights_made_once(), recomputation():
            heads = self._heads(x)
            attended = self.attention_of_groups.attended(heads, saved)
            dr, gradients = self._output_gradients(x, dy, [each.value for each in attended], sums)
            if not needs_x and not self._trains_heads():
                return None, sums.totals
            of_heads: list[HeadGroup] = []
            for place in range(len(heads)):
                # what a group holds is freed before the next one allocates
                given = attended.pop(0)
                of_heads.append(given.gradients(gradients.pop(0), heads.take(place), sums.of))
                del given
            self._input_gradients(x, of_heads, dr, needs_x, sums)
        return (dr if needs_x else None), sums.totals

    # --- parts of both passes ---

    @contextmanager
    def _weights_made_once(self) -> Iterator[None]:
        """Context in which dequantised weights are made once for all tiles."""
        with ExitStack() as stack:
            for _, _, group in (*self.attention.products, *self.mlp.products):
                stack.enter_context(group.merged.base.made_once())
            yield

    def _heads(self, x: Tensor) -> LayerHeads:
        """Return queries, keys and values of all rows for one pass."""

        def of_rows(attention: AttentionHalf, rows: slice) -> Sequence[Tensor]:
            q, k, v, _ = self._heads_of(attention, rows, x[rows])
            return q, k, v

        ranges = ranges_of_heads(len(x), *self.attention.counts, self.tokens.together)
        return LayerHeads.of(self.attention, ranges, of_rows, len(x), self.tile)

    def _heads_of(
        self, attention: AttentionHalf, rows: slice, x: Tensor, skip_output: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values and the residual of some rows.

        Args:
            attention: the attention half, or its share of some heads; adapters drop the same elements
                of a row in each.
            rows: the rows.
            x: their inputs.
            skip_output: only the backward pass is wanted.
        """
        with self.seeds.of(("heads", rows.start)):
            return attention.heads(x, self.tokens.rows(rows), GradientRequest(), skip_output)

    def _attend(self, group: HeadGroup) -> Tensor:
        """Return what attention gives for a group, ``[T, n, W]``."""
        return self.attention.attend(*group.tensors, self.tokens, group.heads, padding=0)

    def _rows_of(self, attended: Sequence[Tensor], rows: slice) -> Tensor:
        """Return what attention gave for some rows, ``[n, H W]``, with room for an adapter."""
        pieces = [part[rows].flatten(1) for part in attended]
        width = sum(piece.shape[1] for piece in pieces)
        room = with_padding(pieces[0], (len(pieces[0]), width), self.attention.last.padding)
        for place, piece in zip(room.split([piece.shape[1] for piece in pieces], 1), pieces):
            place.copy_(piece)
        return room

    def _outputs(self, rows: slice, x: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's outputs of some rows.

        Args:
            rows: the rows.
            x: the residual of these rows.
            attended: what attention gave for them.
        """
        last = self.attention.last
        with self.seeds.of(("outputs", rows.start)):
            branch = self.attention.branch(attended)
            request = GradientRequest(last.padding, last.amaxes(len(x))[1])
            x, branch = self.mlp(x, branch, request)
        return x + branch

    # --- backward pass ---

    def _output_gradients(
        self, x: Tensor, dy: Tensor, attended: Sequence[Tensor], sums: GradientSums
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of the residual and of what attention gave, by groups."""
        dr = torch.empty_like(x)
        gradients = [torch.empty_like(part) for part in attended]
        widths = [part[0].numel() for part in attended]
        for rows in tiles_of(len(x), self.tile):
            residual = x[rows].detach().requires_grad_()
            given = self._rows_of(attended, rows).requires_grad_()
            with torch.enable_grad():
                y = self._outputs(rows, residual, given)
            dr[rows], of_given = sums.add([y], [dy[rows]], (residual, given))
            for gradient, piece in zip(gradients, of_given.split(widths, 1)):
                gradient[rows] = piece.unflatten(1, gradient.shape[1:])
        return dr, gradients

    def _input_gradients(
        self,
        x: Tensor,
        of_heads: Sequence[HeadGroup],
        dr: Tensor,
        needs_x: bool,
        sums: GradientSums,
    ) -> None:
        """Write the gradient of x over that of the residual, tile by tile."""
        for rows in tiles_of(len(x), self.tile):
            tile = x[rows].detach().requires_grad_(needs_x)
            with torch.enable_grad():
                *heads, residual = self._heads_of(self.attention, rows, tile, skip_output=True)
            gradients = [
                torch.cat([part[rows] for part in parts], 1)
                for parts in zip(*(group.tensors for group in of_heads))
            ]
            if needs_x:
                (dr[rows],) = sums.add([*heads, residual], [*gradients, dr[rows]], (tile,))
            else:
                sums.add(heads, gradients, ())

    def _trains_heads(self) -> bool:
        """Return whether parameters of norms and products before attention are trained."""
        before = self.attention.norms.before
        modules = list(self.attention.inner_norms)
        if before is not None:
            modules.append(getattr(self.attention.layer, before[0]))
        for owner, names, group in self.attention.products:
            if group is not self.attention.last:
                modules += [getattr(owner, name) for name in names]
        return any(p.requires_grad for module in modules for p in module.parameters())


class GradientSums:
    """Sums of the gradients of trained parameters over tiles, in fp32 or wider.

    Args:
        trained: the parameters.
    """

    def __init__(self, trained: Sequence[Tensor]):
        self.trained = list(trained)
        self.totals: list[Tensor | None] = [None] * len(self.trained)

    def of(self, output: GradientEdge, gradient: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Add the gradients of the parameters at an output, and return those of ``inputs``.

        The output is given by its edge in the graph, and can be differentiated again.
        """
        return self._add([output], [gradient], inputs, again=True)

    def add(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Add the gradients of the parameters at some outputs, and return those of ``inputs``.

        Outputs without a graph, such as values where norms of queries alone are trained, are left
        out.
        """
        pairs = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if y.requires_grad]
        return self._add([y for y, _ in pairs], [dy for _, dy in pairs], inputs)

    def _add(
        self,
        outputs: Sequence[Tensor] | Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        again: bool = False,
    ) -> list[Tensor]:
        of_inputs = len(inputs)
        found = torch.autograd.grad(
            outputs,
            (*inputs, *self.trained),
            gradients,
            retain_graph=again,
            allow_unused=True,
        )
        for place, gradient in enumerate(found[of_inputs:]):
            total = self.totals[place]
            if gradient is None:
                continue
            if total is None:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                self.totals[place] = gradient.to(wide)
            else:
                total.add_(gradient)
        return list(found[:of_inputs])


class _TiledLayer(torch.autograd.Function):
    """A layer that keeps its input ``[1, T, D]``; its trained parameters are ``trained``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: TiledLayer, *trained: Tensor) -> Tensor:
        ctx.made = made
        ctx.trained = trained
        y = made.forward(x.squeeze(0)).unsqueeze(0)
        ctx.save_for_backward(x, *made.attention_of_groups.to_save())
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *saved = ctx.saved_tensors
        dx, of_trained = ctx.made.backward(
            x.squeeze(0), dy.squeeze(0), saved, ctx.trained, ctx.needs_input_grad[0]
        )
        return (None if dx is None else dx.unsqueeze(0)), None, *of_trained


def run_in_tiles(
    layer: nn.Module, x: Tensor, attention: AttentionHalf, mlp: MLPHalf, tokens: PackedTokens
) -> Tensor:
    """Run a decoder layer whose halves are both fused, ``[1, T, D]``, in tiles.

    Args:
        layer: the layer.
        x: its input.
        attention: its attention half.
        mlp: its MLP half.
        tokens: positions of the rows, and how they attend.
    """
    mlp.tiles = False  # the tiles of the layer are those of its MLP
    trained = [p for p in layer.parameters() if p.requires_grad]
    tile = rows_of_tile(mlp.last.merged.base.width)
    results = getattr(layer, RESULTS, None) if torch.is_grad_enabled() else None
    made = TiledLayer(attention, mlp, tokens, tile, results)
    out: Tensor = _TiledLayer.apply(x, made, *trained)
    return out
