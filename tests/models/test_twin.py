"""Twins: few layers, at least one of every kind that the model has, whatever field of its
configuration says which.
"""

import copy
import re

import pytest
import torch

from chronicals.models import prove_packability, twin, twin_layers
from chronicals.models.twin import twin_config
from chronicals.patching.plan import plan_for
from patching.architectures import architectures

WIDE = {"hidden_size": 256}
"""A width from which a twin has smaller sizes than its model."""

DEEP = {
    "gemma3n": (
        "Gemma3nText",
        {"num_hidden_layers": 10, "num_kv_shared_layers": 3, "intermediate_size": 512},
    ),
    "gemma4": (
        "Gemma4Text",
        {"num_hidden_layers": 18, "num_kv_shared_layers": 6, "use_double_wide_mlp": True},
    ),
    "gemma4, one head": (
        "Gemma4Text",
        {**WIDE, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {"num_hidden_layers": 20, "first_k_dense_replace": 11, "n_routed_experts": 8},
    ),
    "glm_moe_dsa": ("GlmMoeDsa", {"num_hidden_layers": 12, "n_routed_experts": 8}),
    "afmoe": ("Afmoe", {"num_dense_layers": 5, "num_experts": 8}),
    "ernie": (
        "Ernie4_5_Moe",
        {"moe_layer_start_index": 13, "moe_layer_end_index": 20, "moe_num_experts": 8},
    ),
    "qwen2_moe": ("Qwen2Moe", {"decoder_sparse_step": 2, "mlp_only_layers": [9], "num_experts": 8}),
    "qwen3_next": (
        "Qwen3Next",
        {"decoder_sparse_step": 3, "mlp_only_layers": [11, 13], "num_experts": 8},
    ),
    "mllama": ("Mllama", {}),
    "llama4": ("Llama4Text", {"interleave_moe_layer_step": 2, "num_local_experts": 4}),
    "smollm3": ("SmolLM3", {}),
    "hunyuan_v4": ("HYV4", {"num_experts": 4}),
}
"""Models whose layers are of several kinds: name of the classes in transformers, and fields."""


def deep_configuration(name):
    family, fields = DEEP[name]
    if family not in architectures():
        pytest.skip(f"this transformers has no {family}")
    kind = architectures()[family][0]
    if family == "Mllama":
        return kind(text_config=fields)
    return kind(**fields)


def deciding(module):
    """Class of a module, and what its forward decides by: switches, names, and what it has or
    has not.
    """
    fields = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, str) or value in (None, False, True)
    }
    fields.pop("layer_idx", None)
    return type(module).__name__, *sorted((name, str(value)) for name, value in fields.items())


def kinds_of_layers(cls, config):
    """The kinds of a model's layers, each by modules and shapes of parameters, and the number of
    layers.
    """
    with torch.device("meta"):
        model = cls(copy.deepcopy(config))
        layers = model.model.layers
    kinds = set()
    for layer in layers:
        modules = [(path, deciding(module)) for path, module in layer.named_modules()]
        shapes = [(path, parameter.shape) for path, parameter in layer.named_parameters()]
        kinds.add((*modules, *shapes))
    return kinds, len(layers)


@pytest.mark.parametrize("name", DEEP)
def test_a_twin_has_a_layer_of_every_kind_of_the_model_and_of_no_other(name, monkeypatch):
    config = deep_configuration(name)
    cls = architectures()[DEEP[name][0]][1][type(config)]
    got, kept = kinds_of_layers(cls, twin_config(config))
    monkeypatch.setattr(twin, "cut_layers", lambda text, overrides: overrides)
    expected, depth = kinds_of_layers(cls, twin_config(config))
    assert len(expected) > 1 and got == expected
    assert kept < depth or depth <= 4


@pytest.mark.parametrize("name", [name for name in DEEP if name.startswith("gemma4")])
def test_heads_of_the_twin_are_wide_in_the_layers_where_the_models_are(name):
    config = deep_configuration(name)
    with torch.device("meta"):
        cls = architectures()[DEEP[name][0]][1][type(config)]
        layers = cls(twin_config(config)).model.layers
    widths = {len(layer.self_attn.q_norm.weight) for layer in layers}
    assert max(widths) == 2 * min(widths)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_models_whose_last_layers_share_keys_are_proved(name):
    """Their layers are of several widths, too, in lists and in ``per_layer_config``."""
    config = deep_configuration(name)
    with torch.device("meta"):
        model = architectures()[DEEP[name][0]][1][type(config)](config)
    proof = prove_packability(model)
    assert proof.packed and proof.head_proved, proof.reason
    assert plan_for(model).loss


NO_COUNTS = {
    "first_layer_is_expansion",
    "global_attn_every_n_layers",
    "hidden_size_per_layer_input",
    "interleave_moe_layer_step",
    "layer_group_size",
    "lookahead_layers",
    "no_rope_layer_interval",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "vocab_size_per_layer_input",
    "attn_layer_offset",
    "expert_layer_offset",
    "num_layers_per_stack",
}
"""Fields of configurations that speak of layers and hold nothing that fewer layers change:
periods of which the configuration has made a list, offsets within a period, sizes, and layers
beside the model's own."""


def test_every_field_that_speaks_of_layers_is_known():
    """Of all causal language models that this transformers has; a new one may bring a new field."""
    known = {
        *twin_layers.COUNTS,
        *twin_layers.COUNTED_TOO,
        *twin_layers.STACKS,
        *twin_layers.FIRST,
        *twin_layers.LAST,
    }
    known |= {
        *twin_layers.FIRST_INCLUSIVE,
        *twin_layers.LAYER_SECTIONS,
        *twin_layers.PERIODS,
        *NO_COUNTS,
    }
    unknown = set()
    wrong = set()
    for name, (kind, _) in architectures().items():
        try:
            text = kind().get_text_config()
        except Exception:  # some configurations cannot be made of defaults
            continue
        numbers = {
            field
            for field, value in vars(text).items()
            if type(value) is int and re.search(r"layers?(_|$)", field)
        }
        unknown |= {(name, field) for field in numbers - known}
        layers = twin_layers.Layers.of(text, {})
        if layers is None:
            continue
        lists = {
            field
            for field, value in vars(text).items()
            if isinstance(value, list | tuple) and len(value) > 4
        }
        lists -= {*layers.per_layer, *layers.indices, *twin_layers.NO_LAYERS, "architectures"}
        unknown |= {(name, field) for field in lists}
        twin_layers.cut_layers(text, {})
        count = twin_layers.Layers.of(text, {}).count
        wrong |= {(name, field) for field in layers.per_layer if len(getattr(text, field)) != count}
        wrong |= {
            (name, field)
            for field in layers.indices
            if any(index > count for index in getattr(text, field))
        }
    assert not unknown and not wrong
