"""Base class of the policies of a run, their list, and the values that they pass on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeVar

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.checked_class import AUTO
from chronicals.config.memory_entries import ALIASES
from chronicals.memory import LAYERS, NOTHING, RESERVE, Estimate, Moment, StepShape
from chronicals.objectives import Objective
from chronicals.policies.exclusions import conditions, why_excluded
from chronicals.policies.facts import Facts
from chronicals.policies.step_time import StepWork

WORKSPACES = 3
GRAPHED_WORKSPACES = 5
"""Workspaces of cuBLAS without and with CUDA graphs. It has one for each thread and stream.

Products run in the threads of the forward and of the backward pass; graphs are captured on a stream
of their own, and the head's gradient is computed on another one (``kernels.products.at_once``). A
0.5B with packs of 2,048 tokens holds 0.09 GiB beside all other parts without graphs, and 0.16 with
them (``benchmarks/results/row-0.5b-full-2k-h200.json``), which are 3 and 5.
"""


@dataclass(frozen=True)
class Decision:
    """Decision on a policy, and its reason.

    Attributes:
        field: name of the policy.
        runs: True if it runs.
        reason: words for the log.
        how: for recomputation, what every layer saves; for sharding, what is divided.
        layers: for recomputation, the number of layers that are recomputed whole, None for all; for
            offload, the number of layers whose inputs are in host memory, 0 for all that is saved.
        matters: True if the log names the policy even if it does not run.
        among: for sharding, the number of processes that share one copy of what is divided.
        stay: for sharding, the number of the last layers that stay gathered between their passes.
        results: for offload and layers in tiles, the number of layers whose attention's results are in
            host memory, or stay on the card.
    """

    field: str
    runs: bool
    reason: str
    how: str = NOTHING
    layers: int | None = 0
    matters: bool = False
    among: int = 1
    stay: int = 0
    results: int = 0

    def __str__(self) -> str:
        return f"{self.field}: {'on' if self.runs else 'off'}, {self.reason}"


@dataclass(frozen=True)
class MemoryLoad:
    """Bytes that a run needs on a GPU, as the policies change them one after the other.

    Attributes:
        step: shape of a step, which determines the activations.
        frozen: bytes of a frozen value.
        weight: bytes of a trained value.
        states: mean bytes of the optimizer states of a trained value.
        gradient: bytes of the gradient of a trained value.
        gradients_stay: True if gradients exist during a forward pass; else the peak is the larger
            one of activations and gradients, not their sum.
        fixed: further bytes that exist all the time.
        moved: bytes of frozen embeddings and heads that are in host memory.
        head_copy: bytes of a copy of the head that exists during the loss alone.
        gradients: further bytes of gradients that the backward pass makes.
        host: bytes in host memory, by what they are.
        workspaces: number of workspaces of cuBLAS.
        pooled: True if CUDA graphs keep what a micro-step makes in a pool of their own, while
            micro-steps of other shapes make the same beside it.
    """

    step: StepShape
    frozen: float
    weight: float
    states: float
    gradient: float
    gradients_stay: bool
    fixed: int = 0
    moved: int = 0
    head_copy: int = 0
    gradients: int = 0
    host: Mapping[str, int] = field(default_factory=dict)
    workspaces: int = WORKSPACES
    pooled: bool = False


@dataclass(frozen=True)
class Fitted:
    """A run that was fitted to the memory of its card.

    Attributes:
        memory: bytes that are expected, with the layers that stay gathered.
        recomputed: the decision on recomputation.
        sharding: the decision on sharding.
    """

    memory: Estimate
    recomputed: Decision
    sharding: Decision

    @property
    def plan(self) -> tuple[str, int]:
        """Recomputation as ``Estimate.needed`` takes it."""
        made = self.recomputed
        of_the_model = made.runs and made.how == NOTHING and made.layers == 0
        how = LAYERS if made.layers is None or of_the_model else made.how
        if how not in self.memory.kept:
            # Layers of which only parts run fused are estimated as if they kept everything.
            how = NOTHING
        return how, made.layers or 0

    @property
    def peak(self) -> Moment:
        """Largest moment of a step."""
        return self.memory.peak(*self.plan)

    @property
    def held(self) -> int:
        """Bytes that the run holds at most."""
        return self.peak.held

    @property
    def fits(self) -> bool:
        """True if it fits into what a run plans to use of its card, or if there is no card."""
        return not self.memory.total or self.held <= RESERVE * self.memory.total

    @property
    def pool(self) -> int:
        """Bytes of the memory pool of CUDA graphs, beside what the run holds."""
        return self.memory.pool(*self.plan)


@dataclass(frozen=True)
class Course:
    """State of the solver when a policy decides.

    Attributes:
        standing: names of the policies and conditions that exclude others: what is asked for and
            not yet decided, and what was decided to run.
        memory: bytes that the run is expected to hold.
        frees: True if gradients must be summed and freed in the backward pass.
        sharding: the decision on sharding.
        recomputed: the decision on recomputation; None until the memory was decided.
        fitted: the memory with that recomputation; None until then.
    """

    standing: frozenset[str]
    memory: Estimate
    frees: bool
    sharding: Decision
    recomputed: Decision | None = None
    fitted: Fitted | None = None


@dataclass(frozen=True)
class Running:
    """A run between two of its steps, as a policy sees it that may still be added.

    Attributes:
        facts: on which the policies were decided.
        decisions: decision on each policy, by its name.
        model: the prepared model.
        objective: what is minimised.
    """

    facts: Facts
    decisions: Mapping[str, Decision]
    model: Any
    objective: Objective

    def why_excluded(self, policy: str) -> str | None:
        """Return why a policy does not run together with what runs and holds; None if it may."""
        standing = {name for name, decision in self.decisions.items() if decision.runs}
        standing |= conditions(self.facts)
        reasons = [why_excluded(policy, standing, self.facts)]
        reasons += [why_excluded(other, {policy}, self.facts) for other in sorted(standing)]
        return next((reason for reason in reasons if reason), None)


class Remedy(NamedTuple):
    """Fields that make a run take less memory.

    Attributes:
        fields: values of the configuration.
        price: what is given up in words; empty where it is only time.
    """

    fields: dict[str, Any]
    price: str = ""


class Stage(Enum):
    """When the recipe (``chronicals.training.session.prepare_session``) applies a policy.

    LAYERS: before modules are replaced by kernels.
    MODULES: after that, before the optimizer is made.
    WEIGHTS: after weights have their final type and place.
    """

    LAYERS = 1
    MODULES = 2
    WEIGHTS = 3


class Policy:
    """Base class: something that a run may switch on, and all that others must know about it.

    A subclass says how it is asked for, why it cannot run, what it costs, and how it is applied.
    The default is an entry of ``memory`` that runs where it is asked for.

    Attributes:
        name: key of its decision: a switch, or an entry of ``memory``.
        title: what it is in a practitioner's words, for the log; empty where that says it itself.
        runs_as: words for the log about how it runs, where they need no facts.
        setting: how the configuration asks for it, for messages.
        before_memory: True if it is decided before the memory is, on which it does not depend.
        shares: True if it takes a share of what all others leave, so that its bytes count last.
        only_time: True if it saves memory for nothing but time.
        stage: when it is applied; None for a policy that the recipe applies by itself.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    setting: ClassVar[str]
    runs_as: ClassVar[str] = ""
    before_memory: ClassVar[bool] = False
    shares: ClassVar[bool] = False
    only_time: ClassVar[bool] = False
    stage: ClassVar[Stage | None] = None

    def asked(self, config: ChronicalsConfig) -> bool:
        """Return whether the configuration asks for the policy, or permits it."""
        return ALIASES.get(self.name, self.name) in config.memory_policies

    def why_not(self, facts: Facts) -> str | None:
        """Return why the policy cannot run, with the remedy; None if it can."""
        return None

    def words(self, facts: Facts) -> str:
        """Return the reason of a policy that runs, for the log: who asked for it, and how it runs."""
        asked = facts.who_asked(self.name)
        return f"{asked}, {self.runs_as}" if self.runs_as else asked

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Decide whether the policy runs.

        Raises:
            ConfigurationError: it is asked for and cannot run.
        """
        if not self.asked(facts.config):
            return Decision(self.name, False, "not asked for")
        reason = why_excluded(self.name, course.standing, facts) or self.why_not(facts)
        if reason:
            raise ConfigurationError(f"{self.setting}: {reason}")
        return Decision(self.name, True, self.words(facts))

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with the bytes that the policy adds and saves, if it is asked for."""
        return load

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with what the policy adds to a step; called if it runs."""
        return work

    def apply(self, model: Any, facts: Facts, decision: Decision) -> None:
        """Change the model at ``stage``; called if the policy runs."""

    def around_steps(self, model: Any, decision: Decision) -> AbstractContextManager[Any]:
        """Return a context around all steps of a run in which the policy runs."""
        return nullcontext()

    def addition(self, running: Running) -> Decision | None:
        """Return the decision with which the policy joins a run that is short of memory.

        None, the default, if it cannot between two steps, if it would change results, or if the
        configuration sets otherwise. Its reason says for the log what is done.
        """
        return None

    def join(self, running: Running, decision: Decision) -> None:
        """Change the model or the objective of a run between two steps (``addition``).

        What the policy does around the steps begins then, too.
        """

    def spares(self, config: ChronicalsConfig, ranks: int) -> bool:
        """Return whether an entry with ``only_time`` belongs to the leanest ``memory``."""
        return self.name in config.memory_policies

    def settings(self, facts: Facts) -> Iterator[Remedy]:
        """Yield changes, each instead of the others, by which the policy alone saves memory.

        Those without a price change no result, and ``fit`` may take them. The default is the entry
        of ``memory`` of a policy with ``only_time``, if neither it nor ``memory`` without ``auto``
        was set.
        """
        config = facts.config
        entry = ALIASES.get(self.name, self.name)
        given = {switch for switch, other in ALIASES.items() if other == entry}
        if AUTO not in (config.memory or ()):
            given.add("memory")
        if not self.only_time or self.asked(config) or given & config.explicit:
            return
        if self.why_not(facts) is None:
            entries: list[str] = [AUTO, *sorted(config.memory_policies)]
            if config.memory is not None:
                entries = list(config.memory)
            yield Remedy({"memory": [*entries, entry]})

    def unloaded(self, facts: Facts) -> int:
        """Return bytes of weights that are not there with ``settings``.

        They count where the model would have to be loaded in another way, which no estimate of the
        model as it is can tell.
        """
        return 0

    def remedies(self, config: ChronicalsConfig, ranks: int) -> Iterator[Remedy]:
        """Yield changes of the configuration that switch the policy on to save memory.

        Args:
            config: the configuration that does not fit.
            ranks: number of processes that train together.
        """
        return iter(())


class OwnField(Policy):
    """A policy that the field of its own name asks for, which is true or false."""

    def asked(self, config: ChronicalsConfig) -> bool:
        """Return the field of the policy's name."""
        return bool(getattr(config, self.name))


class Switch(OwnField):
    """A ``use_*`` field that is on by default: it permits, and what was set must be honoured."""

    before_memory = True
    matters: ClassVar[bool] = False

    def words(self, facts: Facts) -> str:
        """Return how it runs: nobody has to ask for it."""
        return self.runs_as

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Decide whether the policy runs: if it can, and nothing excludes it.

        Raises:
            ConfigurationError: the field was set, and the policy cannot run.
        """
        if not self.asked(facts.config):
            return Decision(self.name, False, "turned off")
        reason = why_excluded(self.name, course.standing, facts) or self.why_not(facts)
        if reason and self.name in facts.config.explicit:
            raise ConfigurationError(
                f"{self.name}=True cannot be honoured here: {reason}; leave it out or set it to "
                "False"
            )
        return Decision(self.name, not reason, reason or self.words(facts), matters=self.matters)


POLICIES: dict[str, Policy] = {}
"""All policies by name; ``policies`` returns them in the order of the log."""

_LOG_ORDER = (
    "context_parallel",
    "use_flash_attention",
    "use_fused_kernels",
    "use_sequence_packing",
    "use_torch_compile",
    "use_cuda_graphs",
    "quantization",
    "use_fp8",
    "use_gradient_checkpointing",
    "activation_offload",
    "tiled_layers",
    "tiled_mlp",
    "offload_frozen_weights",
    "offload_embeddings",
    "offload_experts",
    "sharding",
    "reduce_in_backward",
    "optimizer_in_backward",
    "use_8bit_optimizer",
    "offload_optimizer_states",
)

_FIRST_REMEDIES = ("micro_batches", "logits_chunk_size", "use_gradient_checkpointing")
"""Policies whose remedies come first: fewer tokens or logits at a time for an unchanged step."""

_LAST_REMEDIES = ("quantization", "max_seq_length")
"""Policies whose remedies come last: fewer trained values, a quantised base, or shorter rows."""

P = TypeVar("P", bound=Policy)


def register_policy(policy: P) -> P:
    """Add ``policy`` to ``POLICIES`` and return it."""
    POLICIES[policy.name] = policy
    return policy


def policies() -> list[Policy]:
    """Return all policies in the order of the log; others than our own come last."""
    order = {name: place for place, name in enumerate(_LOG_ORDER)}
    return sorted(POLICIES.values(), key=lambda policy: order.get(policy.name, len(order)))


def policies_by_cost() -> list[Policy]:
    """Return all policies in the order in which memory is to be saved, what costs least first."""
    places = {name: place for place, name in enumerate(_FIRST_REMEDIES, -len(_FIRST_REMEDIES))}
    places |= {name: place for place, name in enumerate(_LAST_REMEDIES, 1)}
    return sorted(policies(), key=lambda policy: places.get(policy.name, 0))


def apply_policies(
    stage: Stage, model: Any, facts: Facts, decisions: Mapping[str, Decision]
) -> None:
    """Apply all policies of ``stage`` that run."""
    for policy in policies():
        if policy.stage is stage and decisions[policy.name].runs:
            policy.apply(model, facts, decisions[policy.name])
