"""Configuration of the native mixture-of-experts model."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

FULL = "full_attention"
SLIDING = "sliding_attention"
"""Kinds of layer: latent attention over all earlier tokens, and attention over a sliding window."""


@strict
class ChronicalsMoeConfig(PreTrainedConfig):
    """Configuration of ``ChronicalsMoeForCausalLM``.

    Fields beyond those of transformers' decoders:

    - ``layer_types``: the kind of each layer. By default latent and sliding-window attention
      alternate.
    - ``num_key_value_heads``, ``head_dim``, ``sliding_window``: sizes of sliding layers. A token
      attends to itself and to the ``sliding_window - 1`` tokens before it.
    - ``kv_lora_rank``: width of the latent from which keys and values are computed.
      ``qk_rope_head_dim``: width of the rotary key that all heads share. A latent layer caches
      these two for each token.
    - ``qk_nope_head_dim``, ``v_head_dim``: widths of each head of a latent layer. ``q_lora_rank``:
      width of the latent of queries; None for one plain projection.
    - ``num_experts``, ``num_experts_per_tok``, ``moe_intermediate_size``: sizes of the routed
      experts. ``norm_topk_prob``: if true, the weights of a token's experts sum to one.
      ``num_shared_experts``: number of further experts of the same size that process every token.
    - ``lookahead_layers``: D. Each layer predicts the experts of its own router and of the next D
      routers; None for no such heads.
    - ``lookahead_tokens``: K. The last hidden state and the next token predict the experts of all
      layers for K tokens; 0 for no such head.
    - ``lookahead_rank``: rank of the heads. ``lookahead_trunk_gradient``: if true, the losses of
      the heads also train the model below them.
    - ``output_router_logits``, ``router_aux_loss_coef``: the load-balancing loss of ``forward``, as
      in transformers' other mixtures.
    """

    model_type = "chronicals_moe"
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    vocab_size: int = 32000
    hidden_size: int = 768
    num_hidden_layers: int = 8
    layer_types: list[str] | None = None
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = None
    sliding_window: int = 2048
    kv_lora_rank: int = 192
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    attention_bias: bool = False
    attention_dropout: float = 0.0
    num_experts: int = 16
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 512
    num_shared_experts: int = 1
    norm_topk_prob: bool = True
    hidden_act: str = "silu"
    lookahead_layers: int | None = 3
    lookahead_tokens: int = 2
    lookahead_rank: int = 64
    lookahead_trunk_gradient: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    max_position_embeddings: int = 32768
    rope_parameters: RopeParameters | dict | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def kinds(self) -> list[str]:
        """``layer_types`` as a list; construction always sets it."""
        return self.layer_types or []

    @property
    def sliding_sizes(self) -> tuple[int, int]:
        """Number of key-value heads and head width of a sliding layer."""
        assert self.num_key_value_heads is not None and self.head_dim is not None
        return self.num_key_value_heads, self.head_dim

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = [(FULL, SLIDING)[n % 2] for n in range(self.num_hidden_layers)]
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Check that the sizes fit each other; transformers calls this with its own checks.

        Raises:
            ValueError: they do not; the message names the field.
        """
        unknown = sorted(set(self.kinds) - {FULL, SLIDING})
        if unknown:
            raise ValueError(f"layer_types={unknown}: there are {FULL!r} and {SLIDING!r}")
        if len(self.kinds) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.kinds)} layers, "
                f"num_hidden_layers={self.num_hidden_layers}: make them equal"
            )
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            heads = self.num_attention_heads
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads}: does not divide "
                f"num_attention_heads={heads}"
            )
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok}: must be between 1 and "
                f"num_experts={self.num_experts}"
            )
        least = {"sliding_window": 1, "num_shared_experts": 0, "lookahead_rank": 1}
        least |= {"lookahead_tokens": 0, "lookahead_layers": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name}={value}: must be at least {minimum}")
        for name in ("head_dim", "qk_rope_head_dim"):
            if getattr(self, name) % 2:
                raise ValueError(
                    f"{name}={getattr(self, name)}: rotary embeddings turn pairs; take an even "
                    "number"
                )
