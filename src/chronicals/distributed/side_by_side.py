"""Adjacent storage for FSDP weights that belong to one product, such as q, k and v.

FSDP gathers every weight into a buffer of its own, which it frees with ``storage.resize_(0)``. Here
the buffers of several weights are views of one storage, so that they form one matrix while they are
gathered. FSDP copies the result of its collective straight into these views, so there is no further
copy. The rows of each weight must be divisible by the number of ranks, since FSDP pads it
otherwise. The names in ``PRIVATE`` are not part of torch's public interface; they are the same in
torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

PRIVATE = (
    "all_gather_outputs",
    "_unsharded_param",
    "alloc_all_gather_outputs",
    "free_unsharded_param",
    "init_all_gather_outputs",
    "init_unsharded_param",
    "_orig_size",
    "_module_info",
    "sharded_param",
)
"""Private names of torch's ``FSDPParam`` that are used or replaced here."""


class SideBySide:
    """One storage for several gathered weights.

    Args:
        parts: torch's ``FSDPParam`` of each weight, all of one unit and not gathered yet.
        dtype: dtype of the gathered weights.
    """

    def __init__(self, parts: Sequence[Any], dtype: torch.dtype, device: torch.device):
        sizes = [part._orig_size.numel() for part in parts]
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.bytes = self.flat.nbytes
        for part, place in zip(parts, self.flat.split(sizes)):
            part.all_gather_outputs = [place]
            part._unsharded_param = nn.Parameter(
                place.view(part._orig_size), part.sharded_param.requires_grad
            )
            part.alloc_all_gather_outputs = self.allocate
            part.free_unsharded_param = self.free
        self.free()

    def allocate(self) -> None:
        storage = self.flat.untyped_storage()
        if storage.size() != self.bytes:
            storage.resize_(self.bytes)

    def free(self) -> None:
        """Free the storage; FSDP calls this for each weight in turn when it frees the unit."""
        self.flat.untyped_storage().resize_(0)


def lay_side_by_side(
    unit: Any, products: Sequence[tuple[nn.Module, tuple[str, ...]]], dtype: torch.dtype, ranks: int
) -> int:
    """Make FSDP gather the weights and biases of each product adjacently, if their rows divide.

    Args:
        unit: a module after ``fully_shard``, before its first forward pass.
        products: pairs of a module and the names of its linear children that form a product.
        dtype: dtype of the gathered weights.
        ranks: number of ranks that share a weight.

    Returns:
        The number of products whose weights are adjacent.

    Raises:
        RuntimeError: FSDP of this torch version has other internals.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    there = {
        (id(part._module_info.module), part._module_info.param_name): part
        for part in group.fsdp_params
    }
    laid = 0
    for owner, names in products:
        linears = [getattr(owner, name) for name in names]
        for kind in ("weight", "bias"):
            parts = [there.get((id(linear), kind)) for linear in linears]
            if any(part is None or part._orig_size[0] % ranks for part in parts):
                continue
            _check(parts)
            if len({part.sharded_param.dtype for part in parts if part is not None}) == 1:
                SideBySide(parts, dtype, group.device)
                laid += kind == "weight"
    return laid


def _check(parts: Sequence[Any]) -> None:
    missing = [
        name for name in PRIVATE if name != "_unsharded_param" and not hasattr(parts[0], name)
    ]
    if missing or hasattr(parts[0], "_unsharded_param"):
        raise RuntimeError(
            f"sharding='weights': torch {torch.__version__} has another FSDP than is known here "
            f"({', '.join(missing)} missing, "
            "or weights were gathered already); use torch 2.11 to 2.13, or sharding='optimizer'"
        )
