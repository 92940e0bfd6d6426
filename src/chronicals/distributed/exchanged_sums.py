"""Gradients of FSDP's units are sent in the 16 bits in which they were computed, and summed in fp32
where they arrive.

A reduce-scatter adds on the way, so that sums in fp32 send fp32: 4 bytes a weight. Here every rank
sends each other one its part, 2 bytes a weight, and adds what it received (as Megatron-Core's
``reduce_scatter_with_fp32_accumulation`` does). No number is rounded that a sum in fp32 does not
round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class ExchangedSums:
    """In place of the reduce-scatter of one unit (``FSDPModule.set_custom_reduce_scatter``), whose
    ``reduce_dtype`` is that of its gradients.

    FSDP asks for two tensors each time: ``[W · n]`` for the gradients, the parts of all W ranks,
        then ``[n]`` for this rank's
    sums.

    Args:
        ranks: W, at least 2.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        self._sums: int | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor asked for next: gradients in their own ``dtype``, sums in fp32."""
        numbers = math.prod(size)
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
        """Fill ``output_tensor [n]`` with the sums over ranks of this one's part of ``input_tensor
        [W · n]``.

        Raises:
            ValueError: ``op`` is not a sum.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"op={op}: gradients are summed; one place divides by their count")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(self.ranks, -1), 0, dtype=torch.float32, out=output_tensor)
