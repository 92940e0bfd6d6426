"""MLPs computed in tiles of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from chronicals.memory import makes_tiles
from chronicals.memory.recompute import TILE
from chronicals.model_shape import ModelShape
from chronicals.patching import has_gated_mlps, tile_mlps
from chronicals.policies.facts import Facts, trains_layers
from chronicals.policies.policy import Decision, MemoryLoad, Remedy, register_policy
from chronicals.policies.step_time import SKIPPED, SUM_BYTES, StepWork
from chronicals.policies.tiles import TilingPolicy
from chronicals.step_work import MERGED_PROJECTIONS

MLP = ("gate_up", "down")
"""Products of an MLP."""


class TiledMLP(TilingPolicy):
    """Each tile is recomputed in the backward pass; weight gradients are summed over the tiles."""

    name = "tiled_mlp"
    title = "tiled MLPs"
    setting = "memory=['tiled_mlp']"

    def why_not(self, facts: Facts) -> str | None:
        """Return that the model has no gated MLPs, if so."""
        # A plan assumes fused layers, as of recomputation, and does not prove them.
        dense = facts.planned and not ModelShape.of(facts.model.config).experts
        if dense or has_gated_mlps(facts.model):
            return None
        return f"needs gated MLPs, {type(facts.model).__name__} has none; leave it out"

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with inner activations of one tile, and gradients as fp32 sums."""
        if not makes_tiles(load.step.tokens):
            return load
        shape = ModelShape.of(facts.model.config)
        summed = SUM_BYTES * shape.inner * shape.width if trains_layers(facts.model) else 0
        step = replace(load.step, tile=TILE, tile_sums=summed)
        return replace(load, step=step, gradient=SUM_BYTES)

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with the MLPs once more, where there are more rows than a tile.

        What layers that are recomputed whole compute again is not counted twice.
        """
        if not makes_tiles(facts.tokens):
            return work
        backward = work.backward
        others = 1 - work.again
        products = list(backward.products)
        for each in work.forward.products:
            if each.product.name == "gate_up" and others:
                products.append(replace(each, times=others * each.times))
            if each.product.name == SKIPPED:  # by layers, not by tiles
                products.append(each)
        shape = work.job.shape
        moved = others * work.job.tokens * shape.layers * 2 * 3 * shape.inner
        kernels = work.kernels + shape.layers * more_kernels(work)
        backward = replace(backward, products=tuple(products), moved=backward.moved + moved)
        return replace(work, backward=backward, kernels=kernels)

    def settings(self, facts: Facts) -> Iterator[Remedy]:
        """Yield the entry of ``memory`` for batches of more rows than a tile."""
        return super().settings(facts) if makes_tiles(facts.tokens) else iter(())

    def apply(self, model: Any, facts: Facts, decision: Decision) -> None:
        """Compute every gated MLP in tiles."""
        tile_mlps(model)


def more_kernels(work: StepWork) -> int:
    """Return the kernels of a layer that tiles add: its MLP's for each of them, forward ones twice.

    Args:
        work: of a step without tiles.
    """
    forward, backward = (
        1 + sum(each.product.name.split()[0] in MLP for each in passed.products)  # and of the unit
        for passed in (work.forward, work.backward)
    )
    if work.job.dequantised_bytes:
        weights = sum(len(MERGED_PROJECTIONS[name]) for name in MLP)
        forward += weights
        backward += weights
    tiles = -(-work.job.tokens // TILE)
    return (tiles - 1) * (forward + backward) + tiles * forward


register_policy(TiledMLP())
