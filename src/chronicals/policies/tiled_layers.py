"""Decoder layers that run in tiles of rows and groups of heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from chronicals.memory import makes_tiles, rows_of_tile
from chronicals.memory.tiled_layers import LayerTiles
from chronicals.model_shape import ModelShape
from chronicals.patching import tile_layers
from chronicals.policies.facts import Facts, trains_layers
from chronicals.policies.policy import Decision, MemoryLoad, Remedy, register_policy
from chronicals.policies.step_time import OTHER_KERNELS, SUM_BYTES, StepWork
from chronicals.policies.tiles import TilingPolicy

OFFERED_TILES = 4
"""Tiles of a batch from which ``fit`` considers the policy: below, what one tile holds is a large
share of what a layer in one piece does."""


class TiledLayers(TilingPolicy):
    """Every layer keeps its input and is recomputed by itself, a tile of rows at a time.

    Attention runs on some heads at a time. Sums change by their order only.
    """

    name = "tiled_layers"
    title = "layers in tiles"
    setting = "memory=['tiled_layers']"

    def why_not(self, facts: Facts) -> str | None:
        """Return that layers do not run fused, or have experts, if so."""
        if facts.unfused is not None:
            return (
                f"needs fused decoder layers, and none run ({facts.unfused}); take recompute_layers"
            )
        name = type(facts.model).__name__
        if ModelShape.of(facts.model.config).experts:
            return f"needs layers without experts, {name} has some; take recompute_layers"
        if not facts.fuses_halves:
            return f"a part of the layers of {name} does not run fused; take recompute_layers"
        return None

    def tile(self, facts: Facts) -> int:
        """Return the rows of a tile, fewer where layers are wide."""
        return rows_of_tile(ModelShape.of(facts.model.config).inner)

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with layers that hold a tile and a group of heads at a time."""
        rows = self.tile(facts)
        if not makes_tiles(load.step.tokens, rows):
            return load
        tiles = LayerTiles(rows, facts.exchanging if facts.context > 1 else 1)
        if trains_layers(facts.model):
            shape = ModelShape.of(facts.model.config)
            weights = facts.model.get_decoder().layers[0].parameters()
            values = sum(p.numel() for p in weights if p.requires_grad)
            down = load.step.element * shape.inner * shape.width
            tiles = replace(tiles, sums=SUM_BYTES * values, down=down)
        return replace(load, step=replace(load.step, layer_tiles=tiles))

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with the norm before attention once more, and the kernels of all tiles.

        What is computed again is counted as recomputation.
        """
        rows = self.tile(facts)
        if not makes_tiles(facts.tokens, rows):
            return work
        shape = work.job.shape
        tiles = -(-work.job.tokens // rows)
        forward = len(work.forward.products) + OTHER_KERNELS / 3
        backward = len(work.backward.products) + 2 * OTHER_KERNELS / 3
        kernels = shape.layers * (tiles - 1) * (2 * forward + backward)
        moved = work.job.tokens * shape.layers * 2 * 2 * shape.width
        return replace(
            work,
            backward=replace(work.backward, moved=work.backward.moved + moved),
            kernels=work.kernels + kernels,
        )

    def settings(self, facts: Facts) -> Iterator[Remedy]:
        """Yield the entry of ``memory`` for batches of several tiles."""
        offered = makes_tiles(facts.tokens // OFFERED_TILES, self.tile(facts))
        return super().settings(facts) if offered else iter(())

    def apply(self, model: Any, facts: Facts, decision: Decision) -> None:
        """Run every fused layer in tiles."""
        tile_layers(model)


register_policy(TiledLayers())
