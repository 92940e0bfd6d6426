"""What a mask needs and what a backend can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

HALF_DTYPES = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class Spans:
    """Which queries and which keys belong together: N pairs of ranges, one for each document.

    The last query of a pair stands at its last key (bottom-right alignment, as FlashAttention
    defines it): query i of Q sees the keys up to ``i + K - Q`` of K. There are at least as many
    keys as queries.

    Attributes:
        cu_q, cu_k: int32 ``[N + 1]``, ending at the number of queries, and at that of keys or
            before it. One tensor where both are the same tokens.
        max_q, max_k: bounds on a document's queries and on its keys.
    """

    cu_q: Tensor
    max_q: int
    cu_k: Tensor
    max_k: int

    @property
    def are_equal(self) -> bool:
        """Whether queries and keys are the same tokens; bounds with equal values in two tensors
        are not looked into.
        """
        return self.cu_k is self.cu_q


Attend = Callable[
    [Tensor, Tensor, Tensor, Spans, float, int | None, float | None, Tensor | None, int], Tensor
]
"""``(q_QHD, k_TKD, v_TKD, spans, scale, window, softcap, sinks, padding)`` to ``[Q, H, D]``."""


@dataclass(frozen=True)
class Needs:
    """What one call asks for.

    Attributes:
        capability: the card's compute capability; (0, 0) for other devices.
        trains: a gradient will be asked for.
        spans: queries and keys have bounds of their own.
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

    def __str__(self) -> str:
        mask = [name for name in ("window", "softcap", "sinks", "spans") if getattr(self, name)]
        return ", ".join(
            [str(self.dtype).removeprefix("torch."), f"head_dim {self.head_dim}", *mask]
        )


@dataclass(frozen=True)
class Support:
    """What a backend does on one type of device; None is any.

    Attributes:
        widest: by major compute capability the widest head; cards that are not named are not
            supported.
        multiple: head widths between its multiples are filled up with zeros.
        spans: queries and keys may have bounds of their own.
    """

    dtypes: frozenset[torch.dtype] | None = None
    widest: Mapping[int, int] | None = None
    multiple: int = 1
    window: bool = True
    softcap: bool = True
    sinks: bool = True
    spans: bool = True
    forward_only: bool = False

    def lacks(self, needs: Needs) -> str | None:
        """The first thing asked for that is not supported, as ``field=value``, or None."""
        major = needs.capability[0]
        lacking = {
            f"dtype={needs.dtype}": self.dtypes is not None and needs.dtype not in self.dtypes,
            f"capability={needs.capability}": self.widest is not None and major not in self.widest,
            f"head_dim={needs.head_dim}": self.widest is not None
            and needs.head_dim > self.widest.get(major, 0),
            "window": needs.window and not self.window,
            "softcap": needs.softcap and not self.softcap,
            "sinks": needs.sinks and not self.sinks,
            "cu_seqlens_k": needs.spans and not self.spans,
            "requires_grad=True": needs.trains and self.forward_only,
        }
        return next((what for what, is_lacking in lacking.items() if is_lacking), None)


@dataclass(frozen=True)
class Backend:
    """One way to compute document attention.

    Attributes:
        supports: by type of device; ``"any"`` stands for all that are not named.
        available: whether what it is made of is installed.
        remedy: what to do where it is not.
    """

    attend: Attend
    supports: Mapping[str, Support]
    available: Callable[[], bool] = lambda: True
    remedy: str = ""

    def support(self, device: str) -> Support | None:
        return self.supports.get(device, self.supports.get("any"))

    def lacks(self, needs: Needs) -> str | None:
        """Why it cannot run here, or None."""
        support = self.support(needs.device)
        if support is None:
            return f"device={needs.device}"
        return support.lacks(needs) or (
            None if self.available() else f"an installation ({self.remedy})"
        )
