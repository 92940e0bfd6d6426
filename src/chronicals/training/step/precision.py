"""Precision of a run: dtypes of weights and products, and the loss scale of fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from chronicals.models import kept_in_fp32
from chronicals.models.peft_kinds import IN_TYPES_OF_THEIR_OWN, kinds
from chronicals.optimizers import FusedAdamW
from chronicals.quantization import packed_modules

START_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


class Precision:
    """Mixed precision by name.

    ``bf16``: bf16 weights with an exact fp32 master. ``fp16``: fp16 products over fp32 weights,
    with loss scaling (Micikevicius et al., 2018, section 3.2). ``fp32``: all in fp32.

    The loss scale and its counter are tensors on the device. An overflow halves the scale, and
    ``GROWTH_INTERVAL`` finite steps double it, without waiting on the host.
    """

    def __init__(self, mode: str, device: torch.device):
        self.mode = mode
        self.device = device
        self.scale = torch.tensor(START_SCALE if mode == "fp16" else 1.0, device=device)
        self.good_steps = torch.zeros((), device=device)

    def prepare(self, model: Any, optimizer: FusedAdamW) -> None:
        """Cast the weights to their dtype, in place.

        Trained fp32 values are kept exactly by bf16's master. Weights that transformers keeps in
        fp32 for this class, such as routers, stay in fp32.
        """
        frozen = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.mode]
        adapted = hasattr(model, "chronicals_lora")
        patterns = kept_in_fp32(model, frozen)
        # Adapters of some types of PEFT compute with fp32 parameters over a base of any dtype.
        adapters = kinds(model)
        of_peft = bool(adapters) and all(kind in IN_TYPES_OF_THEIR_OWN for kind in adapters)
        for _, module in packed_modules(model):
            module.dtype = frozen
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            value = parameter.data
            stays = value.dtype == torch.float32 and any(pattern in name for pattern in patterns)
            if not parameter.requires_grad:
                parameter.data = value if stays else value.to(frozen)
            elif (
                self.mode == "bf16"
                and not stays
                and not of_peft
                and not (adapted and ".lora_" in name)
            ):
                parameter.data = value.to(torch.bfloat16)
                optimizer.set_master(parameter, value.float())
            else:
                parameter.data = value.float()

    def autocast(self) -> AbstractContextManager:
        """Return a context in which products are in fp16, if the run is."""
        if self.mode == "fp16":
            return torch.autocast(self.device.type, dtype=torch.float16)
        return nullcontext()

    def update(self, finite: Tensor) -> None:
        """Halve or raise the loss scale, depending on whether the step was finite."""
        if self.mode == "fp16":
            good_steps = torch.where(finite, self.good_steps + 1, 0.0)
            grown = good_steps >= GROWTH_INTERVAL
            self.scale.copy_(
                torch.where(finite, torch.where(grown, self.scale * 2, self.scale), self.scale / 2)
            )
            self.good_steps.copy_(torch.where(grown, 0.0, good_steps))

    def state(self) -> dict[str, float]:
        """Return the loss scale and its counter, for a checkpoint."""
        return {"scale": float(self.scale), "good_steps": float(self.good_steps)}

    def load_state(self, state: dict[str, float]) -> None:
        """Set the loss scale and its counter to those of a checkpoint."""
        self.scale.fill_(state["scale"])
        self.good_steps.fill_(state["good_steps"])
