"""Run products of fused decoder layers in another format than that of their weights, such as FP8
where that saves time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chronicals.kernels.fp8_linear import FP8_MULTIPLE
from chronicals.lora.merged_linear import Format
from chronicals.patching.decoder_layer import products_of_halves
from chronicals.patching.fused_weights import FORMATS, Unmerged, move_to_host, use_format
from chronicals.quantization import FP8, FP8InHost

MIN_FP8_WIDTH = 2304
"""Smallest harmonic mean of inputs and outputs of a product that runs in FP8. The product saves
time in proportion to inputs times outputs, quantising takes time in proportion to their sum: a
trained product of 2048 by 2048 saves 7 % of its time.
"""


@dataclass(frozen=True)
class Products:
    """The products that run in another format, each of all linear layers with one input.

    Attributes:
        chosen: number of products that run in the format.
        total: number of products of all fused layers.
        left: reasons why layers that should run fused do not.
    """

    chosen: int
    total: int
    left: tuple[str, ...]


def run_in_format(
    model: Any,
    product_format: Format,
    pays: Callable[[int, int], bool] = lambda inputs, outputs: True,
) -> Products:
    """Let the products of fused layers run in a format of ``quantization/``, or of your own.

    Adapters, norms, the head and weights in 4 bits stay as they are. ``forget_policies`` and
    ``unfuse_weights`` undo it.

    Args:
        model: a patched model.
        product_format: makes the ``Base`` that multiplies in place of a dense weight, on a device.
        pays: tells from inputs and outputs whether a product is to run in the format.
    """
    chosen = 0
    total = 0
    left = []
    for products in products_of_halves(model):
        if isinstance(products, Unmerged):
            left.append(str(products))
            continue
        total += len(products)
        for owner, names, group in products:
            base = group.merged.base
            if group.merged.storage.plain_weight is not None and pays(base.width, base.outputs):
                use_format(owner, names, product_format)
                chosen += 1
    return Products(chosen, total, tuple(dict.fromkeys(left)))


def run_in_fp8(model: Any) -> Products:
    """Let the products of fused layers that are large enough run in FP8, on a card that has it.

    A batch whose number of rows is no multiple of 16 runs in 16 bit.
    """
    return run_in_format(model, FP8, is_large)


def offload_frozen_weights(model: Any) -> int:
    """Move the 16-bit weights of frozen products that run in FP8 to host memory, and keep only
    their rows in FP8. Outputs of fused layers do not change. ``forget_policies`` and
    ``unfuse_weights`` undo it.

    Returns:
        The number of bytes that were moved.
    """
    moved = 0
    for products in products_of_halves(model):
        if isinstance(products, Unmerged):
            continue
        for owner, names, group in products:
            size = group.merged.base.bytes_for_host
            if size:
                moved += size
                move_to_host(owner, names, group.merged.padding.up.device)
    return moved


def is_large(inputs: int, outputs: int) -> bool:
    """Return whether FP8 saves time for a product with so many inputs and outputs."""
    return 2 * inputs * outputs >= MIN_FP8_WIDTH * (inputs + outputs) and not (
        inputs % FP8_MULTIPLE or outputs % FP8_MULTIPLE
    )


def layers_in_fp8(model: Any) -> list[str]:
    """Return the names of the linear layers whose products run in FP8; a layer inside an adapter
    has the adapter's name.
    """
    chosen = set()
    for products in products_of_halves(model):
        if isinstance(products, Unmerged):
            continue
        for owner, names, group in products:
            if vars(owner).get(FORMATS, {}).get(names) in (FP8, FP8InHost):
                chosen.update(group.linears)
    return [
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if module in chosen
    ]
