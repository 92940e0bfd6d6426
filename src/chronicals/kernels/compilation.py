"""Compile the kernels of a piece of work in parallel, before it runs.

Triton compiles a kernel, and a C function that launches it, at its first launch; so the kernels of
a training step are compiled one after the other. Inside ``compiling_only`` a launch only hands its
kernel to a pool of threads; at the end of the block all of them are compiled and loaded.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from chronicals.kernels.launch import HAS_TRITON, triton

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
