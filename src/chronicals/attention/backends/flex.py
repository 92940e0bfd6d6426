"""Compiled FlexAttention (Dong et al., 2024) with a block mask of documents, causality and window.

A query attends to the keys from ``lower``, the start of its document or of its window if that is
later, to ``diagonal``, the key of the query's own token. Neither decreases from one query to the next,
so a block of queries visits consecutive key blocks, and the block mask is computed without a matrix
of all queries and keys. The softcap is a score function; sinks rescale the output afterwards, by
the log-sum-exp.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from chronicals.attention.support import Mask, Spans

MASK_BLOCK = 128
"""Queries and keys of a block of the mask."""

MAX_CACHED_MASKS = 8

# fullgraph: when the limit of recompilations is reached, raise instead of falling back to eager
# mode with the whole score matrix.
_compiled: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True)


_masks: OrderedDict[tuple, tuple[tuple[weakref.ref, ...], tuple[int, ...], BlockMask]] = (
    OrderedDict()
)


def block_mask(spans: Spans, queries: int, keys: int, window: int | None) -> BlockMask:
    """Return the block mask of a batch, cached while its bounds are the same unchanged tensors.

    All layers of a forward pass share it.
    """
    bounds = (spans.cu_q,) if spans.are_equal else (spans.cu_q, spans.cu_k)
    if torch.compiler.is_compiling() or (
        spans.cu_q.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return make_block_mask(spans, queries, keys, window)
    if any(cu.is_inference() for cu in bounds):  # inference tensors have no version counter
        return make_block_mask(spans, queries, keys, window)
    key = (*map(id, bounds), queries, keys, window)
    versions = tuple(cu._version for cu in bounds)
    entry = _masks.pop(key, None)
    if (
        entry is None
        or any(reference() is not cu for reference, cu in zip(entry[0], bounds))
        or entry[1] != versions
    ):
        entry = (
            tuple(map(weakref.ref, bounds)),
            versions,
            make_block_mask(spans, queries, keys, window),
        )
    _masks[key] = entry
    while len(_masks) > MAX_CACHED_MASKS:
        _masks.popitem(last=False)
    return entry[2]


def make_block_mask(spans: Spans, queries: int, keys: int, window: int | None) -> BlockMask:
    """Compute which 128 × 128 blocks of queries and keys are visible in full, in part or not at all."""
    device = spans.cu_q.device
    place = torch.arange(queries, device=device, dtype=torch.int32)
    document = torch.searchsorted(spans.cu_q, place, right=True) - 1
    lower = spans.cu_k[document]
    diagonal = place
    if not spans.are_equal:
        diagonal = place + spans.cu_k[document + 1] - spans.cu_q[document + 1]
    if window is not None:
        lower = torch.maximum(lower, diagonal - (window - 1))

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= lower[query])

    def seen_with_own_bounds(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= diagonal[query]) & (key >= lower[query])

    rows = (queries + MASK_BLOCK - 1) // MASK_BLOCK
    columns = (keys + MASK_BLOCK - 1) // MASK_BLOCK
    row = torch.arange(rows, device=device, dtype=torch.int32)
    column = torch.arange(columns, device=device, dtype=torch.int32)
    first = row * MASK_BLOCK
    last = ((row + 1) * MASK_BLOCK - 1).clamp(max=queries - 1)
    # Visited blocks are lowest..highest, both included; fully visible ones whole..end, end excluded.
    lowest = lower[first] // MASK_BLOCK
    highest = diagonal[last] // MASK_BLOCK
    end = (diagonal[first] + 1) // MASK_BLOCK
    whole = torch.minimum((lower[last] + MASK_BLOCK - 1) // MASK_BLOCK, end)
    before = whole - lowest
    after = (column[None] + (end - before)[:, None]).clamp(max=columns - 1)
    parts = torch.where(column[None] < before[:, None], column[None] + lowest[:, None], after)
    wholes = (column[None] + whole[:, None]).clamp(max=columns - 1)
    return BlockMask.from_kv_blocks(
        (before + highest - end + 1)[None, None],
        parts[None, None],
        (end - whole)[None, None],
        wholes[None, None],
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=seen if spans.are_equal else seen_with_own_bounds,
        seq_lengths=(queries, keys),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, _padding: int = 0) -> Tensor:
    """Compute attention as ``document_attention`` describes it, by compiled FlexAttention."""
    softcap = mask.softcap
    sinks = mask.sinks

    def capped(score: Tensor, *_place: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    options: dict[str, Any] = {
        "score_mod": None if softcap is None else capped,
        "block_mask": block_mask(mask.spans, q.shape[0], k.shape[0], mask.window),
        "scale": mask.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if sinks is not None:
        options["return_aux"] = AuxRequest(lse=True)
    q_BHTD, k_BKTD, v_BKTD = (x.transpose(0, 1)[None] for x in (q, k, v))
    if torch.compiler.is_compiling():
        found = _compiled(q_BHTD, k_BKTD, v_BKTD, **options)
    else:
        # Else torch.compile would make scale and softcap inputs when they change, which the kernel
        # does not support.
        with torch._dynamo.config.patch(specialize_float=True):
            found = _compiled(q_BHTD, k_BKTD, v_BKTD, **options)
    if sinks is None:
        return found[0].transpose(0, 1)
    out, aux = found
    share_BHT = torch.sigmoid(aux.lse - sinks.float()[:, None])
    return (out * share_BHT[..., None]).to(q.dtype)[0].transpose(0, 1)
