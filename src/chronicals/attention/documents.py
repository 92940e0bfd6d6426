"""Causal attention in which every token attends to its own document only.

Shapes: N documents, Q queries and T keys of all of them, H query heads, K key/value heads, D head
width. Tensors are ``q_QHD``, ``k_TKD``, ``v_TKD``. The queries of document n are
``cu_seqlens_q[n]:cu_seqlens_q[n + 1]``. Its keys are the same tokens, or
``cu_seqlens_k[n]:cu_seqlens_k[n + 1]``; then earlier tokens of the document exist as keys only (a
cache, a shared prefix, the chunks of other ranks).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.attention.backends import BACKENDS, choose_backend
from chronicals.attention.backends.cudnn import is_long_document
from chronicals.attention.support import Mask, Spans
from chronicals.batch import SharedKeys


def document_attention(
    q_QHD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    backend: str | None = None,
    flash: bool = True,
    padding: int = 0,
) -> Tensor:
    """Compute causal attention within each document.

    Args:
        q_QHD: queries.
        k_TKD: keys.
        v_TKD: values; may be narrower than the keys, as in latent attention (they are padded with
            zeros).
        cu_seqlens_q: int32 ``[N + 1]``, ending at Q; repeated entries are empty documents.
        max_seqlen_q: upper bound on the queries of a document.
        cu_seqlens_k: the same of the keys, ending at T or before; by default queries and keys are
            the same tokens. A document has at least as many keys as queries, and its last query is
            at its last key (bottom-right alignment, as in FlashAttention).
        max_seqlen_k: upper bound on the keys of a document; required with ``cu_seqlens_k``.
        sinks: ``[H]``, the logit of an extra key without a value, one for each head.
        scale: factor on the scores, ``D ** -0.5`` by default.
        window: a token attends to itself and the ``window - 1`` before it.
        softcap: scores become ``softcap · tanh(score / softcap)``.
        backend: one of ``BACKENDS``; chosen by ``choose_backend`` if None.
        flash: if False, no FlashAttention backend is chosen.
        padding: values to leave free behind the heads of each token of the output; backends that
            cannot do this ignore it.

    Returns:
        ``[Q, H, D]``, as wide as the values, in the dtype of the inputs.

    Raises:
        ValueError: shapes or dtypes do not fit, or ``backend`` cannot do what is asked.
    """
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
        max_seqlen_k = max_seqlen_q
    if max_seqlen_k is None:
        raise ValueError(
            "cu_seqlens_k was given without max_seqlen_k; give a bound on the keys of a document"
        )
    spans = Spans(cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k)
    _check(q_QHD, k_TKD, v_TKD, spans, window, softcap, sinks)
    head_dim = q_QHD.shape[-1]
    window = None if window is None or window >= max_seqlen_k else window
    tensors = (q_QHD, k_TKD, v_TKD) if sinks is None else (q_QHD, k_TKD, v_TKD, sinks)
    name = choose_backend(
        q_QHD.device,
        q_QHD.dtype,
        head_dim,
        window is not None,
        softcap is not None,
        sinks is not None,
        torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
        backend,
        flash,
        not spans.are_equal,
        not is_long_document(q_QHD, spans),
    )
    chosen = BACKENDS[name]
    support = chosen.support(q_QHD.device.type)
    # Zero channels up to the head width that the backend supports change no score.
    missing = -head_dim % (support.multiple if support is not None else 1)
    narrow = v_TKD.shape[-1]
    if missing:
        q_QHD, k_TKD = (F.pad(x, (0, missing)) for x in (q_QHD, k_TKD))
    if narrow < head_dim + missing:
        v_TKD = F.pad(v_TKD, (0, head_dim + missing - narrow))
    scale = head_dim**-0.5 if scale is None else scale
    mask = Mask(spans, scale, window, softcap, sinks)
    out = chosen.attend(q_QHD, k_TKD, v_TKD, mask, padding)
    return out[..., :narrow] if narrow < head_dim + missing else out


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    fits = (
        q.dim() == k.dim() == v.dim() == 3
        and k.shape[:2] == v.shape[:2]
        and v.shape[2] <= k.shape[2] == q.shape[2]
    )
    if not fits or (spans.are_equal and q.shape[0] != k.shape[0]):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        queries = "T" if spans.are_equal else "Q"
        raise ValueError(
            f"q, k, v have shapes {shapes}; give [{queries}, H, D], [T, K, D], [T, K, D]"
        )
    heads = q.shape[1]
    groups = k.shape[1]
    if heads % groups:
        raise ValueError(
            f"{heads} query heads cannot be shared among {groups} key heads; give a multiple"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v are of types {q.dtype}, {k.dtype}, {v.dtype}; give one")
    for name, cu in (("cu_seqlens_q", spans.cu_q), ("cu_seqlens_k", spans.cu_k)):
        if cu.dtype != torch.int32 or cu.dim() != 1 or len(cu) != len(spans.cu_q):
            raise ValueError(f"{name} is {cu.dtype} of shape {tuple(cu.shape)}; give int32 [N + 1]")
    if window is not None and window < 1:
        raise ValueError(f"window={window} sees nothing; give at least 1, or None")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap} is no bound; give a positive number, or None")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks have shape {tuple(sinks.shape)}; give [H] with {heads} heads")


class _SharedKeysGather(torch.autograd.Function):
    """Gather rows of ``x``; the backward pass gathers, too, so that sums have one order.

        y[i] = x[index[i]]        dx[t] = Σ_j dy[places[j, t]]  over the valid places

    Bytes a layer, for keys and for values, with S answers to a prompt: 2·(T + K)·H·D forward;
    backward with at most (S + 1)·T in place of K.
    """

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x_THD.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dy_KHD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        total = dy_KHD.new_zeros(1, dtype=torch.promote_types(dy_KHD.dtype, torch.float32))
        for place in places.unbind():
            of_place = dy_KHD.index_select(0, place.clamp(min=0))
            total = total + torch.where((place >= 0)[:, None, None], of_place, 0.0)
        return total.to(dy_KHD.dtype), None, None


def gather_keys(x_THD: Tensor, keys: SharedKeys) -> Tensor:
    """Gather keys or values ``[K, H, D]`` in the order of ``keys.cu_seqlens``.

    For documents that share a prompt, whose tokens are in ``x_THD`` once.

    On a card K may exceed ``keys.cu_seqlens[-1]``, which the host does not know; attention does not
    read the rest.
    """
    index = keys.index
    if not index.is_cuda:
        index = index[: int(keys.cu_seqlens[-1])]
    gathered: Tensor = _SharedKeysGather.apply(x_THD, index, keys.places)
    return gathered
