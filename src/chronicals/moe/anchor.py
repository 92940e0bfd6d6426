"""The router anchor: routers are held to where they began, on the same tokens.

Some tokens of the training data are replayed beside every forward pass, and the KL of the routers'
distributions on them from those that they had as the run began is a term of the loss. Where the run
began it is 0, for both are the same function of the same tokens; it has a gradient in the model of
today, none in the reference. Neither has dropout or a router's jitter in it: a model whose forward
pass draws random numbers in training is replayed in evaluation mode.
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
"""Of a run's folder: ids and bounds of the tokens, and the reference's logits of each layer."""


@dataclass(frozen=True)
class Anchor:
    """An ``Addition``.

    Attributes:
        coefficient: of the KL in the loss.
        batch: what is replayed, on the device.
        reference: ``[T, E]`` fp32 of each layer, on the device.
        draws: whether a forward pass of the model in training may draw random numbers.
        scores: by what of the logits experts are weighed.
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
        """With the model of now as the reference; to be called where it attends to documents."""
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
        """What a run of this model that goes on wrote when it began.

        Raises:
            ValueError: it is not there, or not whole.
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
    """Documents by themselves, all of whose tokens count, as a Batch of one pack."""
    bounds = cu_seqlens.tolist()
    lengths = [b - a for a, b in zip(bounds, bounds[1:])]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(input_ids.device)
    targets = input_ids.roll(-1).index_fill(0, (cu_seqlens[1:] - 1).long().clamp(min=0), IGNORED)
    return Batch(input_ids, targets, positions, cu_seqlens, max(lengths))


def first_tokens(documents: Iterable[Tensor], most: int) -> Batch:
    """The first ``most`` tokens of documents, int64 ``[n]`` each; the last one is cut where they
    end.

    Raises:
        ValueError: there are none.
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
