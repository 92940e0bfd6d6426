"""Router losses as pure functions of router logits.

Every layer has its own loss, because the index of an expert means nothing in another layer.

z_t are the router logits of token t, and s_t is what the router computes from them to weigh its
experts (``SCORES``):

    P_t = s_t / Σ_e s_t,e = softmax(log s_t)

For a softmax P_t is s_t; for a sigmoid it is s′_t of DeepSeek-V3 (arXiv 2412.19437, equation 20).

S_t are the experts that received the token, however the router chose them. sg(·) stops the
gradient.

    balance      E Σ_e f_e p_e          f_e: share of all choices that fell on e,
                                        p_e: mean of P_t,e
    z            logsumexp(z_t)²
    temporal     ‖P_t − P_{t−1}‖²
    locality     −log Σ_{e ∈ S_{t−1}} P_t,e
    lookahead    KL(sg softmax(z/T) ‖ Q)
                 + a max(0, m − min_{e ∈ S} z′_e + max_{e ∉ S} z′_e) − b log(Σ_{e ∈ S} Q_e) / k
                 with z′ the prediction of z, Q = softmax(z′/T), S the k largest of z
    anchor       KL(P_t ‖ P°_t)         P°: the router's P on the same token at the start of
                                        the run; only P has a gradient

balance is that of Switch (arXiv 2101.03961, equation 4), with a sigmoid that of DeepSeek-V3
(equations 17 to 20); z is that of ST-MoE (arXiv 2202.08906, equation 5).

balance is 1 if all experts get equal shares. The other losses are means over tokens. temporal and
locality average over tokens that have a token before them in their document (an answer after a
shared prompt counts only its own tokens). All losses are then averaged over layers, and lookahead
also over distances. DeepSeek-V3 counts the k largest scores of a sequence; here f counts the
experts that the tokens of a pack received, so correction biases and groups are included.

Functions of P take log s ``[T, E]``; P is its softmax.

Shapes: T tokens, E experts, L layers, P packs of W tokens; T = P · W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.batch import Batch, document_at
from chronicals.models import times_trained


@dataclass(frozen=True)
class CountedTokens:
    """The weight of each token of a Batch in the losses, and its document and pack.

    Attributes:
        counted: fp32 ``[T]``: how often each token counts, which is the number of documents with a
            target that it belongs to (``times_trained``).
        document: int64 ``[T]``: the index of each token's document.
        width: W, tokens of a pack.
    """

    counted: Tensor
    document: Tensor
    width: int

    @classmethod
    def of(cls, batch: Batch, width: int | None) -> CountedTokens:
        """Build from ``batch``.

        Args:
            batch: T tokens.
            width: tokens of a pack; None if the Batch is one pack.
        """
        places = torch.arange(len(batch), device=batch.cu_seqlens.device)
        return cls(times_trained(batch), document_at(places, batch.cu_seqlens), width or len(batch))

    def before(self, distance: int) -> Tensor:
        """Return fp32 ``[T - distance]``: how often token t counts, or 0 at a document boundary.

        It is 0 if token t + distance belongs to another document.
        """
        same = self.document[distance:] == self.document[: len(self.document) - distance]
        return self.counted[: len(self.counted) - distance] * same

    def means(self, values: Tensor, there: Tensor) -> Tensor:
        """Return the weighted mean of ``values`` in each pack, ``[..., P]``; 0 without weight.

        Args:
            values: ``[..., n]``, for the first n tokens.
            there: fp32 ``[n]``, the weight of each.
        """
        missing = len(self.counted) - len(there)
        values, there = (
            F.pad(x, (0, missing)) for x in (torch.where(there > 0, values, 0.0) * there, there)
        )
        sums, counts = (
            x.unflatten(-1, (-1, self.width)).sum(-1) for x in (values, there.to(values.dtype))
        )
        return sums / counts.clamp(min=1.0)


def wide(logits: Tensor) -> Tensor:
    """Return ``logits`` in fp32, or in their own dtype if that is wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def top_k_mask(logits: Tensor, k: int) -> Tensor:
    """Return a bool mask ``[..., E]`` of the k largest logits."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter(
        -1, logits.topk(k, dim=-1).indices, True
    )


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: z,
    "sigmoid": F.logsigmoid,
    "sqrtsoftplus": lambda z: F.softplus(z).log() / 2,
}
"""log s as a function of the logits, by name, up to a constant for each token."""


def log_scores(logits: Tensor, scores: str) -> Tensor:
    """Return log s ``[..., E]``, in fp32 or wider.

    Args:
        logits: z ``[..., E]``.
        scores: a key of ``SCORES``.
    """
    return SCORES[scores](wide(logits))


def known(received: Tensor, experts: int) -> Tensor:
    """Return ``received`` with every id outside 0..E-1, which means no expert, replaced by E."""
    return torch.where((received >= 0) & (received < experts), received, experts)


@dataclass(frozen=True)
class ExpertLoad:
    """Load of the experts from the tokens that count, in fp32.

    Attributes:
        rows_LPE: number of tokens that each expert received.
        choices_P1: number of choices in each pack: k for each token.
        shares_LPE: share f of the choices that fell on each expert; 0 in packs without counted
            tokens.
    """

    rows_LPE: Tensor
    choices_P1: Tensor
    shares_LPE: Tensor

    @classmethod
    def of(
        cls, received: Sequence[Tensor], experts: int, k: int, tokens: CountedTokens
    ) -> ExpertLoad:
        """Count the load.

        Args:
            received: expert ids ``[T, k]`` of each layer.
            experts: E.
            k: experts per token.
            tokens: the tokens that count.
        """
        counted_PW = tokens.counted.view(-1, tokens.width).to(torch.float32)
        ids_LTk = known(torch.stack(list(received)), experts)
        layers = len(ids_LTk)
        packs = len(counted_PW)
        groups = torch.arange(layers * packs, device=ids_LTk.device)[:, None] * (experts + 1)
        each = counted_PW[None, :, :, None].expand(layers, -1, -1, ids_LTk.shape[-1]).reshape(-1)
        # Sums of ones: whatever their order, they are exact.
        rows = each.new_zeros(layers * packs * (experts + 1))
        rows = rows.scatter_add(0, (ids_LTk.view(layers * packs, -1) + groups).view(-1), each)
        rows_LPE = rows.view(layers, packs, experts + 1)[..., :experts]
        choices_P1 = k * counted_PW.sum(1, keepdim=True)
        return cls(rows_LPE, choices_P1, rows_LPE / choices_P1.clamp(min=1.0))


def balance_loss(log_s: Tensor, shares_PE: Tensor, tokens: CountedTokens) -> Tensor:
    """Return the balance loss of one layer, summed over packs.

    Args:
        log_s: ``[T, E]``.
        shares_PE: f of this layer.
        tokens: the tokens that count.
    """
    counted_PW1 = tokens.counted.view(-1, tokens.width, 1).to(torch.float32)
    p_PWE = log_s.softmax(-1).unflatten(0, (-1, tokens.width))
    mean_PE = (p_PWE * counted_PW1).sum(1) / counted_PW1.sum(1).clamp(min=1.0)
    return log_s.shape[-1] * (shares_PE * mean_PE).sum()


def z_losses(logits: Tensor) -> Tensor:
    """Return the z loss of each token, ``[T]``."""
    return wide(logits).logsumexp(-1).square()


def temporal_losses(log_s: Tensor) -> Tensor:
    """Return the temporal loss of each pair of tokens t, t + 1, ``[T - 1]``."""
    p = log_s.softmax(-1)
    return (p[1:] - p[:-1]).square().sum(-1)


def locality_losses(log_s: Tensor, received: Tensor) -> Tensor:
    """Return the locality loss of each pair of tokens t, t + 1, ``[T - 1]``.

    It is 0 if no expert received token t.

    Args:
        log_s: ``[T, E]``.
        received: expert ids ``[T, k]``.
    """
    experts = log_s.shape[-1]
    # The experts that received the token before (S). Ids of no expert fall into a further column.
    earlier = received[:-1]
    none = received.new_zeros(len(earlier), experts + 1, dtype=torch.bool)
    before = none.scatter(-1, known(earlier, experts), True)[:, :experts]
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
    """Return the lookahead loss of each prediction, ``[...]``.

    Args:
        predicted: z′ ``[..., E]``.
        target: z ``[..., E]``, which gets no gradient.
        k: experts per token.
        temperature: T.
        ranking: a, the factor of the ranking term.
        of_set: b, the factor of the set term.
        margin: m.
    """
    predicted = wide(predicted)
    target = wide(target.detach())
    losses = divergences(predicted, target, temperature)
    return losses + set_losses(
        predicted, top_k_mask(target, k), temperature, ranking, of_set, margin
    )


def divergences(predicted: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Return KL(softmax(z/T) ‖ softmax(z′/T)), ``[...]``.

    Args:
        predicted: z′ ``[..., E]``.
        target: z ``[..., E]``.
        temperature: T.
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
    """Return the sum of the ranking term and the set term of each prediction, ``[...]``.

    Args:
        predicted: z′ ``[..., E]``.
        those: bool ``[..., E]``, S.
        temperature: T.
        ranking: a, the factor of the ranking term.
        of_set: b, the factor of the set term.
        margin: m.
        among: bool ``[..., E]``, the experts that are compared with S; all by default.
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
    """Return the share ``[...]`` of the k chosen experts among the first ``among`` predicted.

    Args:
        predicted: z′ ``[..., E]``.
        target: z ``[..., E]``.
        k: experts per token.
        among: k by default.
    """
    return (top_k_mask(predicted, among or k) & top_k_mask(target, k)).sum(-1) / k


def anchor_losses(logits: Tensor, reference: Tensor, scores: str = "softmax") -> Tensor:
    """Return the KL from the reference distribution to the current one for each token, ``[T]``.

    Only ``logits`` get a gradient.

    Args:
        logits: ``[T, E]``.
        reference: ``[T, E]``, logits at the start of the run.
        scores: a key of ``SCORES``.
    """
    log_p, log_r = (log_scores(x, scores).log_softmax(-1) for x in (logits, reference.detach()))
    return (log_p.exp() * (log_p - log_r)).sum(-1)


def entropies(log_s: Tensor) -> Tensor:
    """Return the entropy of P of each token, ``[T]``, in nats."""
    log_p = log_s.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)
