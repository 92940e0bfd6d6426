"""Products of experts on the CPU, from their records in host memory.

torch's own products take every format of records. ``kt_products.py`` has others, for some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.expert_dispatch import Dispatch, dispatch_to_experts
from chronicals.kernels.expert_glu import Gate, expert_glu
from chronicals.kernels.fused_experts import ExpertWeights, ProductInput, apply_product

if TYPE_CHECKING:
    from chronicals.moe.offload.module import LayerSource


class CpuProducts(ABC):
    """Computes what experts give for some rows, on the CPU."""

    @abstractmethod
    def outputs(
        self,
        source: LayerSource,
        experts: Sequence[int],
        x: Tensor,
        counts: Sequence[int],
        gate: Gate,
    ) -> Tensor:
        """Return the outputs ``[n, D]`` of experts for rows that are sorted by expert.

        Args:
            source: the layer's experts.
            experts: those that have rows.
            x: ``[n, D]`` on the CPU.
            counts: rows of each of the experts.
            gate: the gated unit between both products.
        """

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Free what they hold beside the records."""


class TorchProducts(CpuProducts):
    """torch's products, which read the records themselves."""

    def outputs(
        self,
        source: LayerSource,
        experts: Sequence[int],
        x: Tensor,
        counts: Sequence[int],
        gate: Gate,
    ) -> Tensor:
        """Return the outputs of experts for rows that are sorted by expert."""
        memory = source.engine.host_memory_of(source.layer, experts)
        up, down = source.weights_in(memory)
        ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        to = dispatch_to_experts(ids[:, None], len(counts))
        unit, _ = expert_glu(_product(x, up, to, counts), gate)
        assert unit is not None
        return _product(unit, down, to, counts)


def _product(x: Tensor, of: ExpertWeights, to: Dispatch, counts: Sequence[int]) -> Tensor:
    """Return the product of rows with their experts by torch's products in the dtype of x."""
    if not isinstance(of.weight, Tensor) or of.slots is None:
        return apply_product(ProductInput(x), of, to, False, x.dtype)[0]
    weight, bias = of.weight_ENK, of.bias
    return torch.cat(
        [
            F.linear(rows, weight[slot], None if bias is None else bias[slot])
            for rows, slot in zip(x.split(list(counts)), of.slots.tolist())
        ]
    )
