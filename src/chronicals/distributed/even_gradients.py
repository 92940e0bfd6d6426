"""Every rank sums the gradients of all of a unit's trained weights, also of those that its
micro-batch did not use.

FSDP lays the gradients that a rank has one after the other. Where ranks use other weights of a
unit, such as experts that are modules of their own, the rows of one weight would be added to those
of another. A weight that is not used has zeros here, as with torch's
``set_reduce_scatter_unused_params``, which torch 2.11 lacks; and it is known which weights were
used, since one that no rank uses is not updated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

USED = "_chronicals_used"
"""Attribute of a divided weight that had a gradient on this rank in the step so far."""


def sum_evenly(unit: nn.Module) -> None:
    """Give weights without a gradient zeros before the unit, after ``fully_shard``, sums its
    gradients.
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
    """Note that an ``FSDPParam`` has a gradient, or give it zeros."""
    whole = one.unsharded_param
    if whole.grad is not None or one.unsharded_accumulated_grad is not None:
        setattr(one.sharded_param, USED, True)
    elif whole.untyped_storage().size():
        whole.grad = torch.zeros_like(whole)


def forget_broken_step(model: nn.Module) -> None:
    """Of a step that ended between its micro-batches: which weights were used, and what was to
    be added up among copies, which FSDP would add to the first sums of the next step."""
    groups = (_group(module) for module in model.modules() if isinstance(module, FSDPModule))
    for group in filter(None, groups):
        group._partial_reduce_output = None
        for one in group.fsdp_params:
            take_used(one.sharded_param)


def _group(unit: nn.Module) -> Any:
    """FSDP's parameters of a unit; None where it has none of its own."""
    return unit._get_fsdp_state()._fsdp_param_group  # type: ignore[operator, union-attr]


def take_used(weight: Tensor) -> bool:
    """Whether this rank had a gradient of the weight since it was asked last."""
    return bool(vars(weight).pop(USED, False))
