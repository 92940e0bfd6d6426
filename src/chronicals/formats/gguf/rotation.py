"""Rotary positions: from a configuration of transformers to the settings of a file, and back."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from chronicals.formats.gguf.reader import ArchitectureSettings, NotExpressible

FLOAT_TOLERANCE = 1e-5
"""Relative tolerance of settings and frequencies, which a file holds in fp32."""

LOW_FREQUENCY_FACTOR = 1.0
HIGH_FREQUENCY_FACTOR = 4.0
"""``low_freq_factor`` and ``high_freq_factor`` of every Llama 3."""

YARN_KEYS = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
"""Optional settings of YaRN, by their name in ``rope_parameters``."""

SCALINGS_WITH_FACTOR = ("linear", "yarn")
"""Scalings that llama.cpp has under transformers' name, with a factor."""

OTHER_SCALINGS = ("default", "mrope", "llama3", "longrope")
"""Scalings that need no setting; the last two are tensors of the file (``extra_tensors``)."""


def head_dim(config: Any) -> int:
    """Return the number of elements of an attention head."""
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def rope_of(config: Any) -> dict[str, Any]:
    """Return the rotation of layers that see all tokens, as ``rope_parameters`` has it."""
    rope = getattr(config, "rope_parameters", None) or {}
    return dict(rope.get("full_attention", rope))


def original_context(config: Any) -> int:
    """Return the context that a model was pretrained with (Phi-3), before its scaling."""
    longest = config.max_position_embeddings
    return int(
        rope_of(config).get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", longest)
    )


def longrope_attention_factor(config: Any) -> float | None:
    """Return LongRoPE's scale of queries and keys; None with another rotation.

    It is sqrt(1 + ln(s) / ln(c)) for a context of s times the original c, if not configured.
    """
    rope = rope_of(config)
    if rope.get("rope_type") != "longrope":
        return None
    original = original_context(config)
    scale = config.max_position_embeddings / original
    factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return rope.get("attention_factor") or factor


def rope_settings(config: Any) -> dict[str, Any]:
    """Return the base and the scaling of the rotation, by their keys in the file.

    Raises:
        NotExpressible: GGUF has no such scaling.
    """
    rope = rope_of(config)
    kind = rope.get("rope_type", "default")
    settings: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    local = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention")
    if local and local.get("rope_type", "default") != "default":
        raise NotExpressible(
            f"rope_type={local['rope_type']!r} of the layers with a window: llama.cpp scales the "
            "others alone"
        )
    if local:
        settings["rope.freq_base_swa"] = float(local["rope_theta"])
    if kind not in (*SCALINGS_WITH_FACTOR, *OTHER_SCALINGS):
        raise NotExpressible(f"rope_type={kind!r}: GGUF has no such scaling of positions")
    if kind in SCALINGS_WITH_FACTOR:
        settings["rope.scaling.type"] = kind
        settings["rope.scaling.factor"] = float(rope["factor"])
    if kind == "yarn":
        original = rope["original_max_position_embeddings"]
        settings["rope.scaling.original_context_length"] = original
        for name, key in YARN_KEYS.items():
            if rope.get(name) is not None:
                settings[key] = float(rope[name])
    return settings


def rope_parameters(settings: ArchitectureSettings, width: int) -> dict[str, Any]:
    """Return ``rope_parameters`` of the layers that see all tokens, from a file's settings.

    Args:
        settings: of the file.
        width: elements of a head.

    Raises:
        NotExpressible: ``rope_freqs`` scales frequencies otherwise than Llama 3 does.
        ValueError: a setting is missing.
    """
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": settings.get("rope.freq_base", 10000.0),
    }
    rotated = settings.get("rope.dimension_count", width)
    if rotated != width:
        rope["partial_rotary_factor"] = rotated / width
    kind = settings.get("rope.scaling.type")
    original_key = "rope.scaling.original_context_length"
    if kind in SCALINGS_WITH_FACTOR:
        rope["rope_type"] = kind
        rope["factor"] = settings.need("rope.scaling.factor")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = settings.need(original_key)
        for name, key in YARN_KEYS.items():
            if settings.get(key) is not None:
                rope[name] = settings.get(key)
    if "rope_freqs.weight" in settings.file.tensors:
        rope |= _llama3_parameters(settings, rope["rope_theta"], rotated)
    if "rope_factors_long.weight" in settings.file.tensors:
        rope["rope_type"] = "longrope"
        rope["original_max_position_embeddings"] = settings.need(original_key)
        rope["attention_factor"] = settings.need("rope.scaling.attn_factor")
        for name in ("long", "short"):
            factors = settings.file.read(f"rope_factors_{name}.weight")
            rope[f"{name}_factor"] = factors.tolist()
    return rope


def _llama3_parameters(
    settings: ArchitectureSettings, theta: float, rotated: int
) -> dict[str, Any]:
    """Find the parameters of Llama 3's scaling that give the divisors in a file.

    The divisor f of a frequency is 1 for short waves, ``factor`` for long ones, and between them
    (reference code of Llama 3.1; c is the length of training and w the wave's)

        1 / f = (1 − s) / factor + s,   s = (c / w − LOW) / (HIGH − LOW)

    so each divisor between 1 and ``factor`` gives c. Where no frequency lies between them, powers
    of two are tried for c.

    Raises:
        NotExpressible: no parameters give these divisors.
    """
    low = LOW_FREQUENCY_FACTOR
    high = HIGH_FREQUENCY_FACTOR
    divisors = settings.file.read("rope_freqs.weight").double()
    waves = 2 * math.pi * theta ** (torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    factor = float(f"{divisors.max().item():.5g}")
    between = (divisors > 1 + FLOAT_TOLERANCE) & (divisors < factor * (1 - FLOAT_TOLERANCE))
    share = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    lengths = (waves * (share * (high - low) + low))[between].round().unique().tolist()
    for length in [*lengths, *(2**n for n in range(5, 21))]:
        share = torch.clamp((length / waves - low) / (high - low), 0, 1)
        expected = 1 / ((1 - share) / factor + share)
        if torch.allclose(divisors, expected, rtol=1e-3, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(length),
            }
    raise settings.file.refused("rope_freqs.weight divides frequencies otherwise than Llama 3 does")


def extra_tensors(config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a file that divide the frequencies of the rotation, with their names.

    No weight of the model holds them.
    """
    rope = rope_of(config)
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
    """Return the configuration of what llama.cpp computes, and notes where it differs a little."""
    changed = copy.deepcopy(config)
    notes = []
    rope = getattr(changed.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and rope.get("truncate") is False:
        rope["truncate"] = True
        notes.append(
            "llama.cpp rounds the ends of YaRN's ramp, which the model does not (truncate=false)"
        )
    return changed, notes
