"""Compiles the kernels of a piece of work beside each other, before it runs.

Triton compiles a kernel when it is first launched, and a C function that launches it, so those of a
training step one after the other. Within ``compiling_only`` a launch hands its kernel to a pool of
threads and does nothing else; where the block ends, all of them are compiled and loaded.
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


def can_compile_only() -> bool:
    """Whether this Triton can compile without running: it has done so since 3.4, by a module
    that is not public.
    """
    return HAS_TRITON and importlib.util.find_spec("triton.runtime._async_compile") is not None


def identify_compiler() -> None:
    """Let a thread hash Triton's own files, which names what it caches: a third of a second,
    most of it without the GIL, that the first kernel would take."""
    if can_compile_only():
        from triton.runtime.cache import triton_key

        threading.Thread(target=triton_key, daemon=True).start()


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within, in all threads: launches of our kernels compile and do not run, so what they would
    write holds arbitrary values.

    Kernels that are compiled already, in this process or in Triton's cache on disk, cost a look-up.
    Other packages' kernels run as usual: they may be timed, to choose among their configurations.
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
                if compiles is not None:  # as a hook of Triton's may decide
                    kernels[id(compiles)] = compiles
                return compiles
            finally:
                active_mode.reset(before)

        triton.JITFunction.run = compile_only
        try:
            yield
        finally:
            triton.JITFunction.run = launch
            mode.__exit__(
                None, None, None
            )  # waits for what was handed in, and makes it known to its kernel
        device = torch.cuda.current_device()
        list(threads.map(lambda kernel: _load(kernel, device), kernels.values()))


def _load(kernel: Any, device: int) -> None:
    """Load a kernel's machine code, and compile what launches it: attributes that are made when
    they are first read.
    """
    torch.cuda.set_device(device)  # per thread
    getattr(kernel.result() if hasattr(kernel, "result") else kernel, "run")  # noqa: B009
