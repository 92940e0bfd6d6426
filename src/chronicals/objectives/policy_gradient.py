"""Base of the objectives over groups of answers that the model itself draws.

A step has the answers of some prompts, G each; answer i has an advantage A_i (``advantages.py``).
With π_old the distribution that its tokens were drawn from, at the temperature of the draws,

    r_t = π(y_t | x, y_<t) / π_old(y_t | x, y_<t)

An objective's own file has its loss, a function of r_t and A_i. What all of them add to it is here:

    β · KL(π ‖ π_ref)           estimated at the drawn tokens (``drawn_answers.divergence``)
    − c · H(π)                  the entropy of the predictions

Divisors are counts of the whole step: tokens of all answers, or answers. So it does not matter how
a step is divided into micro-batches and over ranks. (TRL's ``bnpo`` divides by the tokens of each
micro-batch, and is refused.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.reward_entries import reward_entry
from chronicals.kernels.token_log_probability import LOG_PROBABILITY_WORK, log_probability_bytes
from chronicals.lora import adapters_are_fresh, without_adapters
from chronicals.models import PresentedModel, Term, Terms, in_evaluation, input_device
from chronicals.objectives.drawn_answers import (
    KL,
    Answers,
    Importance,
    divergence,
    importance_weights,
)
from chronicals.objectives.log_probabilities import TokenScores, document_sums, score_tokens
from chronicals.objectives.reference import ReferenceSettings, WithReference
from chronicals.objectives.terms import (
    REFERENCE_POLICY,
    Columns,
    Count,
    FrozenModel,
    ReferencePolicy,
    ScoredDocument,
    Value,
    settings,
)
from chronicals.saving import SavedModel

DRAWN = "drawn_log_p"
"""Column of tokens: log-probability under the distribution that the token was drawn from."""

OLD = "old_log_p"
"""Column of tokens: log-probability by the trainer's own pass when the answers were drawn."""

ADVANTAGE = "advantage"
REWARD = "reward"
AGE = "age"
ANSWER = "answer"
"""Segments of documents: A_i, R_i, updates since the answer was drawn, its number in the rollout."""

PER_TOKEN = "targets"
PER_ANSWER = "answers"
PER_NEW_TOKEN = "new_targets"
"""Names of counts: trained tokens, answers, and trained tokens that no update came after."""

Truncated = Literal["keep", "mask", "shape"]


@settings
class RolloutSettings(ReferenceSettings):
    """Settings of an objective that draws answers."""

    answers: int = Field(default=8, ge=2, description="Answers that are drawn to each prompt")
    prompts: int = Field(default=8, ge=1, description="Prompts of an optimizer step")
    max_new_tokens: int = Field(default=256, ge=1, description="Most tokens of an answer")
    temperature: float = Field(
        default=1.0, gt=0, description="Divides the logits, of the draws and of the loss"
    )
    updates: int = Field(
        default=1,
        ge=1,
        description="Optimizer steps whose prompts are answered together, before the first of them",
    )
    iterations: int = Field(
        default=1,
        ge=1,
        description="Times that each answer is trained on before new ones are drawn",
    )
    redraws: int = Field(
        default=0,
        ge=0,
        description="Most times that a group whose rewards are all equal is drawn again",
    )
    truncated: Truncated = Field(
        default="keep",
        description="Answers without an end: keep them, mask them out of the loss, or shape the "
        "reward of long ones (DAPO's soft penalty)",
    )
    overlong_margin: int | None = Field(
        default=None,
        ge=1,
        description="Of truncated: shape: tokens before max_new_tokens over which the penalty "
        "grows [max_new_tokens / 4]",
    )
    clip_low: float = Field(default=0.2, ge=0, lt=1, description="Lowest ratio is 1 minus this")
    clip_high: float | None = Field(
        default=None, ge=0, description="Highest ratio is 1 plus this [clip_low]"
    )
    beta: float = Field(
        default=0.0, ge=0, description="Weight of the divergence from the reference policy"
    )
    kl: KL = Field(default="k3", description="Estimator of the divergence")
    kl_ratio: bool = Field(
        default=True,
        description="Weigh the estimates k2 and k3 by the ratio, so that their gradient is that of "
        "the divergence",
    )
    entropy: float = Field(default=0.0, description="Weight of the entropy bonus")
    importance: Importance = Field(
        default="none",
        description="Weights of answers by the trainer's own probabilities when they were drawn "
        "over those of the draws, truncated or masked; none: the ratio is of the draws",
    )
    importance_cap: float = Field(
        default=3.0, gt=1, description="Where these weights are truncated, or masked"
    )
    max_gap: float = Field(
        default=1.0,
        gt=0,
        description="Largest difference of a token's log-probability between the draw and the "
        "trainer's own pass, above which the run stops",
    )

    def __post_init__(self) -> None:
        if self.reference == "stored":
            raise ValueError(
                "reference='stored': answers are drawn in the run, and nothing can be stored of "
                "them before; leave it out, or name a reference_model"
            )
        if self.overlong_margin is not None and self.truncated != "shape":
            raise ValueError(
                f"overlong_margin={self.overlong_margin}: belongs to truncated='shape', and "
                f"truncated is {self.truncated!r}; leave it out"
            )
        if (self.overlong_margin or 1) > self.max_new_tokens:
            raise ValueError(
                f"overlong_margin={self.overlong_margin}: exceeds max_new_tokens="
                f"{self.max_new_tokens}; lower it"
            )
        if self.reference_model is not None and not self.beta:
            raise ValueError(
                f"reference_model={self.reference_model!r}: has no effect with beta=0; set beta, "
                "or leave it out"
            )

    @property
    def margin(self) -> int:
        """Tokens over which the penalty of long answers grows."""
        return self.overlong_margin or max(self.max_new_tokens // 4, 1)

    @property
    def high(self) -> float:
        """Distance of the highest ratio from 1."""
        return self.clip_low if self.clip_high is None else self.clip_high


class PolicyGradient(WithReference):
    """An objective over answers that the model draws, with advantages from their rewards.

    Attributes:
        name: name of the loss among the terms.
    """

    row_kinds: ClassVar[tuple[str, ...]] = ("prompt",)
    draws_answers: ClassVar[bool] = True
    head_bytes = staticmethod(log_probability_bytes)
    head_work = LOG_PROBABILITY_WORK
    full_learning_rate: ClassVar[float] = 1e-6
    adapter_learning_rate: ClassVar[float] = 1e-5
    name: ClassVar[str]

    def __init__(self, settings: Any = None, chunk_size: int | None = None):
        super().__init__(settings, *(() if chunk_size is None else (chunk_size,)))
        self._largest = torch.zeros(len(GAP_FIELDS))
        self._gaps = deque[Tensor](maxlen=2)
        self._tokenizer: Any = None

    @property
    def answer_tokens(self) -> int:
        """Most tokens of an answer."""
        tokens: int = self.settings.max_new_tokens
        return tokens

    # --- the loss

    def __call__(self, model: PresentedModel, batch: Batch) -> Terms:
        """Return the loss of the Batch's answers and its metrics, as sums."""
        given = self.settings
        reference = self.reference_log_p(model, batch) if given.beta else None
        scores = self.token_scores(model, batch)
        answers = Answers(batch)
        drawn = batch.tokens[DRAWN]
        old = batch.tokens.get(OLD, drawn)
        weight, cut = None, None
        if given.importance != "none":
            old = batch.tokens.get(OLD, scores.log_p.detach())
            weight, cut = importance_weights(
                old, drawn, answers, given.importance, given.importance_cap
            )
        log_ratio = torch.where(answers.trained, scores.log_p - old, 0.0)
        advantage = answers.of_tokens(batch.segments[ADVANTAGE])
        losses, ratio, terms = self.losses(log_ratio, scores.log_p, advantage, answers)
        if weight is not None and cut is not None:
            losses = losses * weight
            terms["importance/cut"] = Term(answers.total(cut.float()), 0.0, PER_TOKEN)
        if reference is not None and self.penalises_in_loss:
            kl = divergence(scores.log_p, reference, ratio, given.kl, given.kl_ratio)
            losses = losses + given.beta * kl
            terms["kl"] = Term(answers.total(kl.detach()), 0.0, PER_TOKEN)
        policy = self.reduced(losses, answers)
        entropy = answers.total(scores.entropy)
        terms["entropy"] = Term(entropy.detach(), 0.0, PER_TOKEN)
        if given.entropy:
            terms["entropy_bonus"] = Term(-entropy, given.entropy, PER_TOKEN)
        size = answers.means(advantage.abs())
        terms["advantage"] = Term(size.sum(), 0.0, PER_ANSWER)
        terms |= self._agreement(scores.log_p.detach(), drawn, batch, answers)
        return {self.name: policy, **terms, **scores.auxiliary}

    @torch.no_grad()
    def score(self, model: PresentedModel, batch: Batch) -> Terms:
        """Return the rewards of held-out answers; the loss of an evaluation is minus their mean."""
        answered = document_sums((batch.targets != IGNORED).float(), batch) > 0
        total = torch.where(answered, batch.segments[REWARD], 0.0).sum()
        return {"cost": Term(-total, per=PER_ANSWER), "reward": Term(total, 0.0, PER_ANSWER)}

    @abstractmethod
    def losses(
        self, log_ratio: Tensor, log_p: Tensor, advantage: Tensor, answers: Answers
    ) -> tuple[Tensor, Tensor, dict[str, Term]]:
        """Return the loss and the ratio of each token, ``[T]``, and metrics.

        Args:
            log_ratio: log r of each token, 0 where nothing is trained.
            log_p: log π of each token.
            advantage: A of each token's answer.
            answers: of the Batch.
        """

    @abstractmethod
    def reduced(self, losses: Tensor, answers: Answers) -> Term:
        """Return the term of the losses ``[T]``, with the count of the step that divides it."""

    @abstractmethod
    def advantages(self, rewards: Tensor) -> Tensor:
        """Return the advantages ``[prompts, answers]`` of rewards, NaN where an answer has none."""

    penalises_in_loss: ClassVar[bool] = True
    """True if the divergence from the reference is in the loss, not in the rewards."""

    def token_scores(self, model: PresentedModel, batch: Batch) -> TokenScores:
        """Return log-probability and entropy of each target, at the temperature of the draws."""
        given = self.settings
        return score_tokens(
            model, batch, self.chunk_size, given.temperature, entropy_gradient=bool(given.entropy)
        )

    def token_log_p(self, model: PresentedModel, batch: Batch) -> Tensor:
        """Return the log-probability of each target, fp32 ``[T]``."""
        return self.token_scores(model, batch).log_p

    @property
    def wants_old_passes(self) -> bool:
        """True if weights of answers need the trainer's own pass from before later updates."""
        given = self.settings
        return given.importance != "none" and given.updates * given.iterations > 1

    # --- the definition

    def item_definition(self, item: Sequence[ScoredDocument], known: Mapping[str, Tensor]) -> Terms:
        """Return the loss of an answer by the formula in plain torch."""
        given = self.settings
        (document,) = item
        facts = document.answer
        assert facts is not None
        scored = document.at_temperature(given.temperature)
        log_p = scored.log_p()

        def on_device(values: np.ndarray) -> Tensor:
            return torch.tensor(values, dtype=log_p.dtype, device=log_p.device)

        drawn = on_device(facts.drawn)
        old = drawn if facts.old is None else on_device(facts.old)
        weight: Tensor | float = 1.0
        if given.importance != "none":
            old = log_p.detach() if facts.old is None else old
            weight = self._defined_weight((old - drawn).exp())
        losses, ratio = self.answer_definition(log_p, old, facts.advantage)
        losses = losses * weight
        if given.beta and self.penalises_in_loss:
            reference = scored.frozen[REFERENCE_POLICY].log_softmax(-1)
            ahead = log_p - reference.gather(-1, scored.targets[:, None])[:, 0]
            estimates = {
                "k1": ratio * ahead.detach(),
                "k2": ahead**2 / 2 * (ratio.detach() if given.kl_ratio else 1.0),
                "k3": ((-ahead).exp() - 1 + ahead) * (ratio if given.kl_ratio else 1.0),
            }
            losses = losses + given.beta * estimates[given.kl]
        terms = {self.name: self.answer_term(losses)}
        if given.entropy:
            shares = scored.logits.softmax(-1)
            entropy = torch.special.entr(shares).sum()
            terms["entropy_bonus"] = Term(-entropy, given.entropy, PER_TOKEN)
        return terms

    def _defined_weight(self, weight: Tensor) -> Tensor:
        """Return the weights of an answer's tokens, truncated or masked, from those by token."""
        given = self.settings
        if given.importance.startswith("sequence"):
            weight = weight.prod().expand_as(weight)
        within = (weight <= given.importance_cap).to(weight.dtype)
        if given.importance.endswith("mask"):
            return weight * within
        return weight * within + given.importance_cap * (1 - within)

    @abstractmethod
    def answer_definition(
        self, log_p: Tensor, old: Tensor, advantage: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the ratio of each token of an answer by the formula, ``[n]``."""

    @abstractmethod
    def answer_term(self, losses: Tensor) -> Term:
        """Return the term of an answer's losses ``[n]`` by the formula."""

    # --- the reference policy

    @torch.no_grad()
    def reference_log_p(self, model: PresentedModel, batch: Batch) -> Tensor:
        """Return the log-probability of each target under the reference, fp32 ``[T]``."""
        if REFERENCE_POLICY in batch.tokens:
            return batch.tokens[REFERENCE_POLICY]
        frozen = self.frozen.get(REFERENCE_POLICY)
        if frozen is not None:
            return self.token_scores(frozen, batch).log_p
        with without_adapters(model.model), in_evaluation(model.model):
            return self.token_scores(model, batch).log_p

    def frozen_models(self, config: ChronicalsConfig) -> Sequence[FrozenModel]:
        """Declare the reference model and the reward models, if they are named."""
        entries = [reward_entry(given) for given in config.rewards or ()]
        rewards = [
            FrozenModel(
                f"reward model {entry.place}",
                entry.place,
                config.mixed_precision,
                f"rewards={str(entry)!r}",
                is_reward=True,
            )
            for entry in entries
            if entry.is_model
        ]
        return [*super().frozen_models(config), *rewards]

    def forward_passes(self, config: ChronicalsConfig) -> Sequence[str]:
        """Return the pass of the reference, if the loss compares with it."""
        return super().forward_passes(config) if self.settings.beta else []

    def unplanned_costs(self, config: ChronicalsConfig) -> str | None:
        """Return that answers are drawn before each rollout's first step."""
        return "the draws of the answers, and their rewards"

    def frozen_start(self) -> str | None:
        """Return the reference policy's name, if the loss compares with the model at its start."""
        return super().frozen_start() if self.settings.beta else None

    def start_columns(self, model: Any) -> Sequence[Columns]:
        """Return no column: the answers are not there yet.

        Raises:
            ConfigurationError: the loss compares with the model as the run begins, and that cannot
                be had by switching adapters off.
        """
        given = self.settings
        if given.beta and given.reference_model is None and not adapters_are_fresh(model):
            raise ConfigurationError(
                f"{self.section}.beta={given.beta}: there is no reference policy to compare with: "
                "the model without adapters is not what the run begins with; name it as "
                f"{self.section}.reference_model, a folder or hub name, or set "
                f"{self.section}.beta=0"
            )
        return ()

    def reference_policy(
        self, model: Any, loaded_from: SavedModel | None, config: ChronicalsConfig
    ) -> ReferencePolicy | None:
        """Describe the reference policy; None without a divergence from it."""
        if not self.settings.beta:
            return None
        return super().reference_policy(model, loaded_from, config)

    def _stores_reference(self, model: Any) -> bool:
        """Return False: nothing of the answers can be stored before the run."""
        return False

    def why_not_evaluated(self, model: Any) -> str | None:
        """Return None: an evaluation compares rewards, and needs no reference policy."""
        return None

    # --- agreement of the draws and the trainer's pass

    def prepare(self, model: Any, tokenizer: Any, config: ChronicalsConfig) -> None:
        """Make room for the largest gap of a step on the device of the model."""
        super().prepare(model, tokenizer, config)
        self.section = config.objective
        self._tokenizer = tokenizer
        self._largest = torch.zeros(len(GAP_FIELDS), device=input_device(model))
        self._gaps.clear()

    section: str = "grpo"

    def _agreement(
        self, log_p: Tensor, drawn: Tensor, batch: Batch, answers: Answers
    ) -> dict[str, Term]:
        """Return the sum of the gaps |log π − log π_drawn| of new answers, and how many are large.

        The largest of the step stays on the device, with the place of its token.
        """
        new = answers.trained & (answers.of_tokens(batch.segments[AGE]) == 0)
        gap = torch.where(new, (log_p - drawn).abs(), 0.0)
        # A gap that is not a number is the largest.
        gap = gap.nan_to_num(torch.inf)
        named = (
            gap,
            log_p,
            drawn,
            batch.targets,
            batch.position_ids,
            answers.of_tokens(batch.segments[ANSWER]),
        )
        of_tokens = torch.stack([values.float() for values in named])
        places = of_tokens.index_select(1, gap.argmax()[None])[:, 0].to(self._largest.device)
        torch.where(places[0] > self._largest[0], places, self._largest, out=self._largest)
        over = (gap > self.settings.max_gap).float()
        return {
            "gap": Term(gap.sum(), 0.0, PER_NEW_TOKEN),
            "gap/over": Term(over.sum(), 0.0, PER_NEW_TOKEN),
        }

    def finish_metrics(
        self, values: Mapping[str, Value], counts: Mapping[str, Count]
    ) -> dict[str, Value]:
        """Return the metrics, with the largest gap of this process; none where no answer is new."""
        metrics = dict(values)
        if not counts[PER_NEW_TOKEN]:
            metrics.pop("gap", None)
            metrics.pop("gap/over", None)
            return metrics
        largest = self._largest.clone()
        self._largest.zero_()
        if isinstance(metrics["gap"], Tensor):
            self._gaps.append(largest)
            metrics["gap/largest"] = largest[0]
        return metrics

    def why_wrong(self, values: Mapping[str, float]) -> str | None:
        """Return which token's log-probability differs too much between draw and trainer's pass."""
        if not values.get("gap/over"):
            return None
        limit = f"{self.section}.max_gap={self.settings.max_gap}"
        words = (
            f"the log-probabilities of {values['gap/over']:.2%} of the drawn tokens differ by more "
            f"than {limit} between the draw and the trainer's own pass"
        )
        found = [gap.tolist() for gap in self._gaps if float(gap[0]) == values["gap/largest"]]
        if found and found[-1][0] > self.settings.max_gap:
            named = dict(zip(GAP_FIELDS, found[-1]))
            token = int(named["token"])
            text = "" if self._tokenizer is None else f" {self._tokenizer.decode([token])!r}"
            words += (
                f", most at token{text} ({token}) in position {named['position']:.0f} of "
                f"answer {named['answer']:.0f}: drawn with {named['drawn']:.4f}, passed with "
                f"{named['passed']:.4f}"
            )
        return (
            f"{words}; what is trained is not what was drawn: look at what differs between "
            "generation and training (a patched module, dropout, another precision), or raise "
            "max_gap if rounding explains it"
        )

    def why_no_gradient(self, values: Mapping[str, float]) -> str | None:
        """Return a reason if all advantages are 0, or all ratios that have one are held back."""
        if values.get("advantage", 1.0) == 0.0:
            return "the rewards of each prompt's answers are all equal, so no answer is better"
        given = self.settings
        if given.entropy or (given.beta and self.penalises_in_loss):
            return None
        clipped = values.get("clip/low", 0.0) + values.get("clip/high", 0.0)
        masked = values.get("importance/cut", 0.0) if given.importance.endswith("mask") else 0.0
        if not clipped and not masked:
            return None
        return (
            f"{clipped:.0%} of the ratios are beyond the clip and {masked:.0%} of the weights of "
            "importance are masked, and no other answer has an advantage: the policy is too far "
            f"from the one that drew the answers; lower learning_rate, {self.section}.iterations "
            f"or {self.section}.updates"
        )


GAP_FIELDS = ("gap", "passed", "drawn", "token", "position", "answer")
"""Fields of the largest gap of a step: log-probabilities, and the place of the token."""
