"""Products of fused decoder layers in another format than that of their weights, as FP8 where it
pays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chronicals.kernels.fp8_linear import FP8_MULTIPLE
from chronicals.lora.merged_linear import Format
from chronicals.patching.decoder_layer import products_of_halves
from chronicals.patching.fused_weights import FORMATS, Unmerged, move_to_host, use_format
from chronicals.quantization import FP8, Dense, FP8InHost

LEAST = 2304
"""Harmonic mean of the inputs and outputs of the smallest product that runs in FP8. What the
product saves goes with inputs times outputs, what quantising takes with their sum: one of 2048
by 2048 saves 7 % of its time where it is trained."""


@dataclass(frozen=True)
class Products:
    """What runs in another format. A product is that of all layers with one input.

    Attributes:
        chosen, there: products that run in the format, and those of all fused layers.
        left: why layers that should run fused do not.
    """

    chosen: int
    there: int
    left: tuple[str, ...]


def run_in_format(
    model: Any, stands: Format, pays: Callable[[int, int], bool] = lambda inputs, outputs: True
) -> Products:
    """Let the products of fused layers run in a format of ``quantization/``, or of your own.

    Adapters, norms, the head and weights in 4 bits stay as they are. ``forget_policies`` and
    ``unfuse_weights`` undo it.

    Args:
        stands: makes the ``Base`` that multiplies in place of a dense weight, on a device.
        pays: whether a product with so many inputs and outputs is to run in it.
    """
    chosen = 0
    there = 0
    left = []
    for found in products_of_halves(model):
        if isinstance(found, Unmerged):
            left.append(str(found))
            continue
        there += len(found)
        for owner, names, group in found:
            if isinstance(group.merged.storage, Dense) and pays(
                group.merged.base.width, group.merged.base.outputs
            ):
                use_format(owner, names, stands)
                chosen += 1
    return Products(chosen, there, tuple(dict.fromkeys(left)))


def run_in_fp8(model: Any) -> Products:
    """Let the products of fused layers that are large enough run in FP8, on a card that has it;
    batches whose rows are no multiple of 16 run in 16 bit."""
    return run_in_format(model, FP8, is_large)


def offload_frozen_weights(model: Any) -> int:
    """Let the 16-bit weights of frozen products that run in FP8 wait in host memory, and keep only
    their rows in FP8; how many bytes. What fused layers give stays as it is; ``forget_policies``
    and ``unfuse_weights`` undo it.
    """
    moved = 0
    for found in products_of_halves(model):
        for owner, names, group in found if not isinstance(found, Unmerged) else ():
            base = group.merged.base
            if isinstance(base, FP8) and not isinstance(base, FP8InHost) and not base.trained:
                moved += base.weight.bytes
                move_to_host(owner, names, base.device)
    return moved


def is_large(inputs: int, outputs: int) -> bool:
    """Whether FP8 pays for a product of such layers."""
    return 2 * inputs * outputs >= LEAST * (inputs + outputs) and not (
        inputs % FP8_MULTIPLE or outputs % FP8_MULTIPLE
    )


def layers_in_fp8(model: Any) -> list[str]:
    """Names of the linear layers whose products run in FP8, those inside adapters by the
    adapter's name.
    """
    chosen = {
        linear
        for found in products_of_halves(model)
        if not isinstance(found, Unmerged)
        for owner, names, group in found
        if vars(owner).get(FORMATS, {}).get(names) in (FP8, FP8InHost)
        for linear in group.linears
    }
    return [
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if module in chosen
    ]
