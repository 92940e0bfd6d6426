"""What a weight can be in a product: 16 bit, FP8, FP8 with its 16 bits in host memory; one class each."""

from chronicals.quantization.base import Base, Operand
from chronicals.quantization.dense import Dense
from chronicals.quantization.fp8 import FP8
from chronicals.quantization.host import FP8InHost

__all__ = ["FP8", "Base", "Dense", "FP8InHost", "Operand"]
