"""A model's configuration as the settings of a GGUF file, and back.

Both directions apply the table of ``families.py``. A configuration that was read is written again
and compared with the file: a setting that would be lost, or that differs, is refused by name,
since the model would compute something else than llama.cpp.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from chronicals.formats.gguf.families import COMMON_SETTINGS, FAMILIES, Family, family_of
from chronicals.formats.gguf.reader import ArchitectureSettings, GGUFFile
from chronicals.formats.gguf.rotation import (
    FLOAT_TOLERANCE,
    extra_tensors,
    head_dim,
    rope_of,
    rope_parameters,
    rope_settings,
)
from chronicals.formats.gguf.vocabulary import SPECIAL_TOKEN_KEYS

MEANINGLESS_KEYS = ("rope.scaling.finetuned", "tensor_data_layout")
"""Settings that do not change what is computed."""

BIAS_TENSORS = {
    "attention_bias": ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
    "mlp_bias": ("blk.0.ffn_gate.bias", "blk.0.ffn_up.bias"),
}
"""Fields of configurations that are true if a file has one of these tensors."""


def settings_of(config: Any, family: Family) -> dict[str, Any]:
    """Return all settings of an architecture, by key behind its name, in the file's order.

    Args:
        config: of a language model (transformers).
        family: its family in GGUF.

    Raises:
        NotExpressible: GGUF has no form for its rotation.
    """
    settings = {}
    for setting in COMMON_SETTINGS:
        settings[setting.key] = setting.value_to_write(config)
    settings |= rope_settings(config)
    for setting in family.settings:
        settings[setting.key] = setting.value_to_write(config)
    return {key: value for key, value in settings.items() if value is not None}


def config_of(file: GGUFFile) -> Any:
    """Return the configuration (transformers') of the model in a file.

    Raises:
        NotExpressible: no class of transformers is proved to compute what llama.cpp does.
        ValueError: the file is no model by itself, or damaged.
    """
    import gguf
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = file.value("general.type")
    if kind not in (None, "model"):
        raise ValueError(
            f"{file.path}: general.type={kind!r}: is no model by itself; give the file of the model"
        )
    parts = file.value("split.count")
    if parts is not None and parts > 1:
        raise ValueError(
            f"{file.path}: is one of {parts} parts; join them (llama-gguf-split --merge) and give "
            "the whole file"
        )
    settings = ArchitectureSettings(file)
    names = {
        model_type: gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[family.architecture]]
        for model_type, family in FAMILIES.items()
        if family.is_read
    }
    if settings.architecture not in names.values():
        known = ", ".join(dict.fromkeys(names.values()))
        raise file.refused(f"architecture {settings.architecture!r} is not one of {known}")
    # Llama and Mixtral share an architecture; a file of Mixtral says how many experts it has.
    types = [model_type for model_type, name in names.items() if name == settings.architecture]
    if len(types) > 1:
        has_experts = bool(settings.get("expert_count"))
        by_experts = {}
        for model_type in types:
            keys = [setting.key for setting in FAMILIES[model_type].settings]
            by_experts["expert_count" in keys] = model_type
        types = [by_experts[has_experts]]
    model_type = types[0]
    family = FAMILIES[model_type]
    config = AutoConfig.for_model(model_type, **_fields_of(settings, family))
    for name, tensors in BIAS_TENSORS.items():
        if hasattr(config, name):
            setattr(config, name, any(tensor in file.tensors for tensor in tensors))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    _check_computed_alike(settings, config, family)
    return config


def _fields_of(settings: ArchitectureSettings, family: Family) -> dict[str, Any]:
    """Return the fields of the configuration, of the file and of what llama.cpp has built in."""
    fields: dict[str, Any] = {}
    for setting in (*COMMON_SETTINGS, *family.settings):
        if setting.field is None:
            continue
        needed = not setting.optional and setting.default is None and setting.none_as is None
        value = settings.need(setting.key) if needed else settings.get(setting.key)
        if value is None and setting.default is not None:
            value = setting.default(SimpleNamespace(**fields))
        if setting.optional and not value:
            value = None
        if setting.none_as is not None and value == setting.none_as:
            value = None
        if value is not None:
            fields[setting.field] = value
    width = fields["head_dim"]
    value_width = settings.get("attention.value_length", width)
    if value_width != width:
        raise settings.file.refused(f"heads have keys of {width} and values of {value_width}")
    rope = rope_parameters(settings, width)
    if family.has_local_rope:
        local_base = settings.get("rope.freq_base_swa", 10000.0)
        local = {"rope_type": "default", "rope_theta": local_base}
        rope = {"full_attention": rope, "sliding_attention": local}
    fields["rope_parameters"] = rope
    fields["vocab_size"] = settings.file.shape_of("token_embd.weight")[0]
    fields["tie_word_embeddings"] = "output.weight" not in settings.file.tensors
    ids = {name: settings.file.value(key) for name, key in SPECIAL_TOKEN_KEYS.items()}
    fields["bos_token_id"] = ids["bos"]
    fields["pad_token_id"] = ids["pad"]
    # Generation ends at either of two.
    ends = [ids[name] for name in ("eos", "eot") if ids[name] is not None]
    fields["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    return family.implied_fields(SimpleNamespace(**fields)) | fields


def _check_computed_alike(settings: ArchitectureSettings, config: Any, family: Family) -> None:
    """Raise NotExpressible where the configuration has another setting or rotation than the file."""
    class_name = type(config).__name__
    ours = settings_of(config, family_of(config))
    prefix = f"{settings.architecture}."
    for name in settings.file.reader.fields:
        key = name.removeprefix(prefix)
        if not name.startswith(prefix) or key in MEANINGLESS_KEYS:
            continue
        value = settings.get(key)
        # LongRoPE is recognised by its tensors.
        has_no_effect = value in (0, 0.0, "none", False) or (
            key == "rope.scaling.type" and value == "longrope"
        )
        if key not in ours and not has_no_effect:
            raise settings.file.refused(
                f"{name}={value!r} is a setting that {class_name} does not have"
            )
        if key not in ours:
            continue
        if isinstance(ours[key], int | float) and isinstance(value, int | float):
            same = math.isclose(float(ours[key]), float(value), rel_tol=FLOAT_TOLERANCE)
        else:
            same = bool(ours[key] == value)
        if not same:
            raise settings.file.refused(
                f"{name}={value!r}, where {class_name} computes by {ours[key]!r}"
            )
    file = settings.file
    for name, values in extra_tensors(config):
        if name in file.tensors and not torch.allclose(
            file.read(name), torch.from_numpy(values), rtol=1e-3
        ):
            raise file.refused(f"{name} has other values than {class_name} computes by")
    part = rope_of(config).get("partial_rotary_factor", 1.0)
    if part != 1.0 and not family.rotates_part_of_head:
        raise file.refused(
            f"{settings.architecture}.rope.dimension_count is not the {head_dim(config)} of a head"
        )
