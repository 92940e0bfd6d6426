"""Gated MLPs that process their rows in tiles, so that activations wider than the model exist for
one tile of a long pack at a time.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from chronicals.memory import draws_numbers, tiled
from chronicals.patching.forms import FORM, Forward, signature
from chronicals.patching.fused_weights import use_16_bit
from chronicals.patching.halves import RECOMPUTES, TILES
from chronicals.patching.plan import plan_for

BY = "tiled_mlp"
ROLE = "gated MLP"
"""Role of the modules in a plan."""


def tile_mlps(model: Any) -> int:
    """Let the gated MLPs of ``model`` process their rows in tiles, in fused layers, too. A second
    call changes nothing.

    Patch the model before; kernels stay. ``unpatch_model`` undoes it.

    Returns:
        The number of gated MLPs.
    """
    mlps = _gated_mlps(model)
    for module in mlps:
        run = getattr(vars(module).get("forward"), "__func__", type(module).forward)
        if getattr(run, FORM, None) != BY:
            by_tiles = partial(_forward, run)
            setattr(by_tiles, FORM, BY)
            module.forward = MethodType(by_tiles, module)
    for layer in model.modules():
        if getattr(layer, "mlp", None) in mlps:
            setattr(layer, TILES, True)
    return len(mlps)


def untile_mlps(model: Any) -> None:
    """Undo ``tile_mlps``; kernels stay."""
    for module in model.modules():
        by_tiles: Any = getattr(vars(module).get("forward"), "__func__", None)
        if getattr(by_tiles, FORM, None) == BY:
            run = by_tiles.args[0]
            del module.forward
            if run is not type(module).forward:
                module.forward = MethodType(run, module)
        vars(module).pop(TILES, None)


def forget_policies(model: Any) -> None:
    """Undo the memory policies and FP8 of an earlier run."""
    untile_mlps(model)
    use_16_bit(model)
    for module in model.modules():
        vars(module).pop(RECOMPUTES, None)


def has_gated_mlps(model: Any) -> bool:
    """Return whether the model has gated MLPs that can be tiled."""
    return bool(_gated_mlps(model))


def _gated_mlps(model: Any) -> list[nn.Module]:
    """Return the gated MLPs that run by their class's forward or one of ours, not by that of hooks,
    offload or a quantiser.
    """
    forms = plan_for(model).forms
    mlps = []
    for module in model.modules():
        replaced = vars(module).get("forward")
        is_ours = replaced is None or hasattr(getattr(replaced, "__func__", None), FORM)
        if is_ours and forms.get(signature(module), ("",))[0] == ROLE:
            mlps.append(module)
    return mlps


def _forward(run: Forward, module: nn.Module, x: Tensor) -> Tensor:
    out = tiled(partial(run, module), x.flatten(0, -2), module.training and draws_numbers(module))
    return out.unflatten(0, x.shape[:-1])
