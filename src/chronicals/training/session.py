"""Preparation of a model for training in one fixed order, and its optimizer step.

``ChronicalsTrainer`` and ``verify`` use ``prepare_session``, and the benchmark uses it through the trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.data.packs.steps import Step
from chronicals.distributed import (
    HostExchange,
    Mesh,
    ShardedAdamW,
    Shards,
    WeightShards,
    divide_again,
    forget_broken_step,
    gathers_of,
    is_divided,
    looking_up_as_many,
    on_each_machine,
    prove_alike,
)
from chronicals.kernels.cuda_graphs import Recorder
from chronicals.lora import has_magnitudes
from chronicals.memory import Moment, disable_gradient_checkpointing, let_segments_grow
from chronicals.models import PresentedModel, input_device, why_neighbours_matter
from chronicals.objectives import Count, Objective
from chronicals.optimizers import FusedAdamW
from chronicals.patching import (
    forget_policies,
    forget_row_norms,
    fuse_weights,
    patch_parts,
    unfuse_weights,
)
from chronicals.policies import (
    Decision,
    Facts,
    Stage,
    apply_policies,
    decide,
    planned_peak,
    summary,
)
from chronicals.policies.context_parallel import check_frozen_context, prove_context
from chronicals.policies.exclusions import streams_experts
from chronicals.policies.facts import DIVIDE_WEIGHTS
from chronicals.policies.fit import fit_settings, refuse_what_no_setting_fits
from chronicals.policies.frozen_models import Held, held_by_frozen, held_by_rewards
from chronicals.policies.policy import Policy, policies
from chronicals.policies.recompute_layers import CHECKPOINTED, stop_other_recomputation
from chronicals.policies.sharding import SHARDING
from chronicals.policies.solver import settle_sharding
from chronicals.training.adapters import attach_adapters
from chronicals.training.columns.frozen import bring_frozen, frozen_attending
from chronicals.training.presented import present_for
from chronicals.training.run.checkpoint import MODEL
from chronicals.training.step.compilation import compile_micro_step, compiles_beforehand
from chronicals.training.step.graphs import GraphedStep
from chronicals.training.step.in_backward import ScatteredStep, UpdatesInBackward
from chronicals.training.step.optimizer import Precision, build_optimizer, say_learning_rates
from chronicals.training.step.routers import add_router_terms, prepare_routers
from chronicals.training.step.training_step import (
    EagerStep,
    FrozenGatheredStep,
    GatheredStep,
    counts_of,
    known_before,
    nothing,
    train_step,
)

logger = logging.getLogger(__name__)


def prepare_session(
    model: Any,
    config: ChronicalsConfig,
    objective: Objective,
    ranks: Mesh | None = None,
    resumed: Path | None = None,
    tokenizer: Any = None,
    alike: bool = False,
) -> Session:
    """Prepare a model for training.

    The caller has loaded the model, quantised it if it is to be quantised, and moved it to its
    device. The order of the steps matters:

    1. The objective's frozen models, while the model is as it was loaded, then the parameters that
    the objective trains besides the model's own.
    2. Adapters, onto weights of any format. Facts about the model are read after that.
    3. Kernels, chosen by what was decided.
    4. The optimizer, and then the cast, which stores exact fp32 masters in it.
    5. Joined weights of fused products, in their final dtype.
    6. FP8 copies of the joined weights; only such copies can wait in host memory.

    Args:
        model: the loaded model, on its device.
        config: configuration of the run.
        objective: what is minimised.
        ranks: all ranks of the run; None for a single process.
        resumed: checkpoint that the run resumes from.
        tokenizer: the model's tokenizer; an objective with frozen models or parameters of its own
            may need it.
        alike: all documents have as many tokens and targets.

    Raises:
        ConfigurationError: the configuration cannot be honoured with this model on this machine;
            the message names the field.
    """
    ranks = ranks or Mesh()
    bring_frozen(objective, model, tokenizer, config)
    torch.manual_seed(config.seed)  # so that all ranks draw the same adapters
    objective.prepare(model, tokenizer, config)
    heads = prepare_routers(model, objective.router)
    attach_adapters(model, config, None if resumed is None else resumed / MODEL, heads)
    presented = present_for(objective, model, config)
    add_router_terms(presented, objective.router)
    frozen = held_by_frozen(objective.frozen) | held_by_rewards(objective, config)
    goes_on = resumed is not None
    facts, decisions = decide_together(presented, config, ranks, frozen, alike, goes_on)
    config = facts.config  # with the settings that ``fit`` took
    objective.chunk_size = config.logits_chunk_size  # it was built before they were taken
    if facts.total and ranks.count == 1:
        let_segments_grow(planned_peak(facts, decisions).held, facts.total)
    check_frozen_context(facts, objective.frozen.values())
    stop_other_recomputation(presented.model, decisions["use_gradient_checkpointing"])
    apply_policies(Stage.LAYERS, presented.model, facts, decisions)
    if config.use_fused_kernels and facts.on_card:
        patched = patch_parts(presented.model, whole_layers=facts.unfused is None).counts()
        logger.info(
            "fused kernels: %s",
            ", ".join(f"{count} x {by}" for by, count in patched.items()) or "no module has one",
        )
    apply_policies(Stage.MODULES, presented.model, facts, decisions)
    SHARDING.divide(model, facts, decisions["sharding"], ranks)
    optimizer = build_optimizer(model, config, ranks if decisions["sharding"].runs else None)
    if ranks.writer:
        say_learning_rates(config, optimizer)
    precision = Precision(config.mixed_precision, input_device(model))
    shards_whole = isinstance(optimizer, ShardedAdamW) and isinstance(
        optimizer.shards, WeightShards
    )
    if not shards_whole:  # shards stay fp32, and FSDP gathers weights of a product adjacently
        precision.prepare(model, optimizer)
        fuse_weights(model)
    apply_policies(Stage.WEIGHTS, model, facts, decisions)
    optimizer.weights_moved()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    several = (
        config.gradient_accumulation_steps > 1 or ranks.count > 1 or decisions["tiled_mlp"].runs
    )
    if several and not shards_whole:
        sum_in_fp32(parameters)
    torch.manual_seed(config.seed + ranks.rank)  # dropout differs between ranks
    return Session(
        model,
        config,
        objective,
        ranks,
        presented,
        facts,
        decisions,
        optimizer,
        precision,
        parameters,
        planned_peak(facts, decisions) if facts.on_card else None,
    )


def sum_in_fp32(parameters: Iterable[Tensor]) -> None:
    """Let several gradients be summed in fp32, whatever the dtype of their weight."""
    for parameter in parameters:
        parameter.grad_dtype = torch.float32


def decide_together(
    presented: PresentedModel,
    config: ChronicalsConfig,
    ranks: Mesh,
    frozen_models: Mapping[str, Held] | None = None,
    alike: bool = False,
    resumed: bool = False,
) -> tuple[Facts, dict[str, Decision]]:
    """Return the facts of the run and the decisions on them, the same in all processes.

    The reasons are logged.

    Memory policies of an earlier run are removed from the model first.

    Args:
        presented: the model.
        config: configuration of the run.
        ranks: all ranks of the run.
        frozen_models: the objective's frozen models, by name.
        alike: all documents have as many tokens and targets.
        resumed: the run goes on from a checkpoint.

    Raises:
        ConfigurationError: what is asked for cannot run, or processes decided differently.
    """
    model = presented.model
    reason = why_neighbours_matter(model.config, config.max_seq_length)
    if reason:
        logger.warning("%s", reason)
    forget_policies(model)
    # what an earlier run of chronicals recomputed, this one may not need
    if vars(model.get_decoder()).pop(CHECKPOINTED, False):
        disable_gradient_checkpointing(model)
    facts = Facts.of(
        config,
        presented,
        ranks.count,
        context=ranks.count // ranks.data_count,
        here=on_each_machine(ranks) if config.sharding == DIVIDE_WEIGHTS else None,
        exchanging=1 if ranks.context is None else ranks.context.inner,
        frozen_models=frozen_models,
        alike=alike,
        resumed=resumed,
    )
    if config.fit != "off":
        settled = fit_settings(settle_sharding(facts)[0], ranks.gather_values)
        refuse_what_no_setting_fits(settled)
        if ranks.writer:
            for line in settled.words:
                logger.info("%s", line)
        facts = settled.facts
    decisions = decide(facts, lambda own: min(ranks.gather_values(own)))
    as_collectives_are = {
        field: [made.runs, made.how, made.layers, made.among, made.stay]
        for field, made in decisions.items()
    }
    prove_alike(ranks, as_collectives_are)
    for decision in decisions.values():
        logger.debug("%s", decision)
    for line in summary(decisions.values()):
        logger.info("%s", line)
    return facts, decisions


@contextmanager
def prepared(
    model: Any,
    config: ChronicalsConfig,
    objective: Objective,
    ranks: Mesh | None = None,
    resumed: Path | None = None,
    tokenizer: Any = None,
    alike: bool = False,
) -> Iterator[Session]:
    """Context manager around ``prepare_session`` that restores the model afterwards.

    Its weights are then separate tensors again without gradients, and frozen models are released.
    """
    try:
        yield prepare_session(model, config, objective, ranks, resumed, tokenizer, alike)
    finally:
        objective.frozen.clear()
        _leave(model)


@dataclass(frozen=True)
class StepHooks:
    """Functions of the run that a step calls.

    Attributes:
        before_update: called before weights are changed: between the backward pass and the update,
            or before the backward pass if that updates weights.
        wants_to_stop: returns whether this rank wants all ranks to stop. With several ranks it is
            called in every step, and the step's scalar ``told`` is the number of ranks that said
            yes.
        passed: called after each micro-batch is launched; the device may not have finished it.
        compiling: returns a context for the compilation before the first step, which needs no other
            rank.
        agree: called before gradients are summed over the ranks; it raises if another rank ran out
            of memory in this step.
        free: as in ``EagerStep``.
    """

    before_update: Callable[[], None] = nothing
    wants_to_stop: Callable[[], bool] = bool
    passed: Callable[[], None] = nothing
    compiling: Callable[[], AbstractContextManager[None]] = nullcontext
    agree: Callable[[], None] = nothing
    free: Callable[[str], None] | None = None


@dataclass
class Session:
    """A prepared model with all that trains it.

    Attributes:
        facts: on which the policies were decided.
        decisions: decision on each policy, by its name.
        parameters: the trained parameters.
        planned: largest moment of a step that is expected; None without a card, and after a change
            of the batch or of a policy.
        is_updated: True if the update of the last step was done.
    """

    model: Any
    config: ChronicalsConfig
    objective: Objective
    ranks: Mesh
    presented: PresentedModel
    facts: Facts
    decisions: Mapping[str, Decision]
    optimizer: FusedAdamW
    precision: Precision
    parameters: list[Tensor]
    planned: Moment | None = None
    is_updated: bool = field(init=False, default=False)
    _hooks: StepHooks = field(init=False, default_factory=StepHooks)
    _beside: dict[str, Tensor] = field(init=False, default_factory=dict)
    _around: ExitStack = field(init=False)
    _parts: EagerStep = field(init=False)
    _graphed: GraphedStep | None = field(init=False, default=None)
    _sums: ScatteredStep | Mesh | Shards | WeightShards = field(init=False)
    _compiles: bool = field(init=False, default=False)
    _has_magnitudes: bool = field(init=False, default=False)

    @contextmanager
    def stepping(self, hooks: StepHooks | None = None) -> Iterator[None]:
        """Context manager in which ``train_once`` may be called.

        The model attends within documents.

        Afterwards its weights are separate tensors again, to be saved or used.
        """
        config = self.config
        self._hooks = hooks or StepHooks()
        with ExitStack() as around:
            around.callback(_leave, self.model)
            around.enter_context(self.presented.attending_documents())
            if self.presented.packed:  # all packed batches have the same number of tokens
                around.enter_context(looking_up_as_many(self.model))
            around.enter_context(frozen_attending(self.objective))
            called = (self.presented, *self.objective.frozen.values())
            for presented in called:
                prove_context(presented, self.ranks)
            for policy in policies():
                decision = self.decisions[policy.name]
                if decision.runs:
                    around.enter_context(policy.around_steps(self.model, decision))
            self._around = around
            self._parts = self._step_parts(around)
            if not isinstance(self.optimizer, ShardedAdamW):  # whose updates end with a collective
                self._parts.free = self._hooks.free
            if self.decisions["use_cuda_graphs"].runs:
                exchange = None
                if gathers_of(self.model) is not None:
                    exchange = HostExchange(self.ranks)
                    around.callback(exchange.close)
                around.callback(setattr, self, "_graphed", None)
                around.callback(self.release_graphs)  # before that
                self._graphed = GraphedStep(
                    self._parts,
                    self.model.parameters(),
                    self.parameters,
                    self.optimizer,
                    with_update=not self.decisions["sharding"].runs,
                    exchange=exchange,
                    cut=streams_experts(self.model),
                )
            self._has_magnitudes = has_magnitudes(self.model)
            in_backward = self.decisions["optimizer_in_backward"].runs
            alone = self.ranks.context is None and self.decisions["sharding"].how != DIVIDE_WEIGHTS
            self._compiles = alone and all(
                compiles_beforehand(config, m, in_backward) for m in called
            )
            # Gradients may be left from an interrupted run or from the caller.
            self.model.zero_grad(set_to_none=True)
            yield

    def _step_parts(self, around: ExitStack) -> EagerStep:
        """Return what computes micro-batches and updates, as decided; set what sums gradients."""
        sums = self.optimizer.shards if isinstance(self.optimizer, ShardedAdamW) else self.ranks
        self._sums = sums
        given = self.presented, self.objective, self.parameters, self.optimizer, self.precision
        norm = self.config.max_grad_norm
        if self.decisions["optimizer_in_backward"].runs:
            return around.enter_context(UpdatesInBackward(*given, self.ranks.norm))
        if self.decisions["reduce_in_backward"].runs and isinstance(sums, Shards):
            scattered = ScatteredStep(*given, norm, sums.norm, shards=sums)
            self._sums = around.enter_context(scattered)
            return scattered
        if isinstance(sums, WeightShards):
            return GatheredStep(*given, norm, sums.norm)
        if gathers_of(self.model) is not None:
            return FrozenGatheredStep(*given, norm, sums.norm)
        return EagerStep(*given, norm, sums.norm)

    def train_once(
        self, step: Step, inspect: Callable[[], None] | None = None
    ) -> dict[str, Tensor]:
        """Take one optimizer step, inside ``stepping``.

        Args:
            step: micro-batches of the step.
            inspect: called while gradients exist and before they are used, once for all of them or
                for a part at a time; the step then runs without graphs.

        Returns:
            Scalars as from ``train_step``.
        """
        self.is_updated = False
        step, counts = self._begun(step, self._hooks.before_update)
        if self._graphed is not None and inspect is None:
            with self._graphed.on_stream():
                scalars = train_step(
                    step,
                    counts,
                    self._graphed.micro,
                    self._reduce,
                    partial(self._update, self._graphed.update),
                    self._hooks.passed,
                )
        else:
            self._parts.inspect = None if inspect is None else partial(self._inspect, inspect)
            scalars = train_step(
                step,
                counts,
                self._parts.micro,
                self._reduce,
                partial(self._update, self._parts.update),
                self._hooks.passed,
            )
            self._parts.inspect = None
        if self._has_magnitudes:
            forget_row_norms(self.model)
        return {**self.objective.finish_metrics(scalars, counts), **self._beside}

    def _begun(self, step: Step, hold: Callable[[], None]) -> tuple[Step, Mapping[str, Count]]:
        """Prepare the parts for a step, and compile before the first one.

        Returns:
            The step with what its objective must know before, and its counts.
        """
        counts = counts_of(step, self.ranks)
        step = known_before(
            step,
            counts,
            self.presented,
            self.objective,
            self.ranks,
            self.precision,
            self._hooks.passed,
        )
        self._parts.begin(hold, len(step.batches))
        if self._compiles:
            with self._hooks.compiling():
                compile_micro_step(
                    self.presented, self.objective, step.batches[0], counts, self.precision
                )
            self._compiles = False
        return step, counts

    def rehearse(self, step: Step) -> None:
        """Run forward and backward of the first micro-batches of a step, inside ``stepping``.

        The second one adds to the gradients of the first, so no further one needs more memory. No
        weight changes, and the gradients are thrown away. States of the optimizer exist afterwards.
        Random numbers are drawn.
        """
        for parameter in self.parameters:
            self.optimizer.state_of(parameter)
        first = replace(step, batches=step.batches[:2])
        first, counts = self._begun(first, nothing)
        with self._parts.rehearsing():
            for number, batch in enumerate(first.batches):
                self._parts.micro(batch, counts, number == 0)
        self.forget_step()

    def forget_step(self) -> None:
        """Free what a step holds that was not finished: gradients, graphs, norms of adapters."""
        self.release_graphs()
        self._parts.inspect = None
        forget_broken_step(self.model)
        self.optimizer.zero_grad()
        if self._has_magnitudes:
            forget_row_norms(self.model)

    def divide(self, config: ChronicalsConfig) -> None:
        """Take the micro-batches of another configuration from the next step on.

        Args:
            config: the session's with another ``batch_size`` and ``gradient_accumulation_steps``.
        """
        self.config = config
        self.facts = replace(self.facts, config=config)
        self.planned = None
        if config.gradient_accumulation_steps > 1:
            sum_in_fp32(self.parameters)

    def decide(self, decision: Decision) -> None:
        """Replace the decision on a policy, which its caller applies."""
        self.decisions = {**self.decisions, decision.field: decision}
        self.planned = None

    def enter(self, policy: Policy) -> None:
        """Enter what a policy does around the steps, inside ``stepping`` and until its end."""
        decision = self.decisions[policy.name]
        self._around.enter_context(policy.around_steps(self.model, decision))

    def _update(
        self, update: Callable[[Tensor | None], dict[str, Tensor]], holders: Tensor | None
    ) -> dict[str, Tensor]:
        scalars = update(holders)
        self.is_updated = True
        return scalars

    def _reduce(self, scalars: list[Tensor]) -> Tensor | None:
        self._hooks.agree()
        self._hooks.before_update()
        if self.ranks.count > 1:
            self._beside = {
                "told": torch.full(
                    (), float(self._hooks.wants_to_stop()), device=self.precision.device
                )
            }
        return self._sums.reduce(self.parameters, [*scalars, *self._beside.values()])

    def _inspect(self, inspect: Callable[[], None]) -> None:
        """Call ``inspect`` with all summed gradients; if they are sharded, once for each bucket."""
        if not isinstance(self.optimizer, ShardedAdamW):
            inspect()
            return
        for _ in self.optimizer.shards.bring_gradients():
            inspect()

    @property
    def recorder(self) -> Recorder | None:
        """Recorder of the graphs of steps; None without graphs, or outside ``stepping``."""
        return None if self._graphed is None else self._graphed.recorder

    def release_graphs(self) -> None:
        """Release the memory of CUDA graphs between steps; later steps are captured again."""
        if self._graphed is not None:
            self._graphed.release()


def _leave(model: Any) -> None:
    """Restore the weights and the dtypes of their gradients; drop gradients of a failed step."""
    unfuse_weights(model)
    divide_again(model)
    forget_broken_step(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = None
            if not is_divided(parameter):
                parameter.grad_dtype = parameter.dtype
