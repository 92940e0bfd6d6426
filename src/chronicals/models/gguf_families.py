"""Which models GGUF can express, and how: the architecture's name, its settings, and how its
tensors are laid out.

Names of architectures, settings and tensors are those of the package ``gguf``. What an architecture
of llama.cpp does in one way only (which layers have a window, how attention is scaled) is compared
with the model's configuration; a model that does it otherwise is refused, for it would be computed
wrongly without a word.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Settings = dict[str, Any]
"""By gguf's method that writes them, without ``add_``."""


class NotExpressible(ValueError):
    """GGUF, or llama.cpp, has no form for the model; the message says what of it."""


@dataclass(frozen=True)
class Family:
    """How models of a kind become GGUF.

    Attributes:
        architecture: in ``gguf.MODEL_ARCH``.
        reorders_heads: llama.cpp rotates neighbouring elements of a head where transformers rotates
            its halves: rows of q and k are reordered.
        norm_offset: what a norm adds to its weight, which is part of the weight in the file.
        interleaves_experts: gate and up of stacked experts alternate, and matrices are transposed
            (gpt-oss).
        loses_epsilon: some versions of llama.cpp compute its norms without their epsilon.
        settings: of a configuration, beside those that all have.
        check: raises ``NotExpressible``.
    """

    architecture: str
    reorders_heads: bool = False
    norm_offset: float = 0.0
    interleaves_experts: bool = False
    loses_epsilon: bool = False
    settings: Callable[[Any], Settings] = field(default=lambda config: {})
    check: Callable[[Any], None] = field(default=lambda config: None)


def family_of(config: Any) -> Family:
    """Of a transformers configuration of a language model.

    Raises:
        NotExpressible: there is none, or not for such a configuration.
    """
    found = FAMILIES.get(config.model_type)
    if found is None:
        raise NotExpressible(
            f"model_type={config.model_type!r}: has no proved form in GGUF here; there are "
            f"{', '.join(sorted(FAMILIES))}. "
            "Export merged weights (--to merged) and convert those with llama.cpp's own script"
        )
    if getattr(config, "quantization_config", None):
        raise NotExpressible(
            "the model is quantised; export it with merged weights first (--to merged)"
        )
    found.check(config)
    return found


def settings_of(config: Any, family: Family) -> Settings:
    """Everything that the file says of the architecture's sizes."""
    heads = config.num_attention_heads
    dim = head_dim(config)
    found: Settings = {
        "block_count": config.num_hidden_layers,
        "context_length": _context(config),
        "embedding_length": config.hidden_size,
        "head_count": heads,
        "head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        "key_length": dim,
        "value_length": dim,
        "vocab_size": config.vocab_size,
        "rope_dimension_count": rotated(config),
    }
    if getattr(config, "intermediate_size", None):
        found["feed_forward_length"] = config.intermediate_size
    found["layer_norm_rms_eps"] = config.rms_norm_eps
    return {**found, **_rope(config), **family.settings(config)}


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotated(config: Any) -> int:
    """Elements of a head that are rotated."""
    return int(head_dim(config) * _rope_of(config).get("partial_rotary_factor", 1.0))


def _context(config: Any) -> int:
    """Positions; no more than a window that llama.cpp does not have for this family."""
    window = getattr(config, "sliding_window", None)
    longest = config.max_position_embeddings
    return min(longest, window) if window and config.model_type in WINDOW_IS_CONTEXT else longest


def _rope_of(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    return dict(rope.get("full_attention", rope))


def _rope(config: Any) -> Settings:
    """Base and scaling of the rotation."""
    rope = _rope_of(config)
    kind = rope.get("rope_type", "default")
    found = {"rope_freq_base": float(rope["rope_theta"])}
    local = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention")
    if local and local.get("rope_type", "default") != "default":
        raise NotExpressible(
            f"rope_type={local['rope_type']!r} of the layers with a window: llama.cpp scales the "
            "others alone"
        )
    if local:
        found["rope_freq_base_swa"] = float(local["rope_theta"])
    if kind not in ("default", "mrope", "llama3", "linear", "yarn", "longrope"):
        raise NotExpressible(f"rope_type={kind!r}: GGUF has no such scaling of positions")
    if kind in ("linear", "yarn"):
        found |= {"rope_scaling_type": kind, "rope_scaling_factor": float(rope["factor"])}
    if kind == "yarn":
        found["rope_scaling_orig_ctx_len"] = rope["original_max_position_embeddings"]
        named = {
            "attention_factor": "rope_scaling_yarn_attn_factor",
            "beta_fast": "rope_scaling_yarn_beta_fast",
            "beta_slow": "rope_scaling_yarn_beta_slow",
        }
        found |= {
            key: float(rope[name]) for name, key in named.items() if rope.get(name) is not None
        }
    return found


def extra_tensors(config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of the file that no weight of the model is: what divides the frequencies of the
    rotation.
    """
    rope = _rope_of(config)
    if rope.get("rope_type") == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        dim = head_dim(config)
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        yield "rope_freqs.weight", (plain / scaled).numpy().astype(np.float32)
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", np.asarray(rope[f"{length}_factor"], np.float32)


def as_computed(config: Any) -> tuple[Any, list[str]]:
    """The configuration of what llama.cpp computes, and in words where that is nearly the model
    but not quite.
    """
    changed = copy.deepcopy(config)
    notes = []
    rope = getattr(changed.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and rope.get("truncate") is False:
        rope["truncate"] = True
        notes.append(
            "llama.cpp rounds the ends of YaRN's ramp, which the model does not (truncate=false)"
        )
    return changed, notes


# --- what llama.cpp does in one way only
# -------------------------------------------------------------------------------


def _refuse(wrong: bool, said: str) -> None:
    if wrong:
        raise NotExpressible(
            f"{said}: llama.cpp computes this architecture otherwise; export merged weights (--to "
            "merged)"
        )


def _windows(config: Any, period: int) -> None:
    """Every layer has a window but each ``period``-th."""
    kinds = getattr(config, "layer_types", None)
    expected = [
        "full_attention" if (n + 1) % period == 0 else "sliding_attention"
        for n in range(config.num_hidden_layers)
    ]
    _refuse(kinds is not None and list(kinds) != expected, f"layer_types={kinds}")


def _no_windows(config: Any) -> None:
    kinds = getattr(config, "layer_types", None) or []
    _refuse(
        "sliding_attention" in kinds,
        f"layer_types with {kinds.count('sliding_attention')} layers with a window",
    )


def _all_layers_have_experts(config: Any) -> None:
    step = getattr(config, "decoder_sparse_step", 1)
    dense = getattr(config, "mlp_only_layers", None)
    _refuse(step != 1 or bool(dense), f"decoder_sparse_step={step}, mlp_only_layers={dense}")


def _experts(normalised: bool | None = None) -> Callable[[Any], None]:
    def check(config: Any) -> None:
        _no_windows(config)
        _all_layers_have_experts(config)
        own = getattr(config, "norm_topk_prob", normalised)
        _refuse(own != normalised, f"norm_topk_prob={own}")

    return check


def _gemma2(config: Any) -> None:
    _windows(config, 2)
    _attention_scale(config, largest=46)
    _refuse(
        config.hidden_activation != "gelu_pytorch_tanh",
        f"hidden_activation={config.hidden_activation!r}",
    )


def _gemma3(config: Any) -> None:
    _windows(config, 6)
    _attention_scale(config, largest=62)
    _refuse(getattr(config, "attn_logit_softcapping", None) is not None, "attn_logit_softcapping")
    _refuse(
        bool(getattr(config, "use_bidirectional_attention", False)),
        "use_bidirectional_attention=True",
    )


def _attention_scale(config: Any, largest: int) -> None:
    """The scale of queries is that of their heads; but for the family's largest model, which
    llama.cpp knows by its layers.
    """
    wide = (
        config.hidden_size // config.num_attention_heads
        if config.num_hidden_layers == largest
        else head_dim(config)
    )
    _refuse(
        config.query_pre_attn_scalar != wide,
        f"query_pre_attn_scalar={config.query_pre_attn_scalar}",
    )


def _smollm3(config: Any) -> None:
    _no_windows(config)
    expected = [int((n + 1) % 4 != 0) for n in range(config.num_hidden_layers)]
    _refuse(list(config.no_rope_layers) != expected, f"no_rope_layers={config.no_rope_layers}")


def _gpt_oss(config: Any) -> None:
    kinds = [
        "sliding_attention" if n % 2 == 0 else "full_attention"
        for n in range(config.num_hidden_layers)
    ]
    _refuse(list(config.layer_types) != kinds, f"layer_types={config.layer_types}")


def _a_key_for_each_query(config: Any) -> None:
    own = config.num_key_value_heads
    _refuse(
        own != config.num_attention_heads,
        f"num_key_value_heads={own} for num_attention_heads={config.num_attention_heads}",
    )


def _silu(config: Any) -> None:
    _refuse(
        getattr(config, "hidden_act", "silu") != "silu",
        f"hidden_act={getattr(config, 'hidden_act', None)!r}",
    )


def _both(*checks: Callable[[Any], None]) -> Callable[[Any], None]:
    def check(config: Any) -> None:
        for one in checks:
            one(config)

    return check


# --- settings of some
# --------------------------------------------------------------------------------------------------


def _of_experts(config: Any) -> Settings:
    count = getattr(config, "num_local_experts", None) or config.num_experts
    found = {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    if wide := getattr(config, "moe_intermediate_size", None):
        found["expert_feed_forward_length"] = wide
    if shared := getattr(config, "shared_expert_intermediate_size", None):
        found["expert_shared_feed_forward_length"] = shared
    return found


def _of_gemma2(config: Any) -> Settings:
    return {
        "sliding_window": config.sliding_window,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def _of_gemma3(config: Any) -> Settings:
    capped = getattr(config, "final_logit_softcapping", None)
    return {
        "sliding_window": config.sliding_window,
        **({"final_logit_softcapping": capped} if capped else {}),
    }


def _of_phi3(config: Any) -> Settings:
    rope = _rope_of(config)
    longest = config.max_position_embeddings
    original = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", longest
    )
    found = {"sliding_window": config.sliding_window or 0, "rope_scaling_orig_ctx_len": original}
    if rope.get("rope_type") == "longrope":
        scale = longest / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        found["rope_scaling_attn_factors"] = rope.get("attention_factor") or factor
    return found


def _of_gpt_oss(config: Any) -> Settings:
    return {
        **_of_experts(config),
        "sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.intermediate_size,
    }


def _of_qwen2vl(config: Any) -> Settings:
    """How many pairs of a head turn with time, height and width; llama.cpp has a fourth kind of
    position.
    """
    sections = list(_rope_of(config)["mrope_section"])
    return {"rope_dimension_sections": [*sections, *[0] * (4 - len(sections))]}


def _of_granite(config: Any) -> Settings:
    return {
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "attention_scale": config.attention_multiplier,
        "logit_scale": config.logits_scaling,
    }


WINDOW_IS_CONTEXT = ("mistral", "mixtral", "phi3")
"""Families whose window llama.cpp leaves out: the file's context ends where the window does."""

FAMILIES: dict[str, Family] = {
    "llama": Family("LLAMA", reorders_heads=True, check=_silu),
    "mistral": Family("LLAMA", reorders_heads=True, check=_silu),
    "mixtral": Family("LLAMA", reorders_heads=True, settings=_of_experts, check=_silu),
    "qwen2": Family("QWEN2", check=_both(_silu, _no_windows)),
    "qwen2_5_vl_text": Family(
        "QWEN2VL", loses_epsilon=True, settings=_of_qwen2vl, check=_both(_silu, _no_windows)
    ),
    "qwen3": Family("QWEN3", check=_both(_silu, _no_windows)),
    "qwen2_moe": Family(
        "QWEN2MOE", settings=_of_experts, check=_both(_silu, _experts(normalised=False))
    ),
    "qwen3_moe": Family(
        "QWEN3MOE", settings=_of_experts, check=_both(_silu, _experts(normalised=True))
    ),
    "olmoe": Family(
        "OLMOE",
        settings=_of_experts,
        check=_both(_silu, _experts(normalised=False), _a_key_for_each_query),
    ),
    "gemma2": Family("GEMMA2", norm_offset=1.0, settings=_of_gemma2, check=_gemma2),
    "gemma3_text": Family("GEMMA3", norm_offset=1.0, settings=_of_gemma3, check=_gemma3),
    "phi3": Family("PHI3", settings=_of_phi3, check=_silu),
    "smollm3": Family("SMOLLM3", reorders_heads=True, check=_both(_silu, _smollm3)),
    "olmo2": Family("OLMO2", check=_silu),
    "glm4": Family("GLM4", check=_silu),
    "granite": Family("GRANITE", reorders_heads=True, settings=_of_granite, check=_silu),
    "gpt_oss": Family("GPT_OSS", interleaves_experts=True, settings=_of_gpt_oss, check=_gpt_oss),
}
"""By ``model_type``."""
