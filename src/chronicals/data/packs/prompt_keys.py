"""What the documents of a Batch attend to where answers share a prompt (``shared_prompts.py``)."""

from __future__ import annotations

import numpy as np
import torch

from chronicals.batch import SharedKeys
from chronicals.data.making.shared_prompts import IS_SHARED
from chronicals.data.packs.assembly import WIDTH_BUCKETS

KEY_SHARES = 16
"""Keys of a Batch are filled up to a multiple of such a share of its tokens, so that few numbers
occur.
"""


def shared_keys(
    shared: np.ndarray, sides: np.ndarray, bounds: np.ndarray, width: int
) -> SharedKeys:
    """What the documents of a Batch attend to.

    Args:
        shared: int64 ``[N]``, the column of each document, 0 for filler.
        sides: int64 ``[N]``, the place of each in its item.
        bounds: int32 ``[N + 1]``, of the documents.
        width: tokens of a pack.
    """
    starts = bounds[:-1].astype(np.int64)
    lengths = np.diff(bounds).astype(np.int64)
    tokens = int(bounds[-1])
    before = np.maximum(shared, 0)
    number = np.arange(len(shared))
    prompts = np.where(shared == IS_SHARED, number, len(shared) - 1)
    prompt = starts[
        np.minimum.accumulate(prompts[::-1])[::-1]
    ]  # an item's is the next one behind its answers
    ends = np.append(0, np.cumsum(before + lengths))
    document = np.repeat(number, before + lengths)
    within = np.arange(ends[-1]) - ends[document]
    own = within >= before[document]
    index = np.where(own, starts[document] + within - before[document], prompt[document] + within)
    places = np.full((int(sides[before > 0].max(initial=-1)) + 2, tokens), -1, np.int64)
    row = np.where(own, 0, sides[document] + 1)
    places[row, index] = np.arange(len(index))
    share = -(-tokens // KEY_SHARES)
    filled = np.zeros(-(-len(index) // share) * share, np.int64)
    filled[: len(index)] = index
    longest = int((before + lengths).max(initial=1))
    divisor = WIDTH_BUCKETS
    while -(-width // divisor) < longest and divisor > 1:
        divisor //= 2
    return SharedKeys(
        torch.as_tensor(filled),
        torch.as_tensor(ends.astype(np.int32)),
        torch.as_tensor(places),
        -(-width // divisor),
    )
