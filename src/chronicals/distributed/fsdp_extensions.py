"""Extensions of FSDP's units: sums in fp32, zeros for unused weights, adjacent weights.

``ExchangedSums`` is a reduce-scatter that sends 16-bit gradients and sums them in fp32. An ordinary
one adds on the way, so sums in fp32 send fp32: 4 bytes a weight. Here every rank sends every other
rank its part as it was computed, 2 bytes a weight, and each rank adds what it received in fp32 (as
Megatron-Core's ``reduce_scatter_with_fp32_accumulation`` does). The result is rounded no more than
that of an fp32 reduce-scatter.

``sum_evenly`` is for weights that only some ranks used, such as experts in modules of their own.
FSDP concatenates the gradients that a rank has. If ranks use different weights of a unit, the
reduce-scatter would add the rows of one weight to those of another. Unused weights get zero
gradients first, like torch's ``set_reduce_scatter_unused_params``, which torch 2.11 lacks. The
weights that were used are recorded too, since a weight that no rank used must not be updated.

``lay_side_by_side`` makes weights of one product adjacent, such as those of q, k and v. FSDP
gathers every weight into a buffer of its own, which it frees with ``storage.resize_(0)``. Here the
buffers of several weights are views of one storage, so that they form one matrix while they are
gathered. FSDP copies the result of its collective straight into these views, so there is no further
copy. The rows of each weight must be divisible by the number of ranks, since FSDP pads it
otherwise. The names in ``PRIVATE`` are not part of torch's public interface; they are the same in
torch 2.11 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

USED = "_chronicals_used"
"""Attribute of a sharded weight: True if it had a gradient on this rank in the current step."""

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


class ExchangedSums:
    """Replacement for the reduce-scatter of one unit (``FSDPModule.set_custom_reduce_scatter``).

    The unit's ``reduce_dtype`` must be the dtype of its gradients. For each reduce-scatter FSDP
    allocates two tensors: ``[W · n]`` for the gradients, with the parts of all W ranks, then
    ``[n]`` for this rank's sums.

    Args:
        ranks: W, at least 2.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        self._sums: int | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor for FSDP: gradients in their own ``dtype``, sums in fp32."""
        numbers = math.prod(size)
        # FSDP does not say which of the two tensors it asks for; their sizes and order tell.
        if numbers == self._sums:
            self._sums = None
            return torch.empty(*size, dtype=torch.float32, device=device)
        self._sums = numbers // self.ranks
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
    ) -> None:
        """Sum this rank's part of the gradients over the ranks.

        Args:
            output_tensor: ``[n]``, receives the sums.
            input_tensor: ``[W · n]``, gradients of the parts of all ranks.
            group: process group of the ranks.
            op: must be a sum.

        Raises:
            ValueError: ``op`` is not a sum.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"op={op}: gradients are summed; one place divides by their count")
        # Each rank sends 2 bytes a weight, as computed. A reduce-scatter adds on the way, and would
        # have to send fp32 for sums that are rounded no more than these.
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(self.ranks, -1), 0, dtype=torch.float32, out=output_tensor)


def sum_evenly(unit: nn.Module) -> None:
    """Make a unit give zero gradients to its unused trained weights before FSDP sums its gradients.

    Args:
        unit: a module after ``fully_shard``.
    """
    group = parameter_group(unit)
    if group is None:
        return
    summed = group.post_backward

    def post_backward(*unused: Any) -> None:
        for one in group.fsdp_params:
            if not one.sharded_param.requires_grad or not hasattr(one, "_unsharded_param"):
                continue
            whole = one.unsharded_param
            if whole.grad is not None or one.unsharded_accumulated_grad is not None:
                setattr(one.sharded_param, USED, True)
            elif whole.untyped_storage().size():  # 0 if the weight is not gathered
                # FSDP concatenates the gradients that are there. Without these zeros the rows of
                # one weight would be added to those of another that this rank did not use.
                whole.grad = torch.zeros_like(whole)
        summed(*unused)

    group.post_backward = post_backward


def forget_broken_step(model: nn.Module) -> None:
    """Discard what an interrupted step left: the marks of used weights and FSDP's partial sums.

    FSDP would otherwise add the partial sums of the all-reduce among copies to the next step's.
    """
    for module in model.modules():
        group = parameter_group(module) if isinstance(module, FSDPModule) else None
        if group is not None:
            group._partial_reduce_output = None
            for one in group.fsdp_params:
                vars(one.sharded_param).pop(USED, None)


def parameter_group(unit: nn.Module) -> Any:
    """Return FSDP's parameter group of a unit, or None if the unit has no parameters of its own."""
    return unit._get_fsdp_state()._fsdp_param_group  # type: ignore[operator, union-attr]


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
            # FSDP copies what its collective returns straight into this view.
            part.all_gather_outputs = [place]
            part._unsharded_param = nn.Parameter(
                place.view(part._orig_size), part.sharded_param.requires_grad
            )
            part.alloc_all_gather_outputs = self.allocate
            part.free_unsharded_param = self.free
        self.free()

    def allocate(self) -> None:
        """Give the storage its memory, unless another weight of the product did."""
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
    group = parameter_group(unit)
    there = {
        (id(part._module_info.module), part._module_info.param_name): part
        for part in group.fsdp_params
    }
    laid = 0
    for owner, names in products:
        linears = [getattr(owner, name) for name in names]
        for kind in ("weight", "bias"):
            parts = [there.get((id(linear), kind)) for linear in linears]
            # FSDP pads rows that do not divide, and padding would lie between the weights.
            if any(part is None or part._orig_size[0] % ranks for part in parts):
                continue
            part = parts[0]
            needed = [name for name in PRIVATE if name != "_unsharded_param"]
            missing = [name for name in needed if not hasattr(part, name)]
            # A weight has ``_unsharded_param`` once it was gathered, which is too late.
            if missing or hasattr(part, "_unsharded_param"):
                raise RuntimeError(
                    f"sharding='weights': torch {torch.__version__} has another FSDP than is known "
                    f"here ({', '.join(missing)} missing, "
                    "or weights were gathered already); use torch 2.11 to 2.13, or "
                    "sharding='optimizer'"
                )
            if len({part.sharded_param.dtype for part in parts if part is not None}) == 1:
                SideBySide(parts, dtype, group.device)
                laid += kind == "weight"
    return laid
