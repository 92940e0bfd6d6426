"""Offloading of activations to host memory until the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from torch import nn

from chronicals.config import ChronicalsConfig
from chronicals.memory import LAYERS, ActivationOffload, InputOffload, decoder_layers
from chronicals.memory.attention_results import AttentionResults
from chronicals.policies.facts import DIVIDE_WEIGHTS, Facts
from chronicals.policies.needed_memory import GIB
from chronicals.policies.policy import (
    Course,
    Decision,
    MemoryLoad,
    Policy,
    Running,
    register_policy,
)
from chronicals.policies.step_time import StepWork


class OffloadActivations(Policy):
    """Saved tensors are copied to host memory and back, overlapping with computation."""

    name = "activation_offload"
    title = "activation offload"
    runs_as = "beside the computation"
    setting = "activation_offload=True cannot be honoured here, nor memory=['offload_activations']"
    only_time = True

    def why_not(self, facts: Facts) -> str | None:
        """Return that the activations are in host memory anyway, without a card."""
        if facts.on_card:
            return None
        return "activations are in host memory anyway; leave it out"

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with only a window of the activations on the GPU."""
        return replace(load, step=replace(load.step, offloads=True))

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Decide as for any policy; of layers in tiles as few inputs are moved as must be."""
        decision = super().decide(facts, course)
        assert course.fitted is not None  # it is decided after the memory
        memory = course.fitted.memory
        if not decision.runs or memory.moved_inputs is None:
            return decision
        count = memory.moved_inputs
        results = memory.results_away
        parts = []
        if count:
            size = count * memory.kept[LAYERS] / GIB
            parts.append(f"inputs of {count} of {memory.layers} layers, {size:.2f} GiB")
        if results:
            size = results * memory.result / GIB
            parts.append(f"attention's results of {results}, {size:.2f} GiB")
        if not parts:
            return Decision(self.name, False, "the inputs of all layers fit the card")
        words = f"{decision.reason}: {', and '.join(parts)}"
        return replace(decision, reason=words, layers=count, results=results)

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with the copies of what a forward pass keeps, as far as it moves."""
        memory = work.memory
        if memory.moved_inputs is None:
            return replace(work, offloaded=work.offloaded + work.kept)
        moved = memory.moved_inputs * memory.kept[LAYERS] + memory.results_away * memory.result
        return replace(work, offloaded=work.offloaded + moved)

    def around_steps(self, model: Any, decision: Decision) -> AbstractContextManager[Any]:
        """Return the context that moves saved tensors of the decoder, or inputs of some layers.

        Results of attention of the first layers are moved as far as was decided; those of the last
        ones may stay on the card (``tiled_layers``).
        """
        decoder = model.get_decoder()
        if not decision.layers and not decision.results:
            return ActivationOffload(decoder)
        layers = decoder_layers(model)
        around = ExitStack()
        if decision.layers:
            around.enter_context(InputOffload(decoder, spread(layers, decision.layers)))
        if decision.results:
            around.enter_context(AttentionResults(decoder, layers[: decision.results]))
        return around

    def addition(self, running: Running) -> Decision | None:
        """Return the offload, if nothing was set about it and it can run beside what runs."""
        config = running.facts.config
        if config.memory is not None or self.name in config.explicit:
            return None
        if running.decisions[self.name].runs or running.why_excluded(self.name):
            return None
        if self.why_not(running.facts):
            return None
        return Decision(self.name, True, "activations are offloaded to the host")

    def spares(self, config: ChronicalsConfig, ranks: int) -> bool:
        """Return False for trained weights that are divided, with which it does not run."""
        return ranks == 1 or config.sharding != DIVIDE_WEIGHTS or config.use_lora


def spread(layers: Sequence[nn.Module], count: int) -> list[nn.Module]:
    """Return ``count`` of the layers, as evenly spread as can be; the last one is among them."""
    total = len(layers)
    places = range(total)
    return [layers[i] for i in places if (i + 1) * count // total > i * count // total]


register_policy(OffloadActivations())
