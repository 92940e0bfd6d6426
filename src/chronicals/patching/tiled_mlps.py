"""Gated MLPs that take their rows in tiles: of a long pack, only a tile of what is wider than the model exists at a time."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from chronicals.memory import draws_numbers, tiled
from chronicals.patching.decoder_layer import TILES
from chronicals.patching.forms import FORM, Forward, signature
from chronicals.patching.plan import plan_for

ROLE = "gated MLP"
"""As a plan calls them."""


def tile_mlps(model: Any) -> int:
    """Let the gated MLPs of ``model`` take tiles, in fused layers, too; how many there are.

    Comes after kernels were put in their place, which it keeps; ``unpatch_model`` undoes it.
    """
    forms, count = plan_for(model).forms, 0
    for module in model.modules():
        role, form = forms.get(signature(module), (None, None))
        if role == ROLE:
            run = getattr(vars(module).get("forward"), "__func__", type(module).forward)
            by_tiles = partial(_forward, run)
            setattr(by_tiles, FORM, form.by if form else "")
            module.forward = MethodType(by_tiles, module)
            count += 1
        if isinstance(getattr(module, "mlp", None), nn.Module):
            setattr(module, TILES, True)
    return count


def _forward(run: Forward, module: nn.Module, x: Tensor) -> Tensor:
    out = tiled(partial(run, module), x.flatten(0, -2), module.training and draws_numbers(module))
    return out.unflatten(0, x.shape[:-1])
