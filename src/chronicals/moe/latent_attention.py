"""Multi-head latent attention with one rotary key for all heads.

DeepSeek-V2, 2024, arXiv 2405.04434, equations 9 to 19:

    c_t = norm(W_DKV h_t)                       the latent, R wide
    k^R_t = rope(W_KR h_t)                      the rotary key, shared by all heads
    [k^C_t,i ; v_t,i] = W_UK,i c_t ; W_UV,i c_t
    q_t,i = [q^C_t,i ; rope(q^R_t,i)]
    o_t,i = Σ_j softmax_j((q^C_t,i · k^C_j,i + q^R_t,i · k^R_j) / sqrt(N + P)) v_j,i

The cache holds only (c_t, k^R_t). With few queries, the products with W_UK and W_UV are applied to
the queries instead of the T cached tokens ("absorbed"). The result is the same by associativity:

    q^C_t,i · (W_UK,i c_j) = (W_UK,iᵀ q^C_t,i) · c_j        Σ_j p_j W_UV,i c_j = W_UV,i Σ_j p_j c_j

Shapes: B batch, Q queries, T keys, H heads, R latent width, N and P widths of the plain and rotary
part of a head, V width of its value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from chronicals.moe.configuration import ChronicalsMoeConfig


class LatentAttention(nn.Module):
    """A latent attention layer.

    Attributes:
        absorbs_up_to: largest number of queries for which the absorbed products take fewer
            operations than computing keys and values; None if they always do.
    """

    num_key_value_groups = 1
    is_causal = True

    def __init__(self, config: ChronicalsMoeConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.attention_dropout = config.attention_dropout
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
        """Return the output ``[B, Q, D]`` for ``hidden_states`` ``[B, Q, D]``, and the attention
        weights.

        The weights are ``[B, H, Q, T]``, or None if the attention function does not compute them.
        """
        shape = hidden_states.shape[:-1]
        q_BHQN, q_BHQP = self._queries(hidden_states).split([self.plain, self.rotary], dim=-1)
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
        mask = _as_matrix(attention_mask, keys) if queries == 1 else attention_mask
        if cache is not None and self._absorbs(queries, keys, mask):
            out_BQHV, weights = self._attend_latents(q_BHQN, q_BHQP, c_B1TR, k_B1TP, mask)
        else:
            kv_BHTX = self.kv_b_proj(c_B1TR[:, 0]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            k_BHTN, v_BHTV = kv_BHTX.split([self.plain, self.value], dim=-1)
            attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
            out_BQHV, weights = attend(
                self,
                torch.cat((q_BHQN, q_BHQP), dim=-1),
                torch.cat((k_BHTN, k_B1TP.expand(-1, self.heads, -1, -1)), dim=-1),
                v_BHTV,
                attention_mask,
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                **kwargs,
            )
        return self.o_proj(out_BQHV.reshape(*shape, -1)), weights

    def _queries(self, hidden_states: Tensor) -> Tensor:
        """Return the queries, ``[B, H, Q, N + P]``."""
        if self.config.q_lora_rank is None:
            queries = self.q_proj(hidden_states)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        return queries.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _absorbs(self, queries: int, keys: int, mask: Any) -> bool:
        """Return whether to use the absorbed products.

        They are used if they take fewer operations and the mask is a matrix, or absent with one
        query.
        """
        if self.training and self.attention_dropout:
            return False
        if self.absorbs_up_to is not None and queries > self.absorbs_up_to:
            return False
        if (
            queries == keys and queries > 1
        ):  # a prompt: fused attention kernels have keys and values to read then
            return False
        return (mask is None and queries == 1) or (isinstance(mask, Tensor) and mask.ndim == 4)

    def _attend_latents(
        self, q_BHQN: Tensor, q_BHQP: Tensor, c_B1TR: Tensor, k_B1TP: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend with the absorbed products; scores and softmax are in fp32.

        Returns:
            The output ``[B, Q, H, V]`` and the weights ``[B, H, Q, T]``.
        """
        w_HXR = self._up_projection()
        w_HNR, w_HVR = w_HXR.split([self.plain, self.value], dim=1)
        q_BHQR = torch.einsum("bhqn,hnr->bhqr", q_BHQN, w_HNR)
        B, H, Q, _ = q_BHQR.shape
        rows_BXR = q_BHQR.reshape(B, H * Q, -1)
        rows_BXP = q_BHQP.reshape(B, H * Q, -1)
        scores = (
            rows_BXR @ c_B1TR[:, 0].mT + rows_BXP @ k_B1TP[:, 0].mT
        )  # one product for all heads: they share the keys
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
        weights = (
            scores.softmax(-1).nan_to_num(0.0).to(q_BHQN.dtype)
        )  # a padding token sees nothing
        out_BHQR = (weights.reshape(B, H * Q, -1) @ c_B1TR[:, 0]).view(B, H, Q, -1)
        return torch.einsum("bhqr,hvr->bqhv", out_BHQR, w_HVR), weights

    def _up_projection(self) -> Tensor:
        """Return the effective weight of ``kv_b_proj`` with any adapters, as ``[H, N + V, R]``."""
        layer = self.kv_b_proj
        if type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks:
            weight = layer.weight
        else:
            like = self.kv_a_layernorm.weight
            weight = layer(torch.eye(self.rank, dtype=like.dtype, device=like.device)).mT
        return weight.unflatten(0, (self.heads, -1))


def _as_matrix(mask: Any, keys: int) -> Any:
    """Return FlashAttention's 2-d mask for one query as ``[B, 1, 1, T]``; return other masks
    unchanged.

    A 2-d mask ``[B, n]`` marks which of the first n of T keys are tokens. The query sees all of
    these.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return mask
    return nn.functional.pad(mask.bool(), (0, keys - mask.shape[1]))[:, None, None]
