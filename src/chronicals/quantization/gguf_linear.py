"""LinearGGUF: a frozen linear layer that has its weight in the blocks of a GGUF file and no other.

See ``packed_linear.py`` for what such layers share.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.operators import operator
from chronicals.quantization.gguf import Blocks
from chronicals.quantization.packed_linear import PackedLinear


class LinearGGUF(PackedLinear):
    """``x Wᵀ + b`` over blocks.

    Args:
        packed: the weight ``[out, in]``.
        bias: ``[out]``, or None.
    """

    def __init__(self, packed: Blocks, bias: Tensor | None = None):
        super().__init__(packed.codes, packed.shape, packed.dtype, bias)
        self.kind = packed.kind

    @property
    def packed(self) -> Blocks:
        return Blocks(self.weight, (self.out_features, self.in_features), self.dtype, self.kind)

    @torch.no_grad()
    def squared_norms(self) -> Tensor:
        norms: Tensor = _squared_norms(
            self.weight, self.out_features, self.in_features, self.kind, self.dtype
        )
        return norms

    def _product(self, x: Tensor) -> Tensor:
        y: Tensor = _linear(x, self.weight, self.out_features, self.kind, self.dtype)
        return y

    @property
    def format(self) -> str:
        return f"{self.kind} of GGUF"


def _dense(codes: Tensor, outputs: int, inputs: int, kind: str, dtype: torch.dtype) -> Tensor:
    return Blocks(codes, (outputs, inputs), dtype, kind).dense()


@torch.library.custom_op("chronicals::linear_gguf", mutates_args=())
def _linear(x: Tensor, codes: Tensor, outputs: int, kind: str, dtype: torch.dtype) -> Tensor:
    return F.linear(x, _dense(codes, outputs, x.shape[-1], kind, dtype).to(x.dtype))


@_linear.register_fake
def _(x: Tensor, codes: Tensor, outputs: int, kind: str, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


@operator("chronicals::linear_gguf_input_gradient")
def _input_gradient(
    dy: Tensor, codes: Tensor, inputs: int, kind: str, dtype: torch.dtype
) -> Tensor:
    return dy @ _dense(codes, dy.shape[-1], inputs, kind, dtype).to(dy.dtype)


@torch.library.register_fake(_input_gradient)
def _(dy: Tensor, codes: Tensor, inputs: int, kind: str, dtype: torch.dtype) -> Tensor:
    return dy.new_empty((*dy.shape[:-1], inputs))


@operator("chronicals::linear_gguf_squared_norms")
def _squared_norms(
    codes: Tensor, outputs: int, inputs: int, kind: str, dtype: torch.dtype
) -> Tensor:
    weight = _dense(codes, outputs, inputs, kind, dtype)
    return torch.linalg.vector_norm(
        weight, dim=1, dtype=torch.promote_types(dtype, torch.float32)
    ).square_()


@torch.library.register_fake(_squared_norms)
def _(codes: Tensor, outputs: int, inputs: int, kind: str, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(outputs, dtype=torch.promote_types(dtype, torch.float32))


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, codes, _, *kind = inputs
    ctx.save_for_backward(codes)
    ctx.inputs = x.shape[-1]
    ctx.kind = kind


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _input_gradient(dy, *ctx.saved_tensors, ctx.inputs, *ctx.kind), None, None, None, None


_linear.register_autograd(_backward, setup_context=_setup)
