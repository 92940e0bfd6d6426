"""A frozen weight in FP8 whose 16 bits are in host memory: 1 byte a value on the device."""

from __future__ import annotations

from torch import Tensor

from chronicals.quantization.fp8 import FP8


class FP8InHost(FP8):
    """Keeps its rows on the device and transposes them at each ``input_gradient``; ``weight`` is on the CPU."""

    layout = "rows"

    def dense(self) -> Tensor:
        return self.weight.matrix.to(self.device)

    @property
    def bytes(self) -> int:
        return self._bytes_of_layouts
