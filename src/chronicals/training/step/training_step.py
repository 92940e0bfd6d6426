"""The training step and its usual parts.

``train_step`` defines the order: gradients of every micro-batch, their sum over the ranks, the
update. The parts are passed in: ``EagerStep`` launches every kernel, ``UpdatesInBackward``
(in_backward.py) updates weights during the backward pass, ``GraphedStep`` (graphs.py) replays
either of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.config import ChronicalsConfig
from chronicals.data.packs.steps import Step
from chronicals.distributed import Mesh, gathers_of
from chronicals.models import PresentedModel, Term
from chronicals.objectives import Count, Objective, divide
from chronicals.optimizers import FusedAdamW, learning_rate_factor
from chronicals.training.errors import TrainingError
from chronicals.training.step.optimizer import Precision


def nothing() -> None:
    """Do nothing; default of optional callbacks."""


def train_step(
    step: Step,
    counts: Mapping[str, Count],
    micro: Callable[[Batch, Mapping[str, Count], bool], dict[str, Tensor]],
    reduce: Callable[[list[Tensor]], Tensor | None],
    update: Callable[[Tensor | None], dict[str, Tensor]],
    passed: Callable[[], None] = nothing,
) -> dict[str, Tensor]:
    """Run forward and backward of all micro-batches, sum over the ranks, clip and update.

    The host does not wait for the device.

    Args:
        step: micro-batches of the step.
        counts: result of ``counts_of``.
        micro: as in ``EagerStep``.
        reduce: replaces all gradients, and the scalars that it is given, by their sums over the
            ranks. It may start while gradients are computed, but has finished in stream order when
            it returns. It returns how many ranks had a gradient of each parameter, fp32
            ``[parameters]``, or None for one rank.
        update: as in ``EagerStep``.
        passed: called after each micro-batch is launched; the device may not have finished it.

    Returns:
        Scalars on the device for the whole step on all ranks: ``loss``, the objective's metrics,
            ``grad_norm`` and ``applied`` (1 or 0).
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
    """The parts of a step, launched kernel by kernel; subclasses are its other implementations.

    Args:
        parameters: the trained parameters.
        max_grad_norm: norm to which larger gradients are scaled down; None for no clipping.
        norm: returns the norm of all gradients.

    Attributes:
        inspect: called while the gradients of a step exist, here between ``reduce`` and the update;
            or None.
        free: frees memory after an update ran out of it, given the error's words, so that the
            update can be finished; None if the error is raised.
    """

    inspect: Callable[[], None] | None = None
    free: Callable[[str], None] | None = None

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
        """Prepare for a step; called before its first micro-batch. Nothing is to be done here.

        Args:
            hold: waits until weights may change. It is called here if ``micro`` changes weights;
                else the caller does so before ``update``.
            micro_batches: number of micro-batches of the step.
        """

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        """Run forward and backward of one micro-batch, and add to the gradients.

        Args:
            batch: a Batch in host memory.
            counts: counts of the whole step, by name.
            first: True for the first micro-batch of the step.

        Returns:
            The micro-batch's part of the step's ``loss`` and of the objective's metrics: scalars on
                the device, valid until the next call.
        """
        moved = batch.to(self.precision.device, non_blocking=True)
        return micro_step(self.model, self.objective, moved, counts, self.precision)

    def update(self, holders: Tensor | None) -> dict[str, Tensor]:
        """Clip, apply and drop the gradients.

        Args:
            holders: result of ``reduce`` of ``train_step``.

        Returns:
            Scalars on the device: ``grad_norm`` before clipping, and ``applied`` (1 or 0).
        """
        if self.inspect is not None:
            self.inspect()
        scalars = update(
            self.parameters,
            self.optimizer,
            self.precision,
            self.max_grad_norm,
            self.norm,
            holders,
            self.free,
        )
        self.optimizer.zero_grad()
        return scalars

    def rehearsing(self) -> AbstractContextManager[None]:
        """Return a context in which ``micro`` changes no weight, which it does not here anyway."""
        return nullcontext()


class GatheredStep(EagerStep):
    """``EagerStep`` that sums gradients over copies of the weights only after the last micro-batch.

    The copies are those of several machines.
    """

    _left = 0

    def begin(self, hold: Callable[[], None], micro_batches: int = 1) -> None:
        """Note the number of micro-batches, the last of which sums gradients over the copies."""
        self._left = micro_batches

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        """Run a micro-batch; after the last one gradients are summed over the copies."""
        self._left -= 1
        # FSDP all-reduces the sums among the copies after this backward pass, or not yet.
        self.model.model.set_requires_all_reduce(self._left == 0)
        return super().micro(batch, counts, first)


class FrozenGatheredStep(EagerStep):
    """``EagerStep`` over frozen weights that are gathered layer by layer.

    Every micro-step gathers the same weights in the same order, including all that it reads.
    """

    def begin(self, hold: Callable[[], None], micro_batches: int = 1) -> None:
        """Forget which weights earlier passes gathered."""
        gathers = gathers_of(self.model.model)
        assert gathers is not None
        self.gathers = gathers
        gathers.forget()

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        """Run a micro-batch in a pass that gathers its weights layer by layer."""
        with self.gathers.passing():
            return super().micro(batch, counts, first)


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
    """Return the step with the segments of ``Objective.before_step`` in its Batches, on the device.

    These depend on all Batches of the step.

    Args:
        step: the step.
        counts: result of ``counts_of``.
        model: the model, presented.
        objective: what is minimised.
        ranks: all ranks of the run.
        precision: dtypes of the run.
        passed: as for ``train_step``.
    """
    if type(objective).before_step is Objective.before_step:
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


def asked_before(
    batch: Batch, model: PresentedModel, objective: Objective, precision: Precision
) -> tuple[Batch, dict[str, Term]]:
    """Return the Batch on the device, and the terms of ``Objective.before_step``."""
    with precision.autocast():
        moved = batch.to(precision.device, non_blocking=True)
        asked, terms = model.as_forward(partial(objective.before_step, model, moved))
    return asked, dict(terms)


def values_before(
    sums: Mapping[str, Tensor], terms: Mapping[str, Term], counts: Mapping[str, Count], ranks: Mesh
) -> dict[str, Tensor]:
    """Return the means of the terms over all ranks' Batches as segments, fp32 ``[1]``, by name.

    Args:
        sums: sum of each term over this rank's Batches.
        terms: terms of any Batch, for the names of their counts.
        counts: counts of all Batches of all ranks.
        ranks: all ranks of the run.
    """
    totals = ranks.sum(torch.stack(list(sums.values())))
    return {
        name: (total / (counts[terms[name].per] or 1)).float()[None]
        for name, total in zip(sums, totals)
    }


def counts_of(step: Step, ranks: Mesh) -> Mapping[str, Count]:
    """Return the denominators of the step's sums, by name.

    These are the counts of the whole step, with the sum of its targets' weights (1 without
    weights).

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
    total = 0.0
    for batch in step.batches:
        trained = batch.targets != IGNORED
        # Targets of a Batch without weights weigh 1 each.
        weights = trained if batch.weights is None else batch.weights[trained]
        total += float(weights.sum(dtype=torch.float64))
    return {**counts, "weight": total}


def micro_step(
    model: PresentedModel,
    objective: Objective,
    batch: Batch,
    counts: Mapping[str, Count],
    precision: Precision,
) -> dict[str, Tensor]:
    """Run forward and backward of a Batch, and add to the gradients.

    Returns:
        ``loss`` and the objective's metrics, as from ``divide``.
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
    free: Callable[[str], None] | None = None,
) -> dict[str, Tensor]:
    """Clip and apply the gradients, unless they are not finite.

    Args:
        parameters: the trained parameters.
        optimizer: optimizer of the parameters.
        precision: loss scale of the run.
        max_grad_norm: norm to which larger gradients are scaled down; None for no clipping.
        norm: returns the norm of all gradients.
        holders: number of ranks that had a gradient of each parameter. If it is 0, the parameter is
            neither decayed nor moved, like one without a gradient on a single rank.
        free: as in ``EagerStep``.

    Returns:
        ``grad_norm`` before clipping, and ``applied``.
    """
    grad_norm = norm(gradients_of(parameters)) / precision.scale
    finite = torch.isfinite(grad_norm)
    clip = 1.0 if max_grad_norm is None else (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    used = None if holders is None else dict(zip(parameters, (holders > 0).unbind()))
    apply = partial(optimizer.step, factor=clip / precision.scale, apply=finite, used=used)
    if free is None or (grad_norm.is_cuda and torch.cuda.is_current_stream_capturing()):
        apply()
    else:
        apply_all(optimizer, apply, free)
    precision.update(finite)
    return {"grad_norm": grad_norm, "applied": finite}


def apply_all(
    optimizer: FusedAdamW, apply: Callable[..., object], free: Callable[[str], None]
) -> None:
    """Update the weights; if that runs out of memory, free some, and update those that are left.

    Args:
        optimizer: of the weights; it knows which of them an update has changed.
        apply: ``optimizer.step`` of the present gradients; takes ``resume``.
        free: as in ``EagerStep``.

    Raises:
        torch.OutOfMemoryError: memory is too small again; ``optimizer.is_begun`` says whether
            weights were changed.
    """
    is_begun = False
    try:
        optimizer.allocate()
        is_begun = True
        apply()
        return
    except torch.OutOfMemoryError as error:
        words = str(error)
    free(words)  # after the error is gone, whose frames hold tensors
    apply(resume=is_begun)


def gradients_of(parameters: list[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def warmup_of(config: ChronicalsConfig, total_steps: int) -> int:
    """Return the number of warm-up steps; a share of the run is rounded up, as in transformers."""
    if config.warmup_ratio is not None:
        return math.ceil(
            round(config.warmup_ratio * total_steps, 6)
        )  # 0.07 * 100 is 7.000000000000001
    if "warmup_steps" in config.explicit:
        return config.warmup_steps
    return min(config.warmup_steps, total_steps // 10)


def rate_factor(config: ChronicalsConfig, number: int, total_steps: int) -> float:
    """Return the factor of the peak learning rate for step ``number``, from 0."""
    warmup = warmup_of(config, total_steps)
    return learning_rate_factor(
        config.lr_scheduler,
        number,
        total_steps,
        warmup,
        config.min_lr_ratio,
        config.wsd_decay_ratio,
        config.warmup_from_zero,
    )


def set_learning_rate(optimizer: FusedAdamW, factor: float) -> None:
    """Set the learning rate of every group to ``factor`` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
