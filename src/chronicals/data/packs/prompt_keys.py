"""Keys that documents attend to if answers share a prompt (``shared_prompts.py``)."""

from __future__ import annotations

import numpy as np
import torch

from chronicals.batch import SharedKeys
from chronicals.data.making.shared_prompts import IS_SHARED
from chronicals.data.packs.assembly import width_bucket

KEY_SHARES = 16
"""The number of keys is rounded up to a multiple of 1 / ``KEY_SHARES`` of a Batch's tokens.

Few numbers then occur.
"""


def shared_keys(
    shared: np.ndarray, sides: np.ndarray, bounds: np.ndarray, width: int
) -> SharedKeys:
    """Return the keys that the documents of a Batch attend to.

    The keys of a document are the tokens of its prompt, then its own.

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
    # The prompt of an item is the next one behind its answers.
    number = np.arange(len(shared))
    prompts = np.where(shared == IS_SHARED, number, len(shared) - 1)
    prompt_starts = starts[np.minimum.accumulate(prompts[::-1])[::-1]]
    # For each key: its document, and its place among the keys of that document.
    ends = np.append(0, np.cumsum(before + lengths))
    document = np.repeat(number, before + lengths)
    place = np.arange(ends[-1]) - ends[document]
    is_own = place >= before[document]
    own_tokens = starts[document] + place - before[document]
    index = np.where(is_own, own_tokens, prompt_starts[document] + place)
    # For each token: its key as a document's own (row 0), and as part of each answer's prompt.
    places = np.full((int(sides[before > 0].max(initial=-1)) + 2, tokens), -1, np.int64)
    row = np.where(is_own, 0, sides[document] + 1)
    places[row, index] = np.arange(len(index))
    share = -(-tokens // KEY_SHARES)
    filled = np.zeros(-(-len(index) // share) * share, np.int64)
    filled[: len(index)] = index
    return SharedKeys(
        torch.as_tensor(filled),
        torch.as_tensor(ends.astype(np.int32)),
        torch.as_tensor(places),
        width_bucket(int((before + lengths).max(initial=1)), width),
    )
