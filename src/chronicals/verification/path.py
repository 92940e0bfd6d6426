"""The path of training, one step at a time, with its gradients and fp32 weights held still to be looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.data.loader import Step
from chronicals.distributed import Ranks
from chronicals.kernels.master import join_master
from chronicals.memory import ActivationOffload
from chronicals.objectives import OBJECTIVES
from chronicals.patching import lay_apart
from chronicals.training.in_backward import UpdatesInBackward
from chronicals.training.precision import Precision
from chronicals.training.preparation import build_optimizer, prepare_model
from chronicals.training.step import EagerStep, counts_of, rate_factor, set_learning_rate, train_step


@dataclass(frozen=True)
class Made:
    """What one step of training computed.

    Attributes:
        loss: of the whole step.
        applied: False where a gradient was not finite and the update was left out.
        gradients: by the name of the weight, before clipping, in the type they came in but for fp16's loss scale.
    """

    loss: float
    applied: bool
    gradients: dict[str, Tensor]


class TrainingPath:
    """Prepared and stepped as ``ChronicalsTrainer`` does it, but for graphs: gradients are looked at between the two halves.

    Args:
        model: on its device; it is trained by the steps.
        config: of the run.
        total_steps: of the whole run.
    """

    def __init__(self, model: Any, config: ChronicalsConfig, total_steps: int, device: torch.device):
        self.model, self.config = model, config
        torch.manual_seed(config.seed)
        self.presented, decisions = prepare_model(model, config)
        self.precision = Precision(config.mixed_precision, device)
        several = config.gradient_accumulation_steps > 1 or decisions["tiled_mlp"].runs
        self.optimizer = build_optimizer(model, config, self.precision, several)
        self.trained = {name.replace(".base_layer.", "."): p for name, p in model.named_parameters() if p.requires_grad}
        self.decisions = decisions
        self.parts: EagerStep | UpdatesInBackward
        self.objective = OBJECTIVES[config.objective](config.logits_chunk_size)
        self.total_steps = total_steps
        torch.manual_seed(config.seed)
        model.train()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within: the model takes documents, and memory policies hold that would outlast a step; its weights lie apart
        afterwards."""
        with ExitStack() as around:
            around.callback(lay_apart, self.model)
            around.enter_context(self.presented.attending_documents())
            if self.decisions["activation_offload"].runs:
                around.enter_context(ActivationOffload(self.model.get_decoder()))
            given = self.presented, self.objective, list(self.trained.values()), self.optimizer, self.precision
            if self.decisions["optimizer_in_backward"].runs:
                self.parts = around.enter_context(UpdatesInBackward(*given))
            else:
                self.parts = EagerStep(*given, self.config.max_grad_norm)
            yield

    def rate_factor(self, number: int) -> float:
        """Of the schedule at step ``number``, from 0."""
        return rate_factor(self.config, number, self.total_steps)

    def step(self, step: Step, number: int) -> Made:
        """Train once, within ``stepping``."""
        set_learning_rate(self.optimizer, self.rate_factor(number))
        gradients: dict[str, Tensor] = {}

        def hold() -> None:
            scale = float(self.precision.scale)
            for name, parameter in self.trained.items():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad.clone() if scale == 1.0 else parameter.grad / scale

        self.parts.inspect = hold
        counts = counts_of(step, Ranks())
        scalars = train_step(step, counts, self.parts.micro, lambda _: None, self.parts.update)
        return Made(float(scalars["loss"]), bool(scalars["applied"]), gradients)

    @torch.no_grad()
    def weight(self, name: str) -> Tensor:
        """A copy of a trained weight in fp32: one in bf16 with the half that its master adds."""
        parameter = self.trained[name]
        low = self.optimizer.state.get(parameter, {}).get("low")
        return parameter.detach().float().clone() if low is None else join_master(parameter, low)
