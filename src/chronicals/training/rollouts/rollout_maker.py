"""Rollouts of a run: answers are drawn, rewarded, and compared within their groups."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chronicals.generation import Answer
from chronicals.objectives.advantages import (
    overlong_penalty,
    summed_advantages,
    summed_rewards,
    without_variance,
)
from chronicals.objectives.policy_gradient import PolicyGradient
from chronicals.training.errors import RolloutFailed
from chronicals.training.rollouts.answer_packs import AnswerGroup, DrawnAnswer
from chronicals.training.rollouts.draws import Draws
from chronicals.training.rollouts.rollout import Rollout
from chronicals.training.rollouts.samples import PROMPTS_KEPT, SamplesFile
from chronicals.training.rollouts.scoring import AnswerScores, Scoring, prompt_of
from chronicals.training.rollouts.token_passes import TokenPasses, TokenScoring


class RolloutMaker:
    """Makes rollouts.

    Args:
        objective: says what the advantages are, and which passes they need.
        draws: of the answers.
        scoring: of the answers.
        passes: of the trained model over answers; None where no passes are needed.
        normalises_first: normalise each reward in the group before the rewards are summed.
        samples: where some answers are written; None for nowhere.
    """

    def __init__(
        self,
        objective: PolicyGradient,
        draws: Draws,
        scoring: Scoring,
        passes: TokenPasses | None = None,
        normalises_first: bool = False,
        samples: SamplesFile | None = None,
    ):
        self.objective = objective
        self.draws = draws
        self.scoring = scoring
        self.passes = passes
        self.normalises_first = normalises_first
        self.samples = samples

    def rollout(self, number: int, prompts: np.ndarray, first: int) -> Rollout:
        """Draw the answers to prompts, and return them with rewards and advantages.

        Args:
            number: of the rollout in the run.
            prompts: int64 ``[P]``, their documents in the store.
            first: how many prompts were drawn before in the run.

        Raises:
            RolloutFailed: rewards fail for more than half of the answers, or give none at all.
        """
        began = time.perf_counter()
        places = np.arange(len(prompts))
        answers = self.draws.answers(prompts, first + places)
        drawn_in = time.perf_counter() - began
        scores = self.scoring.scores(prompts, answers)
        again = 0
        for attempt in range(1, self.draws.settings.redraws + 1):
            equal = places[without_variance(self._rewards(scores, answers)).numpy()]
            if not len(equal):
                break
            again += len(equal)
            before = time.perf_counter()
            redrawn = self.draws.answers(prompts[equal], first + equal, attempt)
            drawn_in += time.perf_counter() - before
            for place, group in zip(equal, redrawn, strict=True):
                answers[place] = group
            scores = scores.with_groups(
                equal, self.scoring.scores(prompts[equal], redrawn, scores.kept.numel())
            )
        shown = {
            **_shown(scores, answers),
            "groups/drawn_again": float(again),
            "seconds/draws": drawn_in,
            "seconds/rewards": time.perf_counter() - began - drawn_in,
        }
        rewards = self._rewards(scores, answers)
        if rewards.isnan().all():
            raise RolloutFailed(
                "no answer of a rollout has a reward: every reward gave None for all of them; look "
                "at what the rewards apply to"
            )
        flat = [answer for group in answers for answer in group]
        rollout = Rollout(
            number,
            np.asarray(prompts, np.int64),
            np.array([len(answer.tokens) for answer in flat], np.int64),
            np.concatenate([np.array(answer.tokens, np.int32) for answer in flat]),
            np.concatenate([np.array(answer.log_probabilities, np.float32) for answer in flat]),
            np.array([answer.ended == "stop" for answer in flat]),
            rewards.flatten().numpy(),
            np.zeros(len(flat), np.float32),
        )
        shown |= self._experts_that_differ(rollout, flat)
        return self._finished(rollout, scores, rewards, shown)

    def _finished(
        self, rollout: Rollout, scores: AnswerScores, rewards: Tensor, shown: dict[str, float]
    ) -> Rollout:
        """Return the rollout with advantages, and with the passes that the objective asks for."""
        objective = self.objective
        passed = rollout.passed
        before = time.perf_counter()
        if self.passes is not None and objective.wants_old_passes:
            passed = self._pass(rollout, objective.token_log_p)
        penalises = objective.settings.beta and not objective.penalises_in_loss
        if self.passes is not None and penalises:
            reference = self._pass(rollout, objective.reference_log_p)
            divergence = torch.from_numpy(rollout.sums(rollout.drawn - reference))
            rewards = rewards - objective.settings.beta * divergence.reshape(rewards.shape)
            shown["kl"] = float(divergence.sum() / len(rollout.tokens))
        shown["seconds/passes"] = time.perf_counter() - before
        if self.normalises_first:
            values = scores.values.masked_fill(~scores.kept[..., None], torch.nan)
            advantages = summed_advantages(values, scores.weights)
        else:
            advantages = objective.advantages(rewards)
        shown["groups/without_variance"] = float(without_variance(rewards).double().mean())
        shown["reward"] = _mean(rewards)
        shown["reward/deviation"] = float(rewards[~rewards.isnan()].std(correction=0))
        finished = rollout.with_advantages(
            rewards.flatten().numpy(), advantages.flatten().float().numpy(), passed, shown
        )
        if self.samples is not None:
            self.samples.write(rollout.number, self._sampled(finished, scores))
        return finished

    def _pass(self, rollout: Rollout, scores: TokenScoring) -> np.ndarray:
        """Return log-probabilities of all answers' tokens by a pass of the trainer."""
        assert self.passes is not None
        return self.passes.log_probabilities(self._groups(rollout, len(rollout.prompts)), scores)

    def _groups(self, rollout: Rollout, prompts: int) -> list[AnswerGroup]:
        """Return the answers to the first prompts, all of which are trained."""
        groups = []
        for place, prompt in enumerate(rollout.prompts[:prompts]):
            numbers = range(place * rollout.answers, (place + 1) * rollout.answers)
            answers = [
                DrawnAnswer(n, rollout.tokens[rollout.places(n)], True, 0.0, 0.0, {})
                for n in numbers
            ]
            groups.append(AnswerGroup(self.draws.rows.ids(prompt), answers))
        return groups

    def _experts_that_differ(self, rollout: Rollout, answers: Sequence[Answer]) -> dict[str, float]:
        """Return the share of the experts of drawn tokens that the trainer's pass does not choose.

        It is of the answers whose experts were noted; nothing is returned without any.
        """
        noted = {n: one.experts for n, one in enumerate(answers) if one.experts is not None}
        if self.passes is None or not noted:
            return {}
        passed = self.passes.experts(self._groups(rollout, len(noted) // rollout.answers))
        differ = [
            (drawn.long()[..., None] != passed[n][..., None, :]).all(-1).flatten()
            for n, drawn in noted.items()
        ]
        chosen = torch.cat(differ)
        return {"experts/differ": float(chosen.double().mean())} if len(chosen) else {}

    def _rewards(self, scores: AnswerScores, answers: Sequence[Sequence[Answer]]) -> Tensor:
        """Return the reward of each answer, ``[P, G]``, NaN for those without."""
        rewards = summed_rewards(scores.values, scores.weights)
        settings = self.draws.settings
        if settings.margin is not None:
            lengths = torch.tensor([[len(one.tokens) for one in group] for group in answers])
            rewards = rewards + overlong_penalty(lengths, settings.max_new_tokens, settings.margin)
        return rewards.masked_fill(~scores.kept, torch.nan)

    def _sampled(self, rollout: Rollout, scores: AnswerScores) -> list[dict[str, object]]:
        """Return the first prompts of a rollout with their answers and rewards, as JSON."""
        samples = []
        for place, prompt in enumerate(rollout.prompts[:PROMPTS_KEPT]):
            answers = []
            for side in range(rollout.answers):
                number = place * rollout.answers + side
                values = scores.values[place, side].tolist()
                named = dict(zip(scores.names, [None if v != v else v for v in values]))
                reward = float(rollout.rewards[number])
                answers.append(
                    {
                        "text": self.scoring.text_of(
                            rollout.tokens[rollout.places(number)].tolist()
                        ),
                        "complete": bool(rollout.complete[number]),
                        "reward": None if reward != reward else reward,
                        "advantage": float(rollout.advantages[number]),
                        "rewards": named,
                    }
                )
            asked = prompt_of(self.draws.rows.record(prompt))
            samples.append({"prompt": asked, "answers": answers})
        return samples


def _shown(scores: AnswerScores, answers: Sequence[Sequence[Answer]]) -> dict[str, float]:
    """Return the metrics of answers and of each reward."""
    flat = [answer for group in answers for answer in group]
    lengths = np.array([len(answer.tokens) for answer in flat])
    complete = np.array([answer.ended == "stop" for answer in flat])
    by_name = {
        f"rewards/{name}": _mean(scores.values[..., number])
        for number, name in enumerate(scores.names)
    }
    return {
        **by_name,
        "answers/length": float(lengths.mean()),
        "answers/longest": float(lengths.max()),
        "answers/truncated": float(1 - complete.mean()),
        "answers/left_out": float((~scores.kept).double().mean()),
        "answers/failed": float(scores.failed.double().mean()),
    }


def _mean(values: Tensor) -> float:
    """Return the mean of the values that are numbers; 0 without any."""
    return float(values.nanmean().nan_to_num(0.0))
