"""What a weight can be in a product: 16 bit, FP8, FP8 with its 16 bits in host memory, 4 bits; one class each."""

from chronicals.quantization.base import Base, Operand, Storage
from chronicals.quantization.dense import Dense
from chronicals.quantization.fp8 import FP8
from chronicals.quantization.host import FP8InHost
from chronicals.quantization.linear import Linear4bit
from chronicals.quantization.nf4 import NF4, Packed

__all__ = ["FP8", "NF4", "Base", "Dense", "FP8InHost", "Linear4bit", "Operand", "Packed", "Storage"]
