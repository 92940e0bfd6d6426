"""The training step, written once, and the parts that it usually has.

``train_step`` knows the order: gradients of every micro-batch, their sum over the ranks, the
update. How each part is done is handed in: ``EagerStep`` launches every kernel,
``UpdatesInBackward`` (in_backward.py) updates weights during the backward pass, ``GraphedStep``
(graphs.py) replays what either of them does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.config import ChronicalsConfig
from chronicals.data.packs.steps import Step
from chronicals.distributed import Mesh
from chronicals.models import PresentedModel, Term
from chronicals.objectives import Count, Objective, divide
from chronicals.optimizers import FusedAdamW, learning_rate_factor
from chronicals.training.errors import TrainingError
from chronicals.training.precision import Precision


def nothing() -> None:
    """For whoever need not be told."""


class StepParts(Protocol):
    """The two parts of a step that are done in different ways.

    Attributes:
        inspect: called while the gradients of a step exist, before they are used; None where nobody
            asks.
    """

    inspect: Callable[[], None] | None

    def begin(self, hold: Callable[[], None], micro_batches: int = 1) -> None:
        """Called before the first of so many micro-batches.

        Args:
            hold: waits until weights may change; called here if ``micro`` changes them. The caller
                does so before ``update``.
        """

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        """Forward and backward pass of one micro-batch; its gradients are added to those there are.

        Args:
            batch: on the host.
            counts: of the whole step, by name.
            first: whether it is the first micro-batch of the step.

        Returns:
            Its part of the step's ``loss`` and of what the objective shows beside it, scalars on
            the device, valid until the next call.
        """

    def update(self, holders: Tensor | None) -> dict[str, Tensor]:
        """Clip and apply the gradients, and drop them.

        Args:
            holders: what ``reduce`` of ``train_step`` returned.

        Returns:
            Scalars on the device: ``grad_norm`` before clipping, ``applied`` (1 or 0).
        """


def train_step(
    step: Step,
    counts: Mapping[str, Count],
    micro: Callable[[Batch, Mapping[str, Count], bool], dict[str, Tensor]],
    reduce: Callable[[list[Tensor]], Tensor | None],
    update: Callable[[Tensor | None], dict[str, Tensor]],
    passed: Callable[[], None] = nothing,
) -> dict[str, Tensor]:
    """Forward, backward, sum over the ranks, clip, update. Nothing here waits for the device.

    Args:
        counts: of ``counts_of``.
        micro, update: as in ``StepParts``.
        reduce: replaces all gradients and the scalars that it is given by their sums over the
            ranks. It may begin with some gradients while others are computed, but has finished, in
            the order of the device's work, when it returns. Returns how many ranks had a gradient
            of each parameter, fp32 ``[parameters]``, or None for a single rank.
        passed: called after each micro-batch, with which the device may not be done.

    Returns:
        Scalars on the device: ``loss``, what the objective shows beside it, and ``grad_norm``, of
            the whole step on all ranks;
        ``applied`` (1 or 0).
    """
    first, *others = step.batches
    scalars = {name: value.clone() for name, value in micro(first, counts, True).items()}
    passed()
    for batch in others:
        for name, value in micro(batch, counts, False).items():
            scalars[name] += value
        passed()
    return {**scalars, **update(reduce(list(scalars.values())))}


class EagerStep:
    """Every kernel is launched by the host.

    Args:
        parameters: those that are trained.
        max_grad_norm: gradients with a larger norm are scaled down to it; None never does.
        norm: of all gradients of the model.

    Attributes:
        inspect: called between ``reduce`` and the update, while the gradients of the step exist.
    """

    inspect: Callable[[], None] | None = None

    def __init__(
        self,
        model: PresentedModel,
        objective: Objective,
        parameters: list[Tensor],
        optimizer: FusedAdamW,
        precision: Precision,
        max_grad_norm: float | None,
        norm: Callable[[Sequence[Tensor]], Tensor],
    ):
        self.model = model
        self.objective = objective
        self.precision = precision
        self.parameters = parameters
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.norm = norm

    def begin(self, hold: Callable[[], None], micro_batches: int = 1) -> None:
        """Weights change in ``update`` alone."""

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        moved = batch.to(self.precision.device, non_blocking=True)
        return micro_step(self.model, self.objective, moved, counts, self.precision)

    def update(self, holders: Tensor | None) -> dict[str, Tensor]:
        if self.inspect is not None:
            self.inspect()
        scalars = update(
            self.parameters, self.optimizer, self.precision, self.max_grad_norm, self.norm, holders
        )
        self.optimizer.zero_grad()
        return scalars


@torch.no_grad()
def known_before(
    step: Step,
    counts: Mapping[str, Count],
    model: PresentedModel,
    objective: Objective,
    ranks: Mesh,
    precision: Precision,
    passed: Callable[[], None] = nothing,
) -> Step:
    """The step with what the objective must know of all of it in its Batches
    (``Objective.before_step``), on the device.

    Args:
        passed: as for ``train_step``.
    """
    if not asks_before(objective):
        return step
    batches = []
    sums = dict[str, Tensor]()
    terms = dict[str, Term]()
    for batch in step.batches:
        asked, terms = asked_before(batch, model, objective, precision)
        sums = {name: sums.get(name, 0.0) + term.sum.double() for name, term in terms.items()}
        batches.append(asked)
        passed()
    values = values_before(sums, terms, counts, ranks)
    return replace(
        step, batches=[replace(batch, segments={**batch.segments, **values}) for batch in batches]
    )


def asks_before(objective: Objective) -> bool:
    """Whether it must know something of all Batches together before it scores one."""
    return type(objective).before_step is not Objective.before_step


def asked_before(
    batch: Batch, model: PresentedModel, objective: Objective, precision: Precision
) -> tuple[Batch, dict[str, Term]]:
    """The Batch, on the device, and the terms of ``Objective.before_step``."""
    with precision.autocast():
        moved = batch.to(precision.device, non_blocking=True)
        asked, terms = model.as_forward(partial(objective.before_step, model, moved))
    return asked, dict(terms)


def values_before(
    sums: Mapping[str, Tensor], terms: Mapping[str, Term], counts: Mapping[str, Count], ranks: Mesh
) -> dict[str, Tensor]:
    """The segments, fp32 ``[1]``, that sums over this rank's Batches are on all ranks."""
    totals = ranks.sum(torch.stack(list(sums.values())))
    return {
        name: (total / (counts[terms[name].per] or 1)).float()[None]
        for name, total in zip(sums, totals)
    }


def counts_of(step: Step, ranks: Mesh) -> Mapping[str, Count]:
    """What sums are divided by, by name: the counts of the whole step, with the weight of its
    targets, each 1 without weights.

    Raises:
        ValueError: Batches have weights whose sum over all ranks is not among the step's counts.
    """
    counts = step.counts
    if "weight" in counts:
        return counts
    if all(batch.weights is None for batch in step.batches):
        return {**counts, "weight": counts["targets"]}
    if ranks.count > 1:
        raise ValueError(
            f"Batch.weights: give their sum over all {ranks.count} processes as counts['weight']"
        )
    return {**counts, "weight": sum(_weight(batch) for batch in step.batches)}


def _weight(batch: Batch) -> float:
    """Sum of the weights of the targets, each 1 without weights."""
    trained = batch.targets != IGNORED
    return float(
        (trained if batch.weights is None else batch.weights[trained]).sum(dtype=torch.float64)
    )


def micro_step(
    model: PresentedModel,
    objective: Objective,
    batch: Batch,
    counts: Mapping[str, Count],
    precision: Precision,
) -> dict[str, Tensor]:
    """Gradients of one forward pass, added to those there are; ``loss`` and what the objective
    shows, as of ``divide``.
    """
    with precision.autocast():
        scalars = model.as_forward(lambda: divide(objective(model, batch), counts))
    if not scalars["loss"].requires_grad:
        raise TrainingError(
            "nothing is trained: the loss does not depend on any weight that is trained. Adapters "
            "must be attached to layers "
            "that the model uses, and no objective may detach its terms"
        )
    (scalars["loss"] * precision.scale).backward()
    return {name: value.detach() for name, value in scalars.items()}


def update(
    parameters: list[Tensor],
    optimizer: FusedAdamW,
    precision: Precision,
    max_grad_norm: float | None,
    norm: Callable[[Sequence[Tensor]], Tensor],
    holders: Tensor | None = None,
) -> dict[str, Tensor]:
    """Clip and apply the gradients, unless they are not finite.

    Args:
        holders: how many ranks had a gradient of each parameter; one that none had is left as a
            single process leaves a parameter without a gradient: neither decayed nor moved.

    Returns:
        ``grad_norm`` before clipping, and ``applied``.
    """
    grad_norm = norm(gradients_of(parameters)) / precision.scale
    finite = torch.isfinite(grad_norm)
    clip = 1.0 if max_grad_norm is None else (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    used = None if holders is None else dict(zip(parameters, (holders > 0).unbind()))
    optimizer.step(factor=clip / precision.scale, apply=finite, used=used)
    precision.update(finite)
    return {"grad_norm": grad_norm, "applied": finite}


def gradients_of(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def warmup_of(config: ChronicalsConfig, total_steps: int) -> int:
    """Steps in which the learning rate rises, of a run of so many; a share is rounded up, as in
    transformers.
    """
    if config.warmup_ratio is not None:
        return math.ceil(
            round(config.warmup_ratio * total_steps, 6)
        )  # 0.07 * 100 is 7.000000000000001
    if "warmup_steps" in config.explicit:
        return config.warmup_steps
    return min(config.warmup_steps, total_steps // 10)


def rate_factor(config: ChronicalsConfig, number: int, total_steps: int) -> float:
    """Of the peak, what the schedule gives step ``number``, from 0, of a run of so many."""
    warmup = warmup_of(config, total_steps)
    return learning_rate_factor(
        config.lr_scheduler,
        number,
        total_steps,
        warmup,
        config.min_lr_ratio,
        config.wsd_decay_ratio,
    )


def set_learning_rate(optimizer: FusedAdamW, factor: float) -> None:
    """Of every group so much of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
