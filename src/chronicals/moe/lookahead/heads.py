"""Heads that predict which experts later layers and tokens will choose.

Layer-ahead head of layer l and distance d = 0 … D, from x_l, the normed input of layer l before its
attention:

    z'_{l,d} = W_{l+d} x_l + b_{l+d} + U_{l,d} silu(V_l x_l) + u_{l,d}

W_{l+d} and b_{l+d} are the weight and bias of the router of layer l + d. If U and u are zero, this
is that router applied early ("gate reuse": Fate, 2025, arXiv 2502.12224). W gets no gradient.

Token-ahead head of layer l and distance k = 1 … K, from the last hidden state of token t and the
embedding of the next token:

    z''_{k,l} = (P silu(Q [rms(h_t) ; rms(e_{t+1})] + q) + p)_{k,l}

It predicts the experts of layer l for token t + k. Both parts of the input are normed to a mean
square of one, because embeddings are often much smaller than hidden states.

Shapes: L layers with routers, E experts, D hidden size, R rank, N = D + 1 distances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerAhead(nn.Module):
    """Layer-ahead heads of all layers.

    The weights are plain parameters, not linear layers, so that quantisation and adapters skip
    them.

    Args:
        layers: L.
        furthest: the largest distance; a layer has no head for distances beyond the last layer.
    """

    def __init__(self, layers: int, hidden_size: int, num_experts: int, furthest: int, rank: int):
        super().__init__()
        self.layers = layers
        self.furthest = min(furthest, layers - 1)
        self.shape = (layers, self.furthest + 1, num_experts)
        self.down = nn.Parameter(torch.empty(layers * rank, hidden_size))
        self.up = nn.Parameter(torch.zeros(math.prod(self.shape), rank))
        self.bias = nn.Parameter(torch.zeros(math.prod(self.shape)))
        # Zeros: at first the heads predict by gate reuse.
        with torch.no_grad():
            self.down.normal_(std=hidden_size**-0.5)

    def distances(self, layer: int) -> int:
        """Return the number of layers whose experts ``layer`` predicts, itself included."""
        return min(self.furthest, self.layers - 1 - layer) + 1

    def forward(
        self,
        layer: int,
        x: Tensor,
        gates: Sequence[Tensor],
        biases: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Predict router logits for n distances, fp32 ``[..., n, E]``.

        Args:
            layer: index of the layer that predicts.
            x: ``[..., D]``, its normed input.
            gates: ``[E, D]``, the router weights of all layers.
            biases: ``[E]`` each, the router biases of all layers, if any.
        """
        n = self.distances(layer)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        own = slice(layer, layer + n)
        offsets = [None] * len(gates) if biases is None else list(biases)
        early = []  # logits of the later routers, without a gradient to their weights
        for gate, bias in zip(gates[own], offsets[own]):
            offset = None if bias is None else bias.detach().to(x.dtype)
            early.append(F.linear(x, gate.detach().to(x.dtype), offset))
        inner = F.silu(F.linear(x, self.down.unflatten(0, (self.layers, -1))[layer].to(x.dtype)))
        up_NER = self.up.unflatten(0, self.shape)[layer, :n]
        bias_NE = self.bias.unflatten(0, self.shape)[layer, :n]
        own_part = torch.einsum("...r,ner->...ne", inner, up_NER.to(x.dtype))
        return torch.stack(early, -2) + own_part + bias_NE.to(x.dtype)


class TokenAhead(nn.Module):
    """Token-ahead head for all layers."""

    def __init__(self, layers: int, hidden_size: int, num_experts: int, tokens: int, rank: int):
        super().__init__()
        self.shape = (tokens, layers, num_experts)
        self.down = nn.Parameter(torch.empty(rank, 2 * hidden_size))
        self.down_bias = nn.Parameter(torch.zeros(rank))
        self.up = nn.Parameter(torch.empty(tokens * layers * num_experts, rank))
        self.up_bias = nn.Parameter(torch.zeros(tokens * layers * num_experts))
        # At first the predictions are almost equal for all experts.
        with torch.no_grad():
            self.down.normal_(std=self.down.shape[-1] ** -0.5)
            self.up.normal_(std=0.02)

    def forward(self, hidden: Tensor, next_embedding: Tensor) -> Tensor:
        """Predict router logits of the next K tokens, fp32 ``[..., K, L, E]``.

        Args:
            hidden: ``[..., D]``, the last hidden state of a token.
            next_embedding: ``[..., D]``, the embedding of the token after it.
        """
        wide = torch.promote_types(hidden.dtype, torch.float32)
        x = torch.cat(
            [
                F.rms_norm(part.to(wide), part.shape[-1:], eps=1e-12)
                for part in (hidden, next_embedding)
            ],
            -1,
        )
        inner = F.silu(F.linear(x, self.down.to(x.dtype), self.down_bias.to(x.dtype)))
        return F.linear(inner, self.up.to(x.dtype), self.up_bias.to(x.dtype)).unflatten(
            -1, self.shape
        )
