"""Run the products of experts in FP8 where that saves time.

Their grouped products must replace the class's forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from chronicals.kernels.fp8_linear import FP8_MULTIPLE
from chronicals.patching.forms import holds_experts
from chronicals.quantization import FP8Experts, class_module, packed_shapes
from chronicals.quantization.experts import TAKES_STACKS

IN_FP8 = "_chronicals_experts_in_fp8"
"""Attribute of a module of experts: the FP8 weights that multiply in place of its own, by name."""

_PRODUCTS = ("gate_up_proj", "down_proj")

MIN_MEAN_WIDTH = 512
"""Smallest harmonic mean of model width D and inner width F with which FP8 saves time.

Computed: for each of a token's k experts the products in 16 bit take 12 D F FLOP at 650 TFLOP/s, in
FP8 0.6 of that time; quantising x and dy takes 6 D bytes, dh 2 F, at 3 TB/s. They balance near 250.
Measured on an H100: at 1117 (2048 and 768) a frozen layer takes 0.83 of its time in bf16.
"""

MIN_EXPERT_ROWS = 2048
"""Smallest mean number of rows of an expert with which trained weights run in FP8.

Quantising a weight takes 8 bytes of traffic in a forward and backward pass, its products save 4
FLOP a row. On an H100 a layer of trained experts takes 1.13 times its time in bf16 with 1024 rows,
1.01 and 0.97 with 2048, 0.87 with 8192.
"""


@dataclass(frozen=True)
class ExpertsInFP8:
    """The experts of a model that run in FP8.

    Attributes:
        layers: number of layers whose experts' products run in FP8.
        left: classes that stay in 16 bit, with the reason; each once.
    """

    layers: int
    left: tuple[str, ...]


def run_experts_in_fp8(model: nn.Module, pairs: int | None = None) -> ExpertsInFP8:
    """Let grouped products of experts run in FP8: forward, and the gradient of the input.

    Gradients of weights, biases and adapters stay in 16 bit. ``forget_policies`` and
    ``unfuse_weights`` undo it.

    Args:
        model: a patched model.
        pairs: number of pairs of token and expert in a forward pass; trained weights stay in 16 bit
            if an expert has few.
    """
    layers = 0
    left = []
    for module in model.modules():
        if not packed_shapes(module) and not holds_experts(module):
            continue
        reason = _why_not(module, pairs)
        if reason is not None:
            left.append(f"{type(class_module(module)).__name__} ({reason})")
            continue
        weights = {name: module.get_parameter(name) for name in _PRODUCTS}
        transposed = bool(module.is_transposed)
        vars(module)[IN_FP8] = {
            name: FP8Experts(weight, transposed, weight.device) for name, weight in weights.items()
        }
        layers += 1
    return ExpertsInFP8(layers, tuple(dict.fromkeys(left)))


def _why_not(module: Any, pairs: int | None) -> str | None:
    """Return why the experts of a module stay in 16 bit; None if they run in FP8."""
    if packed_shapes(module):
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
    if 2 * width * inner < MIN_MEAN_WIDTH * (width + inner):
        return f"their widths {width} and {inner} have a harmonic mean below {MIN_MEAN_WIDTH}"
    trained = any(getattr(module, name).requires_grad for name in _PRODUCTS)
    if trained and pairs is not None and pairs < MIN_EXPERT_ROWS * count:
        return (
            f"{pairs // count} rows an expert; quantising trained weights at each use pays "
            f"from {MIN_EXPERT_ROWS}"
        )
    return None


def experts_in_fp8(model: nn.Module) -> list[str]:
    """Return the paths of the modules whose experts' products run in FP8."""
    return [path for path, module in model.named_modules() if IN_FP8 in vars(module)]


def offload_frozen_experts(model: nn.Module) -> int:
    """Move the 16-bit weights of frozen experts whose products run in FP8 to host memory.

    Only their rows in FP8 are kept. ``use_16_bit`` undoes it.

    Returns:
        The number of bytes that were moved.
    """
    moved = 0
    for module in model.modules():
        formats: dict[str, FP8Experts] = vars(module).get(IN_FP8, {})
        for name, experts in list(formats.items()):
            formats[name] = experts.to_host()
            if formats[name] is not experts:
                moved += experts.weight.nbytes
    return moved
