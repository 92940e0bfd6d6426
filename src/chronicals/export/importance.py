"""How much each column of a weight matters: the mean square of what it is multiplied with, over a user's own rows.

llama.cpp weighs the error of quantising by it (an importance matrix).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from chronicals.export.gguf_tensors import Piece
from chronicals.export.part_names import language_name

TOKENS = 1 << 16
"""Enough to be measured over."""


@torch.no_grad()
def importance_of(model: Any, pieces: list[Piece], documents: list[list[int]]) -> dict[str, np.ndarray]:
    """fp32 ``[in]`` by the name of a tensor in the file, of those that are one linear layer's weight.

    Args:
        model: in the names of whose modules the pieces' sources are, but for a language part's.
        documents: token ids, of which the first ``TOKENS`` are taken.
    """
    layers = {language_name(name) or name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    named = {
        p.name: layers[path] for p in pieces if (path := p.sources[0].removesuffix(".weight")) in layers and len(p.sources) == 1
    }
    sums = {name: torch.zeros(layer.in_features, dtype=torch.float64) for name, layer in named.items()}
    counts = dict.fromkeys(named, 0)

    def add(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2).float()
        sums[name] += x.square().sum(0).double().cpu()
        counts[name] += len(x)

    hooks = [layer.register_forward_pre_hook(partial(add, name)) for name, layer in named.items()]
    seen, device = 0, next(model.parameters()).device
    try:
        for ids in documents:
            model(torch.tensor([ids], device=device))
            seen += len(ids)
            if seen >= TOKENS:
                break
    finally:
        for hook in hooks:
            hook.remove()
    return {name: (sums[name] / max(counts[name], 1)).float().numpy() for name in named if counts[name]}
