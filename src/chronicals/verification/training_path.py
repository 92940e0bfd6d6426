"""The training path of a run that is verified: its session, step by step, with its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, TokenStore
from chronicals.data.making.store import LABEL_COLUMN, SIDE_COLUMN
from chronicals.data.packs.steps import Step
from chronicals.kernels.adamw import join_master
from chronicals.objectives import build_objective
from chronicals.training.session import prepare_session
from chronicals.training.step.training_step import rate_factor, set_learning_rate
from chronicals.verification.comparison import plain_name
from chronicals.verification.reference import Item, MaskedDocument


@dataclass(frozen=True)
class Made:
    """Results of one training step.

    Attributes:
        loss: loss of the whole step.
        applied: False if a gradient was not finite and the update was skipped.
        gradients: by name of the weight, before clipping, in their own dtype, with fp16's loss
            scale divided out.
    """

    loss: float
    applied: bool
    gradients: dict[str, Tensor]


class TrainingPath:
    """The session of training, without CUDA graphs, because gradients are copied before the update.

    Args:
        model: the model on its device; steps train it.
        config: configuration of the run.
        total_steps: number of steps of the whole run.
        tokenizer: the model's tokenizer.
    """

    def __init__(
        self, model: Any, config: ChronicalsConfig, total_steps: int, tokenizer: Any = None
    ):
        self.model = model
        self.config = config
        self.total_steps = total_steps
        self.session = prepare_session(model, config, build_objective(config), tokenizer=tokenizer)
        self.trained = {
            plain_name(name): p for name, p in model.named_parameters() if p.requires_grad
        }
        self.stepping = self.session.stepping
        model.train()

    def step(self, step: Step, number: int) -> Made:
        """Train one step; call it in the context of ``stepping``."""
        factor = rate_factor(self.config, number, self.total_steps)
        set_learning_rate(self.session.optimizer, factor)
        gradients: dict[str, Tensor] = {}

        def hold() -> None:
            scale = float(self.session.precision.scale)
            for name, parameter in self.trained.items():
                if parameter.grad is not None:
                    gradients[name] = (
                        parameter.grad.clone() if scale == 1.0 else parameter.grad / scale
                    )

        scalars = self.session.train_once(step, hold)
        return Made(float(scalars["loss"]), bool(scalars["applied"]), gradients)

    @torch.no_grad()
    def weight(self, name: str) -> Tensor:
        """Return a copy of a trained weight in fp32.

        A bf16 weight is joined with the low half that its master keeps.
        """
        parameter = self.trained[name]
        optimizer = self.session.optimizer
        low = optimizer.state_of(parameter).get("low") if parameter in optimizer.state else None
        return (
            parameter.detach().float().clone()
            if low is None
            else join_master(parameter, low.to(parameter.device))
        )


def step_items(store: TokenStore, stream: BatchStream, position: int) -> list[list[Item]]:
    """Return the items of each pack of the step that begins at ``position``, read from the store.

    Each document is returned separately.
    """
    sides, labels = (store.columns.get(name) for name in (SIDE_COLUMN, LABEL_COLUMN))
    packs = []
    for pack in stream.packs_of(position):
        items: list[Item] = []
        for number in pack:
            ids, trained = store.whole_document(number)
            side = 0 if sides is None else int(sides[number])
            label = -1 if labels is None else int(labels[number])
            if side == 0:
                items.append([])
            if trained.any():  # a shared prompt is in front of its answers
                items[-1].append(MaskedDocument(ids, trained, side, label))
        if items:
            packs.append(items)
    return packs
