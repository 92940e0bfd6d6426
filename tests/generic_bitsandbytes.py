"""bitsandbytes as its own generic code computes on CPUs: to be imported by tests that compare with
it.

Its kernel for CPUs with AVX-512 takes wrong scales where the rows of a weight are no whole number
of blocks, and its layers in evaluation mode round their inputs to bf16 on CPUs with AVX512-BF16.
Without bitsandbytes nothing happens.
"""

import contextlib

import torch

with contextlib.suppress(ImportError):
    import bitsandbytes.nn.modules as modules
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.backends.utils import _get_4bit_code

    def dequantize_4bit(codes, absmax, blocksize, quant_type, shape, dtype):
        code = _get_4bit_code(quant_type, codes.device)
        return _dequantize_4bit_compute(
            codes.view(torch.uint8).reshape(-1), absmax, code, blocksize, shape, dtype
        )

    modules.has_avx512bf16 = lambda: False
    library = torch.library.Library("bitsandbytes", "IMPL")
    library.impl("dequantize_4bit", dequantize_4bit, "CPU", allow_override=True)
