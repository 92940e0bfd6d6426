"""The configuration of the model in a GGUF file, of what the file says alone.

What ``gguf_families.py`` makes of the configuration is compared with the file afterwards: a setting
that would be lost, or that the configuration does not repeat, is refused by name, since the model
would compute something else than llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from chronicals.models.gguf_families import (
    NotExpressible,
    extra_tensors,
    family_of,
    head_dim,
    settings_of,
)
from chronicals.models.gguf_reader import File

MEANINGLESS = ("rope.scaling.finetuned", "tensor_data_layout")
"""Settings that change nothing of what is computed."""

SAME = 1e-5
"""Relative, of settings and frequencies in fp32."""

LOW = 1.0
HIGH = 4.0
"""``low_freq_factor`` and ``high_freq_factor`` of every Llama 3."""

Fields = dict[str, Any]


class Settings:
    """The settings of a file's architecture.

    Attributes:
        architecture: llama.cpp's name of it.
    """

    def __init__(self, file: File):
        self.file = file
        self.architecture = str(file.value("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """By the key behind the architecture's name; fp32 numbers as they were meant, to seven
        digits.

        Raises:
            NotExpressible: it differs between layers.
        """
        found = self.file.value(f"{self.architecture}.{key}")
        if isinstance(found, list):
            if len(set(found)) > 1:
                raise _refused(
                    self.file, f"{self.architecture}.{key} differs between layers ({found})"
                )
            found = found[0] if found else None
        if isinstance(found, float):
            found = float(f"{found:.7g}")
        return default if found is None else found

    def need(self, key: str) -> Any:
        """Raises ValueError where it is missing."""
        found = self.get(key)
        if found is None:
            raise ValueError(
                f"{self.file.path}: says no {self.architecture}.{key}; the file is damaged, "
                "download it again"
            )
        return found

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors


def config_of(file: File) -> Any:
    """Of transformers.

    Raises:
        NotExpressible: there is no class for it that is proved to compute what llama.cpp does.
        ValueError: it is no model, or damaged.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    _check_kind(file)
    settings = Settings(file)
    found = ARCHITECTURES.get(settings.architecture)
    if found is None:
        raise _refused(
            file, f"architecture {settings.architecture!r} is not one of {', '.join(ARCHITECTURES)}"
        )
    model_type, more = found(settings)
    config = AutoConfig.for_model(model_type, **{**_common(settings), **more})
    for name, tensors in BIASES.items():
        if hasattr(config, name):
            setattr(config, name, any(settings.has(tensor) for tensor in tensors))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    _check_settings(file, settings, config)
    return config


BIASES = {
    "attention_bias": ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
    "mlp_bias": ("blk.0.ffn_gate.bias", "blk.0.ffn_up.bias"),
}
"""Fields of configurations by the tensors that show them."""


def _refused(file: File, said: str) -> NotExpressible:
    return NotExpressible(
        f"{file.path}: {said}: such a file cannot be trained on here; take the model's own "
        "safetensors"
    )


def _check_kind(file: File) -> None:
    kind = file.value("general.type")
    parts = file.value("split.count")
    if kind not in (None, "model"):
        raise ValueError(
            f"{file.path}: general.type={kind!r}: is no model by itself; give the file of the model"
        )
    if parts is not None and parts > 1:
        raise ValueError(
            f"{file.path}: is one of {parts} parts; join them (llama-gguf-split --merge) and give "
            "the whole file"
        )


def _common(settings: Settings) -> Fields:
    """What all configurations have."""
    heads = settings.need("attention.head_count")
    hidden = settings.need("embedding_length")
    rows = settings.file.shape_of("token_embd.weight")[0]
    wide = settings.get("attention.key_length", hidden // heads)
    if (other := settings.get("attention.value_length", wide)) != wide:
        raise _refused(settings.file, f"heads have keys of {wide} and values of {other}")
    found: Fields = {
        "num_hidden_layers": settings.need("block_count"),
        "max_position_embeddings": settings.need("context_length"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.get("attention.head_count_kv", heads),
        "head_dim": wide,
        "vocab_size": rows,
        "rms_norm_eps": settings.need("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(settings, wide),
        "tie_word_embeddings": not settings.has("output.weight"),
        **_ids(settings.file),
    }
    if inner := settings.get("feed_forward_length"):
        found["intermediate_size"] = inner
    return found


def _ids(file: File) -> Fields:
    """Special ids; generation ends at either of two."""
    named = {name: file.value(f"tokenizer.ggml.{key}_token_id") for name, key in IDS.items()}
    ends = [number for number in (named["eos"], named["eot"]) if number is not None]
    return {
        "bos_token_id": named["bos"],
        "pad_token_id": named["pad"],
        "eos_token_id": None if not ends else ends[0] if len(ends) == 1 else ends,
    }


IDS = {"bos": "bos", "eos": "eos", "eot": "eot", "pad": "padding"}


# --- the rotation
# ------------------------------------------------------------------------------------------------------


def _rope(settings: Settings, wide: int) -> Fields:
    rope: Fields = {"rope_type": "default", "rope_theta": settings.get("rope.freq_base", 10000.0)}
    kind = settings.get("rope.scaling.type")
    turned = settings.get("rope.dimension_count", wide)
    if turned != wide:
        rope["partial_rotary_factor"] = turned / wide
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": settings.need("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = settings.need(
            "rope.scaling.original_context_length"
        )
        given = {name: settings.get(f"rope.scaling.{key}") for name, key in YARN.items()}
        rope |= {name: value for name, value in given.items() if value is not None}
    if settings.has("rope_freqs.weight"):
        rope |= _llama3(settings, rope["rope_theta"], turned)
    if settings.has("rope_factors_long.weight"):
        rope |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": settings.need(
                "rope.scaling.original_context_length"
            ),
            "attention_factor": settings.need("rope.scaling.attn_factor"),
            **{
                f"{name}_factor": settings.file.read(f"rope_factors_{name}.weight").tolist()
                for name in ("long", "short")
            },
        }
    return rope


YARN = {
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def _llama3(settings: Settings, theta: float, turned: int) -> Fields:
    """Of what divides the frequencies: 1 for short waves, ``factor`` for long ones, and between
    them, where c is the length of training and w the wave's (Llama 3.1's reference code)

        1 / f = (1 − s) / factor + s,   s = (c / w − LOW) / (HIGH − LOW)

    Raises:
        NotExpressible: they are divided otherwise.
    """
    divided = settings.file.read("rope_freqs.weight").double()
    waves = 2 * math.pi * theta ** (torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    factor = float(f"{divided.max().item():.5g}")
    between = (divided > 1 + SAME) & (divided < factor * (1 - SAME))
    share = (1 / divided - 1 / factor) / (1 - 1 / factor)
    lengths = (waves * (share * (HIGH - LOW) + LOW))[between].round().unique().tolist()
    for length in [*lengths, *(2**n for n in range(5, 21))]:
        small = torch.clamp((length / waves - LOW) / (HIGH - LOW), 0, 1)
        if torch.allclose(divided, 1 / ((1 - small) / factor + small), rtol=1e-3, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": int(length),
            }
    raise _refused(
        settings.file, "rope_freqs.weight divides frequencies otherwise than Llama 3 does"
    )


# --- architectures
# -----------------------------------------------------------------------------------------------------


def _plain(model_type: str, **fixed: Any) -> Callable[[Settings], tuple[str, Fields]]:
    return lambda settings: (model_type, fixed)


def _experts(settings: Settings) -> Fields:
    return {
        "num_experts": settings.need("expert_count"),
        "num_experts_per_tok": settings.need("expert_used_count"),
    }


def _llama(settings: Settings) -> tuple[str, Fields]:
    if not settings.get("expert_count"):
        return "llama", {}
    found = _experts(settings)
    return "mixtral", {
        "num_local_experts": found.pop("num_experts"),
        **found,
        "sliding_window": None,
    }


def _qwen2_moe(settings: Settings) -> tuple[str, Fields]:
    wide = settings.need("expert_feed_forward_length")
    shared = settings.need("expert_shared_feed_forward_length")
    return "qwen2_moe", {
        **_experts(settings),
        "moe_intermediate_size": wide,
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False,
        "use_sliding_window": False,
    }


def _qwen3_moe(settings: Settings) -> tuple[str, Fields]:
    wide = settings.need("expert_feed_forward_length")
    return "qwen3_moe", {
        **_experts(settings),
        "moe_intermediate_size": wide,
        "norm_topk_prob": True,
    }


def _gemma2(settings: Settings) -> tuple[str, Fields]:
    return "gemma2", {
        "sliding_window": settings.need("attention.sliding_window"),
        **_scaled(settings, largest=46),
        "attn_logit_softcapping": settings.need("attn_logit_softcapping"),
        "final_logit_softcapping": settings.need("final_logit_softcapping"),
    }


def _gemma3(settings: Settings) -> tuple[str, Fields]:
    fields = _scaled(settings, largest=62)
    rope = _rope(settings, settings.get("attention.key_length", 0))
    local = {"rope_type": "default", "rope_theta": settings.get("rope.freq_base_swa", 10000.0)}
    return "gemma3_text", {
        **fields,
        "sliding_window": settings.need("attention.sliding_window"),
        "final_logit_softcapping": settings.get("final_logit_softcapping"),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _scaled(settings: Settings, largest: int) -> Fields:
    """The scale of queries, which the file does not say."""
    heads = settings.need("attention.head_count")
    hidden = settings.need("embedding_length")
    wide = settings.get("attention.key_length", hidden // heads)
    return {
        "query_pre_attn_scalar": hidden // heads
        if settings.need("block_count") == largest
        else wide
    }


def _phi3(settings: Settings) -> tuple[str, Fields]:
    longest = settings.need("context_length")
    original = settings.get("rope.scaling.original_context_length", longest)
    window = settings.get("attention.sliding_window") or None
    return "phi3", {"sliding_window": window, "original_max_position_embeddings": original}


def _granite(settings: Settings) -> tuple[str, Fields]:
    return "granite", {
        "embedding_multiplier": settings.need("embedding_scale"),
        "residual_multiplier": settings.need("residual_scale"),
        "attention_multiplier": settings.need("attention.scale"),
        "logits_scaling": settings.need("logit_scale"),
    }


def _gpt_oss(settings: Settings) -> tuple[str, Fields]:
    found = _experts(settings)
    return "gpt_oss", {
        "num_local_experts": found.pop("num_experts"),
        **found,
        "sliding_window": settings.need("attention.sliding_window"),
        "intermediate_size": settings.need("expert_feed_forward_length"),
    }


ARCHITECTURES: dict[str, Callable[[Settings], tuple[str, Fields]]] = {
    "llama": _llama,
    "qwen2": _plain("qwen2", use_sliding_window=False),
    "qwen2moe": _qwen2_moe,
    "qwen3": _plain("qwen3", use_sliding_window=False),
    "qwen3moe": _qwen3_moe,
    "olmoe": lambda settings: ("olmoe", {**_experts(settings), "norm_topk_prob": False}),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "smollm3": _plain("smollm3", use_sliding_window=False),
    "olmo2": _plain("olmo2"),
    "glm4": _plain("glm4"),
    "granite": _granite,
    "gpt-oss": _gpt_oss,
}
"""By llama.cpp's name: ``model_type``, and fields of the configuration beside those that all
have.
"""


# --- whether the file is repeated
# --------------------------------------------------------------------------------------


def _check_settings(file: File, settings: Settings, config: Any) -> None:
    """Raises NotExpressible where the configuration says something else than the file."""
    import gguf

    family = family_of(config)
    prefix = f"{settings.architecture}."
    writer = gguf.GGUFWriter(None, settings.architecture)
    for key, value in settings_of(config, family).items():
        getattr(writer, f"add_{key}")(
            gguf.RopeScalingType(value) if key == "rope_scaling_type" else value
        )
    ours = {key: entry.value for key, entry in writer.kv_data[0].items() if key.startswith(prefix)}
    for key in (
        key
        for key in file.settings()
        if key.startswith(prefix) and key.removeprefix(prefix) not in MEANINGLESS
    ):
        theirs = settings.get(key.removeprefix(prefix))
        if key not in ours and not _says_nothing(key.removeprefix(prefix), theirs):
            raise _refused(
                file, f"{key}={theirs!r} is a setting that {type(config).__name__} does not have"
            )
        if key in ours and not _same(ours[key], theirs):
            raise _refused(
                file, f"{key}={theirs!r}, where {type(config).__name__} computes by {ours[key]!r}"
            )
    for name, values in extra_tensors(config):
        if name in file.tensors and not torch.allclose(
            file.read(name), torch.from_numpy(values), rtol=1e-3
        ):
            raise _refused(
                file, f"{name} has other values than {type(config).__name__} computes by"
            )
    if "partial_rotary_factor" in _flat_rope(config) and config.model_type not in ("phi3", "glm4"):
        raise _refused(
            file, f"{prefix}rope.dimension_count is not the {head_dim(config)} of a head"
        )


def _says_nothing(key: str, value: Any) -> bool:
    return value in (0, 0.0, "none", False) or (key == "rope.scaling.type" and value == "longrope")


def _flat_rope(config: Any) -> Fields:
    rope = config.rope_parameters or {}
    return {
        name: value
        for name, value in rope.get("full_attention", rope).items()
        if not _is_one(name, value)
    }


def _is_one(name: str, value: Any) -> bool:
    return name == "partial_rotary_factor" and value == 1.0


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return math.isclose(float(ours), float(theirs), rel_tol=SAME)
    return bool(ours == theirs) or str(getattr(ours, "value", ours)) == str(theirs)
