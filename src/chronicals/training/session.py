"""A model made ready to train, by one ordered recipe, and its optimizer step.

Everything that trains goes through ``prepare``: ``ChronicalsTrainer``, ``verify``, and through the
trainer the benchmark.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data.packs.steps import Step
from chronicals.distributed import (
    HostExchange,
    Mesh,
    ShardedAdam8bit,
    ShardedAdamW,
    Shards,
    WeightShards,
    divide_again,
    forget_broken_step,
    gathers_of,
    is_divided,
    looking_up_as_many,
    on_each_machine,
    stay_gathered,
)
from chronicals.lora import has_magnitudes
from chronicals.memory import (
    CHEAP,
    ActivationOffload,
    decoder_layers,
    disable_gradient_checkpointing,
    enable_gradient_checkpointing,
    recomputes,
)
from chronicals.models import PresentedModel, input_device, present, why_neighbours_matter
from chronicals.moe.routers import experts_per_token
from chronicals.objectives import Objective
from chronicals.optimizers import (
    Adam8bit,
    FusedAdamW,
    HostStates,
    keep_full_moments,
    lora_plus_groups,
)
from chronicals.patching import (
    forget_policies,
    forget_row_norms,
    fuse_weights,
    offload_frozen_experts,
    offload_frozen_weights,
    patch_parts,
    recompute_norms_and_units,
    run_experts_in_fp8,
    run_in_fp8,
    tile_mlps,
    unfuse_weights,
)
from chronicals.patching.fp8_layers import MIN_FP8_WIDTH
from chronicals.training.adapters import attach_adapters
from chronicals.training.alike import prove_alike
from chronicals.training.checkpoint import MODEL
from chronicals.training.compilation import compile_micro_step, compiles_beforehand
from chronicals.training.context import check_context, prove_context
from chronicals.training.decisions import Decision, decide, summary, why_not_fused
from chronicals.training.frozen import bring_frozen, frozen_attending, release_frozen
from chronicals.training.graphs import GraphedStep
from chronicals.training.in_backward import UpdatesInBackward
from chronicals.training.precision import Precision
from chronicals.training.routers import add_router_terms, prepare_routers
from chronicals.training.scattered import ScatteredStep
from chronicals.training.step import (
    EagerStep,
    StepParts,
    counts_of,
    known_before,
    nothing,
    train_step,
)
from chronicals.training.weight_sharding import (
    WEIGHTS,
    FrozenGatheredStep,
    GatheredStep,
    check_whole,
    divide_weights,
    trains_layers,
)

logger = logging.getLogger(__name__)

HIGHEST_RATE_OF_B = 1.6e-2
"""Highest learning rate of B at which LoRA+ trained: in benchmarks/results/lora-plus.json
held-out loss falls until A learns at 1e-3 and B at 1.6e-2 (5.98, from 6.00 at a tenth of that);
with 4.8e-2 gradients explode, and it ends at 6.25. Adapters of rank 16 and alpha 32."""

CHECKPOINTED = "_chronicals_checkpointed"
"""Attribute of a decoder whose layers an earlier run recomputed, which a later one may not need."""


def prepare(
    model: Any,
    config: ChronicalsConfig,
    objective: Objective,
    ranks: Mesh | None = None,
    resumed: Path | None = None,
    tokenizer: Any = None,
) -> Session:
    """The recipe, the only place that knows its order.

    The caller has loaded the model, quantising it if it is to be quantised, and moved it to its
    device. The objective's frozen models come first, while the model is as it was loaded, then the
    parameters that it trains beside the model's own; adapters go onto weights of any format. What a
    step needs to know about the model is read after the adapters are there; kernels are chosen for
    what was decided; the cast makes exact fp32 masters in the optimizer, which must exist; weights
    are joined in their final dtype; FP8 copies are made of the joined weights, and only those
    copies can wait in host memory.

    Args:
        resumed: checkpoint that the run goes on from.
        tokenizer: of the model; an objective with frozen models or parameters of its own may need
            it.

    Raises:
        ConfigurationError: the configuration cannot be honoured with this model on this machine;
            the message names the field.
    """
    ranks = ranks or Mesh()
    bring_frozen(objective, model, tokenizer, config)
    torch.manual_seed(config.seed)  # adapters are the same on all ranks
    objective.prepare(model, tokenizer, config)
    heads = prepare_routers(model, objective.router)
    attach_adapters(model, config, None if resumed is None else resumed / MODEL, heads)
    presented = present(
        model,
        config.use_fused_kernels,
        config.use_flash_attention,
        config.max_seq_length,
        objective.shares_prompts(),
    )
    add_router_terms(presented, objective.router)
    check_context(presented, objective, config, ranks)
    decisions = _decide(presented, config, ranks)
    _patch(
        presented.model, config, decisions, whole_layers=why_not_fused(config, presented) is None
    )
    sharding = decisions["sharding"]
    if sharding.how == WEIGHTS:
        divide_weights(model, config, ranks, sharding.among)
        if trains_layers(model):
            divide_again(model)  # after a pass of the caller's own
            stay_gathered(decoder_layers(model), sharding.stay)
    else:
        check_whole(model, config)
        ranks.same_weights(model.parameters())
    optimizer = build_optimizer(model, config, ranks if decisions["sharding"].runs else None)
    if ranks.writer:
        say_learning_rates(config, optimizer)
    precision = Precision(config.mixed_precision, input_device(model))
    shards_whole = isinstance(optimizer, ShardedAdamW) and isinstance(
        optimizer.shards, WeightShards
    )
    if not shards_whole:  # which are fp32, and gathered to where products find them
        precision.prepare(model, optimizer)
        fuse_weights(model)
    if config.use_fp8:
        _run_in_fp8(
            model, config.batch_size * config.max_seq_length * ranks.data_count // ranks.count
        )
    if "offload_frozen_weights" in config.memory_policies:
        _offload_frozen_weights(model)
    optimizer.weights_moved()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    several = (
        config.gradient_accumulation_steps > 1 or ranks.count > 1 or decisions["tiled_mlp"].runs
    )
    if several and not shards_whole:
        for parameter in parameters:  # in which several gradients are summed
            parameter.grad_dtype = torch.float32
    torch.manual_seed(config.seed + ranks.rank)  # dropout is not
    return Session(
        model, config, objective, ranks, presented, decisions, optimizer, precision, parameters
    )


@contextmanager
def prepared(
    model: Any,
    config: ChronicalsConfig,
    objective: Objective,
    ranks: Mesh | None = None,
    resumed: Path | None = None,
    tokenizer: Any = None,
) -> Iterator[Session]:
    """``prepare``; afterwards the model's weights are separate tensors again, and have no
    gradients; frozen models are gone.
    """
    try:
        yield prepare(model, config, objective, ranks, resumed, tokenizer)
    finally:
        release_frozen(objective)
        _leave(model)


@dataclass
class Session:
    """A prepared model with what trains it.

    Attributes:
        decisions: what runs of all that the configuration permits, by the name of its switch.
        parameters: those that are trained.
        before_update: called before weights are changed, between the backward pass and the update,
            or before the backward pass where that updates.
        told: whether this rank wants all to stop; asked in every step of several ranks, whose
            scalars then have ``told``: how many of them do.
        passed: called after each micro-batch, with which the device may not be done.
        compiling: around what is compiled before the first step, for which no other rank is needed.
    """

    model: Any
    config: ChronicalsConfig
    objective: Objective
    ranks: Mesh
    presented: PresentedModel
    decisions: Mapping[str, Decision]
    optimizer: FusedAdamW
    precision: Precision
    parameters: list[Tensor]
    before_update: Callable[[], None] = field(
        init=False, default_factory=lambda: lambda: None
    )  # of the instance: no method
    told: Callable[[], bool] = field(init=False, default_factory=lambda: lambda: False)
    passed: Callable[[], None] = field(init=False, default_factory=lambda: nothing)
    compiling: Callable[[], AbstractContextManager[None]] = field(
        init=False, default_factory=lambda: nullcontext
    )
    _beside: dict[str, Tensor] = field(init=False, default_factory=dict)
    _parts: StepParts = field(init=False)
    _graphed: GraphedStep | None = field(init=False, default=None)
    _summing: ScatteredStep | None = field(init=False, default=None)
    _compiles: bool = field(init=False, default=False)
    _has_magnitudes: bool = field(init=False, default=False)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within: ``train_once`` may be called, and the model attends within documents.
        Afterwards its weights are separate tensors again, to be saved or used."""
        config = self.config
        runs = {name for name, decision in self.decisions.items() if decision.runs}
        given = self.presented, self.objective, self.parameters, self.optimizer, self.precision
        with ExitStack() as around:
            around.callback(_leave, self.model)
            around.enter_context(self.presented.attending_documents())
            if self.presented.packed:  # of which all batches have as many tokens
                around.enter_context(looking_up_as_many(self.model))
            around.enter_context(frozen_attending(self.objective))
            for presented in (self.presented, *self.objective.frozen.values()):
                prove_context(presented, self.ranks)
            if "activation_offload" in runs:
                around.enter_context(ActivationOffload(self.model.get_decoder()))
            if "optimizer_in_backward" in runs:
                self._parts = around.enter_context(UpdatesInBackward(*given, self.ranks.norm))
            elif "reduce_in_backward" in runs and isinstance(self.optimizer, ShardedAdamW):
                shards = self.optimizer.shards
                assert isinstance(shards, Shards)
                scattered = ScatteredStep(*given, config.max_grad_norm, shards.norm, shards=shards)
                self._parts = self._summing = around.enter_context(scattered)
            else:
                self._parts = self._kind_of_step()(*given, config.max_grad_norm, self._sums.norm)
            if "use_cuda_graphs" in runs:
                exchange = None
                if gathers_of(self.model) is not None:
                    exchange = HostExchange(self.ranks)
                    around.callback(exchange.close)
                self._graphed = GraphedStep(
                    self._parts,
                    self.model.parameters(),
                    self.parameters,
                    self.optimizer,
                    with_update="sharding" not in runs,
                    exchange=exchange,
                )
                around.callback(self._drop_graphs)
            self._has_magnitudes = has_magnitudes(self.model)
            called = (self.presented, *self.objective.frozen.values())
            in_backward = "optimizer_in_backward" in runs
            alone = self.ranks.context is None and self.decisions["sharding"].how != WEIGHTS
            self._compiles = alone and all(
                compiles_beforehand(config, m, in_backward) for m in called
            )
            self.model.zero_grad(
                set_to_none=True
            )  # what a run that was broken off, or the caller, left behind
            yield

    def _kind_of_step(self) -> type[EagerStep]:
        if isinstance(self._sums, WeightShards):
            return GatheredStep
        return EagerStep if gathers_of(self.model) is None else FrozenGatheredStep

    def train_once(
        self, step: Step, inspect: Callable[[], None] | None = None
    ) -> dict[str, Tensor]:
        """One optimizer step, within ``stepping``.

        Args:
            inspect: called while gradients exist, before they are used, of all or of some at a
                time; the step then runs without
            graphs.

        Returns:
            As ``train_step``.
        """
        counts = counts_of(step, self.ranks)
        step = known_before(
            step, counts, self.presented, self.objective, self.ranks, self.precision, self.passed
        )
        self._parts.begin(self.before_update, len(step.batches))
        if self._compiles:
            with self.compiling():
                compile_micro_step(
                    self.presented, self.objective, step.batches[0], counts, self.precision
                )
            self._compiles = False
        if self._graphed is not None and inspect is None:
            with self._graphed.on_stream():
                scalars = train_step(
                    step,
                    counts,
                    self._graphed.micro,
                    self._reduce,
                    self._graphed.update,
                    self.passed,
                )
        else:
            self._parts.inspect = None if inspect is None else partial(self._inspect, inspect)
            scalars = train_step(
                step, counts, self._parts.micro, self._reduce, self._parts.update, self.passed
            )
            self._parts.inspect = None
        if self._has_magnitudes:
            forget_row_norms(self.model)
        return {**self.objective.finish_metrics(scalars, counts), **self._beside}

    def _reduce(self, scalars: list[Tensor]) -> Tensor | None:
        self.before_update()
        if self.ranks.count > 1:
            self._beside = {
                "told": torch.full((), float(self.told()), device=self.precision.device)
            }
        return (self._summing or self._sums).reduce(
            self.parameters, [*scalars, *self._beside.values()]
        )

    @property
    def _sums(self) -> Mesh | Shards | WeightShards:
        """What sums gradients over the ranks after the backward pass."""
        return self.optimizer.shards if isinstance(self.optimizer, ShardedAdamW) else self.ranks

    def _inspect(self, inspect: Callable[[], None]) -> None:
        """With all sums; where a rank has a share of them, once for each bucket of weights."""
        if not isinstance(self.optimizer, ShardedAdamW):
            inspect()
            return
        for _ in self.optimizer.shards.bring_gradients():
            inspect()

    def release_graphs(self) -> None:
        """Give back the memory of CUDA graphs between steps; later steps are captured anew."""
        if self._graphed is not None:
            self._graphed.release()

    def _drop_graphs(self) -> None:
        self.release_graphs()
        self._graphed = None


def _leave(model: Any) -> None:
    """Weights, and the dtypes of their gradients, as they were given; gradients of a step that
    failed are dropped.
    """
    unfuse_weights(model)
    divide_again(model)
    forget_broken_step(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = None
            if not is_divided(parameter):
                parameter.grad_dtype = parameter.dtype


def _decide(
    presented: PresentedModel, config: ChronicalsConfig, ranks: Mesh
) -> dict[str, Decision]:
    """What runs of what is permitted, logged with the reasons; memory policies of an earlier run
    are taken off first.
    """
    model = presented.model
    if reason := why_neighbours_matter(model.config, config.max_seq_length):
        logger.warning("%s", reason)
    forget_policies(model)
    if vars(model.get_decoder()).pop(CHECKPOINTED, False):
        disable_gradient_checkpointing(model)
    here = on_each_machine(ranks) if config.sharding == WEIGHTS else None
    context = ranks.count // ranks.data_count
    decisions = decide(
        config, presented, ranks.count, context, here, lambda own: min(ranks.gather_values(own))
    )
    as_collectives_are = {
        field: [made.runs, made.how, made.layers, made.among, made.stay]
        for field, made in decisions.items()
    }
    prove_alike(ranks, as_collectives_are)
    for decision in decisions.values():
        logger.debug("%s", decision)
    for line in summary(decisions.values()):
        logger.info("%s", line)
    return decisions


def _patch(
    model: Any, config: ChronicalsConfig, decisions: Mapping[str, Decision], whole_layers: bool
) -> None:
    """Recomputation, kernels, tiles and compilation, as decided.

    Args:
        whole_layers: whether decoder layers run fused.
    """
    recomputed = decisions["use_gradient_checkpointing"]
    own = recomputed.runs and recomputed.layers == 0 and recomputed.how != CHEAP
    if recomputes(model) and not own:
        disable_gradient_checkpointing(model)
    if recomputed.layers != 0:
        enable_gradient_checkpointing(model, whole_layers, recomputed.layers)
        setattr(model.get_decoder(), CHECKPOINTED, True)
    if recomputed.how == CHEAP:
        recompute_norms_and_units(model)
    if config.use_fused_kernels and input_device(model).type == "cuda":
        patched = patch_parts(model, whole_layers).counts()
        logger.info(
            "fused kernels: %s",
            ", ".join(f"{count} x {by}" for by, count in patched.items()) or "no module has one",
        )
    if decisions["tiled_mlp"].runs:
        tile_mlps(model)
    if decisions["use_torch_compile"].runs:
        for layer in decoder_layers(model):
            layer.compile()  # the entries of the bounds become dynamic when they first change


def build_optimizer(model: Any, config: ChronicalsConfig, ranks: Mesh | None = None) -> FusedAdamW:
    """AdamW over what is trained: LoRA+ groups, or weight decay on matrices only; with 8-bit
    moments, or with states in host memory, where asked.

    Args:
        ranks: over which weights and states are sharded; None where they are not.

    Raises:
        ConfigurationError: nothing requires a gradient.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        adapted = hasattr(model, "chronicals_lora")
        remedy = (
            "unfreeze lora_A and lora_B of its adapters"
            if adapted
            else "unfreeze some or set use_lora=True"
        )
        raise ConfigurationError(f"the model has no parameter that requires a gradient; {remedy}")
    options: dict[str, Any] = {
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "state_dtype": torch.bfloat16 if config.optimizer_state_dtype == "bf16" else torch.float32,
        "master": config.master_weights,
        "host": HostStates() if "offload_optimizer_states" in config.memory_policies else None,
    }
    of_peft = bool(getattr(model, "peft_config", None)) and "use_lora_plus" in config.explicit
    if config.use_lora_plus and (hasattr(model, "chronicals_lora") or of_peft):
        groups = lora_plus_groups(model, config.learning_rate, config.lora_plus_ratio)
    else:
        groups = [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
    if config.use_8bit_optimizer:
        groups = keep_full_moments(model, groups)
    groups = [group for group in groups if group["params"]]
    options |= {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    optimizer: FusedAdamW
    if ranks is not None:
        sharded = ShardedAdam8bit if config.use_8bit_optimizer else ShardedAdamW
        divided = any(is_divided(p) for p in trained)
        optimizer = sharded(
            groups, (WeightShards if divided else Shards)(ranks, trained), **options
        )
    else:
        optimizer = (Adam8bit if config.use_8bit_optimizer else FusedAdamW)(groups, **options)
    for group in optimizer.param_groups:
        group["peak"] = group["lr"]
    return optimizer


def say_learning_rates(config: ChronicalsConfig, optimizer: FusedAdamW) -> None:
    """Log both rates where B learns faster than A, with a warning where B's is beyond those that
    were seen to train.
    """
    slow = config.learning_rate
    fast = max(group["peak"] for group in optimizer.param_groups)
    if fast <= slow:
        return
    logger.info(
        "learning rates: A %s, B %s (LoRA+; use_lora_plus=False for one rate)",
        as_rate(slow),
        as_rate(fast),
    )
    if fast > HIGHEST_RATE_OF_B * (1 + 1e-6):
        logger.warning(
            "B learns at %s, and above %s LoRA+ was seen not to train (docs/training.md): set "
            "learning_rate=%s or lower, or "
            "use_lora_plus=False",
            as_rate(fast),
            as_rate(HIGHEST_RATE_OF_B),
            as_rate(HIGHEST_RATE_OF_B / config.lora_plus_ratio),
        )


def as_rate(value: float) -> str:
    """A learning rate as people write it: ``2.0e-4``."""
    digits, _, exponent = f"{value:.2e}".partition("e")
    digits = digits.removesuffix("0")
    return f"{digits}e{int(exponent)}"


def _run_in_fp8(model: Any, tokens: int) -> None:
    """Raises ConfigurationError where no product is large enough for FP8.

    Args:
        tokens: of a forward pass.
    """
    found = run_in_fp8(model)
    experts = run_experts_in_fp8(model, tokens * _experts_per_token(model))
    if not found.chosen and not experts.layers:
        small = (
            f"no product of this model has inputs and outputs of a harmonic mean of {MIN_FP8_WIDTH}, "
            "and FP8 does not pay for less"
        )
        reason = f"its layers do not run fused: {', '.join(found.left)}" if found.left else small
        stay = f"; its experts stay in 16 bit: {', '.join(experts.left)}" if experts.left else ""
        raise ConfigurationError(
            f"use_fp8=True cannot be honoured here: {reason}{stay}; leave it out"
        )
    if found.left:
        logger.warning(
            "use_fp8: some layers do not run fused and stay in 16 bit: %s", ", ".join(found.left)
        )
    if experts.left:
        logger.warning("use_fp8: some experts stay in 16 bit: %s", ", ".join(experts.left))
    if found.total:
        sizes = f"those whose inputs and outputs have a harmonic mean of at least {MIN_FP8_WIDTH}"
        logger.info(
            "use_fp8: %d of %d products of fused layers, %s", found.chosen, found.total, sizes
        )
    if experts.layers:
        logger.info(
            "use_fp8: both products of the experts of %d layers; gradients of their weights in 16 "
            "bit",
            experts.layers,
        )


def _experts_per_token(model: Any) -> int:
    """1 where the configuration does not say, as where there are no experts."""
    try:
        return experts_per_token(model)
    except ValueError:
        return 1


def _offload_frozen_weights(model: Any) -> None:
    """Raises ConfigurationError where no product in FP8 has a frozen weight."""
    moved = offload_frozen_weights(model) + offload_frozen_experts(model)
    if not moved:
        raise ConfigurationError(
            "memory=['offload_frozen_weights']: every weight that runs in FP8 is trained; leave "
            "it out"
        )
    logger.info("offload_frozen_weights: %.1f GiB wait in host memory", moved / 2**30)
