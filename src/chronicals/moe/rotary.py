"""Rotary tables whose frequencies stay in fp32: a model that is cast computes what it computes
after saving and loading.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Self

from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from chronicals.moe.configuration import ChronicalsMoeConfig


class ChronicalsMoeRotaryEmbedding(Qwen3MoeRotaryEmbedding):
    """``(x, position_ids [B, S])`` to cosines and sines ``[B, S, width]`` in the dtype of ``x``.

    Args:
        width: of what is rotated.
    """

    def __init__(self, config: ChronicalsMoeConfig, width: int):
        config = copy.copy(config)
        config.head_dim = width
        super().__init__(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As of every module, but for dtypes."""

        def moved(x: Tensor) -> Tensor:
            found = fn(x)
            return found if found.dtype == x.dtype or x.is_meta else x.to(found.device)

        return super()._apply(moved, recurse)
