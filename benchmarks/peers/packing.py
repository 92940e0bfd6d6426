"""A step's documents packed into one row, as transformers' flash attention takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chronicals.benchmark.arms.loop import PaddedStep
from chronicals.benchmark.work import Document


def packed(documents: Sequence[Document], place: torch.device) -> PaddedStep:
    """Return the documents one after the other in a single row, for an attention that separates
    documents wherever ``position_ids`` restart at 0.
    """
    ids = torch.from_numpy(
        np.concatenate([np.asarray(document.ids, np.int64) for document in documents])
    )
    labels = torch.from_numpy(
        np.concatenate([np.asarray(document.labels, np.int64) for document in documents])
    )
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    labels[positions == 0] = -100
    tensors = {"input_ids": ids, "labels": labels, "position_ids": positions}
    arguments = {name: x[None].to(place) for name, x in tensors.items()}
    arguments |= flash_lengths(arguments["position_ids"])
    return PaddedStep([(arguments, 1.0)], len(ids), len(ids))


def flash_lengths(position_ids: Tensor) -> dict[str, Any]:
    """Return the bounds of packed documents and the longest length, as arguments of transformers'
    flash attention.

    Without them it computes them in each layer anew, and passes the longest length as a tensor,
    which FlashAttention-4 refuses.

    Args:
        position_ids: of a packed row, ``[1, length]``; each document restarts at 0.
    """
    flat = position_ids.flatten()
    ends = torch.tensor([len(flat)], dtype=torch.int32, device=flat.device)
    bounds = torch.cat([(flat == 0).nonzero().flatten().to(torch.int32), ends])
    longest = int(bounds.diff().max())
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
