"""Causal attention in which every token sees its own document only.

Shapes: T tokens, N documents, H query heads, K key/value heads, D head width.
``q_THD``, ``k_TKD``, ``v_TKD``; document n is ``cu_seqlens[n]:cu_seqlens[n + 1]``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.attention.backends import BACKENDS
from chronicals.attention.choice import choose_backend


def document_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
    flash: bool = True,
    room: int = 0,
) -> Tensor:
    """Attention output ``[T, H, D]``, in the type of the inputs.

    Args:
        cu_seqlens: int32 ``[N + 1]``, ending at T; repeated entries are empty documents.
        max_seqlen: bound on a document's length.
        scale: factor on the scores, ``D ** -0.5`` by default.
        window: a token sees itself and the ``window - 1`` before it.
        softcap: scores become ``softcap · tanh(score / softcap)``.
        sinks: ``[H]``, a logit each head may spend its attention on.
        backend: one of ``BACKENDS``; chosen by ``choose_backend`` if None.
        flash: False chooses no backend of FlashAttention.
        room: values that may be left free behind the heads of each token, by a backend that can.

    Raises:
        ValueError: shapes or types do not fit, or ``backend`` cannot do what is asked.
    """
    _check(q_THD, k_TKD, v_TKD, cu_seqlens, window, softcap, sinks)
    head_dim = q_THD.shape[-1]
    window = None if window is None or window >= max_seqlen else window
    tensors = (q_THD, k_TKD, v_TKD) if sinks is None else (q_THD, k_TKD, v_TKD, sinks)
    name = choose_backend(
        q_THD.device, q_THD.dtype, head_dim, window is not None, softcap is not None, sinks is not None,
        torch.is_grad_enabled() and any(x.requires_grad for x in tensors), backend, flash,
    )  # fmt: skip
    chosen = BACKENDS[name]
    support = chosen.support(q_THD.device.type)
    missing = -head_dim % (support.multiple if support is not None else 1)
    if missing:
        q_THD, k_TKD, v_TKD = (F.pad(x, (0, missing)) for x in (q_THD, k_TKD, v_TKD))
    scale = head_dim**-0.5 if scale is None else scale
    out = chosen.attend(q_THD, k_TKD, v_TKD, cu_seqlens, max_seqlen, scale, window, softcap, sinks, room)
    return out[..., :head_dim] if missing else out


def _check(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v have shapes {shapes}; give [T, H, D], [T, K, D], [T, K, D]")
    heads, groups = q.shape[1], k.shape[1]
    if heads % groups:
        raise ValueError(f"{heads} query heads cannot be shared among {groups} key heads; give a multiple")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v are of types {q.dtype}, {k.dtype}, {v.dtype}; give one")
    if cu.dtype != torch.int32 or cu.dim() != 1:
        raise ValueError(f"cu_seqlens is {cu.dtype} with {cu.dim()} dimensions; give int32 [N + 1]")
    if window is not None and window < 1:
        raise ValueError(f"window={window} sees nothing; give at least 1, or None")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap} is no bound; give a positive number, or None")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks have shape {tuple(sinks.shape)}; give [H] with {heads} heads")
