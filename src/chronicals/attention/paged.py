"""Attention of one query of each sequence to keys and values in pages: its backends, and the choice.

Shapes: N sequences, H query heads, K key heads, D and V widths of a key and a value; P pages of S
tokens, L of them in a row of the block table. Shared pages are read once by ``kernel`` only; the
others read them for each sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from chronicals.attention.backends import flash_attn_4
from chronicals.attention.backends.flash import GROUPED_HEADS
from chronicals.attention.support import HALF_DTYPES, Backend, Needs, Support
from chronicals.kernels.paged_attention import SharedPages, paged_attention

HOPPER = 9
"""Major compute capability whose kernels of FlashAttention-4 cannot split the keys."""


@dataclass(frozen=True)
class PagedNeeds(Needs):
    """Requirements of one call over pages.

    Attributes:
        value_dim: width of a value.
        page_size: tokens of a page.
    """

    trains: bool = False
    value_dim: int = 128
    page_size: int = 16


@dataclass(frozen=True)
class PagedScores:
    """Settings of scores; the fields are those arguments of ``attend_pages``."""

    sinks: Tensor | None
    scale: float
    window: int | None
    softcap: float | None
    shared: SharedPages | None


@dataclass(frozen=True)
class PagedBackend(Backend):
    """One way to compute attention over pages.

    Attributes:
        attend: takes queries, keys, values, pages and lengths, as ``attend_pages``, and ``PagedScores``.
        whole_pages: the tokens of a page must be a multiple of this.
        one_width: keys and values must be equally wide, by a multiple of the support's.
    """

    attend: Callable[..., Tensor]
    whole_pages: int = 1
    one_width: bool = True

    def lacks(self, needs: Needs) -> str | None:
        """Return the first of ``needs`` that is not served, as ``field=value``, or None."""
        assert isinstance(needs, PagedNeeds)
        support = self.support(needs.device)
        if needs.page_size % self.whole_pages:
            return f"page_size={needs.page_size}"
        if self.one_width and needs.value_dim != needs.head_dim:
            return f"value_dim={needs.value_dim}"
        if support is not None and needs.head_dim % support.multiple:
            return f"head_dim={needs.head_dim}"
        return super().lacks(needs)


def _by_kernel(
    q_NHD: Tensor,
    k_PSKD: Tensor,
    v_PSKV: Tensor,
    pages_NL: Tensor,
    lengths_N: Tensor,
    of: PagedScores,
) -> Tensor:
    return paged_attention(q_NHD, k_PSKD, v_PSKV, pages_NL, lengths_N, **vars(of))


def _by_flash_attn_4(
    q_NHD: Tensor,
    k_PSKD: Tensor,
    v_PSKV: Tensor,
    pages_NL: Tensor,
    lengths_N: Tensor,
    of: PagedScores,
) -> Tensor:
    forward, _ = flash_attn_4.kernels_of(q_NHD.device)
    major, _ = torch.cuda.get_device_capability(q_NHD.device)
    with torch.cuda.device_of(q_NHD):
        out, *_ = forward(
            q_NHD[:, None],
            k_PSKD,
            v_PSKV,
            seqused_k=lengths_N.to(torch.int32),
            max_seqlen_k=pages_NL.shape[1] * k_PSKD.shape[1],
            page_table=pages_NL.to(torch.int32),
            softmax_scale=of.scale,
            causal=False,  # the one query is the last, and sees every key
            softcap=of.softcap,
            window_size_left=None if of.window is None else of.window - 1,
            window_size_right=None if of.window is None else 0,
            learnable_sink=of.sinks,
            num_splits=1 if major == HOPPER else 0,  # 0: as many as fill the card
        )
    attended: Tensor = out[:, 0]
    return attended


def _by_varlen_attn(
    q_NHD: Tensor,
    k_PSKD: Tensor,
    v_PSKV: Tensor,
    pages_NL: Tensor,
    lengths_N: Tensor,
    of: PagedScores,
) -> Tensor:
    bounds = torch.arange(len(q_NHD) + 1, dtype=torch.int32, device=q_NHD.device)
    longest = pages_NL.shape[1] * k_PSKD.shape[1]
    options: dict[str, Any] = {
        **GROUPED_HEADS,
        "scale": of.scale,
        "window_size": (-1 if of.window is None else of.window - 1, 0),
        "seqused_k": lengths_N.to(torch.int32),
        "block_table": pages_NL.to(torch.int32),
    }
    out = varlen_attn(q_NHD, k_PSKD, v_PSKV, bounds, None, 1, longest, **options)
    assert isinstance(out, Tensor)
    return out


PAGED_BACKENDS: dict[str, PagedBackend] = {
    "kernel": PagedBackend(_by_kernel, {"any": Support()}, one_width=False),
    # Neither Ampere nor the 5090 (12) has pages in 4.0.0b36.
    "flash-attn-4": PagedBackend(
        _by_flash_attn_4,
        {"cuda": Support(HALF_DTYPES, {9: 256, 10: 128, 11: 128}, multiple=32)},
        flash_attn_4.available,
        "pip install 'chronicals[flash]'",
    ),
    # Pages of FlashAttention-2 hold 256 tokens or a multiple.
    "flash": PagedBackend(
        _by_varlen_attn,
        {
            "cuda": Support(
                HALF_DTYPES,
                dict.fromkeys((8, 9, 10, 11, 12), 256),
                multiple=8,
                softcap=False,
                sinks=False,
            )
        },
        lambda: "block_table" in inspect.signature(varlen_attn).parameters,
        "torch 2.12 or later",
        whole_pages=256,
    ),
}

FASTEST_PAGED: dict[tuple[int, int], tuple[str, ...]] = {(9, 0): ("kernel",)}
"""Backends, fastest first, by compute capability.

On an H200 ``kernel`` reads 64 sequences of 4k keys at 97 to 99 % of the copy rate, which leaves
others nothing; these have not been timed (``benchmarks/kernel_rates.py --only paged_attention``).
"""

DEFAULT_PAGED = ("kernel",)
"""Backends for other cards and devices."""


def paged_backend(needs: PagedNeeds, backend: str | None = None) -> PagedBackend:
    """Return the backend to use.

    Args:
        needs: what the call needs.
        backend: a name from ``PAGED_BACKENDS`` that must be used; None to choose.

    Raises:
        ValueError: ``backend`` is unknown, or cannot do what is needed.
    """
    if backend is None:
        names = FASTEST_PAGED.get(needs.capability, DEFAULT_PAGED)
        able = (PAGED_BACKENDS[name] for name in names)
        return next(one for one in able if one.lacks(needs) is None)
    if backend not in PAGED_BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown; choose one of {', '.join(PAGED_BACKENDS)}, or None"
        )
    lacking = PAGED_BACKENDS[backend].lacks(needs)
    if lacking is not None:
        able_names = [name for name, one in PAGED_BACKENDS.items() if one.lacks(needs) is None]
        raise ValueError(
            f"backend={backend!r} lacks {lacking}; use backend=None, or one of "
            f"{', '.join(able_names)}"
        )
    return PAGED_BACKENDS[backend]


def attend_pages(
    q_NHD: Tensor,
    k_PSKD: Tensor,
    v_PSKV: Tensor,
    pages_NL: Tensor,
    lengths_N: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    shared: SharedPages | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute the attention of one query of each sequence, ``[N, H, V]``; without a gradient.

    Args:
        q_NHD: queries, each at the last token of its sequence.
        k_PSKD: pages of keys.
        v_PSKV: pages of values; what lies behind a sequence's end must be finite.
        pages_NL: int64 or int32, the pages of each sequence in order.
        lengths_N: int64 or int32, keys of each sequence, at least 1.
        sinks: ``[H]``, for each head the logit of an extra key without a value.
        scale: factor on the scores.
        window: a query attends to its own token and the ``window - 1`` before it.
        softcap: scores become ``softcap · tanh(score / softcap)``.
        shared: which sequences share pages.
        backend: one of ``PAGED_BACKENDS``; by default the fastest that was measured.

    Raises:
        ValueError: ``backend`` is unknown, or cannot do what is asked.
    """
    device = q_NHD.device
    needs = PagedNeeds(
        device.type,
        torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        q_NHD.dtype,
        q_NHD.shape[2],
        window is not None,
        softcap is not None,
        sinks is not None,
        value_dim=v_PSKV.shape[3],
        page_size=k_PSKD.shape[1],
    )
    scores = PagedScores(sinks, scale, window, softcap, shared)
    chosen = paged_backend(needs, backend)
    return chosen.attend(q_NHD, k_PSKD, v_PSKV, pages_NL, lengths_N, scores)
