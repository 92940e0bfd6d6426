"""Sliding-window attention: grouped queries, norms on queries and keys, rotary positions.

    o_t = Σ_j softmax_j(q_t · k_j / sqrt(D)) v_j        t - W < j <= t

Only the mask defines the window, so training, prompts and single decoding steps see the same keys.
Positions count from the document's first token, even if a cache has dropped it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from chronicals.moe.configuration import ChronicalsMoeConfig


class SlidingAttention(nn.Module):
    """An attention layer in which a token sees the last ``config.sliding_window`` tokens."""

    is_causal = True

    def __init__(self, config: ChronicalsMoeConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.attention_dropout = config.attention_dropout
        self.sliding_window = config.sliding_window
        key_value_heads, self.head_dim = config.sliding_sizes
        self.num_key_value_groups = config.num_attention_heads // key_value_heads
        self.scaling = self.head_dim**-0.5
        hidden = config.hidden_size
        bias = config.attention_bias
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = Qwen3MoeRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3MoeRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output ``[B, Q, D]`` for ``hidden_states`` ``[B, Q, D]``, and the attention
        weights.

        The weights are None if the attention function does not return them.
        """
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states, self.layer_idx)
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(attn_output.reshape(*input_shape, -1).contiguous()), attn_weights
