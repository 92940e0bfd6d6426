"""FSDP gradients of weights that only some ranks used, such as experts in modules of their own.

FSDP concatenates the gradients that a rank has. If ranks use different weights of a unit, the
reduce-scatter would add the rows of one weight to those of another. Here unused weights get zero
gradients first, like torch's ``set_reduce_scatter_unused_params``, which torch 2.11 lacks. The
weights that were used are recorded too, since a weight that no rank used must not be updated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

USED = "_chronicals_used"
"""Attribute of a sharded weight: True if it had a gradient on this rank in the current step."""


def sum_evenly(unit: nn.Module) -> None:
    """Make a unit give zero gradients to its unused trained weights before FSDP sums its gradients.

    Args:
        unit: a module after ``fully_shard``.
    """
    if (group := _group(unit)) is None:
        return
    summed = group.post_backward

    def post_backward(*unused: Any) -> None:
        for one in group.fsdp_params:
            if one.sharded_param.requires_grad and hasattr(one, "_unsharded_param"):
                _complete(one)
        summed(*unused)

    group.post_backward = post_backward


def _complete(one: Any) -> None:
    """Mark the weight of an ``FSDPParam`` as used if it has a gradient, else give it zeros."""
    whole = one.unsharded_param
    if whole.grad is not None or one.unsharded_accumulated_grad is not None:
        setattr(one.sharded_param, USED, True)
    elif whole.untyped_storage().size():  # 0 if the weight is not gathered
        whole.grad = torch.zeros_like(whole)


def forget_broken_step(model: nn.Module) -> None:
    """Discard what an interrupted step left: the marks of used weights and FSDP's partial sums.

    FSDP would otherwise add the partial sums of the all-reduce among copies to the next step's.
    """
    groups = (_group(module) for module in model.modules() if isinstance(module, FSDPModule))
    for group in filter(None, groups):
        group._partial_reduce_output = None
        for one in group.fsdp_params:
            take_used(one.sharded_param)


def _group(unit: nn.Module) -> Any:
    """Return FSDP's parameter group of a unit, or None if the unit has no parameters of its own."""
    return unit._get_fsdp_state()._fsdp_param_group  # type: ignore[operator, union-attr]


def take_used(weight: Tensor) -> bool:
    """Return whether the weight had a gradient on this rank since the last call, and reset the
    mark.
    """
    return bool(vars(weight).pop(USED, False))
