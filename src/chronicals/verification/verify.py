"""Verify a run against plain transformers in fp32, step by step and module by module.

Three arms compute every step from the same weights, those of the training path at that step:

- ours: the training path with the user's options, such as packs, kernels, accumulation, adapters,
  clipping and schedule.
- fp32: plain transformers with eager attention, a document per row, one mean over the step, and
  torch's AdamW. Its learning rates come from the definition of the schedule; ours must equal them
  at every step of the whole run.
- plain: the same in the run's own dtypes, with transformers' default attention. It shows how large
  rounding errors are. For an fp32 run it uses eager attention and one pass per document.

If the base is in 4 bits, a fourth arm uses other libraries (``bitsandbytes_arm``). Its weights must
equal ours, and its losses and gradients are compared with fp32 like ours.

Each arm keeps its own optimizer states, so only these differ by more than one step's rounding. The
optimizer is also tested separately: torch's AdamW with its own states gets our gradients, and the
updates must agree to fp32 rounding in every dtype.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import BatchStream, filler_token
from chronicals.data.packs.packing import plan_epoch
from chronicals.data.packs.steps import Step, Steps
from chronicals.distributed import Mesh, require_one_process
from chronicals.memory import checkpoints_end_with_errors
from chronicals.models import ModelShape, embedding_table, reach_positions
from chronicals.objectives import Objective, build_objective
from chronicals.objectives.policy_gradient import PolicyGradient
from chronicals.objectives.registry import BESIDE
from chronicals.policies.expert_offload import OFFLOAD_EXPERTS
from chronicals.training.adapters import quantise_as_asked, with_token_ids
from chronicals.training.columns.frozen import with_frozen_columns
from chronicals.training.columns.start_columns import StartColumns
from chronicals.training.preparation import (
    RowSource,
    fit_precision,
    fit_vocabulary,
    one_device,
    open_stores,
    readable_again,
)
from chronicals.training.run.length import Length, fit_batch, fit_learning_rate
from chronicals.training.step.routers import prepare_routers
from chronicals.training.step.training_step import rate_factor
from chronicals.verification import comparison
from chronicals.verification.arms import Arms
from chronicals.verification.bitsandbytes_arm import (
    ARM,
)
from chronicals.verification.comparison import (
    Beside,
    Deviation,
    Modules,
    StepLoss,
    Tally,
    Verification,
    rounding_walk,
)
from chronicals.verification.drawn_steps import DrawnSteps
from chronicals.verification.machine import version_of
from chronicals.verification.reference import (
    Item,
    PlainAdamW,
    count_items,
    exact_products,
    scheduled_rates,
    without_dropout,
)
from chronicals.verification.training_path import TrainingPath, step_items

FEWEST = 5
_MOST = 20
_PACKAGES = (
    "chronicals",
    "torch",
    "triton",
    "transformers",
    "flash-attn-4",
    "bitsandbytes",
    "peft",
)
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLAIN_SCALE = 2.0**12
"""Loss scale of the plain arm in fp16.

In a model that trains, it is low enough not to overflow and high enough not to underflow.
"""

RATE = 1e-9
"""Allowed error of a learning rate as a share of the peak, in fp64."""


def verify(
    model: Any,
    tokenizer: Any,
    config: ChronicalsConfig,
    train_dataset: RowSource,
    eval_dataset: RowSource | None = None,
    steps: int = FEWEST,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Train ``model`` for a few steps with ``config``, and compare each step with the plain arms.

    The model is changed: load it again before training.

    Args:
        model: on the device on which it trains.
        tokenizer: of the model.
        config: of the run.
        train_dataset: as ``ChronicalsTrainer.train`` takes it.
        eval_dataset: the same.
        steps: 5 to 20; a shorter run is compared as a whole.
        progress: called after each step with the number of steps done and of all steps.

    Raises:
        ConfigurationError: the run is not possible or cannot be compared; the message names the
            field.
        DataError: the data would make training wrong.
    """
    with ExitStack() as closing:
        return _verify(
            model, tokenizer, config, train_dataset, eval_dataset, steps, progress, closing
        )


def _verify(
    model: Any,
    tokenizer: Any,
    config: ChronicalsConfig,
    train_dataset: RowSource,
    eval_dataset: RowSource | None,
    steps: int,
    progress: Callable[[int, int], None] | None,
    closing: ExitStack,
) -> Verification:
    """Compare, as ``verify``; ``closing`` ends what the run has started."""
    if not FEWEST <= steps <= _MOST:
        raise ConfigurationError(f"steps={steps}: give {FEWEST} to {_MOST}")
    require_one_process("verify")
    objective = build_objective(config)
    _check_comparable(config, objective)
    device = one_device(model, Mesh())
    config = fit_precision(config, device)
    if config.resize_embeddings:
        config = fit_vocabulary(model, tokenizer, config, Mesh())
    quantise_as_asked(model, config)
    torch.manual_seed(config.seed)
    objective.prepare(model, tokenizer, config)
    prepare_routers(model, None)  # their losses are in no arm
    config, notes = _exactly(model, config)
    embedding_rows = embedding_table(model).shape[0]
    if objective.draws_answers:
        train_dataset = readable_again(train_dataset)
    store, _ = open_stores(
        train_dataset,
        eval_dataset,
        embedding_rows,
        tokenizer,
        config,
        Mesh(),
        answer_tokens=objective.answer_tokens,
    )
    reach_positions(model, store.longest + objective.answer_tokens, config.rope_scaling)
    plan = plan_epoch(store, config)
    config = with_token_ids(fit_learning_rate(config, Mesh(), model), tokenizer)
    drawn = None
    if isinstance(objective, PolicyGradient):
        drawn = closing.enter_context(
            DrawnSteps.of(model, tokenizer, config, objective, train_dataset)
        )
        config = drawn.run.fitted(config, store, Mesh())
        total = drawn.run.total_steps(config, store)
    else:
        config = fit_batch(config, plan, Mesh())
        total = Length.of(config, plan).steps
    filler = filler_token(tokenizer, embedding_rows)
    if total < steps:
        length = f"max_steps={total}"
        if config.epochs:
            length = f"{total} steps in num_epochs={config.epochs}"
        notes.append(f"the run has {length}, not {steps}")
        steps = total
    if device.type == "cuda" and config.use_cuda_graphs:
        notes.append("steps run without CUDA graphs here, to look at gradients before the update")
    arms = Arms.of(model, device, config, objective, notes)
    path = TrainingPath(model, config, total, tokenizer)
    config = path.session.config  # with the settings that fit took, as a run would have them
    store = StartColumns(
        path.session, partial(BatchStream, config=config, padding_token_id=filler, epochs=1)
    ).beside(store)
    (store,) = with_frozen_columns([store], path.session.objective, model, tokenizer, config)
    stored = BatchStream(store, config, filler, config.epochs, pin=device.type == "cuda", plan=plan)
    arms.follow(path, objective.for_definition(tokenizer), notes)
    compared = _Comparison(path, arms, scheduled_rates(config, total), device)
    with path.stepping(), checkpoints_end_with_errors():
        stream: Steps = stored
        items_of: Callable[[Any], list[list[Item]]] = partial(step_items, store, stored)
        if drawn is not None:
            drawn.begin(path.session, store, filler)
            stream = drawn.steps
            items_of = drawn.items
        for number, step in enumerate(stream.steps(count=steps)):
            compared.one_step(step, number, items_of(step.began))
            if progress is not None:
                progress(number + 1, steps)
    return compared.verification(notes, _facts(model, config, device, steps))


def _check_comparable(config: ChronicalsConfig, objective: Objective) -> None:
    """Refuse a run that cannot be computed in fp32 by the formula of its objective.

    Raises:
        ConfigurationError: the objective has no formula, or experts are in host memory.
    """
    why_not = objective.why_not_defined()
    if why_not is not None:
        raise ConfigurationError(f"objective={config.objective!r}: {why_not}")
    if OFFLOAD_EXPERTS.asked(config):
        raise ConfigurationError(
            f"{OFFLOAD_EXPERTS.setting}: verify compares with weights in fp32, which experts in host "
            "memory do not have; leave it out here (it changes no bit of a run)"
        )


def _exactly(model: Any, config: ChronicalsConfig) -> tuple[ChronicalsConfig, list[str]]:
    """Return the configuration without random numbers and rounded states.

    The plain arms have none.

    Returns:
        The configuration, and messages about what was changed.
    """
    notes = without_dropout(model)
    if config.use_lora and config.lora_dropout:
        notes.append(f"lora_dropout={config.lora_dropout} is 0 here: the arms' masks would differ")
    if not config.master_weights:
        notes.append(
            "master_weights=False is true here: the noise of the rounding is larger than an update"
        )
    if config.optimizer_state_dtype != "fp32":
        notes.append(
            f"optimizer_state_dtype={config.optimizer_state_dtype!r} is 'fp32' here: the plain "
            "arms round none"
        )
    if config.use_8bit_optimizer:
        notes.append("use_8bit_optimizer=True is False here: the plain arms keep states in fp32")
    sections = dict(config.sections)
    beside = {name: sections.pop(name) for name in BESIDE if name in sections}
    if beside:
        notes.append(
            f"{beside}: these losses and metrics are in no arm, and their own tests hold them to "
            "their formulas"
        )
    exactly = {"master_weights": True, "optimizer_state_dtype": "fp32", "use_8bit_optimizer": False}
    exactly |= {"lora_dropout": 0.0} if config.use_lora else {}
    config = config.replace(sections=sections, **exactly)
    return config, notes


class _Comparison:
    """The arms, and the sums over the steps compared so far."""

    def __init__(self, path: TrainingPath, arms: Arms, rates: list[float], device: torch.device):
        self.path = path
        self.fp32 = arms.fp32
        self.plain = arms.plain
        self.others = arms.others
        self.config = arms.config
        self.rates = rates
        self.device = device
        start = self._weights()
        self.modules = Modules.of({name: tensor.shape for name, tensor in start.items()})
        self.gradients = Tally("gradient", self.modules, device)
        self.updates = Tally("update", self.modules, device)
        self.optimizer = Tally("optimizer", self.modules, device)
        self.sizes = Tally("weight", self.modules, device)
        self.their_gradients = Tally("gradient", self.modules, device)
        lora = hasattr(path.model, "chronicals_lora")
        self.fp32_optimizer = PlainAdamW(start, arms.config, lora)
        self.plain_optimizer = PlainAdamW(start, arms.config, lora)
        self.our_gradients = PlainAdamW(start, arms.config, lora)
        layers = ModelShape.of(path.model.config).layers
        self.walk = rounding_walk(layers)
        self.losses: list[tuple[float, Tensor, Tensor, int]] = []
        self.their_losses: list[tuple[float, Tensor, Tensor, int]] = []
        self.skipped: list[int] = []

    def _weights(self) -> dict[str, Tensor]:
        """Return fp32 values of everything that should be trained.

        If our path does not train a weight, its value is that of the fp32 arm.
        """
        own = self.fp32.trained
        return {
            name: self.path.weight(name)
            if name in self.path.trained
            else own[name].detach().clone()
            for name in own
        }

    def one_step(self, step: Step, number: int, packs: list[list[Item]]) -> None:
        """Compute a step in all arms from the weights of the run, and add up what differs.

        Args:
            step: of the run.
            number: of the step, from 0.
            packs: the items of each pack of the step.
        """
        before = self._weights()
        counts = {**step.counts, **count_items(packs)}
        targets = int(counts["targets"])
        self.fp32.load(before)
        self.plain.load(before)
        made = self.path.step(step, number)
        if not made.applied:
            self.skipped.append(number + 1)
            return
        with exact_products():
            exact_losses, exact = self.fp32.differentiate(packs, counts)
        scale = PLAIN_SCALE if self.config.mixed_precision == "fp16" else 1.0
        plain_losses, plain = self.plain.differentiate(packs, counts, scale)
        self.losses.append((made.loss, exact_losses, plain_losses, targets))
        with torch.no_grad():
            self.fp32_optimizer.update(before, exact, self.rates[number])
            self.plain_optimizer.update(before, plain, self.rates[number])
            self.our_gradients.update(before, made.gradients, self.rates[number])
            for tally in (self.gradients, self.updates, self.optimizer, self.sizes):
                tally.begin_step()
            self._add(self.gradients, before, made.gradients, plain, exact)
            self._add_updates(before, plain, exact)
        if self.others is not None:
            self.others.load(before)
            their_losses, theirs = self.others.differentiate(packs, counts, scale)
            self.their_losses.append(
                (float(their_losses.sum()) / targets, exact_losses, plain_losses, targets)
            )
            self.their_gradients.begin_step()
            self._add(self.their_gradients, before, theirs, plain, exact)

    def _add(
        self,
        tally: Tally,
        weights: dict[str, Tensor],
        ours: dict[str, Tensor],
        plain: dict[str, Tensor],
        exact: dict[str, Tensor],
    ) -> None:
        """Add the gradients of one step; a missing gradient counts as zero."""
        for name, weight in weights.items():
            nothing = torch.zeros((), device=self.device).expand_as(weight)
            tally.add(name, *(gradients.get(name, nothing) for gradients in (ours, plain, exact)))

    def _add_updates(
        self, weights: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]
    ) -> None:
        """Add the changes of the weights in one step; a missing gradient counts as zero.

        Args:
            weights: before the step.
            plain: gradients in the run's precision.
            exact: gradients in fp32.
        """
        for name, weight in weights.items():
            nothing = torch.zeros((), device=self.device).expand_as(weight)
            clear = comparison.decided(
                exact.get(name, nothing), plain.get(name, nothing), self.walk
            )
            after = self.path.weight(name) if name in self.path.trained else weight
            ours = after - weight
            in_plain = self.plain_optimizer.weights[name] - weight
            in_fp32 = self.fp32_optimizer.weights[name] - weight
            self.updates.add(name, ours * clear, in_plain * clear, in_fp32 * clear)
            due = self.our_gradients.weights[name] - weight
            self.optimizer.add(name, ours, due, due)
            self.sizes.add(name, weight, weight, weight)

    def verification(self, notes: list[str], facts: dict[str, Any]) -> Verification:
        """Return the result of all steps, with messages and facts of the run."""
        if self.skipped:
            notes = [
                *notes,
                f"steps {self.skipped} were skipped for a gradient that is not finite, and are "
                "not compared",
            ]
        eps = torch.finfo(_TYPES[self.config.mixed_precision]).eps
        losses = comparison.step_losses(self.losses, self.walk)
        gradients = self.gradients.deviations(max(eps, self.walk))
        beside = None
        if self.others is not None:
            their_losses = comparison.step_losses(self.their_losses, self.walk)
            beside = Beside(their_losses, self.their_gradients.deviations(max(eps, self.walk)))
        sizes, changes, due = (
            tally.sums()[..., 0].sum(0).sqrt()
            for tally in (self.sizes, self.updates, self.optimizer)
        )
        updates = self.updates.deviations(
            comparison.update_floors(gradients, self.modules, sizes, changes)
        )
        optimizer = self.optimizer.deviations(comparison.optimizer_floors(sizes, due))
        failures = self._failures(losses, [*gradients, *updates, *optimizer])
        if beside is not None:
            failures += self._failures_beside(beside)
        return Verification(losses, gradients, updates, optimizer, failures, notes, facts, beside)

    def _failures_beside(self, beside: Beside) -> list[str]:
        """Return in what other libraries differ from fp32 by more than rounding.

        Then they understand this run differently.
        """
        assert self.others is not None
        failures = [
            f"{path}: the weight of {ARM} is another, by {off:.1%}"
            for path, off in self.others.differs.items()
        ]
        wrong = comparison.wrong_losses(beside.losses)
        if wrong:
            failures.append(
                f"{ARM}: its loss of step {wrong[0].step} is {wrong[0].ours:.6g}, in fp32 "
                f"{wrong[0].fp32:.6g}"
            )
        exceeding = [row for row in beside.gradients if row.ratio > 1]
        if 2 * len(exceeding) > len(beside.gradients):
            worst = exceeding[0]
            failures.append(
                f"{ARM}: its gradients of {len(exceeding)} of {len(beside.gradients)} modules "
                f"are others; {worst.module} {worst.words}"
            )
        return failures

    def _failures(self, losses: list[StepLoss], rows: list[Deviation]) -> list[str]:
        asked = set(self.fp32.trained)
        trained = set(self.path.trained)
        failures = [
            f"{name}: not trained, though the options ask for it"
            for name in sorted(asked - trained)
        ]
        failures += [
            f"{name}: trained, though the options do not ask for it"
            for name in sorted(trained - asked)
        ]
        for number, rate in enumerate(self.rates):
            ours = rate_factor(self.path.config, number, self.path.total_steps)
            if not abs(ours - rate) <= RATE:
                failures.append(
                    f"learning rate of step {number + 1}: {ours:.6g} of its peak, by lr_scheduler="
                    f"{self.config.lr_scheduler!r} {rate:.6g}"
                )
                break
        if not losses:
            failures.append(
                f"no step could be compared: the gradients of all steps ({self.skipped}) are not "
                "finite"
            )
        elif self.skipped and self.config.mixed_precision != "fp16":
            failures.append(f"the gradients of steps {self.skipped} are not finite")
        failures += [
            f"loss of step {row.step}: {row.ours:.6g}, in fp32 {row.fp32:.6g}, may differ by "
            f"{row.allowed:.1e}"
            for row in comparison.wrong_losses(losses)
        ]
        for found in rows:
            if found.missing:
                failures.append(f"{found.module}: {found.quantity} is zero; in fp32 it is not")
            elif not math.isfinite(found.allowed):
                failures.append(
                    f"{found.module}: {found.quantity} of the plain arm is no number: nothing to "
                    "set ours beside"
                )
            elif found.ratio > 1:
                failures.append(f"{found.module}: {found.quantity} {found.words}")
        return failures


def _facts(
    model: Any, config: ChronicalsConfig, device: torch.device, steps: int
) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        versions[name] = version_of(name) or "not installed"
    return {
        "model": model.config._name_or_path or type(model).__name__,
        "class": type(model).__name__,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or "cpu",
        "steps": steps,
        "allowed": comparison.ALLOWED,
        "versions": versions,
        "configuration": config.to_dict(),
    }
