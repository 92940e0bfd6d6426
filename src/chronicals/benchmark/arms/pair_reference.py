"""The fp32 reference of DPO and ORPO: the papers' formulas over padded rows, in plain torch.

With log π(y|x) the sum over an answer's tokens and |y| their number, of a micro-batch with G pairs:

    DPO     1/G Σ − log σ(β (log π(y_w|x)/π_ref(y_w|x) − log π(y_l|x)/π_ref(y_l|x)))
    ORPO    − Σ log π(y_w|x) / Σ |y_w|  −  λ/G Σ log σ(log p_w/(1 − p_w) − log p_l/(1 − p_l)),   log p = log π(y|x) / |y|

A step is the mean over its micro-batches: one, or those of a peer's trainer. π_ref is the model
before the first step. TRL has the prompt's tokens in the first term of ORPO, too.

Where arms train weights in bf16, forward passes have weights rounded to it, as theirs do, and
updates are made of fp32 ones: from weights that are bf16 numbers, updates of 5e-8 do not show for
many steps. Each loss, and for adapters the gradients' norm, is computed in plain bf16, too: DPO's
is a difference of sums over hundreds of tokens, in which rounding shows.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
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

AT_ONCE = 2
"""Pairs whose logits exist together."""


@dataclass(frozen=True)
class Scores:
    """Of a group of G pairs, each ``[G]``: log π of both answers, their numbers of tokens, and
    the log-probability of what the cross-entropy has of the chosen row."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    trained: Tensor


def reference(work: PairWork, plan: ArmPlan) -> None:
    """Train the pairs of the work's first steps, or those of the plan's file."""
    model, settings, tight = fp32_model(work, plan)
    count = min(plan.in_all, TIGHT_STEPS) if tight else plan.in_all
    held = PairSteps([[pairs] for pairs in work.pairs_by_step(count)])
    if plan.documents is not None:
        held = PairSteps.of_json(json.loads(plan.documents.read_text()))
    train(
        model,
        settings,
        work,
        ArmPlan(count, 0, out=plan.out, began=plan.began),
        held,
        1 if tight else AT_ONCE,
    )


def train(
    model: Any, settings: str, work: PairWork, plan: ArmPlan, held: PairSteps, at_once: int
) -> None:
    """Train the steps of ``held``, at most those of the plan, and hand them in.

    Args:
        settings: how the model runs, in words.
    """
    held = replace(held, steps=held.steps[: plan.in_all])
    steps = held.steps
    config = work.config()
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    rounds = config.mixed_precision == "bf16"
    losses_of = Losses(model, work, held, at_once)
    rounded_of = None
    if rounds:
        with in_bf16(model):
            rounded_of = Losses(model, work, held, at_once)
    masters = Masters(parameters if rounds and not work.adapts else [])
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
    of_groups = list[float]()
    loaded = time.perf_counter() - plan.began
    reset_peak()
    clock.mark()
    for number in range(len(steps)):
        if rounded_of is not None:
            with in_bf16(model), torch.set_grad_enabled(work.adapts):
                of_groups = [_added(loss) for loss in rounded_of(number)]
            if work.adapts:
                rounded_norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, math.inf)))
                optimizer.zero_grad(set_to_none=True)
        exact = [_added(loss) for loss in losses_of(number)]
        losses.append(sum(exact))
        if rounded_of is not None:
            rounded.append(sum(of_groups))
            spreads.append(math.sqrt(sum((a - b) ** 2 for a, b in zip(of_groups, exact))))
        norms.append(
            float(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm or math.inf))
        )
        if len(steps) > 1:  # states of a single step may not fit
            with masters.exact():
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


def _added(loss: Tensor) -> float:
    """The value of a group's loss, whose gradients are added where they are computed."""
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach())


class Losses:
    """Of each group of pairs what it adds to its step's loss, as the model is when it is asked.

    Args:
        at_once: pairs of a group. Of DPO the model as it is now is the reference.
    """

    def __init__(self, model: Any, work: PairWork, held: PairSteps, at_once: int):
        self.model = model
        self.work = work
        self.held = held
        self.at_once = at_once
        self.start = (
            [list(self._scores(step)) for step in held.steps] if work.objective == "dpo" else []
        )

    @torch.no_grad()
    def _scores(self, step: Sequence[Sequence[Pair]]) -> list[Scores]:
        return [
            scores_of(self.model, group) for part in step for group in groups(part, self.at_once)
        ]

    def __call__(self, number: int) -> Iterator[Tensor]:
        """Of step ``number``, one group after the other."""
        step = self.held.steps[number]
        trained = self.held.prompt_is_trained
        parts = [(part, group) for part in step for group in groups(part, self.at_once)]
        for place, (part, group) in enumerate(parts):
            scores = scores_of(self.model, group, trained)
            if self.work.objective == "dpo":
                yield dpo_loss(self.work, part, scores, self.start[number][place]) / len(step)
            else:
                yield orpo_loss(self.work, part, scores, trained) / len(step)


class Masters:
    """Weights that are fp32 while they are updated, and rounded to bf16, in fp32, at all other
    times.
    """

    def __init__(self, weights: Sequence[Tensor]):
        self.exactly = {weight: weight.detach().clone() for weight in weights}
        self._round()

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Within: weights have all of their digits, and may be updated."""
        for weight, value in self.exactly.items():
            weight.data.copy_(value)
        yield
        for weight, value in self.exactly.items():
            value.copy_(weight.data)
        self._round()

    def _round(self) -> None:
        for weight in self.exactly:
            weight.data.copy_(weight.data.bfloat16())


@contextmanager
def in_bf16(model: Any) -> Iterator[None]:
    """Within: weights are in bf16, all but adapters."""
    adapted = any(not p.requires_grad for p in model.parameters())
    kept = [(p, p.data) for p in model.parameters() if not (adapted and p.requires_grad)]
    for parameter, value in kept:
        parameter.data = value.bfloat16()
    try:
        yield
    finally:
        for parameter, value in kept:
            parameter.data = value


def groups(pairs: Sequence[Pair], size: int) -> Iterator[Sequence[Pair]]:
    """``size`` of them at a time."""
    return (pairs[start : start + size] for start in range(0, len(pairs), size))


def scores_of(model: Any, pairs: Sequence[Pair], prompt_is_trained: bool = False) -> Scores:
    """Of all rows together, padded on the right.

    Args:
        prompt_is_trained: whether the cross-entropy has the prompt's tokens.
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
    of_answer = (torch.arange(1, ids.shape[1], device=device()) >= prompts[:, None]) & mask[
        :, 1:
    ].bool()
    chosen, rejected = (log_p * of_answer).sum(1).chunk(2)
    trained = log_p[: len(pairs)].sum(1) if prompt_is_trained else chosen
    chosen_tokens, rejected_tokens = of_answer.sum(1).chunk(2)
    return Scores(chosen, rejected, chosen_tokens, rejected_tokens, trained)


def dpo_loss(work: PairWork, part: Sequence[Pair], scores: Scores, start: Scores) -> Tensor:
    """What a group of pairs adds to the loss of its micro-batch ``part``.

    Args:
        start: their scores before the first step.
    """
    margins = (scores.chosen - start.chosen) - (scores.rejected - start.rejected)
    return -F.logsigmoid(work.beta * margins).sum() / len(part)


def orpo_loss(
    work: PairWork, part: Sequence[Pair], scores: Scores, prompt_is_trained: bool
) -> Tensor:
    """As ``dpo_loss``; the cross-entropy is a mean over the micro-batch's tokens."""
    trained = sum(
        len(pair.chosen) + (len(pair.prompt) - 1 if prompt_is_trained else 0) for pair in part
    )
    chosen = scores.chosen / scores.chosen_tokens
    rejected = scores.rejected / scores.rejected_tokens
    odds = (chosen - (1 - chosen.exp()).log()) - (rejected - (1 - rejected.exp()).log())
    return -scores.trained.sum() / trained - work.beta * F.logsigmoid(odds).sum() / len(part)
