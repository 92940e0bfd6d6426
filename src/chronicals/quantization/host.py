"""A frozen weight in FP8 whose 16 bits are in host memory: 1 byte a value on the device."""

from __future__ import annotations

from torch import Tensor

from chronicals.quantization.fp8 import FP8


class FP8InHost(FP8):
    """Keeps its rows on the device and transposes them at each ``input_gradient``; ``weight`` is
    on the CPU.
    """

    layout = "rows"

    @property
    def bytes_for_host(self) -> int:
        return 0

    def dense(self) -> Tensor:
        return self.weight.matrix.to(self.device)

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        return 1
