"""Weights in blocks of GGUF: drawn, or quantised by ggml."""

import ctypes

import numpy as np
import pytest
import torch

from chronicals.kernels.gguf_blocks import GGUF_KINDS
from chronicals.quantization import Blocks


def random_blocks(rows, columns, kind, seed=0, decades=7):
    """Any bytes but for the scales in 16 bits, which are numbers of both signs, some of them
    zero or subnormal.
    """
    block, size = GGUF_KINDS[kind]
    draw = np.random.default_rng(seed)
    found = draw.integers(0, 256, (rows * columns // block, size), np.uint8)
    for place in {"Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):
        scales = draw.normal(size=len(found)) * 10.0 ** draw.integers(-decades, 1, len(found))
        found[:, place : place + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(found.reshape(rows, -1))


def by_gguf(weight, kind):
    """A weight that the package gguf quantises, to Q8_0 or Q4_0."""
    gguf = pytest.importorskip("gguf")
    codes = gguf.quants.quantize(
        weight.detach().float().cpu().numpy(), gguf.GGMLQuantizationType[kind]
    )
    return Blocks.of(torch.from_numpy(codes).to(weight.device), kind, weight.dtype)


def by_ggml(weight, kind):
    """Rows of blocks that ggml's own quantiser makes, through llama-cpp-python."""
    import gguf
    import llama_cpp

    (block, size) = GGUF_KINDS[kind]
    (rows, columns) = weight.shape
    given = weight.float().contiguous()
    packed = torch.empty(rows, columns // block * size, dtype=torch.uint8)
    quantise = llama_cpp.llama_cpp._lib.ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    quantise.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *3 * (ctypes.c_int64,),
        ctypes.c_void_p,
    ]
    made = quantise(
        int(gguf.GGMLQuantizationType[kind]),
        given.data_ptr(),
        packed.data_ptr(),
        0,
        rows,
        columns,
        None,
    )
    assert made == packed.numel()
    return packed
