"""The arms that a run is compared with, each a model of its own that starts as the run's does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from chronicals.config import ChronicalsConfig
from chronicals.models import has_4bit_layers
from chronicals.models.router_loss import SWITCH
from chronicals.objectives import Objective
from chronicals.patching import experts_in_fp8, layers_in_fp8
from chronicals.quantization.bitsandbytes import has_foreign_layers
from chronicals.verification.bitsandbytes_arm import (
    ARM,
    BitsAndBytesArm,
    BitsAndBytesNotRun,
)
from chronicals.verification.quantised import rounded_experts, rounded_layer
from chronicals.verification.reference import (
    PlainArm,
    take_types,
)
from chronicals.verification.training_path import TrainingPath


@dataclass(frozen=True)
class Arms:
    """The arms that the training path is compared with.

    Attributes:
        config: configuration of the run.
        others: the bitsandbytes arm, for a base in 4 bits.
    """

    config: ChronicalsConfig
    fp32: PlainArm
    plain: PlainArm
    others: BitsAndBytesArm | None

    @classmethod
    def of(
        cls,
        model: Any,
        device: torch.device,
        config: ChronicalsConfig,
        objective: Objective,
        notes: list[str],
    ) -> Arms:
        """Create the arms from the model, before the run changes it; add messages to ``notes``."""
        exact = config.mixed_precision == "fp32"
        fp32 = PlainArm(model, device, config, objective)
        plain = PlainArm(model, device, config, objective, alone=exact, usual_attention=not exact)
        own = dict(model.named_buffers())
        for name, right in fp32.model.named_buffers():
            value = own.get(name)
            if value is None or not right.is_floating_point() or value.shape != right.shape:
                continue
            off = float((value.to(right) - right).abs().max() / right.abs().max().clamp(min=1e-30))
            if off > 1e-6:
                # model.bfloat16() also casts rotary frequencies, which then rotate every position
                # by a wrong angle.
                notes.append(
                    f"{name} is off by {off:.1e} from what the configuration gives, which the "
                    "plain arms have: load the model in its type (dtype=…) instead of casting it"
                )
        others = None
        if has_4bit_layers(model) or has_foreign_layers(model):
            try:
                others = BitsAndBytesArm(model, fp32, config)
                notes += others.notes
            except BitsAndBytesNotRun as reason:
                notes.append(f"{ARM} is not run: {reason}")
        start = objective.frozen_start()
        if start is not None:
            for arm in (fp32, plain):
                arm.take_frozen({start: model}, own_types=arm is plain)
        return cls(config, fp32, plain, others)

    def follow(self, path: TrainingPath, further: Mapping[str, Any], notes: list[str]) -> None:
        """Take over what the run made of its model.

        These are dtypes, initial values, frozen models and router losses.

        Args:
            path: of the run.
            notes: gets messages.
            further: more frozen models, by name, that only the objective's definition needs.
        """
        model = path.model
        session = path.session
        if self.fp32.router_loss and session.presented.router_loss is None:
            for arm in filter(None, (self.fp32, self.plain, self.others)):
                arm.router_loss = 0.0
            told = f"{type(model).__name__} adds none, or one that the run leaves out"
            notes.append(f"the router loss ({SWITCH}=True) is in no arm: {told}")
        # Adapters that started with a part of the weight leave a base that lacks it.
        for path_of_layer, layer in model.named_modules():
            if getattr(layer, "lora_start_A", None) is None:
                continue
            for arm in (self.fp32, self.plain):
                own = arm.model.get_submodule(path_of_layer)
                is_parametrised = hasattr(own, "parametrizations")
                name = "parametrizations.weight.original" if is_parametrised else "weight"
                own.get_parameter(name).data.copy_(layer.base_layer.weight)
        frozen = {name: presented.model for name, presented in session.objective.frozen.items()}
        frozen |= {name: other.to(self.fp32.device) for name, other in further.items()}
        for arm in (self.fp32, self.plain):
            arm.take_frozen(frozen, own_types=arm is self.plain)
        take_types(self.plain.model, model)
        for parameter in self.plain.model.parameters():
            if parameter.requires_grad:  # gradients of several passes are accumulated in fp32
                parameter.grad_dtype = torch.float32
        self.plain.autocast = torch.float16 if self.config.mixed_precision == "fp16" else None
        if self.config.use_fp8:
            for name in layers_in_fp8(model):
                layer = self.plain.model.get_submodule(name)
                layer.forward = partial(rounded_layer, layer)
            for name in experts_in_fp8(model):
                layer = self.plain.model.get_submodule(name.replace(".base_layer", ""))
                layer.forward = partial(rounded_experts, layer)
