"""Gated MLPs that take their rows in tiles: of a long pack, only a tile of what is wider than
the model exists at a time.
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
"""As a plan calls them."""


def tile_mlps(model: Any) -> int:
    """Let the gated MLPs of ``model`` take tiles, in fused layers, too; how many there are. A
    second call changes nothing.

    Comes after kernels were put in their place, which it keeps; ``unpatch_model`` undoes it.
    """
    found = _gated_mlps(model)
    for module in found:
        run = getattr(vars(module).get("forward"), "__func__", type(module).forward)
        if getattr(run, FORM, None) != BY:
            by_tiles = partial(_forward, run)
            setattr(by_tiles, FORM, BY)
            module.forward = MethodType(by_tiles, module)
    for layer in model.modules():
        if getattr(layer, "mlp", None) in found:
            setattr(layer, TILES, True)
    return len(found)


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
    """What an earlier run's memory policies and FP8 left on the model."""
    untile_mlps(model)
    use_16_bit(model)
    for module in model.modules():
        vars(module).pop(RECOMPUTES, None)


def has_gated_mlps(model: Any) -> bool:
    """Whether there is anything to tile."""
    return bool(_gated_mlps(model))


def _gated_mlps(model: Any) -> list[nn.Module]:
    """Those that run as their class does, or as ours; not where hooks, offload or a quantiser
    put another forward.
    """
    forms = plan_for(model).forms
    found = []
    for module in model.modules():
        own = vars(module).get("forward")
        ours = own is None or hasattr(getattr(own, "__func__", None), FORM)
        if ours and forms.get(signature(module), ("",))[0] == ROLE:
            found.append(module)
    return found


def _forward(run: Forward, module: nn.Module, x: Tensor) -> Tensor:
    out = tiled(partial(run, module), x.flatten(0, -2), module.training and draws_numbers(module))
    return out.unflatten(0, x.shape[:-1])
