"""Routed and shared experts.

    p = softmax(W_r x)      S = the k largest of p      w_e = p_e / Σ_{e' ∈ S} p_e'
    y = Σ_{e ∈ S} w_e E_e(x) + E_shared(x)      E(x) = W_down (silu(W_gate x) ⊙ W_up x)

Experts have no capacity limit: no token is dropped. ``n`` shared experts are stored as one expert
of n times the width, which is the same function.

Shapes: T tokens, k experts per token, E experts, D hidden size, I expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

from chronicals.moe.configuration import ChronicalsMoeConfig


@use_experts_implementation
class RoutedExperts(nn.Module):
    """Experts with stacked weights.

    ``config._experts_implementation`` names the implementation; ``forward`` is ``eager``, the
    reference.
    """

    def __init__(self, config: ChronicalsMoeConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(
            torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        )
        self.down_proj = nn.Parameter(
            torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim)
        )
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, ``[T, D]``.

        Args:
            hidden_states: ``[T, D]``.
            top_k_index: int64 ``[T, k]``, the experts of each token.
            top_k_weights: ``[T, k]``.
        """
        out_TD = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique():
            token, slot = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            found = (
                F.linear(self.act_fn(gate) * up, self.down_proj[expert])
                * top_k_weights[token, slot, None]
            )
            out_TD = out_TD.index_add(0, token, found.to(out_TD.dtype))
        return out_TD


class TopKRouter(nn.Module):
    """Router that chooses the k experts of each token; logits and softmax are computed in fp32."""

    def __init__(self, config: ChronicalsMoeConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights and chosen experts for ``hidden_states`` ``[T, D]``.

        Returns:
            Logits ``[T, E]``, weights ``[T, k]`` in the dtype of the input, and expert ids, int64
            ``[T, k]``.
        """
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        with torch.autocast(hidden_states.device.type, enabled=False):
            logits = F.linear(hidden_states.to(wide), self.weight.to(wide))
        weights, experts = logits.softmax(-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(hidden_states.dtype), experts


class MixtureOfExperts(nn.Module):
    """Feed-forward block: the routed experts of each token plus the shared experts."""

    def __init__(self, config: ChronicalsMoeConfig):
        super().__init__()
        self.gate = TopKRouter(config)
        self.experts = RoutedExperts(config)
        width = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = Qwen3MoeMLP(config, intermediate_size=width) if width else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[B, S, D]`` to ``[B, S, D]``."""
        flat_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, experts = self.gate(flat_TD)
        out = self.experts(flat_TD, experts, weights).view_as(hidden_states)
        return out if self.shared_experts is None else out + self.shared_experts(hidden_states)
