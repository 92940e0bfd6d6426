"""Launches of kernels: where they run, their registration with torch, and their compilation.

Kernels run on the current CUDA device; for tensors anywhere else the plain-torch reference runs.
Tests run the kernels on the CPU through Triton's interpreter: inside ``interpreting()``, with
TRITON_INTERPRET=1 set before the first import. Without Triton (not Linux) only the references run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def compiled_once(
    *, sizes: Sequence[str] = (), places: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for a kernel that is not compiled anew for values of some arguments.

    Triton compiles a kernel for each combination of integers that are 1 or multiples of 16, and of
    addresses that are multiples of 16 bytes. Where they differ from launch to launch (waves of
    experts), that would stop a run for seconds again and again.

    Args:
        sizes: names of integers that differ.
        places: names of pointers into the middle of a tensor.
    """
    if not HAS_TRITON:
        return lambda function: function
    decorator: Callable[[Callable[..., Any]], Any] = triton.jit(
        do_not_specialize=list(sizes), do_not_specialize_on_alignment=list(places)
    )
    return decorator


def kernel_constant(value: Any) -> Any:
    """Return a number as a global of a module that its kernels may read."""
    return tl.constexpr(value) if HAS_TRITON else value


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


def absent(like: Tensor) -> Tensor:
    """Return an empty tensor as placeholder for a result that an operator leaves out.

    A custom operator returns a fixed number of tensors.
    """
    return like.new_empty(0)


def with_padding(
    like: Tensor, shape: Sequence[int], padding: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty ``[rows, width]`` view with ``padding`` unused columns behind each row.

    The caller of a merged product writes the thin outputs of adapters into these columns.
    """
    rows, width = shape
    return like.new_empty((rows, width + padding), dtype=dtype)[:, :width]


def launches_early(x: Tensor) -> bool:
    """Return whether a kernel on x can be launched before the one before it in its stream has ended.

    Such a kernel waits within itself (``wait_for_kernel_before``), and is launched with
    ``early_options``. From Hopper (sm_90) on; the CUDA programming guide calls it "programmatic
    dependent launch". Between two short kernels it spares a microsecond.
    """
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def early_options(is_early: bool) -> dict[str, Any]:
    """Return Triton's launch options of a kernel that is launched early, or is not."""
    return {"launch_pdl": True} if is_early else {}


@triton.jit
def wait_for_kernel_before(EARLY: tl.constexpr):
    """Let the next kernel begin, then wait until the one before has ended and written all it writes.

    Before it nothing may be read that an earlier kernel writes, and nothing may be written. The next
    kernel begins once all programs of this one have; if it is no early one, when this one has ended.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


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


MASK_32_BITS = 2**32 - 1
"""Keeps the low 32 bits of an int64, as arithmetic on uint32 does."""


@triton.jit
def lowbias32(x):
    """Return a 32-bit hash of ``x``, by which each element has its own random bits, uint32.

    Two rounds of multiplying and shifting (Ellis, 2018, "lowbias32") take about ten instructions,
    as many as one of Philox's ten rounds.
    """
    x = x.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


def lowbias32_reference(x: Tensor) -> Tensor:
    """Return the hash of ``x``, int64 from 0 to 2³² − 1; the same bits as the kernel's."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK_32_BITS
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK_32_BITS
    return x ^ (x >> 16)


def next_power_of_2(n: int) -> int:
    """Return the least power of 2 that is at least ``n``, and 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


OPERATOR_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""The Python function behind each registered operator."""

_libraries: dict[str, torch.library.Library] = {}


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as an operator of torch.

    ``torch.compile`` then sees one node, knows what it returns and writes, and does not break its
    graph. The operator has no derivative: it is called inside an ``autograd.Function`` whose backward pass
    calls operators, too. It takes its arguments by position.

    Args:
        name: ``chronicals::`` and the name of the operator.
        mutates: names of the tensor parameters that the function writes to. Their version counters
            are raised, as after any in-place operation.

    Returns:
        A decorator from the function to the operator. If the function returns tensors, register
        their shapes with ``torch.library.register_fake``.
    """

    def register(function: Callable[..., Any]) -> Any:
        # torch.library.custom_op wraps each call in autograd and checks: 36 µs of host time, where
        # a plain definition takes 2.5 µs.
        namespace, short = name.split("::")
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        library = _libraries[namespace]
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
        library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
        positions = [
            position
            for position, parameter in enumerate(inspect.signature(function).parameters)
            if parameter in mutates
        ]

        @functools.wraps(function)
        def call_and_raise(*args: Any) -> Any:
            """Call the function, then raise the version counters of what it wrote to."""
            result = function(*args)
            for position in positions:
                # Inference tensors have no version counter.
                if not args[position].is_inference():
                    torch.autograd.graph.increment_version(args[position])
            return result

        library.impl(short, call_and_raise if positions else function, "CompositeExplicitAutograd")
        registered = getattr(getattr(torch.ops, namespace), short).default
        OPERATOR_FUNCTIONS[registered] = function
        if not registered._schema.returns:
            torch.library.register_fake(registered, lambda *args: None, lib=library)
        return registered

    return register


MAX_COMPILE_THREADS = 16

PACKAGE_PREFIX = "chronicals."
"""Modules whose kernels are compiled in advance; those of others may have to run, to be timed."""


def can_compile_only() -> bool:
    """Return whether this Triton can compile without running: since 3.4, by a private module."""
    return HAS_TRITON and importlib.util.find_spec("triton.runtime._async_compile") is not None


def identify_compiler() -> None:
    """Start hashing Triton's own files in a thread; the hash is part of the names in its cache."""
    # It takes a third of a second, mostly without the GIL, which the first kernel would wait for.
    if can_compile_only():
        from triton.runtime.cache import triton_key

        threading.Thread(target=triton_key, daemon=True).start()


@contextmanager
def compiling_only() -> Iterator[None]:
    """Let launches of our kernels compile and not run, in all threads, inside the ``with`` block.

    Triton compiles a kernel, and a C function that launches it, at its first launch; so the kernels
    of a training step would be compiled one after the other. Here a launch only hands its kernel to
    a pool of threads; at the end of the block all of them are compiled and loaded.

    Outputs of these launches hold arbitrary values. Kernels that are already compiled, in this
    process or in Triton's cache on disk, cost a look-up. Kernels of other packages run as usual,
    since autotuning may time them.
    """
    from triton.runtime._async_compile import AsyncCompileMode, active_mode

    launch = triton.JITFunction.run
    kernels = dict[int, Any]()
    with ThreadPoolExecutor(min(MAX_COMPILE_THREADS, len(os.sched_getaffinity(0)))) as threads:
        mode = AsyncCompileMode(threads)

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if not kernel.module.startswith(PACKAGE_PREFIX):
                return launch(kernel, *args, grid=grid, warmup=warmup, **options)
            before = active_mode.set(mode)  # per thread: autograd has its own
            try:
                compiles = launch(kernel, *args, grid=grid, warmup=True, **options)
                if compiles is not None:  # a hook of Triton may return None
                    kernels[id(compiles)] = compiles
                return compiles
            finally:
                active_mode.reset(before)

        triton.JITFunction.run = compile_only
        try:
            yield
        finally:
            triton.JITFunction.run = launch
            # Waits for all compilations and hands each result to its kernel.
            mode.__exit__(None, None, None)
        device = torch.cuda.current_device()
        list(threads.map(lambda kernel: _load(kernel, device), kernels.values()))


def _load(kernel: Any, device: int) -> None:
    """Load a kernel's machine code and compile its launcher."""
    torch.cuda.set_device(device)  # per thread
    # Reading ``run`` makes both, lazily.
    getattr(kernel.result() if hasattr(kernel, "result") else kernel, "run")  # noqa: B009
