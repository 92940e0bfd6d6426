"""The stacked weights of experts whose products run in FP8, each expert with one scale
(``kernels/fp8_experts.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from chronicals.kernels.fp8 import Scaled
from chronicals.kernels.fp8_experts import fp8_experts_transposed, fp8_quantize_experts


class FP8Experts:
    """Quantised from a 16-bit weight, which stays where it is; as ``FP8`` of a linear layer.

    A frozen weight is quantised once, in both layouts, and again, into the same memory, by the
    first call in Python after it was written to (writes through ``.data`` cannot be seen). A CUDA
    graph that is replayed reads that memory and calls nothing in Python: it does not notice a
    write. A trained one is quantised at each use: by rows in the forward pass, and in the backward
    pass by columns with the scales that were found there.

    Args:
        weight: the parameter, ``[E, N, K]``, or ``[E, K, N]`` where ``transposed``.
        device: of the products.
    """

    layout = "both"
    """Of a frozen weight: what is kept, as the products name it."""

    def __init__(self, weight: Tensor, transposed: bool, device: torch.device):
        self.weight = weight
        self.transposed = transposed
        self.device = device
        self._known: tuple[tuple, list[Scaled]] | None = None

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        """Memory of a frozen weight on the device of its products, where the 16-bit weight has
        ``itemsize`` bytes a value.
        """
        return itemsize + 2

    @property
    def waits_for(self) -> torch.device | None:
        """Device of the products where the 16 bits wait in host memory; else None."""
        return None

    def to_host(self) -> FP8Experts:
        """Return what multiplies in its place once the 16 bits of a frozen weight are in host
        memory, where this puts them; itself where they stay.
        """
        if self.weight.requires_grad:
            return self
        waiting = FP8ExpertsInHost(self.weight, self.transposed, self.device)
        waiting.rows()  # while the 16 bits are on the device
        self.weight.data = self.weight.data.to("cpu", copy=True)
        return waiting

    def rows(self) -> Scaled:
        """``[E, N, K]``, for ``y = x Wᵀ``."""
        return self._made("rows")[0] if self.weight.requires_grad else self._layouts()[0]

    def columns(self, scale: Tensor) -> Scaled:
        """``[E, K, N]``, for ``dx = dy W``; ``scale`` is that of the rows in the forward pass."""
        if self.weight.requires_grad:
            return self._made("columns", scale)[0]
        rows, *columns = self._layouts()
        return columns[0] if columns else fp8_experts_transposed(rows)

    def _made(self, layout: str, scale: Tensor | None = None) -> list[Scaled]:
        """Rows, columns, or both in this order, of the products; a transposed weight is stored
        by its columns.
        """
        stored = (
            {"rows": "columns", "columns": "rows"}.get(layout, layout)
            if self.transposed
            else layout
        )
        with torch.no_grad():
            found = fp8_quantize_experts(self.weight.detach().to(self.device), stored, scale)
        return [
            scaled
            for scaled in (reversed(found) if self.transposed else found)
            if scaled is not None
        ]

    def _layouts(self) -> list[Scaled]:
        state = self.weight._version, self.weight.dtype
        if self._known is None or self._known[0] != state:
            layouts = self._made(self.layout)
            if self._known is not None:
                for place, new in zip(self._known[1], layouts):
                    place.values.copy_(new.values)
                    place.scale.copy_(new.scale)
                layouts = self._known[1]
            self._known = state, layouts
        return self._known[1]


class FP8ExpertsInHost(FP8Experts):
    """Frozen experts whose 16 bits are in host memory: keeps its rows on the device and
    transposes them for each gradient, so that a weight takes 1 byte there."""

    layout = "rows"

    @property
    def waits_for(self) -> torch.device | None:
        return self.device

    def to_host(self) -> FP8Experts:
        return self

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        return 1
