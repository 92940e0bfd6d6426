"""The fp32 reference of DPO and ORPO: the papers' formulas over padded rows, in plain torch.

With log π(y|x) the sum over an answer's tokens and |y| their number, of a micro-batch with G pairs:

    DPO     1/G Σ − log σ(β (log π(y_w|x)/π_ref(y_w|x) − log π(y_l|x)/π_ref(y_l|x)))
    ORPO    − Σ log π(y_w|x) / Σ |y_w|  −  λ/G Σ log σ(log p_w/(1 − p_w) − log p_l/(1 − p_l)),
            log p = log π(y|x) / |y|

A step is the mean over its micro-batches: one, or those of a peer's trainer. π_ref is the model
before the first step. TRL has the prompt's tokens in the first term of ORPO, too.

If arms train weights in bf16, forward passes here have weights rounded to bf16, and updates are
added to fp32 weights: an update of 5e-8 does not change a bf16 number for many steps. Each loss,
and for adapters the gradients' norm, is also computed in plain bf16, because DPO's loss is a
difference of sums over hundreds of tokens, in which rounding shows.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.benchmark.arms.reference import TIGHT_STEPS, fp32_model
from chronicals.benchmark.measurement import (
    ArmPlan,
    Clock,
    Measurement,
    Movement,
    device,
    peak_gib,
    reset_peak,
)
from chronicals.benchmark.pairs import Pair, PairSteps, PairWork

PAIRS_AT_ONCE = 2
"""Pairs whose logits exist at a time."""


@dataclass(frozen=True)
class PairScores:
    """Scores of a group of G pairs, ``[G]`` each.

    Attributes:
        chosen, rejected: log π of the answers.
        chosen_tokens, rejected_tokens: their numbers of tokens.
        trained: log-probability of the tokens of the chosen row that are in the cross-entropy.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    trained: Tensor


def train_pair_reference(work: PairWork, plan: ArmPlan) -> None:
    """Train the pairs of the work's first steps, or those of the plan's file."""
    model, settings, tight = fp32_model(work, plan)
    count = min(plan.in_all, TIGHT_STEPS) if tight else plan.in_all
    pair_steps = PairSteps([[pairs] for pairs in work.pairs_by_step(count)])
    if plan.documents is not None:
        pair_steps = PairSteps.of_json(json.loads(plan.documents.read_text()))
    short_plan = ArmPlan(count, 0, out=plan.out, began=plan.began)
    train_on_pairs(model, settings, work, short_plan, pair_steps, 1 if tight else PAIRS_AT_ONCE)


def train_on_pairs(
    model: Any, settings: str, work: PairWork, plan: ArmPlan, pair_steps: PairSteps, at_once: int
) -> None:
    """Train the steps, at most those of the plan, and hand them in.

    Args:
        model: in fp32, with the row's adapters.
        settings: how the model runs, in words.
        work: the row.
        plan: the round.
        pair_steps: pairs of each step.
        at_once: pairs whose logits exist at a time.
    """
    pair_steps = replace(pair_steps, steps=pair_steps.steps[: plan.in_all])
    steps = pair_steps.steps
    config = work.config()
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    in_16_bit = config.mixed_precision == "bf16"
    losses_of = Losses(model, work, pair_steps, at_once)
    rounded_of = None
    if in_16_bit:
        with in_bf16(model):
            rounded_of = Losses(model, work, pair_steps, at_once)
    masters = dict[Tensor, Tensor]()  # fp32 values of weights that are rounded to bf16
    if in_16_bit and not work.adapts:
        masters = {weight: weight.detach().clone() for weight in parameters}
    for weight in masters:
        weight.data.copy_(weight.data.bfloat16())
    optimizer = torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=device().type == "cuda",
    )
    losses = list[float]()
    norms = list[float]()
    movement = Movement(model)
    clock = Clock()
    rounded = list[float]()
    rounded_norms = list[float]()
    spreads = list[float]()
    rounded_groups = list[float]()
    loaded = time.perf_counter() - plan.began
    reset_peak()
    clock.mark()
    for number in range(len(steps)):
        if rounded_of is not None:
            with in_bf16(model), torch.set_grad_enabled(work.adapts):
                rounded_groups = [_backward(loss) for loss in rounded_of(number)]
            if work.adapts:
                rounded_norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, math.inf)))
                optimizer.zero_grad(set_to_none=True)
        exact = [_backward(loss) for loss in losses_of(number)]
        losses.append(sum(exact))
        if rounded_of is not None:
            rounded.append(sum(rounded_groups))
            spreads.append(math.sqrt(sum((a - b) ** 2 for a, b in zip(rounded_groups, exact))))
        norms.append(
            float(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm or math.inf))
        )
        if len(steps) > 1:  # with a single step, the optimizer's states may not fit
            with in_fp32(masters):
                optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.mark()
    tokens = [sum(pair.tokens for part in step for pair in part) for step in steps]
    plan.hand_in(
        Measurement(
            settings=settings,
            tokens=tokens,
            slots=tokens,
            seconds=clock.seconds(),
            losses=[*losses],
            grad_norms=[*norms],
            warm_up=0,
            peak_gib=peak_gib(),
            trained_share=movement.trained_share,
            moved_share=movement.moved_share(),
            load_seconds=loaded,
            rounded_losses=rounded or None,
            rounded_norms=rounded_norms or None,
            rounding_spreads=spreads or None,
        )
    )


def _backward(loss: Tensor) -> float:
    """Return the value of a group's loss, and add its gradients if it has some."""
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach())


class Losses:
    """Parts of a step's loss, one for each group of pairs.

    They are computed with the weights that the model has when it is called.

    Args:
        at_once: pairs of a group. DPO's reference policy is the model as it is now.
    """

    def __init__(self, model: Any, work: PairWork, pair_steps: PairSteps, at_once: int):
        self.model = model
        self.work = work
        self.pair_steps = pair_steps
        self.at_once = at_once
        self.start = list[list[PairScores]]()
        if work.objective == "dpo":
            with torch.no_grad():
                for step in pair_steps.steps:
                    self.start.append([scores_of(model, group) for _, group in self._groups(step)])

    def _groups(
        self, step: Sequence[Sequence[Pair]]
    ) -> Iterator[tuple[Sequence[Pair], Sequence[Pair]]]:
        """Yield each micro-batch of a step with each of its groups."""
        for micro_batch in step:
            for start in range(0, len(micro_batch), self.at_once):
                yield micro_batch, micro_batch[start : start + self.at_once]

    def __call__(self, number: int) -> Iterator[Tensor]:
        """Yield the parts of the loss of step ``number``."""
        step = self.pair_steps.steps[number]
        prompt_is_trained = self.pair_steps.prompt_is_trained
        for place, (micro_batch, group) in enumerate(self._groups(step)):
            scores = scores_of(self.model, group, prompt_is_trained)
            if self.work.objective == "dpo":
                loss = dpo_loss(self.work, micro_batch, scores, self.start[number][place])
            else:
                loss = orpo_loss(self.work, micro_batch, scores, prompt_is_trained)
            yield loss / len(step)


@contextmanager
def in_fp32(masters: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Give weights their fp32 values for an update; keep these, and round the weights, at the end.

    Args:
        masters: weights, and their fp32 values.
    """
    for weight, value in masters.items():
        weight.data.copy_(value)
    yield
    for weight, value in masters.items():
        value.copy_(weight.data)
        weight.data.copy_(value.bfloat16())


@contextmanager
def in_bf16(model: Any) -> Iterator[None]:
    """Put the weights in bf16 for the duration of the context, all but adapters."""
    adapted = any(not p.requires_grad for p in model.parameters())
    values = [(p, p.data) for p in model.parameters() if not (adapted and p.requires_grad)]
    for parameter, value in values:
        parameter.data = value.bfloat16()
    try:
        yield
    finally:
        for parameter, value in values:
            parameter.data = value


def scores_of(model: Any, pairs: Sequence[Pair], prompt_is_trained: bool = False) -> PairScores:
    """Compute the scores of all rows together, padded on the right.

    Args:
        model: with its adapters.
        pairs: of one group.
        prompt_is_trained: True if the cross-entropy includes the prompt's tokens.
    """
    rows = [pair.rows[side] for side in (0, 1) for pair in pairs]
    prompts = torch.tensor([len(pair.prompt) for pair in pairs] * 2, device=device())
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long, device=device())
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    log_p = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1) * mask[:, 1:]
    positions = torch.arange(1, ids.shape[1], device=device())
    in_answer = (positions >= prompts[:, None]) & mask[:, 1:].bool()
    chosen, rejected = (log_p * in_answer).sum(1).chunk(2)
    trained = log_p[: len(pairs)].sum(1) if prompt_is_trained else chosen
    chosen_tokens, rejected_tokens = in_answer.sum(1).chunk(2)
    return PairScores(chosen, rejected, chosen_tokens, rejected_tokens, trained)


def dpo_loss(
    work: PairWork, micro_batch: Sequence[Pair], scores: PairScores, start: PairScores
) -> Tensor:
    """Return the part of DPO's loss of a micro-batch that is that of a group of its pairs.

    Args:
        work: the row, with β.
        micro_batch: pairs over which the loss is a mean.
        scores: of the group.
        start: its scores before the first step.
    """
    margins = (scores.chosen - start.chosen) - (scores.rejected - start.rejected)
    return -F.logsigmoid(work.beta * margins).sum() / len(micro_batch)


def orpo_loss(
    work: PairWork, micro_batch: Sequence[Pair], scores: PairScores, prompt_is_trained: bool
) -> Tensor:
    """Return the part of ORPO's loss of a micro-batch that is that of a group of its pairs.

    The cross-entropy is a mean over the micro-batch's tokens.
    """
    trained = sum(len(pair.chosen) for pair in micro_batch)
    if prompt_is_trained:
        trained += sum(len(pair.prompt) - 1 for pair in micro_batch)
    chosen = scores.chosen / scores.chosen_tokens
    rejected = scores.rejected / scores.rejected_tokens
    odds = (chosen - (1 - chosen.exp()).log()) - (rejected - (1 - rejected.exp()).log())
    cross_entropy = -scores.trained.sum() / trained
    return cross_entropy - work.beta * F.logsigmoid(odds).sum() / len(micro_batch)
