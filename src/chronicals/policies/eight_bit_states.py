"""Moments of AdamW in 8 bits (Dettmers et al., 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from chronicals.config import ChronicalsConfig
from chronicals.optimizers import moments_in_8_bits
from chronicals.optimizers.adamw import MIN_8BIT_ELEMENTS
from chronicals.policies.facts import Facts, trains_layers
from chronicals.policies.needed_memory import state_bytes
from chronicals.policies.policy import Decision, MemoryLoad, OwnField, Remedy, register_policy
from chronicals.policies.step_time import StepWork, update_bytes


class EightBitStates(OwnField):
    """Both moments of large matrices in 8 bits, in blocks with a scale each."""

    name = "use_8bit_optimizer"
    title = "8-bit AdamW"
    setting = "use_8bit_optimizer=True cannot be honoured here"

    def why_not(self, facts: Facts) -> str | None:
        """Return that no trained matrix is large enough, if so."""
        if not facts.trained or any(p.numel() for p in moments_in_8_bits(facts.model)):
            return None
        return (
            f"no trained matrix but embeddings has {MIN_8BIT_ELEMENTS} elements, and smaller ones keep "
            "their states in fp32; leave it out"
        )

    def words(self, facts: Facts) -> str:
        """Return the share of the trained weights whose moments are in 8 bits."""
        trained = sum(p.numel() for p in facts.trained)
        share = sum(p.numel() for p in moments_in_8_bits(facts.model)) / max(trained, 1)
        return (
            f"{facts.who_asked(self.name)}, the moments of {share:.1%} of the trained weights; "
            f"embeddings, vectors and matrices under {MIN_8BIT_ELEMENTS} elements in fp32"
        )

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with the mean bytes of states, of which some are in 8 bits."""
        trained = facts.trained
        states = state_bytes(facts.config, facts.model, trained)
        return replace(load, states=states / max(sum(p.numel() for p in trained), 1))

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with an update of narrower states."""
        return replace(work, updated=update_bytes(facts, work.trained, "8bit"))

    def settings(self, facts: Facts) -> Iterator[Remedy]:
        """Yield narrower states, where trained weights have enough of them."""
        config = facts.config
        if config.use_8bit_optimizer or config.optimizer_state_dtype != "fp32":
            return
        if self.why_not(facts) is None and trains_layers(facts.model):
            yield Remedy({self.name: True}, "states are rounded to 8 bits")

    def remedies(self, config: ChronicalsConfig, ranks: int) -> Iterator[Remedy]:
        """Yield narrower states: bf16 first, which is the smaller change."""
        if config.use_lora or config.use_8bit_optimizer:
            return
        fields = {"use_8bit_optimizer": True}
        if config.optimizer_state_dtype == "fp32":
            yield Remedy({"optimizer_state_dtype": "bf16"}, "states are rounded stochastically")
            yield Remedy(fields, "states are rounded to 8 bits")
        else:
            other = {**fields, "optimizer_state_dtype": "fp32"}
            yield Remedy(other, "states are rounded to 8 bits")


register_policy(EightBitStates())
