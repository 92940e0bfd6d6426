"""Decide whether a Triton kernel or its reference runs, and hold what all launches share.

Kernels run on the current CUDA device; for tensors anywhere else the plain-torch reference runs.
Tests run the kernels on the CPU through Triton's interpreter: inside ``interpreting()``, with
TRITON_INTERPRET=1 set before the first import. Without Triton (not Linux) only the references run.
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
"""True inside kernels that the interpreter runs: they skip inline PTX, which only a card has."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_ROW_WIDTH = 32768
"""Elements of the longest row that one program holds in registers; wider rows take the reference."""

_interpreted = False


@dataclass(frozen=True)
class Tile:
    """The tile of one program: ``rows`` × ``block`` elements over ``warps`` warps."""

    rows: int
    block: int
    warps: int


def runs_triton(*tensors: Tensor | None) -> bool:
    """Return whether a kernel takes these tensors; None stands for an argument that is left out.

    True if all have a dtype of ``KERNEL_DTYPES`` and are on the current CUDA device, or if the
    interpreter is on. Tensors on another CUDA device take the reference, with one warning.
    """
    present = [x for x in tensors if x is not None]
    on_card = HAS_TRITON and all(x.is_cuda for x in present) and _is_current(present[0])
    return (on_card or _interpreted) and all(x.dtype in KERNEL_DTYPES for x in present)


def _is_current(x: Tensor) -> bool:
    """Return whether ``x`` is on the device that Triton launches on."""
    # torch.compile's generated code sets the device itself.
    if torch.compiler.is_compiling() or x.get_device() == torch.cuda.current_device():
        return True
    _warn_other_device(x.get_device(), torch.cuda.current_device())
    return False


@functools.cache
def _warn_other_device(index: int, current: int) -> None:
    """Warn once for each pair of devices, by the cache."""
    logger.warning(
        "tensors are on cuda:%d, kernels run on the current device, cuda:%d: plain torch takes "
        "their place, which is slower; "
        "call torch.cuda.set_device(%d) before",
        index,
        current,
        index,
    )


def runs_in_16_bit(*tensors: Tensor) -> bool:
    """Return whether a kernel takes these tensors as operands of products.

    True if a kernel takes them at all, rows are dense, and they share one dtype: a 16-bit one on a
    card, any one in the interpreter.
    """
    first = tensors[0]
    # On a card fp32 serves for proofs, and tl.dot in fp32 sums in one thread, less exactly than
    # torch's product does.
    allowed = not first.is_cuda or first.dtype != torch.float32
    dense = all(x.stride(-1) == 1 for x in tensors)
    return allowed and dense and runs_triton(*tensors) and len({x.dtype for x in tensors}) == 1


def multiplied_in(dtype: torch.dtype) -> Any:
    """Return the Triton dtype to which operands of ``tl.dot`` are cast."""
    kinds = {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float8_e4m3fn: tl.float8e4nv,
    }
    # The interpreter multiplies by numpy, in fp32 only.
    return tl.float32 if triton.knobs.runtime.interpret else kinds[dtype]


@contextmanager
def interpreting() -> Iterator[None]:
    """Let kernels run on the CPU through Triton's interpreter, slowly, inside the ``with`` block.

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
    """Decorate the ``backward`` of an autograd Function so that differentiating it raises.

    Unlike torch's ``once_differentiable``, it also raises if the upstream gradient is a constant;
    there torch silently leaves this part out of a second derivative.

    Args:
        backward: returns a tuple with the gradients of the first inputs. The remaining inputs of
            ``forward`` get None.

    Raises:
        RuntimeError: by the decorated function, if gradients are enabled (``create_graph=True``).
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"create_graph=True: {type(ctx).__name__} has no second derivative; take one of "
                "the model as it was before "
                "patch_model, or of the operation's reference"
            )
        results = backward(ctx, *gradients)
        return *results, *(None for _ in ctx.needs_input_grad[len(results) :])

    return once


def in_rows(x: Tensor) -> Tensor:
    """Return ``x`` ``[..., D]`` as ``[rows, D]`` with dense rows; a view if possible, else a copy."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def own_tensor(y: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return ``y``, in ``shape`` if one is given, as a tensor that autograd does not take for a view.

    Memory and version counter are those of ``y``. Autograd Functions return and save such tensors:
    torch forbids in-place writes to a view made inside a Function and to its base, and some models
    write into the output of a norm.
    """
    return (y if shape is None or y.shape == shape else y.view(shape)).detach()


def with_padding(
    like: Tensor, shape: Sequence[int], padding: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty ``[rows, width]`` view with ``padding`` unused columns behind each row.

    The caller of a merged product writes the thin outputs of adapters into these columns.
    """
    rows, width = shape
    return like.new_empty((rows, width + padding), dtype=dtype)[:, :width]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a card; 2 for the interpreter."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 2
    )


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
