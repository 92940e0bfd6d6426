"""apply_lora: what is adapted, what is frozen, and what the adapted model computes."""

import re

import pytest
import torch
import transformers
from adapted import MODELS, TARGETS, gpt2, llama, logits, randomise, tokens
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import tiny
from chronicals.lora import LoRAConfig, LoRALinear, adapters, apply_lora
from chronicals.models.twin import FIRST_TOKEN, build_twin, plain_surroundings, twin_config
from comparison import equal

LLAMA = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LLAMA += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
GPT2 = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]


def in_both_layers(prefix, names):
    return {f"{prefix}.{layer}.{name}" for layer in (0, 1) for name in names}


def paths(model):
    return {path for path, _ in adapters(model)}


@pytest.mark.parametrize("name", MODELS)
def test_identity_at_first(name):
    """Bit for bit, in training too: B is zero."""
    model = MODELS[name]()
    ids = tokens()
    before = logits(model, ids)
    assert apply_lora(model, LoRAConfig(rank=4, dropout=0.5)) is model
    assert equal(logits(model, ids), before)
    assert equal(logits(model.train(), ids), before)


@pytest.mark.parametrize("targets", [None, "all-linear"])
@pytest.mark.parametrize(
    "name, expected",
    [
        ("llama", in_both_layers("model.layers", LLAMA)),
        ("gpt2", in_both_layers("transformer.h", GPT2)),
    ],
)
def test_every_linear_layer_but_the_head(name, expected, targets):
    model = apply_lora(MODELS[name](), LoRAConfig(rank=4, target_modules=targets))
    assert paths(model) == expected
    assert not isinstance(model.get_output_embeddings(), LoRALinear)


@pytest.mark.parametrize(
    "targets, expected",
    [
        (["q_proj"], in_both_layers("model.layers", LLAMA[:1])),
        (["q_proj", "v_proj", "q_proj"], in_both_layers("model.layers", [LLAMA[0], LLAMA[2]])),
        (["self_attn.o_proj"], in_both_layers("model.layers", [LLAMA[3]])),
        (["model.layers.1.mlp.up_proj"], {"model.layers.1.mlp.up_proj"}),
        (
            ["1.mlp.up_proj", "k_proj"],
            {"model.layers.1.mlp.up_proj"} | in_both_layers("model.layers", [LLAMA[1]]),
        ),
        (
            r".*\.0\..*(up|down)_proj",
            {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"},
        ),
        ("model.layers.1.self_attn.v_proj", {"model.layers.1.self_attn.v_proj"}),
        (["lm_head"], {"lm_head"}),
    ],
    ids=lambda given: "" if isinstance(given, set) else str(given),
)
def test_targets_by_name_and_by_regular_expression(targets, expected):
    assert paths(apply_lora(llama(), LoRAConfig(rank=4, target_modules=targets))) == expected


ERRORS = {
    "no such name": (
        ["q_prj"],
        "'q_prj' matches no layer.*down_proj, gate_proj, k_proj, o_proj, q_proj",
    ),
    "one of two matches nothing": (["q_proj", "c_attn"], "'c_attn' matches no layer"),
    "only the end of a name": (["proj"], "'proj' matches no layer"),
    "no match of the expression": (
        r"layers\.0\.q_proj",
        "so nothing would be trained; linear layers here: down_proj, gate_",
    ),
    "an empty list": ([], "nothing would be trained"),
    "a block": (["mlp"], "layers.0.mlp' is LlamaMLP; only linear layers"),
    "a norm": (["input_layernorm"], "is LlamaRMSNorm; only linear layers"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_targets_that_cannot_be_adapted(case):
    """The model is as it was: nothing frozen, nothing wrapped."""
    targets, message = ERRORS[case]
    model = llama()
    with pytest.raises(ValueError, match=f"lora_target_modules.*{message}"):
        apply_lora(model, LoRAConfig(rank=4, target_modules=targets))
    assert all(p.requires_grad for p in model.parameters())
    assert not paths(model) and not hasattr(model, "chronicals_lora")


def test_a_second_time_is_refused():
    model = apply_lora(llama(), LoRAConfig(rank=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="has adapters already"):
        apply_lora(model, LoRAConfig(rank=4, target_modules=["v_proj"]))
    assert paths(model) == in_both_layers("model.layers", LLAMA[:1])


@pytest.mark.parametrize("wrapped", [True, False], ids=["PeftModel", "injected"])
def test_over_pefts_adapters_is_refused(wrapped):
    """Their matrices are linear layers too; merged, the model is plain again."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = (
        peft.get_peft_model(llama(), config)
        if wrapped
        else peft.inject_adapter_in_model(config, llama())
    )
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(
        ValueError,
        match=r"has PEFT's adapters already \(.*\).*leave use_lora out.*merge_and_unload",
    ):
        apply_lora(model, LoRAConfig(rank=2))
    assert (
        not paths(model)
        and {name for name, p in model.named_parameters() if p.requires_grad} == trained
    )
    if wrapped:
        assert len(paths(apply_lora(model.merge_and_unload(), LoRAConfig(rank=2)))) == 14


@pytest.mark.parametrize("name", MODELS)
def test_everything_else_is_frozen(name):
    config = LoRAConfig(rank=4, target_modules=TARGETS[name])
    model = apply_lora(MODELS[name](), config)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trainable == {
        f"{path}.{matrix}" for path in paths(model) for matrix in ("lora_A", "lora_B")
    }
    assert model.chronicals_lora is config
    randomise(model)
    model(input_ids=tokens()).logits.square().sum().backward()
    for n, parameter in model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.any().item()) == (n in trainable), n


def test_shapes_and_start_of_the_matrices():
    model = apply_lora(gpt2(), LoRAConfig(rank=4, target_modules=["c_attn"]))
    layer = model.transformer.h[0].attn.c_attn
    assert layer.lora_A.shape == (4, 32) and layer.lora_B.shape == (96, 4)
    assert (
        not layer.lora_B.any()
        and layer.lora_A.abs().max() <= 1 / 32**0.5
        and layer.lora_A.std() > 0.05
    )
    other = model.transformer.h[1].attn.c_attn
    assert not equal(layer.lora_A, other.lora_A)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_output_is_that_of_the_merged_weights(name, rslora):
    """``W + alpha / rank · B A`` (or over the root of the rank), by hand, in the plain model."""
    plain = MODELS[name]()
    ids = tokens()
    config = LoRAConfig(4, 12, 0.3, TARGETS[name], rslora)
    untouched = logits(plain, ids)
    model = apply_lora(MODELS[name](), config).eval()
    randomise(model)
    scale = 12 / 4**0.5 if rslora else 12 / 4
    with torch.no_grad():
        for path, layer in adapters(model):
            delta = scale * (layer.lora_B.double() @ layer.lora_A.double())
            weight = plain.get_submodule(path).weight
            weight += (
                delta if isinstance(plain.get_submodule(path), nn.Linear) else delta.t()
            ).float()
    expected = logits(plain, ids)
    got = logits(model, ids)
    assert (expected - untouched).abs().max() > 0.02 * untouched.abs().max()
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.slow
def test_dropout_acts_in_training_alone():
    """It is on the input of A: over many draws its mean is the layer without."""
    config = LoRAConfig(rank=4, alpha=8, dropout=0.5)
    layer = LoRALinear(nn.Linear(16, 5), config, 16, 5)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(3, 16)
    with torch.no_grad():
        calm = [layer.eval()(x) for _ in range(2)]
        wild = [layer.train()(x) for _ in range(4000)]
    assert equal(*calm)
    by_hand = layer.base_layer(x) + 2 * (x @ layer.lora_A.t() @ layer.lora_B.t())
    torch.testing.assert_close(calm[0], by_hand.detach(), rtol=1e-5, atol=1e-5)
    stacked = torch.stack(wild)
    assert (stacked[0] != stacked[1]).all()
    spread = stacked.std(0) / 4000**0.5
    assert ((stacked.mean(0) - calm[0]).abs() < 6 * spread).all()


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_kept(training):
    """A model that is not in training (as one is after from_pretrained) is not dropped out of
    when adapted.
    """
    model = apply_lora(llama().train(training), LoRAConfig(rank=4, dropout=0.5))
    assert {module.training for module in model.modules()} == {training}
    randomise(model)
    ids = tokens()
    assert equal(logits(model, ids), logits(model, ids)) != training


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_whole_model_in_training(rate):
    model = apply_lora(tiny.llama(), LoRAConfig(rank=4, dropout=rate)).train()
    randomise(model)
    ids = tokens()
    assert equal(logits(model, ids), logits(model, ids)) == (rate == 0)
    assert equal(logits(model.eval(), ids), logits(model, ids))


def test_bf16_base_with_fp32_adapters():
    """The output has the type of the base; the adapter's own values keep theirs."""
    base = nn.Linear(16, 5).bfloat16()
    layer = LoRALinear(base, LoRAConfig(rank=4, alpha=4, dropout=0.0), 16, 5)
    nn.init.normal_(layer.lora_B)
    assert layer.lora_A.dtype == layer.lora_B.dtype == torch.float32
    x = torch.randn(7, 16).bfloat16()
    got = layer(x)
    assert got.dtype == torch.bfloat16
    with torch.no_grad():
        low_rank = x.double() @ layer.lora_A.double().t() @ layer.lora_B.double().t()
        exact = x.double() @ base.weight.double().t() + base.bias.double() + low_rank
    assert (got.double() - exact).norm() <= 2**-6 * exact.norm()


def test_base_weights_keep_their_identity():
    """An adapter takes no copy, so a tied or shared weight stays one."""
    model = llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    apply_lora(model, LoRAConfig(rank=4))
    assert model.model.layers[0].mlp.up_proj.base_layer.weight is weight


def test_the_message_lists_what_there_is():
    """The last parts of the paths, each once."""
    with pytest.raises(ValueError) as error:
        apply_lora(gpt2(), LoRAConfig(rank=4, target_modules=["q_proj"]))
    assert re.search(r"linear layers here: c_attn, c_fc, c_proj$", str(error.value))


# --- models whose forwards do more with a linear layer than call it
# ----------------------------------------------


def twin(name):
    """A small random model of the class, in training mode."""
    with plain_surroundings():
        config = getattr(transformers, f"{name}Config")
        return build_twin(MODEL_FOR_CAUSAL_LM_MAPPING[config], twin_config(config())).train()


ROUTERS = {
    "Llama4Text": "Llama4Router, the first is model.layers.0.feed_forward.router",
    "Phimoe": "PhimoeTopKRouter, the first is model.layers.0.mlp.router",
    "DeepseekV4": "DeepseekV4GroupedLinear, the first is model.layers.0.self_attn.o_a_proj",
}
READERS = {
    "Mamba": (),
    "FalconMamba": (),
    "Jamba": (),
    "NemotronH": (),
    "HunYuanMoEV1": (),
    "DeepseekV32": ("indexer",),
}
"""Of classes that read a layer's weight or its type, the layers that choose and so get no
gradient.
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*READERS, "Falcon"])
def test_a_weight_that_is_read_instead_of_called_has_the_adapter_in_it(name):
    """In the loss, as merging by hand into the plain model shows, and in the gradients."""
    model = twin(name)
    plain = twin(name)
    apply_lora(model, LoRAConfig(rank=2, dropout=0.0))
    randomise(model)
    with torch.no_grad():
        for path, layer in adapters(model):
            plain.get_submodule(path).weight += layer.scale * (layer.lora_B @ layer.lora_A)
    ids = torch.randint(FIRST_TOKEN, 97, (2, 9))
    loss, expected = (m(input_ids=ids, labels=ids, use_cache=False).loss for m in (model, plain))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0.0)
    loss.backward()
    idle = [
        path
        for path, layer in adapters(model)
        if layer.lora_B.grad is None or not layer.lora_B.grad.any()
    ]
    assert [path for path in idle if not any(part in path for part in READERS.get(name, ()))] == []


@pytest.mark.parametrize("name", ROUTERS)
def test_what_only_derives_from_a_linear_layer_is_left_out_and_named(name, caplog):
    model = twin(name)
    apply_lora(model, LoRAConfig(rank=2, dropout=0.0))
    randomise(model)
    assert ROUTERS[name] in caplog.text
    path = ROUTERS[name].rpartition(" ")[2]
    assert path not in paths(model) and not model.get_submodule(path).weight.requires_grad
    ids = torch.randint(FIRST_TOKEN, 97, (2, 9))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert any(
        layer.lora_B.grad.any() for _, layer in adapters(model) if layer.lora_B.grad is not None
    )


def test_what_only_derives_from_a_linear_layer_cannot_be_asked_for():
    with pytest.raises(
        ValueError, match="feed_forward.router' is Llama4Router; only linear layers and embeddings"
    ):
        apply_lora(twin("Llama4Text"), LoRAConfig(rank=2, target_modules=["router"]))


@pytest.mark.parametrize("bias", [False, True])
def test_weight_and_bias_of_an_adapted_layer(bias):
    layer = LoRALinear(nn.Linear(6, 5, bias).bfloat16(), LoRAConfig(rank=2, dropout=0.0), 6, 5)
    nn.init.normal_(layer.lora_B)
    assert layer.weight.dtype == torch.bfloat16 and layer.bias is layer.base_layer.bias
    assert "weight" not in dict(layer.named_parameters(recurse=False))
    x = torch.randn(3, 6).double()
    torch.testing.assert_close(
        x @ layer.weight.double().t(),
        layer.double()(x) - (layer.bias if bias else 0),
        rtol=0.05,
        atol=0.05,
    )


def test_the_weight_of_a_conv1d_keeps_its_layout():
    layer = (
        apply_lora(gpt2(), LoRAConfig(rank=2, target_modules=["c_attn"]))
        .transformer.h[0]
        .attn.c_attn
    )
    nn.init.normal_(layer.lora_B)
    x = torch.randn(3, 32)
    assert layer.weight.shape == layer.base_layer.weight.shape == (32, 96)
    torch.testing.assert_close(x @ layer.weight + layer.bias, layer.eval()(x), rtol=1e-4, atol=1e-4)


def test_a_quantised_weight_is_not_read_without_its_adapter():
    layer = LoRALinear(nn.Linear(6, 5), LoRAConfig(rank=2), 6, 5)
    layer.base_layer.weight = nn.Parameter(torch.zeros(15, dtype=torch.uint8), requires_grad=False)
    assert not hasattr(layer, "weight")
