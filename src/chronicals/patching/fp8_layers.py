"""Products of fused decoder layers in FP8, where they are large enough for it to pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chronicals.kernels.fp8_linear import MULTIPLE
from chronicals.patching.decoder_layer import products_of_halves
from chronicals.patching.side_by_side import FP8, Unmerged, leave

LEAST = 2304
"""Harmonic mean of the inputs and outputs of the smallest product that runs in FP8. What the product saves goes with inputs
times outputs, what quantising takes with their sum: one of 2048 by 2048 saves 7 % of its time where it is trained."""


@dataclass(frozen=True)
class FP8Products:
    """What runs in FP8. A product is that of all layers with one input.

    Attributes:
        chosen, there: products that run in FP8, and those of all fused layers.
        left: why layers that should run fused do not.
    """

    chosen: int
    there: int
    left: tuple[str, ...]


def run_in_fp8(model: Any) -> FP8Products:
    """Let the products of fused layers that are large enough run in FP8, on a card that has it.

    Adapters, norms and the head stay as they are. Batches whose rows are no multiple of 16 run in 16 bit. ``forget_policies``
    and ``lay_apart`` undo it.
    """
    chosen, there, left = 0, 0, []
    for found in products_of_halves(model):
        if isinstance(found, Unmerged):
            left.append(str(found))
            continue
        there += len(found)
        for owner, names, group in found:
            if is_large(group.merged.width, group.merged.outputs):
                vars(owner).setdefault(FP8, {})[names] = None
                chosen += 1
    return FP8Products(chosen, there, tuple(dict.fromkeys(left)))


def offload_frozen_weights(model: Any) -> int:
    """Let the 16-bit weights of frozen products that run in FP8 wait in host memory, and keep only their rows in FP8; how many
    bytes. What fused layers give stays as it is; ``forget_policies`` and ``lay_apart`` undo it.
    """
    moved = 0
    for found in products_of_halves(model):
        for owner, names, group in found if not isinstance(found, Unmerged) else ():
            if group.fp8 is not None and group.fp8.frozen and not group.merged.apart:
                moved += group.merged.matrix.nbytes
                leave(owner, names, group.merged.matrix.device)
    return moved


def is_large(inputs: int, outputs: int) -> bool:
    """Whether FP8 pays for a product of such layers."""
    return 2 * inputs * outputs >= LEAST * (inputs + outputs) and not (inputs % MULTIPLE or outputs % MULTIPLE)


def layers_in_fp8(model: Any) -> list[str]:
    """Names of the linear layers whose products run in FP8, those inside adapters by the adapter's name."""
    chosen = {
        linear
        for found in products_of_halves(model)
        if not isinstance(found, Unmerged)
        for owner, names, group in found
        if names in vars(owner).get(FP8, {})
        for linear in group.linears
    }
    return [name.removesuffix(".base_layer") for name, module in model.named_modules() if module in chosen]
