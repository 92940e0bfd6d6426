"""Stacked expert weights whose products run in FP8 (``kernels/fp8_experts.py``).

Each expert has one scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chronicals.kernels.fp8 import Scaled
from chronicals.kernels.fp8_experts import fp8_experts_transposed, fp8_quantize_experts


class FP8Experts:
    """FP8 products of a stacked 16-bit weight, which stays in memory.

    The weight is quantised like that of ``FP8``. A frozen weight is quantised once, in both
    layouts. After a write to the weight, the next call in Python quantises it again into the same
    memory; writes through ``.data`` are not noticed. A replayed CUDA graph reads that memory
    without a call in Python, so it does not notice a write.

    A trained weight is quantised at each use: by rows in the forward pass, and by columns with the
    same scales in the backward pass.

    Args:
        weight: the parameter, ``[E, N, K]``, or ``[E, K, N]`` if ``transposed``.
        device: device of the products.
    """

    layout = "both"
    """Layouts that are kept of a frozen weight, by the names that the products use."""

    waits_for: torch.device | None = None
    """Device of the products if the 16-bit weight is in host memory; else None."""

    def __init__(self, weight: Tensor, transposed: bool, device: torch.device):
        self.weight = weight
        self.transposed = transposed
        self.device = device
        self._known: tuple[tuple, list[Scaled]] | None = None

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        """Return the bytes per value of a frozen weight on the device of its products.

        Args:
            itemsize: bytes per value of the 16-bit weight.
        """
        return itemsize + 2

    def to_host(self) -> FP8Experts:
        """Move the 16-bit values of a frozen weight to host memory.

        Returns:
            The object that then multiplies in place of this one; this one if the weight is trained
            or already in host memory.
        """
        if self.weight.requires_grad or self.waits_for is not None:
            return self
        waiting = FP8ExpertsInHost(self.weight, self.transposed, self.device)
        waiting.rows()  # while the 16 bits are on the device
        self.weight.data = self.weight.data.to("cpu", copy=True)
        return waiting

    def rows(self) -> Scaled:
        """Return the rows, ``[E, N, K]``, for ``y = x Wᵀ``."""
        return self._made("rows")[0] if self.weight.requires_grad else self._layouts()[0]

    def columns(self, scale: Tensor) -> Scaled:
        """Return the columns, ``[E, K, N]``, for ``dx = dy W``.

        Args:
            scale: scale of the rows in the forward pass.
        """
        if self.weight.requires_grad:
            return self._made("columns", scale)[0]
        rows, *columns = self._layouts()
        return columns[0] if columns else fp8_experts_transposed(rows)

    def _made(self, layout: str, scale: Tensor | None = None) -> list[Scaled]:
        """Return the rows, the columns, or both in this order, as the products read them.

        A transposed weight is stored by its columns.
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
        """Return the quantised layouts of a frozen weight, made anew if it was written to."""
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
    """Frozen FP8 experts whose 16-bit weight is in host memory.

    Only the rows are on the device, 1 byte per value; they are transposed for each gradient.
    """

    layout = "rows"

    def __init__(self, weight: Tensor, transposed: bool, device: torch.device):
        super().__init__(weight, transposed, device)
        self.waits_for = device

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        """Return the byte of the rows."""
        return 1
