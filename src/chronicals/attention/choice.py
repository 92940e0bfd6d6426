"""Which backend for which mask on which card."""

from __future__ import annotations

import logging
from functools import cache

import torch

from chronicals.attention.backends import BACKENDS
from chronicals.attention.support import HALF_DTYPES, Needs

logger = logging.getLogger(__name__)

FLASH = ("flash-attn-4", "flash")
"""Backends that never hold a score matrix and need nothing compiled by torch."""

FASTEST_ORDERS: dict[tuple[int, int], dict[int, tuple[str, ...]]] = {
    (9, 0): {
        128: ("flash-attn-4", "flash", "flex", "per-document"),
        256: ("flash", "flash-attn-4", "flex", "per-document"),
    },
}
"""By compute capability and widest head of the class, fastest first. Measured on an H200 at head
widths 64 and 128 with documents of 512 to 8192 tokens: flash-attn-4 before flash everywhere.
Above 128 nothing was measured, and what is proved longest comes first."""

DEFAULT_ORDER = ("flash-attn-4", "flash", "flex", "per-document")
EXACT_ORDER = ("per-document",)
"""For other devices, and for types of more than 16 bits, which are there for proof."""


def order(needs: Needs) -> tuple[str, ...]:
    """Names of backends, the preferred one first."""
    if needs.device != "cuda" or needs.dtype not in HALF_DTYPES:
        return EXACT_ORDER
    classes = FASTEST_ORDERS.get(needs.capability, {})
    return next(
        (names for widest, names in classes.items() if needs.head_dim <= widest), DEFAULT_ORDER
    )


@torch.compiler.assume_constant_result
def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int = 128,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    trains: bool = True,
    backend: str | None = None,
    flash: bool = True,
    spans: bool = False,
) -> str:
    """Name of the backend that runs; said once in the log.

    Args:
        head_dim: width of a head.
        window, softcap, sinks: whether the mask has them.
        trains: whether a gradient will be asked for.
        backend: a name from ``BACKENDS`` that must be used.
        flash: False chooses none of ``FLASH``.
        spans: queries and keys have bounds of their own.

    Raises:
        ValueError: ``backend`` is unknown, or cannot do what is needed.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    needs = Needs(device.type, capability, dtype, head_dim, window, softcap, sinks, trains, spans)
    if backend is not None:
        _check(backend, needs)
        chosen = backend
    else:
        names = [name for name in order(needs) if flash or name not in FLASH]
        chosen = next(name for name in names if BACKENDS[name].lacks(needs) is None)
    _say(chosen, str(needs), "asked for" if backend else "chosen")
    return chosen


def _check(backend: str, needs: Needs) -> None:
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown; choose one of {', '.join(BACKENDS)}, or None"
        )
    lacking = BACKENDS[backend].lacks(needs)
    if lacking is not None:
        able = [name for name, other in BACKENDS.items() if other.lacks(needs) is None]
        raise ValueError(
            f"backend={backend!r} lacks {lacking}; use backend=None, or one of {', '.join(able)}"
        )


@cache
def _say(backend: str, needs: str, how: str) -> None:
    logger.debug("attention: %s for %s (%s)", backend, needs, how)
