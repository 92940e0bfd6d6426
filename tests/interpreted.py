"""Kernels on the CPU, through Triton's interpreter, where there is no card."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from chronicals.kernels.fp8 import FP8_MAX
from chronicals.kernels.launch import interpreting

ROUNDED = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": torch.bfloat16}


only_interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="fp32 takes the reference on a card"
)
"""For a test of kernels in fp32."""


@contextmanager
def kernels_run() -> Iterator[None]:
    """Within: kernels run as they do on a card, with patches of their own, so that those of a
    test are undone before.
    """
    if torch.cuda.is_available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch, interpreting():
        round_as_a_card_does(patch)
        yield


@contextmanager
def rows_multiplied_alike() -> Iterator[None]:
    """Within: a row of an interpreted product has the same bits at each place of a tile, as on a card.

    numpy's own products give it others on processors without AVX-512; sums are in fp64 here.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, *options):
        product = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Within: counts launches of kernels by their names, compiled or interpreted."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launches = Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for kind in (InterpretedFunction, JITFunction):
            own = kind.run

            def run(kernel, *args, own=own, **options):
                launches[kernel.fn.__name__] += 1
                return own(kernel, *args, **options)

            patch.setattr(kind, "run", run)
        yield launches


def round_as_a_card_does(patch):
    """By itself Triton's interpreter loses the carry of a rounding to 8 bits (1.99 becomes 1),
    and cuts bf16 off; torch 2.11 makes NaN of what lies beyond the limit of 8 bits."""
    from triton.runtime import interpreter

    usual = interpreter._convert_float

    def convert(data, given, wanted, rounding):
        if str(given) != "fp32" or str(wanted) not in ROUNDED:
            return usual(data, given, wanted, rounding)
        given = torch.from_numpy(np.ascontiguousarray(data))
        kind = ROUNDED[str(wanted)]
        rounded = (
            given.clamp(-torch.finfo(kind).max, torch.finfo(kind).max).to(kind)
            if kind in FP8_MAX
            else given.to(kind)
        )
        return rounded.view(torch.uint16 if str(wanted) == "bf16" else torch.uint8).numpy()

    patch.setattr(interpreter, "_convert_float", convert)
