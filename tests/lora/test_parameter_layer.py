"""Adapters of bare parameters, such as all experts of a layer in one tensor, beside the real
PEFT, both ways.
"""

import copy
import json
import sys

import pytest
import torch
import transformers
from adapted import close, logits, randomise, train_on
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import families
from chronicals import patch_model, unpatch_model
from chronicals.lora import (
    LoRAConfig,
    adapters,
    add_adapter,
    apply_lora,
    load_adapter,
    merge_and_unload,
    report_frozen_experts,
    save_adapter,
    set_adapter,
    without_adapters,
)
from chronicals.lora.parameter_layer import LoRAParameter, innermost
from chronicals.lora.targets import stacked_parameters
from chronicals.models.twin import FIRST_TOKEN, build_twin, plain_surroundings, twin_config
from chronicals.optimizers.learning_rates import lora_plus_groups
from comparison import equal

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTERS = {"mixtral": "gate.weight", "qwen3_moe": "gate.weight", "gpt_oss": "router.weight"}
TARGETS = {
    "both": BOTH,
    "one": ["experts.down_proj"],
    "a path": ["model.layers.1.mlp.experts.gate_up_proj"],
    "a router": None,
}


def tokens():
    return torch.randint(1, families.VOCABULARY, (2, 11))


def targets(name, case):
    return TARGETS[case] or [ROUTERS[name], "down_proj"]


def ours(name="mixtral", wanted=BOTH, modules=("q_proj",), seed=0, **fields):
    config = LoRAConfig(3, 7, 0.0, list(modules), target_parameters=wanted, **fields)
    model = apply_lora(families.mixture(name, seed), config).eval()
    randomise(model)
    return model


def theirs(name="mixtral", wanted=BOTH, modules=("q_proj",), **fields):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=list(modules), target_parameters=wanted, **fields
    )
    model = peft.get_peft_model(families.mixture(name), config).eval()
    randomise(model)
    return model


def loaded_by_peft(folder, name="mixtral", **options):
    peft = pytest.importorskip("peft", "0.20", reason="PEFT 0.19 loads no adapter over experts")
    return peft.PeftModel.from_pretrained(
        families.mixture(name), folder, is_trainable=True, **options
    ).eval()


@pytest.mark.parametrize("case", TARGETS)
@pytest.mark.parametrize("name", families.MIXTURES)
def test_there_and_back(tmp_path, name, case):
    """Logits are equal in both libraries, and still are after training on in both."""
    other = theirs(name, targets(name, case))
    ids = tokens()
    bare = logits(families.mixture(name), ids)
    expected = logits(other, ids)
    other.save_pretrained(tmp_path / "theirs")
    model = load_adapter(families.mixture(name), tmp_path / "theirs").eval()
    assert not close(expected, bare, 1e-3) and close(logits(model, ids), expected)
    save_adapter(model, tmp_path / "ours")
    again = loaded_by_peft(tmp_path / "ours", name)
    assert close(logits(again, ids), expected)
    first, second = (
        load_file(tmp_path / whose / "adapter_model.safetensors") for whose in ("theirs", "ours")
    )
    assert first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    after = train_on(model, ids)
    assert close(after, train_on(again, ids), 1e-4) and not close(after, expected, 1e-3)


@pytest.mark.parametrize("case", ["both", "a router"])
@pytest.mark.parametrize("name", families.MIXTURES)
def test_gradients_are_pefts(tmp_path, name, case):
    """In fp64, of every matrix, those of the inner adapters too; the experts themselves have
    none.
    """
    other = theirs(name, targets(name, case))
    ids = tokens()
    other.save_pretrained(tmp_path)
    model = load_adapter(families.mixture(name, experts_implementation="eager"), tmp_path).double()
    other.get_base_model().set_experts_implementation("eager")
    other = other.double()
    for each in (model, other):
        each(input_ids=ids, labels=ids).loss.backward()
    expected = {
        key.replace("base_model.model.", "").replace(".default.weight", ""): p.grad
        for key, p in other.named_parameters()
    }
    got = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
    assert len(got) == 2 * len(list(adapters(model))) and all(".lora_" in key for key in got)
    for key, gradient in got.items():
        assert gradient.any() and (gradient - expected[key]).norm() <= 1e-5 * gradient.norm(), (
            key
        )  # norms round to fp32


def test_what_is_written(tmp_path):
    model = ours("qwen3_moe")
    save_adapter(model, tmp_path)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    experts = [f"model.layers.{n}.mlp.experts" for n in (0, 1)]
    assert described["target_parameters"] == [
        f"{path}.{name}" for path in experts for name in ("down_proj", "gate_up_proj")
    ]
    assert described["target_modules"] == [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    tensors = {
        key: list(tensor.shape)
        for key, tensor in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    inner, outer = (
        f"base_model.model.{experts[0]}.{within}lora_" for within in ("base_layer.", "")
    )
    assert tensors[f"{inner}A.weight"] == [15, 32] and tensors[f"{inner}B.weight"] == [
        48,
        15,
    ]  # gate and up, the first
    assert tensors[f"{outer}A.weight"] == [15, 24] and tensors[f"{outer}B.weight"] == [32, 15]


def test_ranks_of_some_parameters(tmp_path):
    """By the path of the parameter, not of its layer."""
    model = ours(
        rank_pattern={"gate_up_proj": 5},
        alpha_pattern={r"layers\.1\.mlp\.experts\.down_proj": 2},
    )
    ids = tokens()
    found = {
        layer.named_at(path): (layer.rank, layer.scale)
        for path, layer in adapters(model)
        if isinstance(layer, LoRAParameter)
    }
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == (5, 7 / 5)
    assert found["model.layers.1.mlp.experts.down_proj"] == (3, 2 / 3)
    save_adapter(model, tmp_path)
    assert close(logits(loaded_by_peft(tmp_path), ids), logits(model, ids))
    assert equal(
        logits(load_adapter(families.mixture("mixtral"), tmp_path).eval(), ids), logits(model, ids)
    )


def test_parameters_of_some_layers():
    model = ours(layers=[1])
    assert {path.split(".")[2] for path, _ in adapters(model)} == {"1"}
    assert len(list(adapters(model))) == 3


def test_parameters_alone(tmp_path):
    """``target_modules`` may be empty; PEFT may say so by null."""
    model = ours(modules=())
    ids = tokens()
    assert all(isinstance(layer, LoRAParameter) for _, layer in adapters(model))
    save_adapter(model, tmp_path)
    assert close(logits(loaded_by_peft(tmp_path), ids), logits(model, ids))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "target_modules": None}))
    assert equal(
        logits(load_adapter(families.mixture("mixtral"), tmp_path).eval(), ids), logits(model, ids)
    )


@pytest.mark.parametrize("init", ["default", "gaussian"])
def test_at_first_the_model_is_unchanged(init):
    model = families.mixture("mixtral")
    ids = tokens()
    bare = logits(model, ids)
    apply_lora(model, LoRAConfig(64, 1, 0.0, [], target_parameters=["down_proj"], init=init))
    assert close(logits(model, ids), bare)
    a, b = next(adapters(model))[1].pair
    expected = 1 / 64 if init == "gaussian" else (3 * 48) ** -0.5
    assert not b.any() and abs(a.std() / expected - 1) < 0.1


@pytest.mark.parametrize("case", ["both", "a router"])
@pytest.mark.parametrize("name", families.MIXTURES)
def test_merged_it_is_a_plain_model(tmp_path, name, case):
    model = ours(name, targets(name, case))
    ids = tokens()
    expected = logits(model, ids)
    bare = families.mixture(name)
    kind = type(families.mixture(name))
    merged = merge_and_unload(model)
    assert close(logits(merged, ids), expected) and not close(expected, logits(bare, ids), 1e-3)
    assert type(merged) is kind and merged.state_dict().keys() == bare.state_dict().keys()
    merged.save_pretrained(tmp_path / "whole")
    again = kind.from_pretrained(
        tmp_path / "whole", experts_implementation=merged.config._experts_implementation
    ).eval()
    assert all(
        equal(weight, merged.state_dict()[key]) for key, weight in again.state_dict().items()
    )
    assert equal(logits(again, ids), logits(merged, ids))


def test_merging_rounds_once():
    """bf16: the sum of both in fp32, rounded; the update alone is not rounded before."""
    model = ours()
    for parameter in model.parameters():
        parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
    layer = next(layer for _, layer in adapters(model) if isinstance(layer, LoRAParameter))
    weight = layer.parameter
    down_ERK, up_ENR, scale = layer.factors(torch.float32)
    expected = (weight.float() + scale * (up_ENR @ down_ERK)).bfloat16()
    merge_and_unload(model)
    assert equal(weight, expected)


@pytest.mark.parametrize("case", ["both", "a router"])
def test_without_adapters_it_is_the_base(case):
    model = ours(wanted=targets("mixtral", case))
    ids = tokens()
    expected = logits(model, ids)
    with without_adapters(model):
        assert equal(logits(model, ids), logits(families.mixture("mixtral"), ids))
    assert equal(logits(model, ids), expected)


def test_a_copy_and_a_refill(tmp_path):
    model = ours()
    ids = tokens()
    other = copy.deepcopy(model)
    expected = logits(model, ids)
    save_adapter(model, tmp_path)
    randomise(model)
    assert equal(logits(other, ids), expected) and not close(logits(model, ids), expected)
    load_adapter(model, tmp_path)
    assert equal(logits(model, ids), expected)


@pytest.mark.parametrize("name", families.MIXTURES)
def test_a_layer_with_a_hook_computes_the_same(name):
    """It is called, with the adapted weights in the place of its own; afterwards it has its own
    again.
    """
    model = ours(name)
    ids = tokens()
    seen = []
    expected = logits(model, ids)
    layer = innermost(model.model.layers[0].mlp.experts)
    before = layer.down_proj
    layer.register_forward_hook(lambda *_: seen.append(1))
    assert close(logits(model, ids), expected) and seen and layer.down_proj is before


def test_what_is_read_of_the_layer_has_the_adapter_in_it():
    """By a class that does not call it; what is not adapted is its own."""
    model = ours()
    wrapped = model.model.layers[0].mlp.experts
    layer = innermost(wrapped)
    for name in ("down_proj", "gate_up_proj"):
        assert not torch.allclose(getattr(wrapped, name), getattr(layer, name))
        getattr(wrapped, name).sum().backward()
    assert (
        all(p.grad.any() for p in wrapped.parameters() if p.requires_grad)
        and wrapped.num_experts == 4
    )
    with without_adapters(model):
        assert wrapped.down_proj is layer.down_proj
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = wrapped.nothing


SEEN = [
    "Llama4Text",
    "JetMoe",
    "NemotronH",
    "GptOss",
    "DeepseekV3",
    "FlexOlmo",
    "Jamba",
    "Qwen3Next",
    "Zaya",
    "Phimoe",
]


@pytest.mark.parametrize("name", SEEN)
def test_experts_of_other_classes(name):
    """With and without gates, biases, transposed, in latent spaces, or of a class that computes
    them otherwise.
    """
    with plain_surroundings():
        config = getattr(transformers, f"{name}Config")
        model = build_twin(MODEL_FOR_CAUSAL_LM_MAPPING[config], twin_config(config())).train()
    apply_lora(model, LoRAConfig(3, 7, 0.0, [], target_parameters=stacked_parameters(model)))
    randomise(model)
    ids = torch.randint(FIRST_TOKEN, 97, (2, 9))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad.any() for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, use_cache=False).logits
        got = merge_and_unload(model)(input_ids=ids, use_cache=False).logits
    assert (got - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["both", "a router"])
def test_compiled_layers(case):
    model = ours(wanted=targets("mixtral", case))
    ids = tokens()
    trained = [p for p in model.parameters() if p.requires_grad]
    plain = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, trained)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    compiled = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, trained)
    assert all(
        a.any() and (a - b).norm() <= 1e-4 * a.norm() for a, b in zip(plain, compiled, strict=True)
    )


@pytest.mark.slow
def test_a_patched_model(kernels):
    """Experts run as grouped products with their adapters in them, which the report says."""
    model = ours()
    ids = tokens()
    expected = logits(model, ids)
    report = patch_model(model)
    assert close(logits(model, ids), expected, 1e-4)
    assert {found.path for found in report.replaced if found.part == "MixtralExperts"} == {
        f"model.layers.{n}.mlp.experts.base_layer.base_layer" for n in (0, 1)
    }
    unpatch_model(model)
    assert close(logits(model, ids), expected)


def test_in_bf16_it_follows_fp32(seed):
    model = ours()
    ids = tokens()
    expected = logits(model, ids)
    for parameter in model.parameters():
        parameter.data = (
            parameter.data.bfloat16() if not parameter.requires_grad else parameter.data
        )
    got = logits(model, ids)
    assert got.dtype == torch.bfloat16 and (got - expected).norm() <= 0.1 * expected.norm()


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(tensor, torch.Tensor) and not any(tensor is given for given in args):
                fresh = all(
                    tensor.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
                    for given in args
                    if isinstance(given, torch.Tensor)
                )
                self.elements = max(self.elements, tensor.numel()) if fresh else self.elements
        return found


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_nothing_of_the_size_of_the_experts_is_made(name):
    """Neither forward nor backward: few tokens among many experts."""
    model = ours(name)
    layer = model.model.layers[0].mlp.experts
    experts = torch.tensor([[0, 2], [1, 3], [2, 0]])
    hidden = torch.randn(3, 32, requires_grad=True)
    shares = torch.rand(3, 2)
    with Largest() as largest:
        layer(hidden, experts, shares).sum().backward()
    assert hidden.grad.any() and 0 < largest.elements < layer.parameter.numel()


def test_the_switched_off_one_of_two_adds_nothing():
    model = ours()
    ids = tokens()
    outer = model.model.layers[0].mlp.experts
    expected = logits(model, ids)
    outer.enabled = False
    off = logits(model, ids)
    outer.enabled = True
    with torch.no_grad():
        outer.lora_B.zero_()
    assert not close(off, expected) and close(off, logits(model, ids))


def test_b_learns_faster_in_lora_plus():
    groups = lora_plus_groups(ours(modules=()), 1.0, 8.0)
    assert [(group["lr"], len(group["params"])) for group in groups] == [(1.0, 4), (8.0, 4)]


def test_adapted_experts_are_not_said_to_be_frozen(caplog):
    report_frozen_experts(ours())
    assert not caplog.text
    report_frozen_experts(
        apply_lora(families.mixture("mixtral"), LoRAConfig(2, 2, 0.0, ["q_proj"]))
    )
    for name in ("down_proj", "gate_up_proj"):
        assert f"model.layers.0.mlp.experts.{name} (layers 0-1), " in caplog.text
        assert f"lora_target_parameters={name} adapts them" in caplog.text


def test_stacked_weights_that_are_no_experts_are_not_named(caplog):
    """As of recurrent layers."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    sizes = {"attention_window_size": 8, "lru_width": 32, "block_types": ["recurrent", "attention"]}
    model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**{**families.SIZES, **sizes}))
    assert any(parameter.ndim == 3 and min(parameter.shape) > 1 for parameter in model.parameters())
    report_frozen_experts(apply_lora(model, LoRAConfig(2, 2, 0.0, ["q_proj"])))
    assert not caplog.text


def test_what_reads_images_beside_experts_is_not_named(caplog, let_return):
    """A tower may have 3-D parameters, and is frozen."""
    model = ours()
    model.model.tower = torch.nn.Module()
    model.model.tower.positions = torch.nn.Parameter(torch.randn(2, 3, 4), requires_grad=False)
    report_frozen_experts(model)
    assert "model.tower.positions" in caplog.text
    caplog.clear()
    let_return(sys.modules["chronicals.lora.stacked_experts"], beside_text=["model.tower"])
    report_frozen_experts(model)
    assert not caplog.text


def test_layers_of_one_weight_are_told_as_ranges():
    from chronicals.lora.stacked_experts import _ranges

    assert _ranges([3, 0, 1, 5, 6, 9]) == "0-1, 3, 5-6, 9"


# --- what is refused
# -------------------------------------------------------------------------------------------------

FIELDS = {
    "dropout": ({"dropout": 0.1}, r"dropout=0\.1 with target_parameters=\['a'\].*set dropout=0"),
    "dora": (
        {"use_dora": True},
        r"use_dora=True with target_parameters=\['a'\].*leave use_dora out",
    ),
    "one name": (
        {"target_parameters": "down_proj"},
        "target_parameters='down_proj': give a list of names",
    ),
    "pissa": ({"init": "pissa"}, r"init='pissa' with target_parameters=\['a'\].*leave init out"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_what_they_cannot_have_is_refused_by_name(case):
    fields, message = FIELDS[case]
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**{"dropout": 0.0, "target_parameters": ["a"], **fields})
    LoRAConfig(**{"dropout": 0.0, **fields, "target_parameters": None})


NAMES = {
    "unknown": (
        ["mlp.experts.w1"],
        "'mlp.experts.w1' matches no parameter; .* here: mlp.experts.down_proj, "
        "mlp.experts.gate_up",
    ),
    "one of two unknown": (["down_proj", "proj"], "'proj' matches no parameter"),
    "a linear layer's": (
        ["q_proj.weight"],
        "q_proj.weight' is of Linear; .* name 'q_proj' in lora_target_modules",
    ),
    "the embedding's": (
        ["embed_tokens.weight"],
        "is of Embedding; .* name 'embed_tokens' in lora_target_modules",
    ),
    "a vector": (["input_layernorm.weight"], "has 1 dimensions; a matrix has 2"),
}


@pytest.mark.parametrize("case", NAMES)
def test_what_cannot_be_adapted_is_refused_by_name(case):
    """The model is as it was."""
    wanted, message = NAMES[case]
    model = families.mixture("mixtral")
    with pytest.raises(ValueError, match=f"lora_target_parameters: .*{message}"):
        apply_lora(model, LoRAConfig(2, 2, 0.0, None, target_parameters=wanted))
    assert not list(adapters(model)) and all(p.requires_grad for p in model.parameters())


def test_quantised_experts_are_refused_by_name():
    model = families.mixture("mixtral")
    layer = model.model.layers[1].mlp.experts
    layer.down_proj = torch.nn.Parameter(
        torch.zeros(4, 32, 24, dtype=torch.uint8), requires_grad=False
    )
    with pytest.raises(
        ValueError,
        match=r"layers.1.mlp.experts.down_proj' is quantised \(torch.uint8\).*base in 16 bit",
    ):
        apply_lora(model, LoRAConfig(2, 2, 0.0, [], target_parameters=["down_proj"]))


def test_layers_without_the_parameters_are_refused():
    with pytest.raises(ValueError, match="lora_layers"):
        ours(layers=[7])
    with pytest.raises(
        ValueError,
        match=r"lora_layers: none of lora_target_parameters=\['layers.0.mlp.experts.down_proj'\]",
    ):
        ours(wanted=["layers.0.mlp.experts.down_proj"], layers=[1])


def test_they_are_not_switched(tmp_path):
    """PEFT combines none of them either."""
    save_adapter(ours(), tmp_path)
    with pytest.raises(ValueError, match="target_parameters=.*cannot be one of several"):
        add_adapter(families.mixture("mixtral"), "one", tmp_path)
    model = ours()
    save_adapter(
        apply_lora(families.mixture("mixtral"), LoRAConfig(2, 2, 0.0, ["q_proj"])),
        tmp_path / "plain",
    )
    with pytest.raises(ValueError, match="target_parameters=.*cannot be switched"):
        add_adapter(model, "plain", tmp_path / "plain")
        set_adapter(model, "plain")


def test_peft_refuses_dropout_too():
    with pytest.raises(ValueError, match="lora_dropout"):
        theirs(lora_dropout=0.1)
