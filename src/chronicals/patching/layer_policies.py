"""The ways in which a run may have a patched model compute, and their undoing.

Products of fused decoder layers in another format than that of their weights, such as FP8 where
that saves time; the weights of such products in host memory; gated MLPs that process their rows in
tiles, so that activations wider than the model exist for one tile of a long pack at a time; layers
in tiles as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from chronicals.kernels.fp8_linear import FP8_MULTIPLE
from chronicals.lora.merged_linear import ProductFormat
from chronicals.memory import draws_numbers, tiled
from chronicals.patching.decoder_layer import FUSED_LAYER, fused_layers, products_of_halves
from chronicals.patching.forms import FORM, Forward, signature
from chronicals.patching.fused_weights import (
    PRODUCT_FORMATS,
    Unmerged,
    move_to_host,
    use_16_bit,
    use_format,
)
from chronicals.patching.halves import RECOMPUTES, TILES
from chronicals.patching.plan import GATED_MLP, plan_for
from chronicals.patching.tiled_layer import TILES_LAYER
from chronicals.quantization import FP8Base, FP8InHost

MIN_FP8_WIDTH = 2304
"""Smallest harmonic mean of inputs and outputs of a product that runs in FP8.

The product saves time in proportion to inputs times outputs, quantising takes time in proportion
to their sum: a trained product of 2048 by 2048 saves 7 % of its time.
"""


TILED_MLP = "tiled_mlp"
"""Name of the form of gated MLPs in tiles."""


@dataclass(frozen=True)
class FormattedProducts:
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
    product_format: ProductFormat,
    pays: Callable[[int, int], bool] = lambda inputs, outputs: True,
) -> FormattedProducts:
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
    return FormattedProducts(chosen, total, tuple(dict.fromkeys(left)))


def run_in_fp8(model: Any) -> FormattedProducts:
    """Let the products of fused layers that are large enough run in FP8, on a card that has it.

    A batch whose number of rows is no multiple of 16 runs in 16 bit.
    """
    return run_in_format(model, FP8Base, is_large)


def offload_frozen_weights(model: Any) -> int:
    """Move the 16-bit weights of frozen products that run in FP8 to host memory.

    Only their rows in FP8 are kept. Outputs of fused layers do not change. ``forget_policies`` and
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
    """Return the names of the linear layers whose products run in FP8.

    A layer inside an adapter has the adapter's name.
    """
    chosen = set()
    for products in products_of_halves(model):
        if isinstance(products, Unmerged):
            continue
        for owner, names, group in products:
            if vars(owner).get(PRODUCT_FORMATS, {}).get(names) in (FP8Base, FP8InHost):
                chosen.update(group.linears)
    return [
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if module in chosen
    ]


def tile_mlps(model: Any) -> int:
    """Let the gated MLPs of ``model`` process their rows in tiles, in fused layers, too.

    Patch the model before; kernels stay. A second call changes nothing. ``unpatch_model`` undoes
    it.

    Returns:
        The number of gated MLPs.
    """
    mlps = _gated_mlps(model)
    for module in mlps:
        run = getattr(vars(module).get("forward"), "__func__", type(module).forward)
        if getattr(run, FORM, None) != TILED_MLP:
            by_tiles = partial(_run_in_tiles, run)
            setattr(by_tiles, FORM, TILED_MLP)
            module.forward = MethodType(by_tiles, module)
    for layer in model.modules():
        if getattr(layer, "mlp", None) in mlps:
            setattr(layer, TILES, True)
    return len(mlps)


def untile_mlps(model: Any) -> None:
    """Undo ``tile_mlps``; kernels stay."""
    for module in model.modules():
        by_tiles: Any = getattr(vars(module).get("forward"), "__func__", None)
        if getattr(by_tiles, FORM, None) == TILED_MLP:
            run = by_tiles.args[0]
            del module.forward
            if run is not type(module).forward:
                module.forward = MethodType(run, module)
        vars(module).pop(TILES, None)


def tile_layers(model: Any) -> int:
    """Let the fused decoder layers of ``model`` run in tiles as a whole, each recomputed by itself.

    Patch the model before; their recomputation by transformers is switched off. ``untile_layers``
    undoes it.

    Returns:
        The number of layers.
    """
    count = 0
    for layer, anatomy in fused_layers(model):
        if anatomy.by == FUSED_LAYER:
            setattr(layer, TILES_LAYER, True)
            count += 1
            for module in layer.modules():
                if hasattr(module, "gradient_checkpointing"):
                    module.gradient_checkpointing = False  # type: ignore[assignment]
    return count


def untile_layers(model: Any) -> None:
    """Undo ``tile_layers``; layers keep their activations then."""
    for module in model.modules():
        vars(module).pop(TILES_LAYER, None)


def forget_policies(model: Any) -> None:
    """Undo the memory policies and FP8 of an earlier run."""
    untile_layers(model)
    untile_mlps(model)
    use_16_bit(model)
    for module in model.modules():
        vars(module).pop(RECOMPUTES, None)


def has_gated_mlps(model: Any) -> bool:
    """Return whether the model has gated MLPs that can be tiled."""
    return bool(_gated_mlps(model))


def _gated_mlps(model: Any) -> list[nn.Module]:
    """Return the gated MLPs that run by their class's forward or one of ours.

    Those with the forward of hooks, offload or a quantiser are left out.
    """
    forms = plan_for(model).forms
    mlps = []
    for module in model.modules():
        replaced = vars(module).get("forward")
        is_ours = replaced is None or hasattr(getattr(replaced, "__func__", None), FORM)
        if is_ours and forms.get(signature(module), ("",))[0] == GATED_MLP:
            mlps.append(module)
    return mlps


def _run_in_tiles(run: Forward, module: nn.Module, x: Tensor) -> Tensor:
    out = tiled(partial(run, module), x.flatten(0, -2), module.training and draws_numbers(module))
    return out.unflatten(0, x.shape[:-1])
