"""Reduce-scatter for FSDP that sends 16-bit gradients and sums them in fp32.

An ordinary reduce-scatter adds on the way, so sums in fp32 send fp32: 4 bytes a weight. Here every
rank sends every other rank its part as it was computed, 2 bytes a weight, and each rank adds what
it received in fp32 (as Megatron-Core's ``reduce_scatter_with_fp32_accumulation`` does). The result
is rounded no more than that of an fp32 reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


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
        """Sum this rank's part of ``input_tensor [W · n]`` over the ranks into ``output_tensor
        [n]``.

        Raises:
            ValueError: ``op`` is not a sum.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"op={op}: gradients are summed; one place divides by their count")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(self.ranks, -1), 0, dtype=torch.float32, out=output_tensor)
