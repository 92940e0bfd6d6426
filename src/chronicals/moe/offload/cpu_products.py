"""Products of experts on the CPU, from their records in host memory.

torch's own products take every format of records. ``kt_products.py`` has others, for some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.expert_dispatch import dispatch_to_experts
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

    def __init__(self) -> None:
        self._dense: dict[int, _DenseLayer | None] = {}

    def outputs(
        self,
        source: LayerSource,
        experts: Sequence[int],
        x: Tensor,
        counts: Sequence[int],
        gate: Gate,
    ) -> Tensor:
        """Return the outputs of experts for rows that are sorted by expert."""
        if source.layer not in self._dense:
            self._dense[source.layer] = _DenseLayer.of(source)
        layer = self._dense[source.layer]
        if layer is None:
            return _packed_outputs(source, experts, x, counts, gate)
        unit, _ = expert_glu(layer.up.products(x, experts, counts), gate)
        assert unit is not None
        return layer.down.products(unit, experts, counts)

    def close(self) -> None:
        """Let go of the records."""
        self._dense.clear()


class _Matrices(NamedTuple):
    """One of the two products of all experts of a layer, in records of 16 or 32 bits.

    Their views are made once: to make those of an expert takes the host as long as to call its
    product.

    Attributes:
        weights: ``[N, K]`` of each expert.
        biases: ``[N]`` of each, or None.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]

    @classmethod
    def of(cls, product: ExpertWeights) -> _Matrices:
        """Return the views of a product of all experts."""
        weights = product.weight_ENK.unbind()
        biases = [None] * len(weights) if product.bias is None else product.bias.unbind()
        return cls(weights, biases)

    def products(self, x: Tensor, experts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the products ``[n, N]`` of rows ``[n, K]``, which are sorted by expert."""
        return torch.cat(
            [
                F.linear(rows, self.weights[expert], self.biases[expert])
                for rows, expert in zip(x.split(list(counts)), experts)
            ]
        )


class _DenseLayer(NamedTuple):
    """Both products of a layer's experts."""

    up: _Matrices
    down: _Matrices

    @classmethod
    def of(cls, source: LayerSource) -> _DenseLayer | None:
        """Return the products of a layer, or None if its records hold packed weights."""
        everything = range(source.records.count)
        up, down = source.weights_in(source.engine.host_memory_of(source.layer, everything))
        if not isinstance(up.weight, Tensor) or not isinstance(down.weight, Tensor):
            return None
        return cls(_Matrices.of(up), _Matrices.of(down))


def _packed_outputs(
    source: LayerSource, experts: Sequence[int], x: Tensor, counts: Sequence[int], gate: Gate
) -> Tensor:
    """Return the outputs of packed experts, of which those with rows are dequantised."""
    up, down = source.weights_in(source.engine.host_memory_of(source.layer, experts))
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    to = dispatch_to_experts(ids[:, None], len(counts))
    h = apply_product(ProductInput(x), up, to, False, x.dtype)[0]
    unit, _ = expert_glu(h, gate)
    assert unit is not None
    return apply_product(ProductInput(unit), down, to, False, x.dtype)[0]
