"""Descriptions of what a call of attention needs and of what a backend supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

HALF_DTYPES = frozenset({torch.bfloat16, torch.float16})

LONG_DOCUMENT = "one long document"
"""What ``Needs`` say of themselves where there is no pack of several or short documents."""


@dataclass(frozen=True)
class Spans:
    """Bounds of the documents among queries and keys: a pair of ranges for each of N documents.

    The last query of a document is at its last key (bottom-right alignment, as in FlashAttention):
    query i of Q attends to the keys up to ``i + K - Q`` of K. There are at least as many keys as
    queries.

    Attributes:
        cu_q, cu_k: int32 ``[N + 1]``, ending at the number of queries, and at the number of keys or
            before. The same tensor object if both are the same tokens.
        max_q, max_k: upper bounds on the queries and on the keys of a document.
    """

    cu_q: Tensor
    max_q: int
    cu_k: Tensor
    max_k: int

    @property
    def are_equal(self) -> bool:
        """True if queries and keys are the same tokens."""
        # By identity; comparing values would make the host wait for a card.
        return self.cu_k is self.cu_q

    @property
    def are_one_document(self) -> bool:
        """True if all tokens are of one document; packs of more have more bounds."""
        return self.are_equal and len(self.cu_q) == 2


@dataclass(frozen=True)
class Mask:
    """The keys that queries attend to, and what is done to their scores.

    Attributes:
        spans: bounds of the documents.
        scale: factor on the scores.
        window: a token attends to itself and the ``window - 1`` before it; None for all.
        softcap: scores become ``softcap · tanh(score / softcap)``; None for no bound.
        sinks: ``[H]``, for each head the logit of an extra key without a value; None for none.
    """

    spans: Spans
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


Attend = Callable[[Tensor, Tensor, Tensor, Mask, int], Tensor]
"""A function of ``(q_QHD, k_TKD, v_TKD, mask, padding)`` that returns ``[Q, H, D]``."""


@dataclass(frozen=True)
class Needs:
    """Requirements of one call.

    Attributes:
        device: type of the device.
        capability: the card's compute capability; (0, 0) for other devices.
        window, softcap, sinks: whether the mask has them.
        trains: whether gradients will be computed.
        spans: whether queries and keys have different bounds.
        packs: whether there may be several documents, or one that is not long.
        deterministic: whether sums must have a fixed order.
    """

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    trains: bool = True
    spans: bool = False
    packs: bool = True
    deterministic: bool = False

    def __str__(self) -> str:
        mask = [name for name in ("window", "softcap", "sinks", "spans") if getattr(self, name)]
        if not self.packs:
            mask.append(LONG_DOCUMENT)
        return ", ".join(
            [str(self.dtype).removeprefix("torch."), f"head_dim {self.head_dim}", *mask]
        )


@dataclass(frozen=True)
class Support:
    """Abilities of a backend on one type of device.

    Attributes:
        dtypes: supported dtypes; None for any.
        widest: the widest head for each major compute capability; cards not named are not
            supported. None for any.
        multiple: heads are padded with zeros to a multiple of this width.
        window, softcap, sinks: whether masks with them are supported.
        spans: whether queries and keys may have different bounds.
        packs: whether there may be several documents; else only a long one.
        deterministic: whether the backward pass can sum in a fixed order.
        forward_only: whether gradients are not supported.
    """

    dtypes: frozenset[torch.dtype] | None = None
    widest: Mapping[int, int] | None = None
    multiple: int = 1
    window: bool = True
    softcap: bool = True
    sinks: bool = True
    spans: bool = True
    packs: bool = True
    deterministic: bool = True
    forward_only: bool = False


@dataclass(frozen=True)
class Backend:
    """One way to compute document attention.

    Attributes:
        attend: the function that computes it.
        supports: abilities by type of device; ``"any"`` stands for all types not named.
        available: returns whether the required packages are installed.
        remedy: how to install them.
    """

    attend: Attend
    supports: Mapping[str, Support]
    available: Callable[[], bool] = lambda: True
    remedy: str = ""

    def support(self, device: str) -> Support | None:
        """Return the abilities on a type of device, or None if it is not supported."""
        return self.supports.get(device, self.supports.get("any"))

    def lacks(self, needs: Needs) -> str | None:
        """Return the first of ``needs`` that is not served, as ``field=value``, or None."""
        support = self.support(needs.device)
        if support is None:
            return f"device={needs.device}"
        dtypes = support.dtypes
        widest = support.widest
        major = needs.capability[0]
        lacking = {
            f"dtype={needs.dtype}": dtypes is not None and needs.dtype not in dtypes,
            f"capability={needs.capability}": widest is not None and major not in widest,
            f"head_dim={needs.head_dim}": widest is not None
            and needs.head_dim > widest.get(major, 0),
            "window": needs.window and not support.window,
            "softcap": needs.softcap and not support.softcap,
            "sinks": needs.sinks and not support.sinks,
            "cu_seqlens_k": needs.spans and not support.spans,
            "packs of several or short documents": needs.packs and not support.packs,
            "torch.use_deterministic_algorithms(True)": needs.trains
            and needs.deterministic
            and not support.deterministic,
            "requires_grad=True": needs.trains and support.forward_only,
        }
        for what, is_lacking in lacking.items():
            if is_lacking:
                return what
        return None if self.available() else f"an installation ({self.remedy})"
