"""Families of models that GGUF can hold: one entry each, used for writing and for reading.

An entry names llama.cpp's architecture, the settings of the file with the fields of transformers'
configuration that hold the same numbers, the fields that the file does not have because
llama.cpp's graph has their values built in, and the layout of tensors. Names of architectures are
those of the package ``gguf``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from chronicals.formats.gguf.reader import NotExpressible
from chronicals.formats.gguf.rotation import (
    head_dim,
    longrope_attention_factor,
    original_context,
    rope_of,
)


@dataclass(frozen=True)
class FileSetting:
    """A setting of the file and the field of the configuration that holds the same value.

    Attributes:
        field: of the configuration; None for a setting that is computed from other fields, and
            from which reading takes nothing.
        key: in the file, behind the architecture's name.
        kind: int, float or list; ints are stored as uint32, floats as fp32.
        optional: the setting is left out where the field has no value or 0; otherwise a file
            without it is damaged.
        default: computes the value of a missing field or setting from other fields.
        written: computes what is written from the configuration, in place of the field's value.
        none_as: number in the file that stands for a field of None.
    """

    field: str | None
    key: str
    kind: type = int
    optional: bool = False
    default: Callable[[Any], Any] | None = None
    written: Callable[[Any], Any] | None = None
    none_as: int | None = None

    def value_to_write(self, config: Any) -> Any:
        """Return the value for the file, or None where the setting is left out."""
        if self.written is not None:
            value = self.written(config)
        else:
            assert self.field is not None
            value = getattr(config, self.field, None)
        if value is None and self.default is not None:
            value = self.default(config)
        if value is None:
            value = self.none_as
        if self.optional and not value:
            return None
        return self.kind(value)


@dataclass(frozen=True)
class Family:
    """The form of a family of models in GGUF.

    Attributes:
        architecture: its name in ``gguf.MODEL_ARCH``.
        settings: of the file, besides those that all families have.
        implied: fields of the configuration whose values llama.cpp's graph has built in: a value,
            or a function that computes it from the configuration. A model with other values is
            refused; a configuration that is read from a file gets them.
        reorders_heads: rows of q and k are reordered, since llama.cpp rotates neighbouring
            elements of a head where transformers rotates its halves.
        norm_offset: number that a norm adds to its weight, which the weight in the file includes.
        interleaves_experts: rows of gate and up alternate in stacked experts, whose matrices are
            transposed (gpt-oss).
        loses_epsilon: some versions of llama.cpp compute its norms without their epsilon.
        rotates_part_of_head: the architecture may rotate fewer elements than a head has.
        has_local_rope: layers with a window have a rotation of their own.
        is_read: files of the architecture are read as this family.
    """

    architecture: str
    settings: tuple[FileSetting, ...] = ()
    implied: Mapping[str, Any] = field(default_factory=dict)
    reorders_heads: bool = False
    norm_offset: float = 0.0
    interleaves_experts: bool = False
    loses_epsilon: bool = False
    rotates_part_of_head: bool = False
    has_local_rope: bool = False
    is_read: bool = True

    def implied_fields(self, config: Any) -> dict[str, Any]:
        """Compute the fields that the file does not hold."""
        return {
            name: value(config) if callable(value) else value
            for name, value in self.implied.items()
        }


def family_of(config: Any) -> Family:
    """Return the family of a language model's configuration (transformers').

    Raises:
        NotExpressible: the model type has no entry, the model is quantised, or llama.cpp computes
            the architecture with another value of a field.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise NotExpressible(
            f"model_type={config.model_type!r}: has no proved form in GGUF here; there are "
            f"{', '.join(sorted(FAMILIES))}. "
            "Export merged weights (--to merged) and convert those with llama.cpp's own script"
        )
    if getattr(config, "quantization_config", None):
        raise NotExpressible(
            "the model is quantised; export it with merged weights first (--to merged)"
        )
    for name, implied in family.implied_fields(config).items():
        value = getattr(config, name, None)
        if isinstance(value, tuple):
            value = list(value)
        if value is not None and value != implied:
            raise NotExpressible(
                f"{name}={value!r}: llama.cpp computes this architecture otherwise; export merged "
                "weights (--to merged)"
            )
    return family


# --- values that llama.cpp computes from others


def _full_each(period: int, config: Any) -> list[str]:
    """Return the layers' types: every ``period``-th has full attention, the others a window."""
    return [
        "full_attention" if (n + 1) % period == 0 else "sliding_attention"
        for n in range(config.num_hidden_layers)
    ]


def _query_scale(largest: int, config: Any) -> int:
    """Compute ``query_pre_attn_scalar``, the width that scales queries.

    It is the width of a head. In the largest model of a family, which llama.cpp recognises by its
    number of layers, it is the hidden size over the number of heads.
    """
    if config.num_hidden_layers == largest:
        return int(config.hidden_size // config.num_attention_heads)
    return head_dim(config)


def _context_within_window(config: Any) -> int:
    window = getattr(config, "sliding_window", None)
    longest = int(config.max_position_embeddings)
    return min(longest, window) if window else longest


def _mrope_sections(config: Any) -> list[int]:
    """Return the numbers of rotated pairs of a head for time, height, width and a fourth position.

    The fourth exists only in llama.cpp.
    """
    sections = list(config.rope_parameters["mrope_section"])
    return sections + [0] * (4 - len(sections))


# --- the table

COMMON_SETTINGS = (
    FileSetting("num_hidden_layers", "block_count"),
    FileSetting("max_position_embeddings", "context_length"),
    FileSetting("hidden_size", "embedding_length"),
    FileSetting("num_attention_heads", "attention.head_count"),
    FileSetting(
        "num_key_value_heads",
        "attention.head_count_kv",
        default=lambda config: config.num_attention_heads,
    ),
    FileSetting("head_dim", "attention.key_length", default=head_dim),
    FileSetting(None, "attention.value_length", written=head_dim),
    FileSetting(None, "vocab_size", written=lambda config: config.vocab_size),
    FileSetting(
        None,
        "rope.dimension_count",
        written=lambda config: int(
            head_dim(config) * rope_of(config).get("partial_rotary_factor", 1.0)
        ),
    ),
    FileSetting("intermediate_size", "feed_forward_length", optional=True),
    FileSetting("rms_norm_eps", "attention.layer_norm_rms_epsilon", float),
)
"""Settings of every family; those of the rotation are in ``rotation.py``."""

CONTEXT_WITHIN_WINDOW = FileSetting(
    "max_position_embeddings", "context_length", written=_context_within_window
)
"""Context of a family whose window llama.cpp leaves out: it ends where the window does."""

WINDOW = FileSetting("sliding_window", "attention.sliding_window")
EXPERTS_USED = FileSetting("num_experts_per_tok", "expert_used_count")
ROUTED_EXPERTS = (FileSetting("num_experts", "expert_count"), EXPERTS_USED)
LOCAL_EXPERTS = (FileSetting("num_local_experts", "expert_count"), EXPERTS_USED)
EXPERT_WIDTH = FileSetting("moe_intermediate_size", "expert_feed_forward_length")

SILU = {"hidden_act": "silu"}
GELU = {"hidden_activation": "gelu_pytorch_tanh"}
FULL_ATTENTION = {"layer_types": lambda config: ["full_attention"] * config.num_hidden_layers}
ROTATED_THREE_OF_FOUR = {
    "no_rope_layers": lambda config: [
        int((n + 1) % 4 != 0) for n in range(config.num_hidden_layers)
    ]
}
"""1 for each layer with rotary positions, else 0: SmolLM3 has none in every fourth."""

EXPERTS_IN_ALL_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": []}

FAMILIES: dict[str, Family] = {
    "llama": Family("LLAMA", implied=SILU, reorders_heads=True),
    "mistral": Family(
        "LLAMA",
        settings=(CONTEXT_WITHIN_WINDOW,),
        implied=SILU,
        reorders_heads=True,
        is_read=False,  # its files are those of llama
    ),
    "mixtral": Family(
        "LLAMA",
        settings=(CONTEXT_WITHIN_WINDOW, *LOCAL_EXPERTS),
        implied=SILU,
        reorders_heads=True,
    ),
    "qwen2": Family("QWEN2", implied=SILU | FULL_ATTENTION),
    "qwen2_5_vl_text": Family(
        "QWEN2VL",
        settings=(FileSetting(None, "rope.dimension_sections", list, written=_mrope_sections),),
        implied=SILU | FULL_ATTENTION,
        loses_epsilon=True,
        is_read=False,  # no class of transformers is this part alone
    ),
    "qwen3": Family("QWEN3", implied=SILU | FULL_ATTENTION),
    "qwen2_moe": Family(
        "QWEN2MOE",
        settings=(
            *ROUTED_EXPERTS,
            EXPERT_WIDTH,
            FileSetting("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ),
        implied=SILU | FULL_ATTENTION | EXPERTS_IN_ALL_LAYERS | {"norm_topk_prob": False},
    ),
    "qwen3_moe": Family(
        "QWEN3MOE",
        settings=(*ROUTED_EXPERTS, EXPERT_WIDTH),
        implied=SILU
        | EXPERTS_IN_ALL_LAYERS
        | {"norm_topk_prob": True, "use_sliding_window": False},
    ),
    "olmoe": Family(
        "OLMOE",
        settings=ROUTED_EXPERTS,
        implied=SILU
        | {
            "norm_topk_prob": False,
            "num_key_value_heads": lambda config: config.num_attention_heads,
        },
    ),
    "gemma2": Family(
        "GEMMA2",
        settings=(
            WINDOW,
            FileSetting("attn_logit_softcapping", "attn_logit_softcapping", float),
            FileSetting("final_logit_softcapping", "final_logit_softcapping", float),
        ),
        implied=GELU
        | {
            "layer_types": partial(_full_each, 2),
            "query_pre_attn_scalar": partial(_query_scale, 46),
        },
        norm_offset=1.0,
    ),
    "gemma3_text": Family(
        "GEMMA3",
        settings=(
            WINDOW,
            FileSetting("final_logit_softcapping", "final_logit_softcapping", float, optional=True),
        ),
        implied={
            "layer_types": partial(_full_each, 6),
            "query_pre_attn_scalar": partial(_query_scale, 62),
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        norm_offset=1.0,
        has_local_rope=True,
    ),
    "phi3": Family(
        "PHI3",
        settings=(
            CONTEXT_WITHIN_WINDOW,
            FileSetting("sliding_window", "attention.sliding_window", none_as=0),
            FileSetting(
                "original_max_position_embeddings",
                "rope.scaling.original_context_length",
                default=lambda config: config.max_position_embeddings,
                written=original_context,
            ),
            FileSetting(
                None,
                "rope.scaling.attn_factor",
                float,
                optional=True,
                written=longrope_attention_factor,
            ),
        ),
        implied=SILU,
        rotates_part_of_head=True,
    ),
    "smollm3": Family(
        "SMOLLM3",
        implied=SILU | FULL_ATTENTION | ROTATED_THREE_OF_FOUR,
        reorders_heads=True,
    ),
    "olmo2": Family("OLMO2", implied=SILU),
    "glm4": Family("GLM4", implied=SILU, rotates_part_of_head=True),
    "granite": Family(
        "GRANITE",
        settings=(
            FileSetting("embedding_multiplier", "embedding_scale", float),
            FileSetting("residual_multiplier", "residual_scale", float),
            FileSetting("attention_multiplier", "attention.scale", float),
            FileSetting("logits_scaling", "logit_scale", float),
        ),
        implied=SILU,
        reorders_heads=True,
    ),
    "gpt_oss": Family(
        "GPT_OSS",
        settings=(
            *LOCAL_EXPERTS,
            WINDOW,
            FileSetting("intermediate_size", "expert_feed_forward_length"),
        ),
        implied={"layer_types": partial(_full_each, 2)},
        interleaves_experts=True,
    ),
}
"""Entries by ``model_type`` of transformers."""
