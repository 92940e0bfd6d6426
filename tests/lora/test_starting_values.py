"""Adapters that start from the weights of their base, beside the real PEFT: the start, training,
what is saved and read.
"""

import copy
import json

import pytest
import torch
from adapted import MODELS, TARGETS, changed, close, gpt2, llama, logits, tokens, train_on
from torch.nn import functional as F

import families
from chronicals.lora import (
    LoRAConfig,
    adapters,
    apply_lora,
    load_adapter,
    save_adapter,
    without_adapters,
)
from chronicals.patching import patch_parts
from comparison import equal

peft = pytest.importorskip("peft")

INITS = ["pissa", "olora", "pissa_niter_4"]
SHAPE = {"rank": 4, "alpha": 12, "dropout": 0.0}


def ours(init, name="llama", **fields):
    torch.manual_seed(5)  # of the randomised decomposition
    return apply_lora(
        MODELS[name](), LoRAConfig(**SHAPE, target_modules=TARGETS[name], init=init, **fields)
    ).eval()


def theirs(init, name="llama", **fields):
    torch.manual_seed(5)
    options = {
        "target_modules": TARGETS[name],
        "fan_in_fan_out": name == "gpt2",
        "init_lora_weights": init,
        **fields,
    }
    return peft.get_peft_model(
        MODELS[name](), peft.LoraConfig(r=4, lora_alpha=12, **options)
    ).eval()


@pytest.mark.parametrize("name, init", [("llama", "pissa"), ("llama", "olora"), ("gpt2", "pissa")])
def test_the_start_and_the_training_are_pefts(name, init):
    model = ours(init, name)
    other = theirs(init, name)
    ids = tokens()
    for path, layer in adapters(model):
        mate = other.get_submodule(f"base_model.model.{path}")
        assert close(layer.lora_A, mate.lora_A["default"].weight, 1e-4)
        assert close(layer.lora_B, mate.lora_B["default"].weight, 1e-4)
        assert close(layer.base_layer.weight, mate.base_layer.weight, 1e-4)
        assert changed(layer.base_layer.weight, MODELS[name]().get_submodule(path).weight)
    assert close(logits(model, ids), logits(MODELS[name](), ids), 1e-4)
    after = train_on(model, ids)
    assert changed(after, logits(MODELS[name](), ids)) and close(after, train_on(other, ids), 1e-3)


def test_the_randomised_decomposition_takes_nearly_as_much():
    exact = ours("pissa")
    found = ours("pissa_niter_16")
    ids = tokens()
    for (_, best), (_, layer) in zip(adapters(exact), adapters(found), strict=True):
        assert 1 - 1e-6 < layer.base_layer.weight.norm() / best.base_layer.weight.norm() < 1.001
        assert not equal(layer.lora_A, best.lora_A)
    assert close(logits(found, ids), logits(llama(), ids), 1e-4)


def test_olora_on_the_transposed_weights_of_gpt2():
    """PEFT decomposes the weight as it is stored and then does not fit it; ours is of the
    layer's own matrix.
    """
    assert close(logits(ours("olora", "gpt2"), ids := tokens()), logits(gpt2(), ids), 1e-4)


def test_gaussian_is_pefts_distribution():
    model = ours("gaussian", rank_pattern={"q_proj": 16})
    for _, layer in adapters(model):
        assert not layer.lora_B.any()
        assert 0.75 < layer.lora_A.std() * len(layer.lora_A) < 1.25


PATTERNS = {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"down_proj": 3}}


@pytest.mark.parametrize(
    "fields", [{}, {"use_rslora": True}, PATTERNS], ids=["plain", "rslora", "patterns"]
)
@pytest.mark.parametrize("init", INITS)
def test_what_is_saved_is_right_on_the_original_base(tmp_path, init, fields):
    model = ours(init, **fields)
    ids = tokens()
    train_on(model, ids)
    save_adapter(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["init_lora_weights"] is True
    expected = logits(model, ids)
    assert changed(expected, logits(llama(), ids))
    assert close(
        logits(peft.PeftModel.from_pretrained(llama(), tmp_path).eval(), ids), expected, 1e-4
    )
    assert close(logits(load_adapter(llama(), tmp_path).eval(), ids), expected, 1e-4)


def test_it_is_pefts_conversion(tmp_path):
    """Of the same adapters, what PEFT writes with the start as
    ``path_initial_model_for_weight_conversion``.
    """
    model = ours("pissa")
    other = theirs("pissa")
    ids = tokens()
    other.save_pretrained(tmp_path / "start")
    train_on(model, ids), train_on(other, ids)
    other.peft_config["default"].init_lora_weights = "pissa"
    other.save_pretrained(
        tmp_path / "theirs", path_initial_model_for_weight_conversion=str(tmp_path / "start")
    )
    save_adapter(model, tmp_path / "ours")
    described = [
        json.loads((tmp_path / who / "adapter_config.json").read_text())
        for who in ("ours", "theirs")
    ]
    assert all(
        described[0][name] == described[1][name]
        for name in ("r", "lora_alpha", "init_lora_weights")
    )
    one, two = (load_adapter(llama(), tmp_path / who).eval() for who in ("ours", "theirs"))
    assert close(logits(one, ids), logits(two, ids), 1e-3) and changed(
        logits(one, ids), logits(llama(), ids)
    )


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_pefts_unconverted_adapters_are_read(tmp_path, init):
    other = theirs(init)
    ids = tokens()
    train_on(other, ids)
    other.save_pretrained(tmp_path)
    model = load_adapter(llama(), tmp_path).eval()
    assert close(logits(model, ids), logits(other, ids), 1e-4) and changed(
        logits(model, ids), logits(llama(), ids)
    )
    save_adapter(model, tmp_path / "again")
    assert close(
        logits(load_adapter(llama(), tmp_path / "again").eval(), ids), logits(other, ids), 1e-4
    )


def test_refilled_bit_by_bit(tmp_path):
    model = ours("pissa")
    ids = tokens()
    train_on(model, ids)
    save_adapter(model, tmp_path)
    again = load_adapter(ours("pissa"), tmp_path)
    assert equal(logits(again, ids), logits(model, ids))
    assert all(
        equal(p, q)
        for p, q in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_values_that_started_elsewhere_are_refused(tmp_path):
    model = ours("pissa")
    save_adapter(model, tmp_path)
    other = ours("olora")
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="started from other values .*load_adapter"):
        load_adapter(other, tmp_path)
    assert all(equal(before[name], value) for name, value in other.state_dict().items())


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_merged_and_off(init):
    model = ours(init)
    ids = tokens()
    expected = train_on(model, ids)
    bare = logits(llama(), ids)
    with without_adapters(model):
        assert close(logits(model, ids), bare, 1e-4)
        path, layer = next(adapters(model))
        assert close(layer.weight, llama().get_submodule(path).weight, 1e-4)
    assert close(logits(model.merge_and_unload(), ids), expected, 1e-4)


def test_off_in_fused_layers(kernels):
    """There too what is off is the start, not the rest of the weight alone."""
    model = llama(vocab_size=families.SIZES["vocab_size"]).double().train()
    apply_lora(model, LoRAConfig(5, 9, 0.0, init="pissa")).double()
    batch = families.documents_batch()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    plain = copy.deepcopy(model)
    patch_parts(model, whole_layers=True)
    families.assert_same(
        families.states_and_gradients(plain, batch), families.states_and_gradients(model, batch)
    )
    with torch.no_grad(), without_adapters(plain), without_adapters(model):
        off, expected = (m(input_ids=batch.input_ids[None]).logits for m in (model, plain))
    assert close(off, expected)
    with torch.no_grad():
        assert changed(off, model(input_ids=batch.input_ids[None]).logits)


def test_a_layer_by_hand():
    """In double precision, the definition: with the start taken from a random weight, y = W x."""
    torch.manual_seed(0)
    for init in ("pissa", "olora"):
        model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(13, 7).double()})
        model.get_output_embeddings = model.get_input_embeddings = lambda: None
        model.config = type("Config", (), {"_name_or_path": ""})()
        x = torch.randn(5, 13).double()
        w = model["q_proj"].weight.detach().clone()
        layer = model["q_proj"]
        from chronicals.lora.layers import LoRALinear
        from chronicals.lora.starting_values import start_from_weights

        model["q_proj"] = LoRALinear(layer, LoRAConfig(3, 5, 0.0, init=init), 13, 7)
        start_from_weights(model, init)
        y = model["q_proj"](x)
        assert torch.allclose(y, F.linear(x, w, layer.bias), rtol=1e-6, atol=1e-6)
        rest = torch.linalg.svdvals(layer.weight.detach())
        if init == "pissa":  # the largest singular values have gone
            assert (
                torch.allclose(rest[:4], torch.linalg.svdvals(w)[3:], atol=1e-5)
                and rest[4:].abs().max() < 1e-5
            )


REFUSED = {
    "a shared weight": (
        lambda: gpt2(),
        {"target_modules": ["lm_head"]},
        "lm_head shares its weight with transformer.wte",
    ),
    "too large a rank": (
        lambda: llama(),
        {"rank": 65, "target_modules": ["q_proj"]},
        "has rank 65, its weight .* only 64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_start_so_is_refused(case):
    build, fields, message = REFUSED[case]
    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        apply_lora(model, LoRAConfig(**{**SHAPE, "init": "pissa", **fields}))
    assert not list(adapters(model)) and all(
        equal(before[name], t) for name, t in model.state_dict().items()
    )


def test_a_quantised_weight_is_refused():
    model = llama()
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="lora_init='olora': the weight of .*q_proj is quantised"):
        apply_lora(model, LoRAConfig(**SHAPE, init="olora", target_modules=["q_proj"]))


@pytest.mark.parametrize("init", ["pisa", "pissa_niter_0", "True", "eva"])
def test_unknown_ways_name_those_there_are(init):
    with pytest.raises(ValueError, match=f"init='{init}': takes default, gaussian, pissa"):
        LoRAConfig(init=init)
