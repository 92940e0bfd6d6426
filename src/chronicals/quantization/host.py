"""A frozen FP8 weight whose 16-bit values are in host memory: 1 byte per value on the device."""

from __future__ import annotations

from torch import Tensor

from chronicals.quantization.fp8 import FP8


class FP8InHost(FP8):
    """FP8 weight with only its rows on the device, transposed at each ``input_gradient``.

    ``weight`` is on the CPU.
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
