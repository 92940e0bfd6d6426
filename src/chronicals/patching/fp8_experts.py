"""The products of experts in FP8, where their grouped products run in place of the class's
forward and FP8 pays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels.fp8_linear import FP8_MULTIPLE
from chronicals.patching.forms import holds_experts
from chronicals.quantization import Experts4bit, FP8Experts, FP8ExpertsInHost
from chronicals.quantization.experts import TAKES_STACKS

IN_FP8 = "_chronicals_experts_in_fp8"
"""Attribute of a module of experts: what multiplies in place of its weights, by their names."""

PRODUCTS = ("gate_up_proj", "down_proj")

NARROWEST = 512
"""Harmonic mean of model width and inner width below which FP8 does not pay. Computed: of a
token's k experts the products of 16 bit take 12 D F FLOP each at 650 TFLOP/s, in FP8 0.6 of it;
quantising x and dy takes 6 D bytes, dh 2 F, at 3 TB/s. That is even near 250. Measured on an
H100 is 1117 (2048 and 768), where a frozen layer takes 0.83 of its time in bf16."""

FEWEST = 2048
"""Rows of an expert, in the mean, below which trained weights stay in 16 bit: quantising a
weight takes 8 bytes of traffic in a forward and backward pass, its products save 4 FLOP a row.
On an H100 a layer of trained experts takes 1.13 times its time in bf16 with 1024 rows, 1.01 and
0.97 with 2048, 0.87 with 8192."""


@dataclass(frozen=True)
class Chosen:
    """What runs in FP8 of the experts of a model.

    Attributes:
        layers: how many have their experts' products in FP8.
        left: why others stay in 16 bit, each class and reason once.
    """

    layers: int
    left: tuple[str, ...]


def run_experts_in_fp8(model: nn.Module, pairs: int | None = None) -> Chosen:
    """Let the products of experts that run as grouped products be in FP8: forward, and of the
    gradients that of the input.

    Gradients of weights, biases and adapters stay in 16 bit. ``forget_policies`` and
    ``unfuse_weights`` undo it.

    Args:
        pairs: of token and expert in a forward pass; trained weights of experts with few of them
            stay in 16 bit.
    """
    layers = 0
    left = []
    for module in model.modules():
        if not isinstance(module, Experts4bit) and not holds_experts(module):
            continue
        if (reason := _why_not(module, pairs)) is not None:
            left.append(f"{type(getattr(module, 'inner', module)).__name__} ({reason})")
            continue
        weights = {name: module.get_parameter(name) for name in PRODUCTS}
        transposed = bool(module.is_transposed)
        vars(module)[IN_FP8] = {
            name: FP8Experts(weight, transposed, weight.device) for name, weight in weights.items()
        }
        layers += 1
    return Chosen(layers, tuple(dict.fromkeys(left)))


def _why_not(module: Any, pairs: int | None) -> str | None:
    if isinstance(module, Experts4bit):
        return "they are in 4 bits"
    if not hasattr(getattr(vars(module).get("forward"), "__func__", None), TAKES_STACKS):
        return "their class computes them"
    weight = module.down_proj
    if type(weight.data) is not Tensor or not weight.is_floating_point() or weight.itemsize < 2:
        return (
            f"their weights are {type(weight.data).__name__} in "
            f"{str(weight.dtype).removeprefix('torch.')}"
        )
    count, width, inner = weight.shape
    if width % FP8_MULTIPLE or inner % FP8_MULTIPLE:
        return f"one of their widths {width} and {inner} is no multiple of {FP8_MULTIPLE}"
    if 2 * width * inner < NARROWEST * (width + inner):
        return f"their widths {width} and {inner} have a harmonic mean below {NARROWEST}"
    trained = any(getattr(module, name).requires_grad for name in PRODUCTS)
    if trained and pairs is not None and pairs < FEWEST * count:
        return (
            f"{pairs // count} rows an expert; quantising trained weights at each use pays "
            f"from {FEWEST}"
        )
    return None


def format_of(module: Any, name: str) -> FP8Experts | None:
    """What multiplies in place of a weight of the module, if something does: made anew where the
    parameter was replaced.
    """
    formats: dict[str, FP8Experts] = vars(module).get(IN_FP8, {})
    if name in formats and formats[name].weight is not getattr(module, name):
        formats[name] = type(formats[name])(
            getattr(module, name), formats[name].transposed, formats[name].device
        )
    return formats.get(name)


def experts_in_fp8(model: nn.Module) -> list[str]:
    """Paths of the modules whose experts' products run in FP8."""
    return [path for path, module in model.named_modules() if IN_FP8 in vars(module)]


def offload_frozen_experts(model: nn.Module) -> int:
    """Let the 16-bit weights of frozen experts whose products run in FP8 wait in host memory,
    and keep only their rows in FP8; how many bytes. ``experts_in_16_bit`` brings them back."""
    moved = 0
    for module in model.modules():
        formats: dict[str, FP8Experts] = vars(module).get(IN_FP8, {})
        for name, stands in list(formats.items()):
            weight = stands.weight
            if not isinstance(stands, FP8ExpertsInHost) and not weight.requires_grad:
                moved += weight.nbytes
                formats[name] = FP8ExpertsInHost(weight, stands.transposed, stands.device)
                formats[name].rows()  # while the 16 bits are there
                weight.data = weight.data.to("cpu", copy=True)
    return moved


def device_of_waiting(module: Any) -> torch.device | None:
    """Where the products of a module run whose weights wait in host memory; None where none do."""
    formats: dict[str, FP8Experts] = vars(module).get(IN_FP8, {})
    return next(
        (stands.device for stands in formats.values() if isinstance(stands, FP8ExpertsInHost)), None
    )


@torch.no_grad()
def experts_in_16_bit(model: nn.Module) -> None:
    """Let experts multiply by their own weights again; those in host memory come back to where
    they were.
    """
    for module in model.modules():
        formats: dict[str, FP8Experts] = vars(module).pop(IN_FP8, {})
        waiting = [
            (stands.weight, stands.device)
            for stands in formats.values()
            if isinstance(stands, FP8ExpertsInHost)
        ]
        formats.clear()  # which frees what the weights need room for
        for weight, device in waiting:
            weight.data = weight.data.to(device, copy=True)
