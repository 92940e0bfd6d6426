"""Where adapters start, other than uniform A and zero B.

    gaussian   A normal with deviation 1 / r, B zero                                   (PEFT's ``init_lora_weights="gaussian"``)
    pissa      W = U S Vᵀ:  A = √(S/s) Vᵀ,  B = U √(S/s)   of the r largest values     (Meng et al., 2024, equations 2 to 4)
    olora      W = Q R:     A = R[:r],      B = Q[:, :r]                               (Büyükakyüz, 2024, algorithm 1)

The last two begin with a part of the weight and leave the rest, ``W − s · B₀ A₀``, in the base. B₀
and A₀ are kept: an adapter over the original weight is that of twice the rank, ``s · [B  −B₀] [A ;
A₀]``, as PEFT converts it (``path_initial_model_for_weight_conversion``). ``pissa_niter_N`` takes a
randomised decomposition with N iterations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.lora.config import LoRAConfig
from chronicals.lora.layers import LoRALinear, linear_adapters

Start = tuple[Tensor, Tensor]
"""A₀ ``[r, in]`` and B₀ ``[out, r]``."""


def check_weights(model: Any, paths: Collection[str], config: LoRAConfig) -> None:
    """Raises ValueError where a weight is quantised, shared with another layer, or smaller than
    the rank.
    """
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    for path in paths:
        weight = model.get_submodule(path).weight
        rank = config.at(path).rank
        field = f"lora_init={config.init!r}"
        if not weight.is_floating_point() or weight.element_size() == 1:
            raise ValueError(
                f"{field}: the weight of {path} is quantised ({weight.dtype}), and a part of it "
                "cannot be taken out; load the "
                "base in 16 bit, or leave lora_init out"
            )
        if others := [owner for owner in owners[id(weight)] if owner != path]:
            raise ValueError(
                f"{field}: {path} shares its weight with {others[0]}, which would be changed with "
                "it; leave it out of "
                "lora_target_modules"
            )
        if rank > min(weight.shape):
            raise ValueError(
                f"{field}: the adapter of {path} has rank {rank}, its weight "
                f"{tuple(weight.shape)} only {min(weight.shape)}; "
                "set lora_rank, or lora_rank_pattern for this layer"
            )


def start_from_weights(model: Any, init: str, known: Mapping[str, Start] | None = None) -> None:
    """Move a part of each adapted weight into its adapter, in place.

    Args:
        init: ``pissa``, ``pissa_niter_N`` or ``olora``.
        known: starting values by path, which are taken instead of computed ones.
    """
    for path, layer in linear_adapters(model):
        _start(layer, init, (known or {}).get(path))


@torch.no_grad()
def _start(layer: LoRALinear, init: str, known: Start | None) -> None:
    base: Any = layer.base_layer
    upright = isinstance(base, nn.Linear)  # a Conv1D's weight is [in, out]
    weight = base.weight if upright else base.weight.t()
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    a, b = known or _parts(exact, len(layer.lora_A), layer.scale, init)
    layer.lora_A.copy_(a)
    layer.lora_B.copy_(b)
    layer.keep_start()
    weight.copy_(exact - layer.scale * (layer.lora_B @ layer.lora_A).to(exact))


def _parts(weight: Tensor, rank: int, scale: float, init: str) -> Start:
    if init == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank], q[:, :rank]
    _, _, rounds = init.partition("_niter_")
    if rounds:
        u, s, v = torch.svd_lowrank(weight, rank, niter=int(rounds))
        vh = v.t()
    else:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    root = (s[:rank] / scale).sqrt()
    return root[:, None] * vh[:rank], u[:, :rank] * root
