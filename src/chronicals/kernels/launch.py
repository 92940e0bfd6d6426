"""Where a Triton kernel runs, and what all launches share.

Kernels run on the current CUDA device; elsewhere the plain reference does. Within
``interpreting()`` they run on the CPU too, for tests, which needs TRITON_INTERPRET=1 before the
first import. Without Triton (not Linux) only the references exist.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

HAS_TRITON = importlib.util.find_spec("triton") is not None
triton: Any = (
    importlib.import_module("triton")
    if HAS_TRITON
    else SimpleNamespace(jit=lambda function: function)
)
tl: Any = (
    importlib.import_module("triton.language") if HAS_TRITON else SimpleNamespace(constexpr=None)
)
INTERPRETED: Any = tl.constexpr(triton.knobs.runtime.interpret) if HAS_TRITON else None
"""For kernels: whether they are, so that they leave out what is written for a card."""

TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 32768
"""Elements of a row that one program holds in registers; wider rows take the reference."""

_interpreted = False


@dataclass(frozen=True)
class Tile:
    """What one program holds: ``rows`` × ``block`` elements over ``warps`` warps."""

    rows: int
    block: int
    warps: int


def runs_triton(*tensors: Tensor | None) -> bool:
    """Whether all of ``tensors`` are where, and of a type that, a kernel takes."""
    there = [x for x in tensors if x is not None]
    on_card = HAS_TRITON and all(x.is_cuda for x in there) and _is_current(there[0])
    return (on_card or _interpreted) and all(x.dtype in TYPES for x in there)


def _is_current(x: Tensor) -> bool:
    """Whether ``x`` is on the card that Triton launches on. What is compiled makes it so by
    itself.
    """
    if torch.compiler.is_compiling() or x.get_device() == torch.cuda.current_device():
        return True
    _say_elsewhere(x.get_device(), torch.cuda.current_device())
    return False


@functools.cache
def _say_elsewhere(index: int, current: int) -> None:
    logger.warning(
        "tensors are on cuda:%d, kernels run on the current device, cuda:%d: plain torch takes "
        "their place, which is slower; "
        "call torch.cuda.set_device(%d) before",
        index,
        current,
        index,
    )


def runs_in_16_bit(*tensors: Tensor) -> bool:
    """Whether a kernel takes them for products: on a card in 16 bit only. fp32 is there for
    proof, and sums of one thread are not as exact as others; the interpreter takes it."""
    first = tensors[0]
    allowed = not first.is_cuda or first.dtype != torch.float32
    dense = all(x.stride(-1) == 1 for x in tensors)
    return allowed and dense and runs_triton(*tensors) and len({x.dtype for x in tensors}) == 1


def multiplied_in(dtype: torch.dtype) -> Any:
    """What operands of ``tl.dot`` are made into; the interpreter multiplies in fp32 only."""
    kinds = {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float8_e4m3fn: tl.float8e4nv,
    }
    return tl.float32 if triton.knobs.runtime.interpret else kinds[dtype]


@contextmanager
def interpreting() -> Iterator[None]:
    """Within: kernels run on the CPU through Triton's interpreter, slowly.

    Raises:
        RuntimeError: Triton was imported without TRITON_INTERPRET=1.
    """
    global _interpreted
    if not HAS_TRITON or not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before chronicals is imported")
    before = _interpreted
    _interpreted = True
    try:
        yield
    finally:
        _interpreted = before


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward pass of a Function: refuses to be differentiated itself. torch's
    ``once_differentiable`` leaves that part of a second derivative out, without a word, where the
    upstream gradient is a constant.

    ``backward`` returns a tuple with the gradients of the first inputs; those that follow have
    none.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"create_graph=True: {type(ctx).__name__} has no second derivative; take one of "
                "the model as it was before "
                "patch_model, or of the operation's reference"
            )
        found = backward(ctx, *gradients)
        return *found, *(None for _ in ctx.needs_input_grad[len(found) :])

    return once


def in_rows(x: Tensor) -> Tensor:
    """``x`` as ``[rows, D]`` whose rows are dense; a view where there is one."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def own_tensor(y: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return ``y``, in ``shape`` if one is given, over the same memory and with the same version,
    but as no view.

    For what an autograd Function returns and saves: torch refuses to let what follows write into a
        view that was made within a
    Function, as some models do with what a norm returns, and into its base.
    """
    return (y if shape is None or y.shape == shape else y.view(shape)).detach()


def with_padding(
    like: Tensor, shape: Sequence[int], padding: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Empty ``[rows, width]`` whose rows have ``padding`` columns behind them, for what adapters
    add to a product.
    """
    rows, width = shape
    return like.new_empty((rows, width + padding), dtype=dtype)[:, :width]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 2
    )


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
