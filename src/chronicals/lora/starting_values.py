"""Starting values of adapters, other than uniform A and zero B.

    gaussian   A normal with deviation 1 / r, B zero                                   (PEFT's ``init_lora_weights="gaussian"``)
    pissa      W = U S Vᵀ:  A = √(S/s) Vᵀ,  B = U √(S/s)   of the r largest values     (Meng et al., 2024, equations 2 to 4)
    olora      W = Q R:     A = R[:r],      B = Q[:, :r]                               (Büyükakyüz, 2024, algorithm 1)

The last two move a part of the weight into the adapter and leave the rest, ``W − s · B₀ A₀``, in
the base. B₀ and A₀ are kept: over the original weight the adapter has twice the rank, ``s · [B
−B₀] [A ; A₀]``, as PEFT converts it (``path_initial_model_for_weight_conversion``).
``pissa_niter_N`` takes a randomised decomposition with N iterations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.lora.config import LoRAConfig
from chronicals.lora.layers import exact, linear_adapters

Start = tuple[Tensor, Tensor]
"""A₀ ``[r, in]`` and B₀ ``[out, r]``."""


def check_base_weights(model: Any, paths: Collection[str], config: LoRAConfig) -> None:
    """Raise ValueError if a weight is quantised, shared, or smaller than the rank."""
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
                "cannot be taken out; load the base in 16 bit, or leave lora_init out"
            )
        others = [owner for owner in owners[id(weight)] if owner != path]
        if others:
            raise ValueError(
                f"{field}: {path} shares its weight with {others[0]}, which would be changed with "
                "it; leave it out of lora_target_modules"
            )
        if rank > min(weight.shape):
            raise ValueError(
                f"{field}: the adapter of {path} has rank {rank}, its weight "
                f"{tuple(weight.shape)} only {min(weight.shape)}; set lora_rank, or "
                "lora_rank_pattern for this layer"
            )


@torch.no_grad()
def start_from_weights(model: Any, init: str, known: Mapping[str, Start] | None = None) -> None:
    """Move a part of each adapted weight into its adapter, in place.

    Args:
        model: a model with adapters.
        init: ``pissa``, ``pissa_niter_N`` or ``olora``.
        known: starting values by path, used instead of computed ones.
    """
    known = known or {}
    for path, layer in linear_adapters(model):
        base: Any = layer.base_layer
        is_linear = isinstance(base, nn.Linear)  # a Conv1D's weight is [in, out]
        weight = base.weight if is_linear else base.weight.t()
        weight_fp32 = exact(weight)
        rank = len(layer.lora_A)
        a, b = known.get(path) or largest_parts(weight_fp32, rank, layer.scale, init)
        layer.lora_A.copy_(a)
        layer.lora_B.copy_(b)
        # the part that is taken out of the base's weight
        layer.lora_start_A = layer.lora_A.detach().clone()
        layer.lora_start_B = layer.lora_B.detach().clone()
        weight.copy_(weight_fp32 - layer.scale * (layer.lora_B @ layer.lora_A).to(weight_fp32))


def largest_parts(weight: Tensor, rank: int, scale: float, init: str = "pissa") -> Start:
    """Return A ``[r, in]`` and B ``[out, r]`` with ``s · B A`` the largest part of a weight.

    Args:
        weight: ``[out, in]``, fp32 or wider.
        rank: r.
        scale: s.
        init: ``pissa``, ``pissa_niter_N`` or ``olora``.
    """
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
