"""The attention layers of the native model: latent attention and sliding-window attention.

Latent attention has several heads and one rotary key for all of them (DeepSeek-V2, 2024, arXiv
2405.04434, equations 9 to 19):

    c_t = norm(W_DKV h_t)                       the latent, R wide
    k^R_t = rope(W_KR h_t)                      the rotary key, shared by all heads
    [k^C_t,i ; v_t,i] = W_UK,i c_t ; W_UV,i c_t
    q_t,i = [q^C_t,i ; rope(q^R_t,i)]
    o_t,i = Σ_j softmax_j((q^C_t,i · k^C_j,i + q^R_t,i · k^R_j) / sqrt(N + P)) v_j,i

The cache holds only (c_t, k^R_t). With few queries, the products with W_UK and W_UV are applied to
the queries instead of the T cached tokens ("absorbed"). The result is the same by associativity:

    q^C_t,i · (W_UK,i c_j) = (W_UK,iᵀ q^C_t,i) · c_j        Σ_j p_j W_UV,i c_j = W_UV,i Σ_j p_j c_j

Sliding-window attention has grouped queries, norms on queries and keys, and rotary positions:

    o_t = Σ_j softmax_j(q_t · k_j / sqrt(D)) v_j        t - W < j <= t

Only the mask defines the window, so training, prompts and single decoding steps see the same keys.
Positions count from the document's first token, even if a cache has dropped it.

Shapes: B batch, Q queries, T keys, H heads, R latent width, N and P widths of the plain and rotary
part of a head, V width of its value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from chronicals.moe.configuration import ChronicalsMoeConfig


class CachedAttention(nn.Module):
    """Base of both attention layers: their settings, and the model's attention function."""

    is_causal = True
    scaling: float

    def __init__(self, config: ChronicalsMoeConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.attention_dropout = config.attention_dropout

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output ``[B, Q, H, V]`` and the weights, by ``config._attn_implementation``.

        Args:
            queries: ``[B, H, Q, .]``.
            keys: ``[B, ., T, .]``.
            values: ``[B, ., T, V]``.
            mask: in the form that the attention function takes.
            **kwargs: passed on, such as document bounds.
        """
        function: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        return function(
            self,
            queries,
            keys,
            values,
            mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )


class LatentAttention(CachedAttention):
    """A latent attention layer.

    Attributes:
        absorbs_up_to: largest number of queries for which the absorbed products take fewer
            operations than computing keys and values; None if they always do.
    """

    num_key_value_groups = 1

    def __init__(self, config: ChronicalsMoeConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.plain = config.qk_nope_head_dim
        self.rotary = config.qk_rope_head_dim
        self.value = config.v_head_dim
        self.rank = config.kv_lora_rank
        self.heads = config.num_attention_heads
        self.scaling = (self.plain + self.rotary) ** -0.5
        hidden = config.hidden_size
        bias = config.attention_bias
        queries = self.heads * (self.plain + self.rotary)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = Qwen3MoeRMSNorm(config.q_lora_rank, eps=config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rotary, bias=bias)
        self.kv_a_layernorm = Qwen3MoeRMSNorm(self.rank, eps=config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.plain + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=bias)
        made = self.rank * (self.plain + self.value)
        extra = 2 * self.rank - self.plain - self.value
        self.absorbs_up_to = made // extra if extra > 0 else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output ``[B, Q, D]`` and the attention weights of ``[B, Q, D]``.

        The weights are ``[B, H, Q, T]``, or None if the attention function does not compute them.
        """
        shape = hidden_states.shape[:-1]
        if self.config.q_lora_rank is None:
            projected = self.q_proj(hidden_states)
        else:
            projected = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q_BHQX = projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q_BHQN, q_BHQP = q_BHQX.split([self.plain, self.rotary], dim=-1)
        latent, rotary = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.rank, self.rotary], dim=-1
        )
        c_B1TR = self.kv_a_layernorm(latent)[:, None]
        k_B1TP = rotary[:, None]
        q_BHQP, k_B1TP = apply_rotary_pos_emb(q_BHQP, k_B1TP, *position_embeddings)
        if cache is not None:
            c_B1TR, k_B1TP = cache.update(c_B1TR, k_B1TP, self.layer_idx)
        queries = shape[1]
        keys = c_B1TR.shape[2]
        mask = attention_mask
        # FlashAttention's mask [B, n] marks which of the first n keys are tokens; a single query
        # sees all of these.
        if queries == 1 and isinstance(mask, Tensor) and mask.ndim == 2:
            mask = nn.functional.pad(mask.bool(), (0, keys - mask.shape[1]))[:, None, None]
        weights: Tensor | None
        if cache is not None and self._absorbs(queries, keys, mask):
            out_BQHV, weights = self._attend_latents(q_BHQN, q_BHQP, c_B1TR, k_B1TP, mask)
        else:
            kv_BHTX = self.kv_b_proj(c_B1TR[:, 0]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            k_BHTN, v_BHTV = kv_BHTX.split([self.plain, self.value], dim=-1)
            out_BQHV, weights = self.attend(
                torch.cat((q_BHQN, q_BHQP), dim=-1),
                torch.cat((k_BHTN, k_B1TP.expand(-1, self.heads, -1, -1)), dim=-1),
                v_BHTV,
                attention_mask,
                **kwargs,
            )
        return self.o_proj(out_BQHV.reshape(*shape, -1)), weights

    def _absorbs(self, queries: int, keys: int, mask: Any) -> bool:
        """Return whether to use the absorbed products.

        They are used if they take fewer operations and the mask is a matrix, or absent with one
        query.
        """
        if self.training and self.attention_dropout:
            return False
        if self.absorbs_up_to is not None and queries > self.absorbs_up_to:
            return False
        # A prompt: fused attention kernels have keys and values to read then.
        if queries == keys and queries > 1:
            return False
        return (mask is None and queries == 1) or (isinstance(mask, Tensor) and mask.ndim == 4)

    def _attend_latents(
        self, q_BHQN: Tensor, q_BHQP: Tensor, c_B1TR: Tensor, k_B1TP: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend with the absorbed products; scores and softmax are in fp32.

        Returns:
            The output ``[B, Q, H, V]`` and the weights ``[B, H, Q, T]``.
        """
        # The effective weight of kv_b_proj, with any adapters.
        layer = self.kv_b_proj
        if type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks:
            weight = layer.weight
        else:
            like = self.kv_a_layernorm.weight
            weight = layer(torch.eye(self.rank, dtype=like.dtype, device=like.device)).mT
        w_HXR = weight.unflatten(0, (self.heads, -1))
        w_HNR, w_HVR = w_HXR.split([self.plain, self.value], dim=1)
        q_BHQR = torch.einsum("bhqn,hnr->bhqr", q_BHQN, w_HNR)
        B, H, Q, _ = q_BHQR.shape
        rows_BXR = q_BHQR.reshape(B, H * Q, -1)
        rows_BXP = q_BHQP.reshape(B, H * Q, -1)
        # One product for all heads: they share the keys.
        scores = rows_BXR @ c_B1TR[:, 0].mT + rows_BXP @ k_B1TP[:, 0].mT
        scores = (
            scores.view(B, H, Q, -1).to(torch.promote_types(scores.dtype, torch.float32))
            * self.scaling
        )
        if mask is not None:
            scores = (
                scores.masked_fill(~mask, float("-inf"))
                if mask.dtype == torch.bool
                else scores + mask
            )
        # A padding token sees nothing: its softmax is not a number.
        weights = scores.softmax(-1).nan_to_num(0.0).to(q_BHQN.dtype)
        out_BHQR = (weights.reshape(B, H * Q, -1) @ c_B1TR[:, 0]).view(B, H, Q, -1)
        return torch.einsum("bhqr,hvr->bqhv", out_BHQR, w_HVR), weights


class SlidingAttention(CachedAttention):
    """An attention layer in which a token sees the last ``config.sliding_window`` tokens."""

    def __init__(self, config: ChronicalsMoeConfig, layer_idx: int):
        super().__init__(config, layer_idx)
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
        """Return the output ``[B, Q, D]`` and the attention weights of ``[B, Q, D]``.

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
        attn_output, attn_weights = self.attend(
            query_states,
            key_states,
            value_states,
            attention_mask,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(attn_output.reshape(*input_shape, -1).contiguous()), attn_weights


class ChronicalsMoeRotaryEmbedding(Qwen3MoeRotaryEmbedding):
    """Map ``(x, position_ids [B, S])`` to cosines and sines ``[B, S, width]`` in x's dtype.

    The frequencies stay in fp32 when the model is cast. A cast model therefore computes the same
    values before saving and after loading.

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
