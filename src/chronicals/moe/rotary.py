"""Rotary embedding whose frequencies stay in fp32 when the model is cast.

A cast model therefore computes the same values before saving and after loading.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Self

from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from chronicals.moe.configuration import ChronicalsMoeConfig


class ChronicalsMoeRotaryEmbedding(Qwen3MoeRotaryEmbedding):
    """Map ``(x, position_ids [B, S])`` to cosines and sines ``[B, S, width]`` in the dtype of
    ``x``.

    Args:
        width: number of rotated channels of a head.
    """

    def __init__(self, config: ChronicalsMoeConfig, width: int):
        config = copy.copy(config)
        config.head_dim = width
        super().__init__(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move buffers between devices like any module, but ignore changes of dtype."""

        def moved(x: Tensor) -> Tensor:
            found = fn(x)
            return found if found.dtype == x.dtype or x.is_meta else x.to(found.device)

        return super()._apply(moved, recurse)
