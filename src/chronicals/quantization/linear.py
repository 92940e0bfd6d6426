"""Linear4bit: a frozen linear layer that has its weight in 4 bits and no other.

See ``packed_linear.py`` for what such layers share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.kernels.nf4 import Scales
from chronicals.kernels.operators import operator
from chronicals.quantization.bitsandbytes_format import read_weight, stored_tensors
from chronicals.quantization.nf4 import Packed
from chronicals.quantization.packed_linear import PackedLinear


class Linear4bit(PackedLinear):
    """``x Wᵀ + b`` over codes of 4 bits and their scales, which stay fp32.

    Args:
        packed: the weight ``[out, in]``.
        bias: ``[out]``, or None.
    """

    in_4_bits = True
    absmax: Tensor
    absmax2: Tensor | None
    code2: Tensor | None
    offset: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None = None):
        super().__init__(packed.codes, packed.shape, packed.dtype, bias)
        self.block = packed.block
        self.code = packed.code
        self.block2 = packed.scales.block2
        self.quantized_from = packed.quantized_from
        for name in SCALES:
            self.register_buffer(name, getattr(packed.scales, name))

    @classmethod
    def of(cls, linear: nn.Linear, device: torch.device | None = None) -> Self:
        """A plain layer, its weight quantised to NF4 in blocks of 64 with nested scales.

        Args:
            device: where it is quantised and stays; by default where it is.
        """
        bias = None if linear.bias is None else linear.bias.detach().to(device)
        return cls(Packed.of(linear.weight.detach().to(device)), bias).train(linear.training)

    @property
    def packed(self) -> Packed:
        scales = Scales(self.absmax, self.absmax2, self.code2, self.offset, self.block2)
        shape = self.out_features, self.in_features
        return Packed(
            self.weight, scales, shape, self.dtype, self.block, self.code, self.quantized_from
        )

    @torch.no_grad()
    def squared_norms(self) -> Tensor:
        """Of the rows of the dequantised weight, ``[out]``, in at least fp32."""
        scales = self.absmax, self.absmax2, self.code2, self.offset, self.block2
        shape = self.out_features, self.in_features
        norms: Tensor = _squared_norms(
            self.weight, *scales, *shape, self.block, self.code, self.dtype
        )
        return norms

    def _product(self, x: Tensor) -> Tensor:
        scales = self.absmax, self.absmax2, self.code2, self.offset, self.block2
        y: Tensor = _linear(
            x, self.weight, *scales, self.out_features, self.block, self.code, self.dtype
        )
        return y

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """By the names of bitsandbytes, so that it and transformers load what is saved."""
        tensors = stored_tensors(f"{prefix}weight", self.packed)
        if self.bias is not None:
            tensors[f"{prefix}bias"] = self.bias
        destination.update(
            {name: tensor if keep_vars else tensor.detach() for name, tensor in tensors.items()}
        )

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Into the memory that is there."""
        stored = {name: tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
        bias = stored.pop(f"{prefix}bias", None)
        try:
            found = read_weight(f"{prefix}weight", stored)
            self._take(found)
        except ValueError as error:
            error_msgs.append(str(error))
            return
        if self.bias is not None and bias is not None:
            with torch.no_grad():
                self.bias.copy_(bias)
        elif strict and self.bias is not None:
            missing_keys.append(f"{prefix}bias")
        known = stored_tensors(f"{prefix}weight", found).keys()
        unexpected_keys += [name for name in stored if name not in known] if strict else []
        unexpected_keys += (
            [f"{prefix}bias"] if strict and self.bias is None and bias is not None else []
        )

    @torch.no_grad()
    def _take(self, packed: Packed) -> None:
        """Copy another weight of the same format; raises ValueError where it has another."""
        here = self.packed
        kinds = [
            (x.shape, x.block, x.code, x.scales.nested, x.scales.block2) for x in (here, packed)
        ]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"the 4-bit weight is {kinds[1]} there and {kinds[0]} here: shape, block, format, "
                "nested, its block"
            )
        here.codes.view(-1).copy_(packed.codes.view(-1))
        for name in SCALES:
            if (place := getattr(self, name)) is not None:
                place.copy_(getattr(packed.scales, name))

    @property
    def format(self) -> str:
        return f"{self.code} in blocks of {self.block}"


SCALES = ("absmax", "absmax2", "code2", "offset")
"""Names of the buffers, as in ``Scales``."""


@torch.library.custom_op("chronicals::linear_4bit", mutates_args=())
def _linear(
    x: Tensor,
    codes: Tensor,
    absmax: Tensor,
    absmax2: Tensor | None,
    code2: Tensor | None,
    offset: Tensor | None,
    block2: int,
    outputs: int,
    block: int,
    code: str,
    dtype: torch.dtype,
) -> Tensor:
    scales = Scales(absmax, absmax2, code2, offset, block2)
    return F.linear(
        x, Packed(codes, scales, (outputs, x.shape[-1]), dtype, block, code).dense().to(x.dtype)
    )


@_linear.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    absmax: Tensor,
    absmax2: Any,
    code2: Any,
    offset: Any,
    block2: int,
    outputs: int,
    *_: Any,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


@operator("chronicals::linear_4bit_input_gradient")
def _input_gradient(
    dy: Tensor,
    codes: Tensor,
    absmax: Tensor,
    absmax2: Tensor | None,
    code2: Tensor | None,
    offset: Tensor | None,
    block2: int,
    inputs: int,
    block: int,
    code: str,
    dtype: torch.dtype,
) -> Tensor:
    scales = Scales(absmax, absmax2, code2, offset, block2)
    return dy @ Packed(codes, scales, (dy.shape[-1], inputs), dtype, block, code).dense().to(
        dy.dtype
    )


@torch.library.register_fake(_input_gradient)
def _(
    dy: Tensor,
    codes: Tensor,
    absmax: Tensor,
    absmax2: Any,
    code2: Any,
    offset: Any,
    block2: int,
    inputs: int,
    *_: Any,
) -> Tensor:
    return dy.new_empty((*dy.shape[:-1], inputs))


@operator("chronicals::linear_4bit_squared_norms")
def _squared_norms(
    codes: Tensor,
    absmax: Tensor,
    absmax2: Tensor | None,
    code2: Tensor | None,
    offset: Tensor | None,
    block2: int,
    outputs: int,
    inputs: int,
    block: int,
    code: str,
    dtype: torch.dtype,
) -> Tensor:
    weight = Packed(
        codes, Scales(absmax, absmax2, code2, offset, block2), (outputs, inputs), dtype, block, code
    ).dense()
    return torch.linalg.vector_norm(
        weight, dim=1, dtype=torch.promote_types(dtype, torch.float32)
    ).square_()


@torch.library.register_fake(_squared_norms)
def _(
    codes: Tensor,
    absmax: Tensor,
    absmax2: Any,
    code2: Any,
    offset: Any,
    block2: int,
    outputs: int,
    inputs: int,
    block: int,
    code: str,
    dtype: torch.dtype,
) -> Tensor:
    return absmax.new_empty(outputs, dtype=torch.promote_types(dtype, torch.float32))


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, codes, absmax, absmax2, code2, offset, block2, _, *kind = inputs
    ctx.save_for_backward(codes, absmax, absmax2, code2, offset)
    ctx.block2 = block2
    ctx.inputs = x.shape[-1]
    ctx.kind = kind


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _input_gradient(dy, *ctx.saved_tensors, ctx.block2, ctx.inputs, *ctx.kind), *(None,) * 10


_linear.register_autograd(_backward, setup_context=_setup)
