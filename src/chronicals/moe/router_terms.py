"""Router losses, their metrics and the router anchor as terms of a training run.

They are independent of its objective.

Every term is a mean over a pack, summed over the packs of a Batch. The caller divides it by the
number of packs in the step. So it depends neither on ``batch_size`` and accumulation nor on the
number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.memory import draws_numbers
from chronicals.models import Computed, PresentedModel, Term, Terms, in_evaluation
from chronicals.moe import router_losses as losses
from chronicals.moe.router_losses import CountedTokens, ExpertLoad
from chronicals.moe.router_settings import RouterSettings

PER = "packs"


@dataclass(frozen=True)
class Routing:
    """Properties of a model's routers."""

    k: int
    experts: int
    scores: str | None = "softmax"
    logits: bool = True


@dataclass(frozen=True)
class RouterTerms:
    """The ``AdditionalTerm`` of every router loss with a coefficient in ``settings``; metrics."""

    settings: RouterSettings
    routing: Routing

    @property
    def lookahead(self) -> bool:
        """True if heads that predict experts are trained."""
        return bool(self.settings.layer_ahead or self.settings.token_ahead)

    def terms(self, model: PresentedModel, computed: Computed, batch: Batch) -> Terms:
        """Return the losses and metrics of one forward pass by name, each summed over packs."""
        tokens = CountedTokens.of(batch, model.pack_width)
        given = self.settings
        received = computed.received
        load = ExpertLoad.of(received, self.routing.experts, self.routing.k, tokens)
        logits = computed.router_logits if self.routing.logits else []
        pairs = tokens.before(1)

        def scores_of(z: Tensor) -> Tensor:
            return losses.log_scores(z, self.routing.scores or "")

        sums = dict[str, list[Tensor]]()
        if given.balance:
            sums["balance"] = [
                losses.balance_loss(scores_of(z), shares_PE, tokens)
                for z, shares_PE in zip(logits, load.shares_LPE, strict=True)
            ]
        if given.z:
            sums["z"] = [tokens.means(losses.z_losses(z), tokens.counted).sum() for z in logits]
        if given.temporal:
            sums["temporal"] = [
                tokens.means(losses.temporal_losses(scores_of(z)), pairs).sum() for z in logits
            ]
        if given.locality:
            sums["locality"] = [
                tokens.means(losses.locality_losses(scores_of(z), ids), pairs).sum()
                for z, ids in zip(logits, received, strict=True)
            ]
        found = {
            f"router/{name}": Term(torch.stack(values).mean(), getattr(given, name), PER)
            for name, values in sums.items()
        }
        for head in ("layer_ahead", "token_ahead"):
            if getattr(given, head):
                found |= self._lookahead(head, computed, tokens)
        entropies = list[Tensor]()
        if self.routing.scores:
            entropies = [losses.entropies(scores_of(z.detach())) for z in logits]
        return {**found, **_metrics(load, entropies, tokens)}

    def _lookahead(self, name: str, computed: Computed, tokens: CountedTokens) -> dict[str, Term]:
        """Return the loss of the heads ``name``, and their recall at each distance as metrics."""
        given = self.settings
        # Distance in layers or tokens, shift in tokens, prediction, and target.
        pairs = list[tuple[int, int, Tensor, Tensor]]()
        if name == "layer_ahead":
            for layer, predicted in enumerate(computed.layers_ahead):
                for d in range(predicted.shape[1]):
                    pairs.append((d, 0, predicted[:, d], computed.router_logits[layer + d]))
        else:
            ahead = computed.tokens_ahead
            assert ahead is not None
            for k in range(1, ahead.shape[1] + 1):
                for layer, logits in enumerate(computed.router_logits):
                    pairs.append((k, k, ahead[: len(ahead) - k, k - 1, layer], logits[k:]))
        sums = list[Tensor]()
        recalled = dict[int, list[Tensor]]()
        for distance, shift, predicted, target in pairs:
            there = tokens.before(shift)
            values = losses.lookahead_losses(
                predicted,
                target,
                self.routing.k,
                given.lookahead_temperature,
                given.lookahead_ranking,
                given.lookahead_set,
                given.lookahead_margin,
            )
            sums.append(tokens.means(values, there).sum())
            share = losses.recalls(predicted.detach(), target.detach(), self.routing.k)
            recalled.setdefault(distance, []).append(tokens.means(share, there).sum())
        found = {f"router/{name}": Term(torch.stack(sums).mean(), getattr(given, name), PER)}
        for distance, shares in recalled.items():
            found[f"router/{name}_recall_{distance}"] = Term(torch.stack(shares).mean(), 0.0, PER)
        return found


def _metrics(load: ExpertLoad, entropies: list[Tensor], tokens: CountedTokens) -> dict[str, Term]:
    """Return the load and entropy metrics of the routers.

    ``busiest`` is the load of the busiest expert in units of an equal share (1 is balanced).
    ``idle`` is the share of the experts that received no token. ``dropped`` is the share of the
    choices that no expert received. ``entropy`` is that of P in nats, if P is known.

    Each is a mean over layers; with the suffix ``_worst`` it is that of the worst layer of a pack.
    """
    choices_P = load.choices_P1[:, 0]
    there_P = (choices_P > 0).float()
    shown = {
        "busiest": load.rows_LPE.shape[-1] * load.shares_LPE.amax(-1),
        "idle": (load.rows_LPE == 0).float().mean(-1) * there_P,
        "dropped": (choices_P - load.rows_LPE.sum(-1)) / choices_P.clamp(min=1.0),
    }
    worst = {name: values_LP.amax(0) for name, values_LP in shown.items()}
    if entropies:
        shown["entropy"] = tokens.means(torch.stack(entropies), tokens.counted)
        worst["entropy"] = shown["entropy"].amin(0)
    found = {name: values_LP.mean(0) for name, values_LP in shown.items()}
    found |= {f"{name}_worst": values_P for name, values_P in worst.items()}
    return {f"router/{name}": Term(values_P.sum(), 0.0, PER) for name, values_P in found.items()}


FILE = "router-anchor.safetensors"
"""File in the run's folder: the token ids, the document bounds and the reference logits by layer.
"""


@dataclass(frozen=True)
class Anchor:
    """The ``AdditionalTerm`` of the router anchor, which keeps routers close to where they began.

    Some tokens of the training data are run through the model again beside every forward pass. The
    loss gets the KL divergence between the router distributions at the start of the run (the
    reference) and those of the current model on these tokens. It is 0 at the start, because both
    come from the same weights and tokens. Only the current model gets a gradient. Dropout and
    router jitter are excluded: a model that draws random numbers in training runs these tokens in
    evaluation mode.

    Attributes:
        coefficient: weight of the KL in the loss.
        batch: the tokens that are run again, on the device.
        reference: router logits at the start of the run, fp32 ``[T, E]`` for each layer, on the
            device.
        draws: True if a forward pass of the model in training may draw random numbers.
        scores: function that turns router logits into expert weights, a key of
            ``router_losses.SCORES``.
    """

    coefficient: float
    batch: Batch
    reference: Sequence[Tensor]
    draws: bool = False
    scores: str = "softmax"
    lookahead = False

    def terms(self, model: PresentedModel, computed: Computed, batch: Batch) -> Terms:
        """Return the drift of the routers, one forward pass of the replayed tokens."""
        with in_evaluation(model.model) if self.draws else nullcontext():
            now = model.router_logits(self.batch)
        drifts = [
            losses.anchor_losses(logits, began, self.scores).mean()
            for logits, began in zip(now, self.reference)
        ]
        drift = torch.stack(drifts).mean()
        # Every pack with a token that counts has the same replay: the mean over a step's packs is
        # the drift.
        tokens = CountedTokens.of(batch, model.pack_width)
        packs = (tokens.counted > 0).view(-1, tokens.width).any(1).sum().float()
        return {"router/anchor": Term(drift * packs, self.coefficient, "packs")}

    @classmethod
    def of(cls, coefficient: float, model: PresentedModel, batch: Batch) -> Self:
        """Build an anchor with the current router logits of ``model`` as the reference.

        Call it while the model attends within documents.
        """
        with torch.no_grad(), in_evaluation(model.model):
            reference = [logits.float() for logits in model.router_logits(batch)]
        return cls(coefficient, batch, reference, draws_numbers(model.model))

    def write(self, folder: Path) -> None:
        """Write the tokens and the reference to ``folder``, in one piece or not at all."""
        tensors = {"input_ids": self.batch.input_ids, "cu_seqlens": self.batch.cu_seqlens}
        tensors["router_logits"] = torch.stack(list(self.reference))
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"{FILE}.aside"
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, aside)
        aside.replace(folder / FILE)

    @classmethod
    def read(
        cls, coefficient: float, model: PresentedModel, folder: Path, device: torch.device
    ) -> Self:
        """Read the anchor that this run wrote to ``folder`` when it started, to resume the run.

        Raises:
            ValueError: the file is missing or damaged.
        """
        try:
            found = load_file(folder / FILE)
            batch = replayed(found["input_ids"], found["cu_seqlens"]).to(device)
            reference = list(found["router_logits"].to(device).unbind())
        except (OSError, SafetensorError, KeyError) as error:
            raise ValueError(
                f"router.anchor={coefficient}: {folder / FILE} cannot be read ({error}), and says "
                "where the routers of this "
                "run began; restore it, or begin anew"
            ) from error
        return cls(coefficient, batch, reference, draws_numbers(model.model))


def replayed(input_ids: Tensor, cu_seqlens: Tensor) -> Batch:
    """Return separate documents as a Batch of one pack in which every token counts.

    Args:
        input_ids: int64 ``[T]``, the documents one after another.
        cu_seqlens: int32 ``[N + 1]``, the document bounds.
    """
    bounds = cu_seqlens.tolist()
    lengths = [b - a for a, b in zip(bounds, bounds[1:])]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(input_ids.device)
    targets = input_ids.roll(-1).index_fill(0, (cu_seqlens[1:] - 1).long().clamp(min=0), IGNORED)
    return Batch(input_ids, targets, positions, cu_seqlens, max(lengths))


def first_tokens(documents: Iterable[Tensor], most: int) -> Batch:
    """Return the first ``most`` tokens of ``documents`` as a Batch; the last document may be cut.

    Args:
        documents: int64 ``[n]`` each.
        most: largest number of tokens.

    Raises:
        ValueError: the documents hold no token.
    """
    parts = list[Tensor]()
    room = most
    for ids in documents:
        parts.append(ids[:room])
        room -= len(parts[-1])
        if not room:
            break
    if not any(map(len, parts)):
        raise ValueError("router.anchor: the training data has no token to replay")
    return replayed(torch.cat(parts), torch.tensor([0, *map(len, parts)]).cumsum(0).int())
