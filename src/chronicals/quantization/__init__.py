"""Weight formats of linear products, one class each.

They are 16 bit, FP8, FP8 with its 16-bit values in host memory, FP8 in blocks, 4 bits, MXFP4 and
GGUF blocks.
"""

from chronicals.quantization.base import Base, Operand, Storage
from chronicals.quantization.dense import AdapterPadding, Dense, columns_for
from chronicals.quantization.dense_copies import LayerProduct, PackedProduct, dense_copies
from chronicals.quantization.experts import (
    Experts4bit,
    PackedExperts,
    Stack,
    call_with,
    class_module,
    dense_stack,
    packed_experts,
    packed_shapes,
    packed_stacks,
    stacked_weight,
)
from chronicals.quantization.fp8 import FP8Base, FP8Experts, FP8ExpertsInHost, FP8InHost
from chronicals.quantization.fp8_blocks import FP8Blocks
from chronicals.quantization.gguf import GGUF, Blocks, LinearGGUF
from chronicals.quantization.mxfp4 import MXFP4
from chronicals.quantization.nf4 import NF4, RECIPES, FourBits, Linear4bit, Packed
from chronicals.quantization.packed import PackedStorage, PackedWeight, format_of_files
from chronicals.quantization.packed_linear import (
    PackedLinear,
    PackedModule,
    is_linear,
    packed_layers,
    packed_modules,
    packed_weight,
    packed_words,
    product_dtype,
)
from chronicals.quantization.plain import PlainWeight, frozen_weight

__all__ = [
    "GGUF",
    "MXFP4",
    "NF4",
    "RECIPES",
    "AdapterPadding",
    "Base",
    "Blocks",
    "Dense",
    "Experts4bit",
    "FP8Base",
    "FP8Blocks",
    "FP8Experts",
    "FP8ExpertsInHost",
    "FP8InHost",
    "FourBits",
    "LayerProduct",
    "Linear4bit",
    "LinearGGUF",
    "Operand",
    "Packed",
    "PackedExperts",
    "PackedLinear",
    "PackedModule",
    "PackedProduct",
    "PackedStorage",
    "PackedWeight",
    "PlainWeight",
    "Stack",
    "Storage",
    "call_with",
    "class_module",
    "columns_for",
    "dense_copies",
    "dense_stack",
    "format_of_files",
    "frozen_weight",
    "is_linear",
    "packed_experts",
    "packed_layers",
    "packed_modules",
    "packed_shapes",
    "packed_stacks",
    "packed_weight",
    "packed_words",
    "product_dtype",
    "stacked_weight",
]


def __dir__() -> list[str]:
    return sorted(__all__)
