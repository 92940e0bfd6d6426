"""Backend of FlashAttention-4 (package ``flash-attn-4``, CuTe).

Its kernels are called below the package's autograd and registered with torch.

Shapes: q ``[Q, H, D]``, k and v ``[T, K, D]``, log-sum-exp fp32 ``[H, Q]``, sinks ``[H]``. Rows of
q, k and v may be strided, as in a merged product. The first call of a kind of shape compiles for
some seconds; compiled kernels are cached on disk (``KERNEL_CACHE``), and later processes load them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chronicals import precompilation
from chronicals.attention.support import HALF_DTYPES, Backend, Mask, Support
from chronicals.kernels.launch import absent, operator


@cache
def available() -> bool:
    """Return whether all packages that the kernels need are installed."""
    return all(find_spec(name) is not None for name in ("flash_attn", "cutlass", "quack")) and (
        find_spec("flash_attn.cute") is not None
    )


KERNEL_CACHE = Path.home() / ".cache" / "chronicals" / "flash-attn-4"
"""Folder of compiled kernels, unless the package's own environment variables are set."""

COMPILE_POLL_SECONDS = 0.02
"""Seconds between two checks whether the process that compiles in advance has ended."""


def _keep_compiled_kernels(device: torch.device) -> None:
    """Turn on the package's own cache on disk, by the environment variables that its import reads.

    The package names a kernel's file by its sources and by the versions of Python, CUTLASS and
    TVM's FFI. Its kernels also depend on ``quack`` and on the kind of card, so both are in the
    folder's name. A source checkout of quack has no version; then nothing is cached.
    """
    major, minor = torch.cuda.get_device_capability(device)
    try:
        folder = KERNEL_CACHE / f"quack-{version('quack-kernels')}-sm{major}{minor}"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, PackageNotFoundError):
        return  # not writable, or a source checkout of quack: every process compiles
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


@cache
def kernels_of(device: torch.device) -> tuple[Callable[..., tuple], Callable[..., tuple]]:
    """Return the package's forward and backward functions.

    Importing the package takes seconds, so it happens at the first call. If a process compiles
    kernels in advance, this waits for it.
    """
    _keep_compiled_kernels(device)
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    while precompilation.running("chronicals.attention.compilation"):
        time.sleep(COMPILE_POLL_SECONDS)
    return _flash_attn_fwd, _flash_attn_bwd


def _common(
    cu_q: Tensor,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> dict[str, Any]:
    """Return the arguments that forward and backward share.

    ``cu_k`` is None if it is the same tensor as ``cu_q``, since an operator must not get a tensor
    twice.
    """
    return {
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": None if window is None else window - 1,
        "window_size_right": None if window is None else 0,
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_q if cu_k is None else cu_k,
        "max_seqlen_q": max_q,
        "max_seqlen_k": max_k,
        "learnable_sink": sinks,
    }


@torch.library.custom_op("chronicals::flash_attn_4_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    padding: int = 0,
) -> tuple[Tensor, Tensor]:
    forward, _ = kernels_of(q.device)
    out, lse = _outputs(q, k, v, cu_q, cu_k, max_q, max_k, scale, window, softcap, sinks, padding)
    common = _common(cu_q, cu_k, max_q, max_k, scale, window, sinks)
    with torch.cuda.device_of(q):
        forward(q, k, v, softcap=softcap, out=out, lse=lse, return_lse=True, **common)
    return out, lse


@_forward.register_fake
def _outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    padding: int = 0,
) -> tuple[Tensor, Tensor]:
    """Allocate the output, with ``padding`` free values behind each token, and the log-sum-exp."""
    tokens, heads, width = q.shape
    out = q.new_empty((tokens, heads * width + padding))[:, : heads * width].unflatten(
        1, (heads, width)
    )
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@operator("chronicals::flash_attn_4_backward")
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the sinks; the last is ``absent`` without sinks."""
    _, backward = kernels_of(q.device)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    with torch.cuda.device_of(q):
        gradients = backward(
            q,
            k,
            v,
            out,
            dout.contiguous(),
            lse,
            softcap=softcap or 0.0,
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_common(cu_q, cu_k, max_q, max_k, scale, window, sinks),
        )
    return dq, dk, dv, absent(q) if sinks is None else gradients[3]


@torch.library.register_fake(_backward)
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, absent(q) if sinks is None else sinks.new_empty(sinks.shape)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, *options, sinks, _ = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, sinks)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return tuple(None for _ in ctx.needs_input_grad)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "create_graph=True: FlashAttention-4 has no second derivative; set "
            "use_flash_attention=False"
        )
    *saved, sinks = ctx.saved_tensors
    dq, dk, dv, d_sinks = _backward(dout, *saved, *ctx.options, sinks)
    of_bounds = (None, None)
    of_options = [None for _ in ctx.options]
    of_padding = None
    return dq, dk, dv, *of_bounds, *of_options, None if sinks is None else d_sinks, of_padding


_forward.register_autograd(_gradients, setup_context=_save)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, padding: int = 0) -> Tensor:
    spans = mask.spans
    bounds = spans.cu_q, None if spans.are_equal else spans.cu_k, spans.max_q, spans.max_k
    options = mask.scale, mask.window, mask.softcap, mask.sinks
    out, _ = _forward(q, k, v, *bounds, *options, padding)
    return out


# Width 256 on Blackwell (10, 11) is left out: its backward supports neither softcap nor sinks.
# Heads are padded to multiples of 32, since gradients are wrong at width 80.
FLASH_ATTENTION_4 = Backend(
    _attend,
    {"cuda": Support(HALF_DTYPES, {9: 256, 10: 128, 11: 128}, multiple=32)},
    available,
    "pip install 'chronicals[flash]'",
)
