"""The fp32 reference of DPO and ORPO: the papers' formulas over padded rows, in plain torch.

With log π(y|x) the sum over an answer's tokens and |y| their number, of a micro-batch with G pairs:

    DPO     1/G Σ − log σ(β (log π(y_w|x)/π_ref(y_w|x) − log π(y_l|x)/π_ref(y_l|x)))
    ORPO    − Σ log π(y_w|x) / Σ |y_w|  −  λ/G Σ log σ(log p_w/(1 − p_w) − log p_l/(1 − p_l)),   log p = log π(y|x) / |y|

A step is the mean over its micro-batches: one, or those of a peer's trainer. π_ref is the model before the first step. TRL has
the prompt's tokens in the first term of ORPO, too.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.benchmark.arms.plain import TIGHT_STEPS, fp32_model
from chronicals.benchmark.measurement import ArmPlan, Clock, Measurement, Movement, device, peak_gib, reset_peak
from chronicals.benchmark.pairs import Held, Pair, PairWork

AT_ONCE = 2
"""Pairs whose logits exist together."""


@dataclass(frozen=True)
class Scores:
    """Of a group of G pairs, each ``[G]``: log π of both answers, their numbers of tokens, and the log-probability of what the
    cross-entropy has of the chosen row."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    trained: Tensor


def reference(work: PairWork, plan: ArmPlan) -> None:
    """Train the pairs of the work's first steps, or those of the plan's file."""
    model, tight = fp32_model(work, plan)
    count = min(plan.in_all, TIGHT_STEPS) if tight else plan.in_all
    held = Held([[pairs] for pairs in work.pairs_by_step(count)])
    if plan.documents is not None:
        held = Held.of_json(json.loads(plan.documents.read_text()))
    train(model, work, ArmPlan(count, 0, out=plan.out, began=plan.began), held, 1 if tight else AT_ONCE)


def train(model: Any, work: PairWork, plan: ArmPlan, held: Held, at_once: int) -> None:
    """Train the steps of ``held``, at most those of the plan, and hand them in."""
    steps, config = held.steps[: plan.in_all], work.config()
    model.train()
    references = iter(start_scores(model, steps, at_once) if work.objective == "dpo" else [])
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_epsilon,
        weight_decay=config.weight_decay, fused=device().type == "cuda",
    )  # fmt: skip
    losses, norms, movement, clock = list[float](), list[float](), Movement(model), Clock()
    loaded = time.perf_counter() - plan.began
    reset_peak()
    clock.mark()
    for step in steps:
        total = 0.0
        for part in step:
            for group in groups(part, at_once):
                scores = scores_of(model, group, held.prompt_is_trained)
                if work.objective == "dpo":
                    loss = dpo_loss(work, part, scores, next(references)) / len(step)
                else:
                    loss = orpo_loss(work, part, scores, held.prompt_is_trained) / len(step)
                loss.backward()
                total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm or math.inf)))
        if len(steps) > 1:  # states of a single step may not fit
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        clock.mark()
    tokens = [sum(pair.tokens for part in step for pair in part) for step in steps]
    plan.hand_in(
        Measurement(
            settings="fp32, sdpa, AdamW", tokens=tokens, slots=tokens, seconds=clock.seconds(), losses=[*losses],
            grad_norms=[*norms], warm_up=0, peak_gib=peak_gib(), trained_share=movement.trained_share,
            moved_share=movement.moved_share(), load_seconds=loaded,
        )
    )  # fmt: skip


def groups(pairs: Sequence[Pair], size: int) -> Iterator[Sequence[Pair]]:
    """``size`` of them at a time."""
    return (pairs[start : start + size] for start in range(0, len(pairs), size))


@torch.no_grad()
def start_scores(model: Any, steps: Sequence[Sequence[Sequence[Pair]]], at_once: int) -> list[Scores]:
    """The scores of every group before the first step, in the order in which they are trained."""
    return [scores_of(model, group) for step in steps for part in step for group in groups(part, at_once)]


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
    of_answer = (torch.arange(1, ids.shape[1], device=device()) >= prompts[:, None]) & mask[:, 1:].bool()
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


def orpo_loss(work: PairWork, part: Sequence[Pair], scores: Scores, prompt_is_trained: bool) -> Tensor:
    """As ``dpo_loss``; the cross-entropy is a mean over the micro-batch's tokens."""
    trained = sum(len(pair.chosen) + (len(pair.prompt) - 1 if prompt_is_trained else 0) for pair in part)
    chosen, rejected = scores.chosen / scores.chosen_tokens, scores.rejected / scores.rejected_tokens
    odds = (chosen - (1 - chosen.exp()).log()) - (rejected - (1 - rejected.exp()).log())
    return -scores.trained.sum() / trained - work.beta * F.logsigmoid(odds).sum() / len(part)
