"""The native mixture-of-experts model.

Latent and sliding-window attention layers alternate. Every layer has routed and shared experts, and
lookahead heads predict which experts will be chosen:

    p = softmax(W_r x)      S = the k largest of p      w_e = p_e / Σ_{e' ∈ S} p_e'
    y = Σ_{e ∈ S} w_e E_e(x) + E_shared(x)      E(x) = W_down (silu(W_gate x) ⊙ W_up x)

Experts have no capacity limit: no token is dropped. ``n`` shared experts are stored as one expert
of n times the width, which is the same function.

A latent layer caches the latent as keys and the rotary key as values, ``[B, 1, T, R]`` and ``[B, 1,
T, P]``. A sliding layer caches the last ``sliding_window - 1`` keys and values of its heads. Both
are layers of transformers' ``DynamicCache`` (and of its static and offloaded caches).

It is an ordinary transformers model: it works with ``generate``, ``Trainer``, ``pipeline``, PEFT
and ``save_pretrained``. After ``import chronicals``, ``AutoModelForCausalLM`` loads it without
remote code.

Shapes: T tokens, k experts per token, E experts, D hidden size, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeMLP,
    Qwen3MoeRMSNorm,
    load_balancing_loss_func,
)
from transformers.utils import ModelOutput, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from chronicals import deferred_imports  # noqa: F401  transformers, without what other tasks need
from chronicals.batch import document_at
from chronicals.moe.attention import ChronicalsMoeRotaryEmbedding, LatentAttention, SlidingAttention
from chronicals.moe.configuration import FULL, SLIDING, ChronicalsMoeConfig
from chronicals.moe.lookahead.heads import LayerAhead, TokenAhead
from chronicals.versions import CACHE_RENAMED, transformers_before

CACHE = "past_key_values" if transformers_before(CACHE_RENAMED) else "cache"
"""Name of the cache in the arguments and outputs of a model."""


@dataclass
class Lookahead(ModelOutput):
    """Predicted router logits (see ``lookahead/heads.py``).

    Attributes:
        layers: for each layer ``[B, S, n, E]``: its own router and those of the next n - 1 layers.
        tokens: ``[B, S, K, L, E]``: entry t predicts tokens t + 1 … t + K from the hidden state of
            t and the embedding of token t + 1. The last entry of a document is meaningless, because
            its next token is unknown; use ``predict_tokens`` with the sampled token instead.
    """

    layers: tuple[Tensor, ...] | None = None
    tokens: Tensor | None = None


@dataclass
class ChronicalsMoeModelOutput(MoeModelOutputWithPast):
    """Output of the decoder: that of transformers' mixtures, and predicted router logits."""

    lookahead: Lookahead | None = None


@dataclass
class ChronicalsMoeCausalLMOutput(MoeCausalLMOutputWithPast):
    """Output with a head: that of transformers' mixtures, and predicted router logits."""

    lookahead: Lookahead | None = None


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

    def forward(self, hidden_states: Tensor, available_E: Tensor | None = None) -> Tensor:
        """Map ``[B, S, D]`` to ``[B, S, D]``.

        Args:
            hidden_states: ``[B, S, D]``.
            available_E: bool ``[E]``. For an expert that is not available, the shared experts stand
                in with its weight: ``w_e (a_e E_e(x) + (1 − a_e) E_shared(x))``.
        """
        flat_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, experts = self.gate(flat_TD)
        if available_E is None:
            out = self.experts(flat_TD, experts, weights).view_as(hidden_states)
            return out if self.shared_experts is None else out + self.shared_experts(hidden_states)
        assert self.shared_experts is not None
        a_Tk = available_E[experts]
        # Weights of zero go to an expert that is available, so that no other is called.
        experts = torch.where(a_Tk, experts, available_E.int().argmax())
        fallback_T1 = torch.where(a_Tk, 0, weights).sum(-1, keepdim=True)
        out = self.experts(flat_TD, experts, torch.where(a_Tk, weights, 0))
        out = out + (1 + fallback_T1) * self.shared_experts(flat_TD)
        return out.view_as(hidden_states)


class ChronicalsMoeDecoderLayer(GradientCheckpointingLayer):
    """A layer of attention and a mixture of experts, each behind a norm and beside a residual."""

    def __init__(self, config: ChronicalsMoeConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        attention = LatentAttention if config.kinds[layer_idx] == FULL else SlidingAttention
        self.self_attn = attention(config, layer_idx)
        self.mlp = MixtureOfExperts(config)
        self.input_layernorm = Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        available_expert_masks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Map ``[B, S, D]`` to ``[B, S, D]``."""
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        if available_expert_masks is None:
            hidden_states = self.mlp(hidden_states)
        else:
            hidden_states = self.mlp(hidden_states, available_expert_masks[self.layer_idx])
        return residual + hidden_states


class ChronicalsMoePreTrainedModel(PreTrainedModel):
    """The properties of the native model that transformers asks for, and its initialisation."""

    config: ChronicalsMoeConfig
    config_class = ChronicalsMoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["ChronicalsMoeDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "router_logits": OutputRecorder(TopKRouter, index=0),
        "hidden_states": ChronicalsMoeDecoderLayer,
        "attentions": [
            OutputRecorder(LatentAttention, index=1),
            OutputRecorder(SlidingAttention, index=1),
        ],
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, RoutedExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, TopKRouter):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, LayerAhead):
            init.normal_(module.down, mean=0.0, std=self.config.hidden_size**-0.5)
            init.zeros_(module.up)
            init.zeros_(module.bias)
        elif isinstance(module, TokenAhead):
            init.normal_(module.down, mean=0.0, std=(2 * self.config.hidden_size) ** -0.5)
            init.normal_(module.up, mean=0.0, std=std)
            init.zeros_(module.down_bias)
            init.zeros_(module.up_bias)


class ChronicalsMoeModel(ChronicalsMoePreTrainedModel):
    """The decoder: embedding, layers and final norm."""

    def __init__(self, config: ChronicalsMoeConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [ChronicalsMoeDecoderLayer(config, n) for n in range(config.num_hidden_layers)]
        )
        self.norm = Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = ChronicalsMoeRotaryEmbedding(config, config.sliding_sizes[1])
        self.latent_rotary_emb = ChronicalsMoeRotaryEmbedding(config, config.qk_rope_head_dim)
        sizes = config.num_hidden_layers, config.hidden_size, config.num_experts
        furthest = config.lookahead_layers
        tokens = config.lookahead_tokens
        rank = config.lookahead_rank
        self.layer_ahead = None if furthest is None else LayerAhead(*sizes, furthest, rank)
        self.token_ahead = TokenAhead(*sizes, tokens, rank) if tokens else None
        self.gradient_checkpointing = False
        self.post_init()

    def _check_masks(self, masks_LE: Tensor) -> None:
        """Raise ValueError unless experts that are not available can be stood in for."""
        expected = self.config.num_hidden_layers, self.config.num_experts
        if masks_LE.shape != expected or masks_LE.dtype != torch.bool:
            raise ValueError(
                f"available_expert_masks is {masks_LE.dtype} {tuple(masks_LE.shape)}: expected "
                f"torch.bool {expected}"
            )
        if not self.config.num_shared_experts:
            raise ValueError(
                "available_expert_masks: this model has no shared experts that could stand in "
                "(num_shared_experts=0)"
            )
        if any("forward" in vars(layer) for layer in self.layers):
            raise ValueError(
                "available_expert_masks: its layers run fused and would not see them; call "
                "unpatch_model first"
            )

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        output_lookahead: bool = False,
        available_expert_masks: Tensor | None = None,
        **kwargs: Any,
    ) -> ChronicalsMoeModelOutput:
        """Run the decoder, like transformers' decoders.

        Args:
            input_ids: int64 ``[B, S]``, or None with ``inputs_embeds``.
            attention_mask: ``[B, T]``, or a dictionary of masks by kind of layer.
            position_ids: ``[B, S]``; for packed documents they restart at each document. If None,
                they are computed from ``cu_seq_lens_q`` (the document bounds) or from the cache.
            cache: keys and values of earlier tokens, or None.
            inputs_embeds: ``[B, S, D]`` in place of ``input_ids``.
            use_cache: make a cache if none is given.
            past_key_values: the cache, under the name of older versions of transformers.
            output_lookahead: if true, also predict experts.
            available_expert_masks: bool ``[L, E]``, the experts of each layer that may be called;
                the shared experts stand in for the others, with their weights.
            **kwargs: passed on to the layers, such as document bounds.

        Raises:
            ValueError: both or neither of ``input_ids`` and ``inputs_embeds`` are given, or
                ``available_expert_masks`` do not fit the model.
        """
        if available_expert_masks is not None:
            self._check_masks(available_expert_masks)
            kwargs["available_expert_masks"] = available_expert_masks
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds: give exactly one of them")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            places = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
            bounds = kwargs.get("cu_seq_lens_q")
            if bounds is None:
                # A cache counts every token seen, including those a window has dropped.
                seen = 0 if cache is None else cache.get_seq_length()
                position_ids = (places + seen)[None]
            else:
                position_ids = (places - bounds[document_at(places, bounds)])[None]
        given = {
            "config": self.config,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            CACHE: cache,
            "position_ids": position_ids,
        }
        kinds = set(self.config.kinds)
        if isinstance(attention_mask, dict):  # as generation makes them for caches of a fixed size
            full = attention_mask.get(FULL)
            sliding = attention_mask.get(SLIDING)
        else:
            full = create_causal_mask(**given) if FULL in kinds else None
            sliding = create_sliding_window_causal_mask(**given) if kinds != {FULL} else None
        latent_tables, tables = (
            rope(inputs_embeds, position_ids) for rope in (self.latent_rotary_emb, self.rotary_emb)
        )

        hidden_states = inputs_embeds
        predicted = []
        layers: list[Any] = list(self.layers)
        for number, (layer, kind) in enumerate(zip(layers, self.config.kinds)):
            if output_lookahead and self.layer_ahead is not None:
                features = layer.input_layernorm(hidden_states)
                if not self.config.lookahead_trunk_gradient:
                    features = features.detach()
                gates = [other.mlp.gate.weight for other in layers]
                predicted.append(self.layer_ahead(number, features, gates))
            hidden_states = layer(
                hidden_states,
                attention_mask=full if kind == FULL else sliding,
                position_ids=position_ids,
                cache=cache,
                position_embeddings=latent_tables if kind == FULL else tables,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        lookahead = None
        if output_lookahead:
            of_tokens = None
            if self.token_ahead is not None:
                # The last token has no next token; zeros stand in for its embedding.
                following = nn.functional.pad(inputs_embeds[:, 1:], (0, 0, 0, 1))
                of_tokens = self._predict(self.token_ahead, hidden_states, following)
            lookahead = Lookahead(tuple(predicted) or None, of_tokens)
        return ChronicalsMoeModelOutput(
            last_hidden_state=hidden_states, lookahead=lookahead, **{CACHE: cache}
        )

    def _predict(self, head: TokenAhead, hidden_states: Tensor, embeddings: Tensor) -> Tensor:
        if not self.config.lookahead_trunk_gradient:
            hidden_states = hidden_states.detach()
            embeddings = embeddings.detach()
        return head(hidden_states, embeddings)

    def predict_tokens(self, hidden_states: Tensor, next_ids: Tensor) -> Tensor:
        """Predict the router logits of all layers for ``next_ids`` and the K - 1 tokens after it.

        Args:
            hidden_states: ``[..., D]``, last hidden states of the previous tokens.
            next_ids: int64 ``[...]``, the sampled tokens.

        Returns:
            Logits ``[..., K, L, E]``.

        Raises:
            ValueError: the model has no such head.
        """
        if self.token_ahead is None:
            raise ValueError(
                "lookahead_tokens=0: the model has no head that predicts the experts of later "
                "tokens"
            )
        return self._predict(self.token_ahead, hidden_states, self.embed_tokens(next_ids))


class ChronicalsMoeForCausalLM(ChronicalsMoePreTrainedModel, GenerationMixin):
    """The decoder with a language-model head."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: ChronicalsMoeConfig):
        super().__init__(config)
        self.model = ChronicalsMoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Cache | None = None,
        output_lookahead: bool = False,
        **kwargs: Any,
    ) -> ChronicalsMoeCausalLMOutput:
        """Run the model, like transformers' causal language models.

        Args:
            input_ids: int64 ``[B, S]``, or None with ``inputs_embeds``.
            attention_mask: as for the decoder.
            position_ids: as for the decoder.
            cache: keys and values of earlier tokens, or None.
            inputs_embeds: ``[B, S, D]`` in place of ``input_ids``.
            labels: int64 ``[B, S]`` targets of the loss, -100 for none.
            use_cache: make a cache if none is given.
            output_router_logits: if true, return the router logits, and add the load-balancing loss
                if ``labels`` are given.
            logits_to_keep: number of last positions with logits, or their indices; 0 for all.
            past_key_values: the cache, under the name of older versions of transformers.
            output_lookahead: if true, also predict experts.
            **kwargs: passed on to the decoder and the loss function.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            output_lookahead=output_lookahead,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = aux_loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs
            )
        if output_router_logits:
            sizes = self.num_experts, self.num_experts_per_tok
            aux_loss = load_balancing_loss_func(outputs.router_logits, *sizes, attention_mask)
            if loss is not None:
                loss = loss + self.router_aux_loss_coef * aux_loss.to(loss.device)
        return ChronicalsMoeCausalLMOutput(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            lookahead=outputs.lookahead,
            **{CACHE: getattr(outputs, CACHE)},
        )


class ChronicalsMoeForSequenceClassification(
    GenericForSequenceClassification, ChronicalsMoePreTrainedModel
):
    """The decoder with a linear head, ``score``, on the hidden state of the last token.

    Reward models are saved in this class.
    """
