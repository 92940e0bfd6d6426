"""The router anchor: a KL term that keeps routers close to where they were at the start of the run.

Some tokens of the training data are run through the model again beside every forward pass. The loss
gets the KL divergence between the router distributions at the start of the run (the reference) and
those of the current model on these tokens. It is 0 at the start, because both come from the same
weights and tokens. Only the current model gets a gradient. Dropout and router jitter are excluded:
a model that draws random numbers in training runs these tokens in evaluation mode.
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
from chronicals.moe.router_losses import Tokens

FILE = "router-anchor.safetensors"
"""File in the run's folder: the token ids, the document bounds and the reference logits by layer.
"""


@dataclass(frozen=True)
class Anchor:
    """An ``Addition`` to the loss: the router anchor.

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
        with in_evaluation(model.model) if self.draws else nullcontext():
            now = model.router_logits(self.batch)
        drifts = [
            losses.anchor_losses(logits, began, self.scores).mean()
            for logits, began in zip(now, self.reference)
        ]
        drift = losses.mean(drifts)
        packs = Tokens.of(
            batch, model.pack_width
        ).packs  # every pack has the same replay: the mean over a step's is the drift
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
        """Read the anchor that this run wrote to ``folder`` when it started, in order to resume the
        run.

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
