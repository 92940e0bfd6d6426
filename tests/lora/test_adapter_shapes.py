"""Ranks, alphas and layers that differ within a model, beside the real PEFT, both ways."""

import json

import pytest
import torch
from adapted import TARGETS, changed, close, llama, logits, randomise, tokens, train_on

import families
from chronicals.lora import LoRAConfig, adapters, apply_lora, load_adapter, save_adapter
from chronicals.patching import patch_parts
from chronicals.patching.decoder_layer import FUSED_LAYER, runs
from comparison import equal

peft = pytest.importorskip("peft")

PATTERNS = {
    "ends of paths": ({"q_proj": 2, "layers.1.mlp.down_proj": 7}, {"down_proj": 5}),
    "expressions": ({r"layers\.[01]\..*q_proj": 3, "q_proj": 5}, {r".*\.1\.mlp\..*": 2.5}),
    "the first that matches": ({r".*1.self_attn.q_proj": 3, "q_proj": 6}, {}),
    "no whole name": ({"_proj": 9, "q_proj": 2}, {"proj": 1.0}),
}


def fitted(patterns, paths):
    import re

    return {
        key: value
        for key, value in patterns.items()
        if any(re.match(rf"(.*\.)?({key})$", path) for path in paths)
    }


def shapes(model):
    return {path: (tuple(layer.lora_A.shape), layer.scale) for path, layer in adapters(model)}


@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rslora"])
@pytest.mark.parametrize("case", PATTERNS)
def test_patterns_mean_what_they_mean_to_peft(tmp_path, case, rslora):
    ranks, alphas = PATTERNS[case]
    described = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=TARGETS["llama"],
        rank_pattern=ranks,
        alpha_pattern=alphas,
        use_rslora=rslora,
    )
    theirs = peft.get_peft_model(llama(), described).eval()
    ids = tokens()
    randomise(theirs)
    theirs.save_pretrained(tmp_path)
    model = load_adapter(llama(), tmp_path).eval()
    for path, (shape, scale) in shapes(model).items():
        layer = theirs.get_submodule(f"base_model.model.{path}")
        assert (
            shape == layer.lora_A["default"].weight.shape and scale == layer.scaling["default"]
        ), path
    assert len(set(shapes(model).values())) > 1
    assert changed(logits(model, ids), logits(llama(), ids)) and close(
        logits(model, ids), logits(theirs, ids)
    )
    assert close(train_on(model, ids), train_on(theirs, ids), 1e-4)


@pytest.mark.parametrize("case", ["ends of paths", "expressions"])
def test_peft_reads_our_patterns(tmp_path, case):
    ranks, alphas = PATTERNS[case]
    shape = LoRAConfig(4, 12, 0.0, TARGETS["llama"], rank_pattern=ranks, alpha_pattern=alphas)
    model = apply_lora(llama(), shape).eval()
    ids = tokens()
    randomise(model)
    save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True).eval()
    assert close(logits(theirs, ids), logits(model, ids))
    again = load_adapter(llama(), tmp_path).eval()
    assert shapes(again) == shapes(model) and equal(logits(again, ids), logits(model, ids))
    assert close(train_on(theirs, ids), train_on(model, ids), 1e-4)


LAYERS = [
    {"layers_to_transform": [1]},
    {"layers_to_transform": 0},
    {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    {"layers_to_transform": [2], "layers_pattern": ["blocks", "layers"]},
    {"layers_to_transform": []},
]


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_pefts_layers_are_read(tmp_path, options):
    described = peft.LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS["llama"], **options)
    theirs = peft.get_peft_model(llama(num_hidden_layers=3), described).eval()
    ids = tokens()
    randomise(theirs)
    theirs.save_pretrained(tmp_path)
    model = load_adapter(llama(num_hidden_layers=3), tmp_path).eval()
    adapted = {
        name.removeprefix("base_model.model.")
        for name, m in theirs.named_modules()
        if hasattr(m, "lora_A")
    }
    assert {path for path, _ in adapters(model)} == adapted
    assert close(logits(model, ids), logits(theirs, ids))


def test_peft_reads_our_layers(tmp_path):
    model = apply_lora(llama(num_hidden_layers=3), LoRAConfig(4, 12, 0.0, layers=[0, 2])).eval()
    ids = tokens()
    assert {path.split(".")[2] for path, _ in adapters(model)} == {"0", "2"}
    randomise(model)
    save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(llama(num_hidden_layers=3), tmp_path).eval()
    assert changed(logits(model, ids), logits(llama(num_hidden_layers=3), ids))
    assert close(logits(theirs, ids), logits(model, ids))


def test_the_number_of_a_layer_is_the_first_in_the_path(tmp_path):
    """Experts that are modules have numbers, too."""
    model = llama(num_hidden_layers=2)
    for layer in model.model.layers:
        layer.mlp.inner = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
    apply_lora(model, LoRAConfig(2, 2, 0.0, ["inner.1", "q_proj"], layers=[0]))
    assert {path for path, _ in adapters(model)} == {
        "model.layers.0.mlp.inner.1",
        "model.layers.0.self_attn.q_proj",
    }


REFUSED = {
    "a key that matches nothing": (
        {"rank_pattern": {"k_proj": 3}},
        "lora_rank_pattern: 'k_proj' matches no adapted layer",
    ),
    "of an alpha": (
        {"alpha_pattern": {"q": 3}},
        "lora_alpha_pattern: 'q' matches no adapted layer",
    ),
    "a layer that is not there": (
        {"layers": [1, 5]},
        "no target is in layer 5; layers with targets: 0 to 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_ignored_is_refused(case):
    fields, message = REFUSED[case]
    model = llama()
    with pytest.raises(ValueError, match=message):
        apply_lora(model, LoRAConfig(4, 12, 0.0, ["q_proj"], **fields))
    assert not list(adapters(model)) and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("rank_pattern", {"q": 0}, "rank_pattern: q=0: must be at least 1"),
        ("alpha_pattern", {"q": 0.0}, "alpha_pattern: q=0.0: must be positive"),
        ("rank_pattern", {"q(": 2}, r"rank_pattern: 'q\(' is no regular expression"),
    ],
)
def test_patterns_of_no_sense_name_the_field(field, value, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**{field: value})


def test_an_adapter_with_other_patterns_does_not_refill(tmp_path):
    model = apply_lora(
        llama(), LoRAConfig(4, 12, 0.0, ["q_proj"], alpha_pattern={"layers.1.self_attn.q_proj": 3})
    )
    save_adapter(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["alpha_pattern"] == {
        "layers.1.self_attn.q_proj": 3
    }
    with pytest.raises(
        ValueError, match="layers.1.self_attn.q_proj is scaled by 0.75, the model's adapter by 3"
    ):
        load_adapter(apply_lora(llama(), LoRAConfig(4, 12, 0.0, ["q_proj"])), tmp_path)


@pytest.mark.slow
def test_fused_layers_take_parts_of_different_ranks(kernels):
    """Three parts of one product, of three ranks and scales, one layer without adapters."""
    import copy

    model = llama(num_hidden_layers=3, vocab_size=families.SIZES["vocab_size"]).double().train()
    shape = LoRAConfig(
        5,
        9,
        0.0,
        layers=[0, 2],
        rank_pattern={"k_proj": 1, "up_proj": 11, "layers.2.mlp.down_proj": 3},
        alpha_pattern={"v_proj": 2.0},
    )
    apply_lora(model, shape).double()
    randomise(model)
    batch = families.documents_batch()
    expected = families.states_and_gradients(copy.deepcopy(model), batch)
    patch_parts(model, whole_layers=True)
    before = runs.copy()
    families.assert_same(expected, families.states_and_gradients(model, batch))
    assert (runs - before)[FUSED_LAYER] == 3
