"""Decoder layers that run in tiles of rows and groups of heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from chronicals.memory import decoder_layers, makes_tiles, rows_of_tile
from chronicals.memory.attention_results import RESULTS, ResultsOnDevice
from chronicals.memory.tiled_layers import LayerTiles
from chronicals.model_shape import ModelShape
from chronicals.patching import tile_layers
from chronicals.patching.decoder_layer import ATTENTION
from chronicals.patching.head_groups import heads_stand_alone, ranges_of_heads
from chronicals.policies.facts import Facts, trains_layers
from chronicals.policies.needed_memory import GIB
from chronicals.policies.policy import (
    Course,
    Decision,
    MemoryLoad,
    Remedy,
    Running,
    register_policy,
)
from chronicals.policies.step_time import OTHER_KERNELS, SUM_BYTES, StepWork
from chronicals.policies.tiles import TilingPolicy

OFFERED_TILES = 4
"""Tiles of a batch from which ``fit`` considers the policy: below, what one tile holds is a large
share of what a layer in one piece does."""

HEAD_KERNELS = 8
"""Kernels that make queries, keys and values of a tile: the norm, the adapters' two, the product, the
rotation, and a copy of each."""

QUERY_KEY_VALUE = "qkv"
"""Name of the product that makes them (``chronicals.step_work``)."""


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
        tiles = LayerTiles(rows, _together(facts), at_once=makes_heads_at_once(facts))
        if trains_layers(facts.model):
            shape = ModelShape.of(facts.model.config)
            weights = facts.model.get_decoder().layers[0].parameters()
            values = sum(p.numel() for p in weights if p.requires_grad)
            down = load.step.element * shape.inner * shape.width
            tiles = replace(tiles, sums=SUM_BYTES * values, down=down)
        return replace(load, step=replace(load.step, layer_tiles=tiles))

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Decide as for any tiling; results of attention stay on the card as far as there is room."""
        decision = super().decide(facts, course)
        assert course.fitted is not None  # it is decided after the memory
        memory = course.fitted.memory
        count = memory.results_here
        if not decision.runs or not count:
            return decision
        size = count * memory.result / GIB
        words = f"attention's results of {count} of {memory.layers} layers stay, {size:.2f} GiB"
        return replace(decision, reason=f"{decision.reason}; {words}", results=count)

    def around_steps(self, model: Any, decision: Decision) -> AbstractContextManager[Any]:
        """Return the context in which the last layers keep attention's results on the card."""
        if not decision.results:
            return nullcontext()
        return ResultsOnDevice(decoder_layers(model)[-decision.results :])

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with the norm before attention once more, and the kernels of all tiles.

        Where queries, keys and values are made by groups of heads, the norm is computed for each
        group, and where attention is computed again they are made once more. Attention whose results
        are kept is not computed again. What else is, is counted as recomputation.
        """
        rows = self.tile(facts)
        if not makes_tiles(facts.tokens, rows):
            return work
        shape = work.job.shape
        tiles = -(-work.job.tokens // rows)
        forward = len(work.forward.products) + OTHER_KERNELS / 3
        backward = len(work.backward.products) + 2 * OTHER_KERNELS / 3
        kernels = (tiles - 1) * (2 * forward + backward)
        of_norm = work.job.tokens * shape.layers * 2 * 2 * shape.width
        groups = number_of_groups(facts)
        by_group = groups > 1 and not makes_heads_at_once(facts)
        kept = work.memory.kept_results / work.memory.layers
        again = 1 - kept if by_group else 0.0
        norms = groups * (1 + again) if by_group else 1
        more = groups - 1 if by_group else 0
        made_again = [
            replace(each, times=again * each.times)
            for each in work.forward.products
            if again and each.product.name == QUERY_KEY_VALUE
        ]
        kernels += tiles * HEAD_KERNELS * (more * (2 + again) + again)
        return replace(
            work,
            forward=replace(work.forward, moved=work.forward.moved + more * of_norm),
            backward=replace(
                work.backward,
                scores=work.backward.scores - kept * work.forward.scores,
                moved=work.backward.moved + norms * of_norm,
                products=(*work.backward.products, *made_again),
            ),
            kernels=work.kernels + shape.layers * kernels,
        )

    def addition(self, running: Running) -> Decision | None:
        """Return that attention is computed again, where its results stay on the card."""
        decision = running.decisions[self.name]
        if not decision.runs or not decision.results:
            return None
        reason = "layers compute attention again, and its results do not stay"
        return replace(decision, reason=reason, results=0)

    def join(self, running: Running, decision: Decision) -> None:
        """Let layers compute attention again."""
        for layer in decoder_layers(running.model):
            results = getattr(layer, RESULTS, None)
            if isinstance(results, ResultsOnDevice):
                results.remove()

    def settings(self, facts: Facts) -> Iterator[Remedy]:
        """Yield the entry of ``memory`` for batches of several tiles."""
        offered = makes_tiles(facts.tokens // OFFERED_TILES, self.tile(facts))
        return super().settings(facts) if offered else iter(())

    def apply(self, model: Any, facts: Facts, decision: Decision) -> None:
        """Run every fused layer in tiles."""
        tile_layers(model)


def makes_heads_at_once(facts: Facts) -> bool:
    """Return whether a layer makes queries, keys and values of all heads at once.

    Else it makes those of a group of heads at a time (``patching.head_groups``). Products in FP8 make
    all.
    """
    layers = decoder_layers(facts.model)
    attention = getattr(layers[0], ATTENTION, None) if layers else None
    return facts.config.use_fp8 or attention is None or not heads_stand_alone(attention)


def number_of_groups(facts: Facts) -> int:
    """Return the number of groups of heads that attend one after the other."""
    shape = ModelShape.of(facts.model.config)
    heads = shape.heads or 1
    return len(ranges_of_heads(facts.tokens, heads, shape.kv_heads or heads, _together(facts)))


def _together(facts: Facts) -> int:
    """Return the number of key heads that attend in one call, or a divisor of it."""
    return facts.exchanging if facts.context > 1 else 1


register_policy(TiledLayers())
