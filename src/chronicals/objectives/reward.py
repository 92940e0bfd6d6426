"""Reward model, trained on which of two answers was chosen.

By equation 1 of Ouyang et al. (2022, arXiv 2203.02155),

    loss = − log σ(r(x, y_w) − r(x, y_l))  +  c (r(x, y_w) + r(x, y_l))²
    r(x, y) = w · h,    h the hidden state of the last token of x and y

w, a new weight ``score``, is trained with the model, or whole beside adapters. The second term
holds rewards, which the first knows up to a constant for each prompt, around zero (Eisenstein et
al., 2023, arXiv 2312.09244, equation 2); c is 0 unless set. Equation 1 divides by the pairs of a
prompt; here the mean is over all pairs of an optimizer step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import stop_token_ids
from chronicals.kernels.linear_head import NO_LOGITS, HeadBytes, HeadShape
from chronicals.models import PresentedModel, Term, Terms, attach_score, embedding_table, score_of
from chronicals.models.four_bits import Watch
from chronicals.objectives.pairs import (
    CHOSEN,
    PER_PAIR,
    REJECTED,
    Pairs,
    reward_metrics,
    why_flat,
)
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Objective, Paper, ScoredDocument, settings
from chronicals.saving import SavedModel

logger = logging.getLogger(__name__)


def bradley_terry_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the negative log-likelihood of each choice, given both answers' rewards ``[G]``."""
    return -F.logsigmoid(chosen - rejected)


def score_bytes(shape: HeadShape) -> HeadBytes:
    """Return the bytes of scores: hidden states and their gradient, without logits of the head."""
    return HeadBytes(logits=0, states=2 * shape.states, gradient=0)


@register("reward")
class RewardObjective(Objective):
    """An objective that trains a score, higher for the chosen answer than for the rejected one."""

    row_kinds = ("preference",)
    head_work = NO_LOGITS
    papers = (
        Paper("reward model", "Ouyang et al., 2022, eq. 1"),
        Paper("rewards held around zero", "Eisenstein et al., 2023, eq. 2"),
    )
    head_bytes = staticmethod(score_bytes)
    full_learning_rate = 1e-5
    adapter_learning_rate = 1e-4
    generates = False

    @settings
    class Settings:
        """Section ``reward`` of a configuration."""

        center_coefficient: float = Field(
            default=0.0,
            ge=0,
            description="c: weight of the squared sum of a pair's rewards, which holds them "
            "around zero",
        )
        pad_token: str | None = Field(
            default=None,
            description="Token that rows of the saved model are padded with, with which no answer "
            "may end; by default the "
            "tokenizer's, or another special token where answers end with that",
        )

    @classmethod
    def load(
        cls,
        saved: SavedModel,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        quantization: str | None = None,
        watch: Watch | None = None,
    ) -> Any:
        """Load a language model, which gets a new score, or a reward model to train further."""
        if saved.is_scored(trust_remote_code):
            return saved.scored_model(dtype, trust_remote_code, quantization)
        return super().load(saved, dtype, trust_remote_code, quantization, watch)

    def prepare(self, model: Any, tokenizer: Any, config: ChronicalsConfig) -> None:
        """Give the model a score, and the tokenizer a padding token with which no answer ends.

        Raises:
            ConfigurationError: the model has PEFT's adapters, tokens are trained by themselves, or
                the architecture can have no score.
        """
        if getattr(model, "peft_config", None):
            raise ConfigurationError(
                "objective='reward': the model has PEFT's adapters, with which its new head would "
                "not be saved; merge them "
                "(merge_and_unload), or train ours (use_lora=True)"
            )
        if config.lora_trainable_tokens is not None:
            raise ConfigurationError(
                f"lora_trainable_tokens={config.lora_trainable_tokens!r}: rows of the embedding "
                "are not trained by themselves "
                "with objective='reward'; leave it out"
            )
        pad = padding_token(tokenizer, embedding_table(model).shape[0], self.settings.pad_token)
        try:
            attach_score(model, pad)
        except ValueError as error:
            raise ConfigurationError(
                f"objective='reward': {error}; take a model of another architecture"
            ) from error

    def __call__(self, model: PresentedModel, batch: Batch) -> Terms:
        """Return the loss of the Batch's pairs and its metrics, as sums."""
        states, auxiliary = model.states(batch)
        pairs = Pairs.of(document_scores(model, states, batch), batch, None)
        return {**self.terms(pairs), **auxiliary}

    def why_no_gradient(self, values: Mapping[str, float]) -> str | None:
        """Return a reason if the loss of every pair is 0, its limit, where it is flat."""
        return why_flat(values["loss"])

    def item_definition(self, item: Sequence[ScoredDocument], known: Mapping[str, Tensor]) -> Terms:
        """Return the loss by the sigmoid itself, not by its logarithm."""
        rewards = {document.side: document.score for document in item}
        chosen = rewards[CHOSEN]
        rejected = rewards[REJECTED]
        weight = self.settings.center_coefficient
        assert chosen is not None and rejected is not None
        loss = -torch.sigmoid(chosen - rejected).log() + weight * (chosen + rejected) ** 2
        return {"reward": Term(loss, per="items")}

    def terms(self, pairs: Pairs) -> dict[str, Term]:
        """Return the losses and metrics of pairs whose values are rewards."""
        chosen = pairs.chosen
        rejected = pairs.rejected
        weight = self.settings.center_coefficient
        losses = bradley_terry_losses(chosen, rejected)
        terms = {"bradley_terry": Term(pairs.total(losses), per=PER_PAIR)}
        if weight:
            terms["centering"] = Term(pairs.total((chosen + rejected).square()), weight, PER_PAIR)
        return {**terms, **reward_metrics(pairs, chosen, rejected)}


def document_scores(model: PresentedModel, states: Tensor, batch: Batch) -> Tensor:
    """Return the score of each document, fp32 ``[N]``, given the hidden states ``[T, D]``.

    Raises:
        ConfigurationError: the model has no score.
    """
    score = score_of(model.model)
    if score is None:
        raise ConfigurationError(
            "objective='reward': the model has no score yet; train it, then evaluate the trained "
            "model"
        )
    last = (batch.cu_seqlens[1:].long() - 1).clamp(min=0)
    return score.of(states[last])


def padding_token(tokenizer: Any, rows: int, asked: str | None = None) -> int:
    """Make a token with which no answer ends the tokenizer's padding token; return its id.

    transformers takes the score of the last token that is not the padding token, which therefore
    must not be an end.

    Args:
        tokenizer: the model's tokenizer, which is changed.
        rows: rows of the embedding, which must have the token.
        asked: the token's text; None to choose one of the special tokens.

    Raises:
        ConfigurationError: there is no such token, or the one that is asked for is not one.
    """
    vocabulary = tokenizer.get_vocab()
    ends = set(stop_token_ids(tokenizer))
    if asked is not None:
        candidates = [asked]
    else:
        named = [
            token
            for token in vocabulary
            if "pad" in token.lower() and token in tokenizer.all_special_tokens
        ]
        candidates = [
            tokenizer.pad_token,
            *named,
            tokenizer.unk_token,
            tokenizer.bos_token,
            *tokenizer.all_special_tokens,
        ]
    usable = {token for token, number in vocabulary.items() if number not in ends and number < rows}
    chosen = next((token for token in candidates if token in usable), None)
    if chosen is None:
        problem = (
            f"reward.pad_token={asked!r}: is no token of the model, or one with which answers end"
            if asked
            else (
                f"the tokenizer pads with {tokenizer.pad_token!r}, with which answers end, and "
                "has no other special token"
            )
        )
        raise ConfigurationError(
            f"{problem}; set reward.pad_token to a token of its vocabulary that ends no answer"
        )
    if chosen != tokenizer.pad_token:
        logger.info(
            "rows of the saved model are padded with %r; answers may end with %r",
            chosen,
            tokenizer.pad_token,
        )
        tokenizer.pad_token = chosen
    return int(vocabulary[chosen])
