"""Optimizer states in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from chronicals.config import ChronicalsConfig
from chronicals.kernels.host_memory import available_memory
from chronicals.optimizers import buffer_bytes, host_states, states_in_host_memory
from chronicals.policies.facts import Facts
from chronicals.policies.needed_memory import agreeing_switches, leanest_memory, state_bytes
from chronicals.policies.policy import Decision, MemoryLoad, Policy, Remedy, register_policy
from chronicals.policies.step_time import StepWork


class OffloadOptimizerStates(Policy):
    """States of large weights are copied to the GPU for every update, through buffers, and back."""

    name = "offload_optimizer_states"
    title = "optimizer states in host memory"
    setting = "memory=['offload_optimizer_states']"
    only_time = True

    def why_not(self, facts: Facts) -> str | None:
        """Return that no states are large enough, or that host memory is too small."""
        moved = states_in_host_memory(facts.model)
        if any(p.numel() for p in facts.trained) and not moved:
            return (
                f"no trained weight has {host_states.MIN_HOST_ELEMENTS} elements, and smaller ones keep "
                "their states where they are; leave it out"
            )
        size = state_bytes(facts.config, facts.model, moved)
        available = None if facts.planned else available_memory()
        if available is None or size <= available:
            return None
        smaller = "" if facts.config.use_8bit_optimizer else "set use_8bit_optimizer=True, or "
        return (
            f"states of {size / 2**30:.2f} GiB, and {available / 2**30:.2f} GiB of host memory "
            f"are free; {smaller}leave it out"
        )

    def words(self, facts: Facts) -> str:
        """Return the share of the weights, and the bytes that come and go."""
        moved = states_in_host_memory(facts.model)
        share = sum(p.numel() for p in moved) / max(sum(p.numel() for p in facts.trained), 1)
        size = state_bytes(facts.config, facts.model, moved) / 2**30
        where = "" if facts.on_card else ", from memory to memory, since there is no card"
        return (
            f"{facts.who_asked(self.name)}, of {share:.1%} of the trained weights; {size:.2f} GiB "
            f"come and go in every update{where}"
        )

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with buffers instead of the states that moved to host memory."""
        moved = states_in_host_memory(facts.model)
        away = {id(p) for p in moved}
        here = [p for p in facts.trained if id(p) not in away]
        size = state_bytes(facts.config, facts.model, here)
        size += buffer_bytes(state_bytes(facts.config, facts.model, moved))
        host = {**load.host, self.title: state_bytes(facts.config, facts.model, moved)}
        return replace(load, states=size / max(sum(p.numel() for p in facts.trained), 1), host=host)

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with the states that come and go in an update, both ways at once."""
        moved = states_in_host_memory(facts.model)
        size = state_bytes(facts.config, facts.model, moved)
        return replace(work, exchanged=work.exchanged + size / facts.sharing)

    def remedies(self, config: ChronicalsConfig, ranks: int) -> Iterator[Remedy]:
        """Yield all that costs only time together with this policy."""
        if config.use_lora or self.asked(config):
            return
        memory = sorted(leanest_memory(config, ranks) | {self.name})
        yield Remedy({"memory": memory, **agreeing_switches(config)})


register_policy(OffloadOptimizerStates())
