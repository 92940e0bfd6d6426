"""LoRAEmbedding: a frozen input embedding with an adapter beside it.

    y = (W + s · (B A)ᵀ)[ids] · e          W [V, D], A [r, V], B [D, r]; e: the scale of classes that have one (Gemma 3), else 1

A starts at zero and B normal, as PEFT starts them: the model is at first unchanged. There is no
dropout, since the inputs are ids.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.lora.adapter_layer import AdapterLayer, draw, exact
from chronicals.lora.config import LoRAConfig


class LoRAEmbedding(AdapterLayer):
    """An input embedding with an adapter.

    Args:
        base_layer: an embedding for which ``is_embedding`` is true; it is frozen.
        config: rank and scale.
    """

    MATRICES = ("lora_embedding_A", "lora_embedding_B")
    lora_embedding_A: nn.Parameter
    lora_embedding_B: nn.Parameter

    def __init__(self, base_layer: nn.Embedding, config: LoRAConfig):
        super().__init__(base_layer, config)
        rows, width = base_layer.weight.shape
        self._make_matrices((config.rank, rows), (width, config.rank), base_layer.weight.device)
        nn.init.zeros_(self.lora_embedding_A)
        draw(self.lora_embedding_B, nn.init.normal_)

    @property
    def weight(self) -> Any:
        """The base's weight without the adapter, since a head that is tied to it has none."""
        return self.base_layer.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.base_layer(ids)
        if not self.enabled:
            return y
        base: Any = self.base_layer
        a, b = self.pair
        rows = F.embedding(ids, a.t(), base.padding_idx, scale_grad_by_freq=base.scale_grad_by_freq)
        added = F.linear(rows.to(y.dtype), b.to(y.dtype)) * self.scale
        factor = getattr(base, "embed_scale", None)
        if factor is not None:
            added = added * torch.as_tensor(factor).to(added.device, base.weight.dtype)
        return y + added.to(y.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        a, b = self.pair
        weight: Tensor = self.weight
        weight.copy_(exact(weight) + (self.scale * (b @ a)).t().to(weight.device))


def is_embedding(layer: Any) -> bool:
    """Return whether the layer computes ``W[ids]``, or that times its ``embed_scale``. A class with
    another forward than ``nn.Embedding`` is tried with a small copy.
    """
    if not isinstance(layer, nn.Embedding) or layer.max_norm is not None or layer.sparse:
        return False
    if type(layer).forward is nn.Embedding.forward:
        return "embed_scale" not in vars(layer) and "embed_scale" not in layer._buffers
    ids = torch.tensor([[4, 1, 1], [0, 3, 2]])
    with torch.random.fork_rng(devices=[]):
        small = nn.Embedding(5, 3, device="cpu", dtype=torch.float32)
    expected = small(ids)
    small.__dict__ = {
        name: value for name, value in vars(layer).items() if name != "forward"
    } | vars(small)
    small.__class__ = type(layer)
    try:
        small._buffers = {
            name: buffer.float().cpu()
            for name, buffer in layer._buffers.items()
            if buffer is not None
        }
        got = small(ids)
        factor = torch.as_tensor(getattr(layer, "embed_scale", 1.0)).float().cpu()
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return False
    return (
        factor.numel() == 1
        and got.shape == expected.shape
        and torch.allclose(got, expected * factor, rtol=1e-4)
    )
