"""Decoder layers compiled by torch.compile, if they do not run fused."""

from __future__ import annotations

from typing import Any

from chronicals.memory import decoder_layers
from chronicals.models import unfused_kind
from chronicals.policies.facts import ONE_BY_ONE, Facts
from chronicals.policies.policy import Decision, Stage, Switch, register_policy


class CompiledLayers(Switch):
    """Compilation of each decoder layer by itself."""

    name = "use_torch_compile"
    title = "torch.compile"
    runs_as = "decoder layers"
    stage = Stage.MODULES

    def why_not(self, facts: Facts) -> str | None:
        """Return why layers are not compiled by themselves; None if they can be."""
        model = facts.model
        if not (facts.on_card and facts.packed):
            return "only packs on a card are compiled for"
        if not decoder_layers(model):
            return f"{type(model).__name__} has no list of layers"
        if facts.one_by_one:
            return ONE_BY_ONE
        if facts.records_routers:
            return "its layers' router logits are recorded for the losses of routers"
        if unfused_kind(model) is not None:
            return "adapters run through PEFT's own modules"
        return None

    def apply(self, model: Any, facts: Facts, decision: Decision) -> None:
        """Compile each decoder layer by itself, at its first call."""
        for layer in decoder_layers(model):
            # One recompilation follows: the number of document bounds becomes dynamic when it
            # first changes.
            layer.compile()


register_policy(CompiledLayers())
