"""Compiled FlexAttention (Dong et al., 2024) with a block mask of documents, causality and window.

A token sees the tokens from ``lower`` to itself: the start of its document, or of its window if that is later. As ``lower``
never falls, a block of queries sees one run of key blocks, so the block mask is counted out without a T × T matrix.
Softcap is a function of the score; sinks take their share afterwards, by the log-sum-exp.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK, KEPT = 128, 8

# fullgraph: where recompilation reaches its limit it raises, instead of running with the whole score matrix.
_compiled: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True)


def _run(*tensors: Tensor, **options: Any) -> Any:
    """Scale and softcap stay constants of the kernel when a second value comes; it takes no numbers as inputs."""
    if torch.compiler.is_compiling():
        return _compiled(*tensors, **options)
    with torch._dynamo.config.patch(specialize_float=True):
        return _compiled(*tensors, **options)


_masks: OrderedDict[tuple, tuple[weakref.ref, int, BlockMask]] = OrderedDict()


def block_mask(cu: Tensor, tokens: int, window: int | None) -> BlockMask:
    """The mask of a batch, made once: kept as long as ``cu`` is the same tensor with the same contents."""
    if torch.compiler.is_compiling() or (cu.is_cuda and torch.cuda.is_current_stream_capturing()) or cu.is_inference():
        return make_block_mask(cu, tokens, window)
    key = (id(cu), tokens, window)
    kept = _masks.pop(key, None)
    if kept is None or kept[0]() is not cu or kept[1] != cu._version:
        kept = (weakref.ref(cu), cu._version, make_block_mask(cu, tokens, window))
    _masks[key] = kept
    while len(_masks) > KEPT:
        _masks.popitem(last=False)
    return kept[2]


def make_block_mask(cu: Tensor, tokens: int, window: int | None) -> BlockMask:
    """From bounds ``[N + 1]``: 128 × 128 blocks that are seen whole, in part, or not at all."""
    place = torch.arange(tokens, device=cu.device, dtype=torch.int32)
    lower = cu[torch.searchsorted(cu, place, right=True) - 1]
    if window is not None:
        lower = torch.maximum(lower, place - (window - 1))

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= lower[query])

    rows = (tokens + BLOCK - 1) // BLOCK
    row = torch.arange(rows, device=cu.device, dtype=torch.int32)
    first, last = row * BLOCK, ((row + 1) * BLOCK - 1).clamp(max=tokens - 1)
    lowest = lower[first] // BLOCK
    whole = torch.minimum((lower[last] + BLOCK - 1) // BLOCK, row)
    # in part: the blocks from lowest to whole, and the diagonal; whole: those between
    before = whole - lowest
    parts = torch.where(row[None] < before[:, None], row[None] + lowest[:, None], row[:, None])
    wholes = (row[None] + whole[:, None]).clamp(max=rows - 1)
    return BlockMask.from_kv_blocks(
        (before + 1)[None, None], parts[None, None], (row - whole)[None, None], wholes[None, None],
        BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(tokens, tokens),
    )  # fmt: skip


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, _longest: int, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None, _room: int = 0,
) -> Tensor:  # fmt: skip
    def capped(score: Tensor, *_place: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    options: dict[str, Any] = {
        "score_mod": None if softcap is None else capped,
        "block_mask": block_mask(cu, q.shape[0], window),
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    q_BHTD, k_BKTD, v_BKTD = (x.transpose(0, 1)[None] for x in (q, k, v))
    if sinks is None:
        return _run(q_BHTD, k_BKTD, v_BKTD, **options)[0].transpose(0, 1)
    out, aux = _run(q_BHTD, k_BKTD, v_BKTD, **options, return_aux=AuxRequest(lse=True))
    share_BHT = torch.sigmoid(aux.lse - sinks.float()[:, None])
    return (out * share_BHT[..., None]).to(q.dtype)[0].transpose(0, 1)

