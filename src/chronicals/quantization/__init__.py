"""What a weight can be in a product: 16 bit, FP8, FP8 with its 16 bits in host memory, 4 bits,
GGUF blocks; one class each.
"""

from chronicals.quantization.base import Base, Operand, Storage
from chronicals.quantization.dense import Dense
from chronicals.quantization.experts import Experts4bit, Stack
from chronicals.quantization.fp8 import FP8
from chronicals.quantization.fp8_experts import FP8Experts, FP8ExpertsInHost
from chronicals.quantization.gguf import GGUF, Blocks
from chronicals.quantization.gguf_linear import LinearGGUF
from chronicals.quantization.host import FP8InHost
from chronicals.quantization.linear import Linear4bit
from chronicals.quantization.nf4 import NF4, Packed
from chronicals.quantization.packed import PackedBase, PackedWeight
from chronicals.quantization.packed_linear import PackedLinear

__all__ = [
    "FP8",
    "GGUF",
    "NF4",
    "Base",
    "Blocks",
    "Dense",
    "Experts4bit",
    "FP8Experts",
    "FP8ExpertsInHost",
    "FP8InHost",
    "Linear4bit",
    "LinearGGUF",
    "Operand",
    "Packed",
    "PackedBase",
    "PackedLinear",
    "PackedWeight",
    "Stack",
    "Storage",
]


def __dir__() -> list[str]:
    return sorted(__all__)
