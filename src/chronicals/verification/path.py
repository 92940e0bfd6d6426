"""The training path, run step by step, with access to gradients and fp32 weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.data.packs.steps import Step
from chronicals.kernels.adamw import join_master
from chronicals.objectives import build_objective
from chronicals.training.session import prepare_session
from chronicals.training.step import rate_factor, set_learning_rate
from chronicals.verification.modules import plain_name


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

    def rate_factor(self, number: int) -> float:
        """Return the learning-rate factor of the schedule at step ``number``, from 0."""
        return rate_factor(self.config, number, self.total_steps)

    def step(self, step: Step, number: int) -> Made:
        """Train one step; call it in the context of ``stepping``."""
        set_learning_rate(self.session.optimizer, self.rate_factor(number))
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
