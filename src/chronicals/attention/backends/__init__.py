"""The backends by name, and the choice of one for a mask and a card."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from chronicals.attention.backends.cudnn import CUDNN
from chronicals.attention.backends.flash import FLASH_ATTENTION_2
from chronicals.attention.backends.flash_attn_4 import FLASH_ATTENTION_4
from chronicals.attention.backends.per_document import PER_DOCUMENT
from chronicals.attention.support import HALF_DTYPES, Backend, Mask, Needs, Support

logger = logging.getLogger(__name__)


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, padding: int = 0) -> Tensor:
    from chronicals.attention.backends import flex  # its import takes a second

    return flex.attend(q, k, v, mask, padding)


FLEX_ATTENTION = Backend(
    _flex_attention,
    {
        "cuda": Support(
            HALF_DTYPES | {torch.float32}, dict.fromkeys((8, 9, 10, 11, 12), 256), multiple=16
        ),
        "cpu": Support(
            HALF_DTYPES | {torch.float32}, {0: 256}, multiple=16, sinks=False, forward_only=True
        ),
    },
)

BACKENDS: dict[str, Backend] = {
    "flash-attn-4": FLASH_ATTENTION_4,
    "cudnn": CUDNN,
    "flash": FLASH_ATTENTION_2,
    "flex": FLEX_ATTENTION,
    "per-document": PER_DOCUMENT,
}

FLASH = ("flash-attn-4", "cudnn", "flash")
"""FlashAttention backends, which never hold a score matrix and need no torch.compile."""

# Measured on an H200 at head widths 64 and 128 with documents of 512 to 8192 tokens: flash-attn-4
# is faster than flash everywhere. Above 128 nothing was measured; the longest proven comes first.
# cuDNN takes single documents of 16,384 tokens and more, where it is faster than flash.
FASTEST_ORDERS: dict[tuple[int, int], dict[int, tuple[str, ...]]] = {
    (9, 0): {
        128: ("flash-attn-4", "cudnn", "flash", "flex", "per-document"),
        256: ("flash", "flash-attn-4", "flex", "per-document"),
    },
}
"""Backends, fastest first, by compute capability and by the widest head that an entry is for."""

DEFAULT_ORDER = ("flash-attn-4", "flash", "flex", "per-document")
"""Backends for other cards."""

EXACT_ORDER = ("per-document",)
"""Backends for other devices, and for dtypes of more than 16 bits, which serve for proofs."""

logged_choices: set[tuple[str, str, str]] = set()
"""Name of the backend, what was needed, and whether it was requested, of each choice so far."""


def order(needs: Needs) -> tuple[str, ...]:
    """Return names of backends, the preferred one first."""
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
    packs: bool = True,
) -> str:
    """Return the name of the backend to use; each new choice is logged once.

    Args:
        device: device of the queries.
        dtype: dtype of queries, keys and values.
        head_dim: width of a head.
        window: whether tokens attend to a window only.
        softcap: whether scores are bounded.
        sinks: whether heads have an extra key without a value.
        trains: whether gradients will be computed.
        backend: a name from ``BACKENDS`` that must be used; None to choose.
        flash: if False, none of ``FLASH`` is chosen.
        spans: whether queries and keys have different bounds.
        packs: whether there may be several documents, or one that is not long.

    Raises:
        ValueError: ``backend`` is unknown, or cannot do what is needed.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    needs = Needs(
        device.type,
        capability,
        dtype,
        head_dim,
        window,
        softcap,
        sinks,
        trains,
        spans,
        packs,
        torch.are_deterministic_algorithms_enabled(),
    )
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown; choose one of {', '.join(BACKENDS)}, or None"
        )
    if backend is not None:
        lacking = BACKENDS[backend].lacks(needs)
        if lacking is not None:
            able = [name for name, other in BACKENDS.items() if other.lacks(needs) is None]
            raise ValueError(
                f"backend={backend!r} lacks {lacking}; use backend=None, or one of "
                f"{', '.join(able)}"
            )
        chosen = backend
    else:
        names = [name for name in order(needs) if flash or name not in FLASH]
        chosen = next(name for name in names if BACKENDS[name].lacks(needs) is None)
    choice = chosen, str(needs), "requested" if backend else "chosen"
    if choice not in logged_choices:
        logged_choices.add(choice)
        logger.debug("attention: %s for %s (%s)", *choice)
    return chosen
