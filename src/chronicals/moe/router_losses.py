"""Losses of routers, each a pure function of scores; every layer by itself, for an expert's number
means nothing in another.

With z_t the logits of a token's router and s_t what it makes of them to weigh its experts
(``SCORES``),

    P_t = s_t / Σ_e s_t,e = softmax(log s_t)     for a softmax P_t is s_t, for a sigmoid s′_t of DeepSeek-V3 (2412.19437, 20)

S_t the experts that really got the token, however the router chose them, sg(·) without a gradient:

    balance      E Σ_e f_e p_e      f_e: share of all choices that fell on e, p_e: mean of P_t,e
                                    (Switch: arXiv 2101.03961, 4; with a sigmoid DeepSeek-V3, 17 to
                                    20)
    z            logsumexp(z_t)²                                                               (ST-MoE: arXiv 2202.08906, 5)
    temporal     ‖P_t − P_{t−1}‖²
    locality     −log Σ_{e ∈ S_{t−1}} P_t,e
    lookahead    KL(sg softmax(z/T) ‖ Q) + a max(0, m − min_{e ∈ S} z′_e + max_{e ∉ S} z′_e) − b log(Σ_{e ∈ S} Q_e) / k
                 of z′ predicted of z, Q = softmax(z′/T), S the k largest of z
    anchor       KL(P_t ‖ P°_t), P° of the router as the run began, on the same token; 0 then, and with a gradient in P

balance is 1 where experts get equal shares. All but balance are means over tokens; temporal and
locality over tokens that have a token before them in their document (of an answer behind a shared
prompt, among its own tokens); then all are means over layers, and lookahead over distances. Where
DeepSeek-V3 counts the k largest scores of a sequence, f counts the experts that a pack's tokens
got, by correction biases and groups, too.

Functions of P take log s ``[T, E]``, of which P is the softmax.

Shapes: T tokens, E experts, L layers, P packs of W tokens; T = P · W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.batch import Batch
from chronicals.models import times_trained
from chronicals.models.router_loss import document_of


@dataclass(frozen=True)
class Tokens:
    """Which tokens of a Batch count, and in which packs.

    Attributes:
        counted: fp32 ``[T]``: how many times each does: by its documents with a target
            (``times_trained``).
        document: int64 ``[T]``: the number of a token's document.
        width: W.
    """

    counted: Tensor
    document: Tensor
    width: int

    @classmethod
    def of(cls, batch: Batch, width: int | None) -> Tokens:
        """Args:
        width: tokens of a pack; None for a Batch of one.
        """
        places = torch.arange(len(batch), device=batch.cu_seqlens.device)
        return cls(times_trained(batch), document_of(places, batch.cu_seqlens), width or len(batch))

    def before(self, distance: int) -> Tensor:
        """fp32 ``[T - distance]``: how many times token t counts, where token t + distance is of
        the same document; else 0.
        """
        same = self.document[distance:] == self.document[: len(self.document) - distance]
        return self.counted[: len(self.counted) - distance] * same

    def means(self, values: Tensor, there: Tensor) -> Tensor:
        """``[..., P]``: the mean of a pack's ``values``, each as many times as it is ``there``; of
        packs without any, 0.

        Args:
            values: ``[..., n]``, of the first n tokens.
            there: fp32 ``[n]``.
        """
        missing = len(self.counted) - len(there)
        values, there = (
            F.pad(x, (0, missing)) for x in (torch.where(there > 0, values, 0.0) * there, there)
        )
        sums, counts = (
            x.unflatten(-1, (-1, self.width)).sum(-1) for x in (values, there.to(values.dtype))
        )
        return sums / counts.clamp(min=1.0)

    def sum_over_packs(self, values: Tensor, there: Tensor) -> Tensor:
        """The sum of ``means``."""
        return self.means(values, there).sum()

    @property
    def packs(self) -> Tensor:
        """How many packs have a token that counts; a scalar in fp32."""
        return (self.counted > 0).view(-1, self.width).any(1).sum().float()


def wide(logits: Tensor) -> Tensor:
    """In fp32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def chosen(logits: Tensor, k: int) -> Tensor:
    """bool ``[..., E]``: the k largest."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter(
        -1, logits.topk(k, dim=-1).indices, True
    )


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: z,
    "sigmoid": F.logsigmoid,
    "sqrtsoftplus": lambda z: F.softplus(z).log() / 2,
}
"""By the name of s its logarithm, up to a constant of the token."""


def log_scores(logits: Tensor, scores: str) -> Tensor:
    """log s, in fp32 at least."""
    return SCORES[scores](wide(logits))


def sent(received: Tensor, experts: int) -> Tensor:
    """bool ``[..., E]``: S, of the experts that tokens got, ``[..., k]``; ids that no expert has
    are none's.
    """
    none = received.new_zeros(*received.shape[:-1], experts + 1, dtype=torch.bool)
    return none.scatter(-1, known(received, experts), True)[..., :experts]


def known(received: Tensor, experts: int) -> Tensor:
    """The ids of experts, and E for any other."""
    return torch.where((received >= 0) & (received < experts), received, experts)


@dataclass(frozen=True)
class Load:
    """What experts got of the tokens that count, in fp32.

    Attributes:
        rows_LPE: how many rows.
        choices_P1: how many were chosen: k for each token.
    """

    rows_LPE: Tensor
    choices_P1: Tensor

    @classmethod
    def of(cls, received: Sequence[Tensor], experts: int, k: int, tokens: Tokens) -> Load:
        """Args:
        received: ``[T, k]`` of each layer.
        """
        counted_PW = tokens.counted.view(-1, tokens.width).to(torch.float32)
        ids_LTk = known(torch.stack(list(received)), experts)
        layers = len(ids_LTk)
        packs = len(counted_PW)
        groups = torch.arange(layers * packs, device=ids_LTk.device)[:, None] * (experts + 1)
        each = counted_PW[None, :, :, None].expand(layers, -1, -1, ids_LTk.shape[-1]).reshape(-1)
        rows = each.new_zeros(
            layers * packs * (experts + 1)
        )  # sums of ones: whatever their order, they are exact
        rows = rows.scatter_add(0, (ids_LTk.view(layers * packs, -1) + groups).view(-1), each)
        return cls(
            rows.view(layers, packs, experts + 1)[..., :experts],
            k * counted_PW.sum(1, keepdim=True),
        )

    @property
    def shares_LPE(self) -> Tensor:
        """f; 0 of packs without a token that counts."""
        return self.rows_LPE / self.choices_P1.clamp(min=1.0)

    @property
    def dropped_LP(self) -> Tensor:
        """Which share of the choices no expert got."""
        return (self.choices_P1[:, 0] - self.rows_LPE.sum(-1)) / self.choices_P1[:, 0].clamp(
            min=1.0
        )


def balance(log_s: Tensor, shares_PE: Tensor, tokens: Tokens) -> Tensor:
    """The sum over the packs, of one layer, whose f are given."""
    counted_PW1 = tokens.counted.view(-1, tokens.width, 1).to(torch.float32)
    p_PWE = log_s.softmax(-1).unflatten(0, (-1, tokens.width))
    mean_PE = (p_PWE * counted_PW1).sum(1) / counted_PW1.sum(1).clamp(min=1.0)
    return log_s.shape[-1] * (shares_PE * mean_PE).sum()


def z_losses(logits: Tensor) -> Tensor:
    """``[T]``, of each token."""
    return wide(logits).logsumexp(-1).square()


def temporal_losses(log_s: Tensor) -> Tensor:
    """``[T - 1]``: of token t + 1 beside token t."""
    p = log_s.softmax(-1)
    return (p[1:] - p[:-1]).square().sum(-1)


def locality_losses(log_s: Tensor, received: Tensor) -> Tensor:
    """``[T - 1]``: of token t + 1 beside token t; 0 where no expert got token t.

    Args:
        received: ``[T, k]``.
    """
    before = sent(received[:-1], log_s.shape[-1])
    before = before | ~before.any(-1, keepdim=True)
    return -log_s.log_softmax(-1)[1:].masked_fill(~before, float("-inf")).logsumexp(-1)


def lookahead_losses(
    predicted: Tensor,
    target: Tensor,
    k: int,
    temperature: float,
    ranking: float,
    of_set: float,
    margin: float,
) -> Tensor:
    """``[...]``: of each prediction.

    Args:
        predicted: z′ ``[..., E]``.
        target: z ``[..., E]``, of which no gradient is made.
        ranking, of_set, margin: a, b and m.
    """
    predicted = wide(predicted)
    target = wide(target.detach())
    losses = divergences(predicted, target, temperature)
    return losses + set_losses(predicted, chosen(target, k), temperature, ranking, of_set, margin)


def divergences(predicted: Tensor, target: Tensor, temperature: float) -> Tensor:
    """``[...]``: KL(softmax(z/T) ‖ softmax(z′/T)) of ``target`` z and ``predicted`` z′, ``[...,
    E]``.
    """
    aim = (target / temperature).log_softmax(-1)
    log_q = (predicted / temperature).log_softmax(-1)
    return (aim.exp() * (aim - log_q)).sum(-1)


def set_losses(
    predicted: Tensor,
    those: Tensor,
    temperature: float,
    ranking: float,
    of_set: float,
    margin: float,
    among: Tensor | None = None,
) -> Tensor:
    """``[...]``: the ranking and the set term of ``predicted`` z′.

    Args:
        those: bool ``[..., E]``, S.
        among: bool ``[..., E]``, which are compared; by default all.
    """
    if among is not None:
        predicted = predicted.masked_fill(~(among | those), float("-inf"))
    log_q = (predicted / temperature).log_softmax(-1)
    losses = torch.zeros_like(predicted[..., 0])
    if ranking:
        least = predicted.masked_fill(~those, float("inf")).amin(-1)
        most = predicted.masked_fill(those, float("-inf")).amax(-1)
        losses = losses + ranking * (margin - least + most).relu()
    if of_set:
        losses = losses - of_set * log_q.masked_fill(~those, float("-inf")).logsumexp(
            -1
        ) / those.sum(-1)
    return losses


def recalls(predicted: Tensor, target: Tensor, k: int, among: int | None = None) -> Tensor:
    """``[...]``: which share of the k chosen experts is among so many (by default k) that are
    predicted first.
    """
    return (chosen(predicted, among or k) & chosen(target, k)).sum(-1) / k


def anchor_losses(logits: Tensor, reference: Tensor, scores: str = "softmax") -> Tensor:
    """``[T]``: KL from the reference's distribution to that of now, with a gradient in
    ``logits``.
    """
    log_p, log_r = (log_scores(x, scores).log_softmax(-1) for x in (logits, reference.detach()))
    return (log_p.exp() * (log_p - log_r)).sum(-1)


def entropies(log_s: Tensor) -> Tensor:
    """``[T]``: of P, in nats."""
    log_p = log_s.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean()
