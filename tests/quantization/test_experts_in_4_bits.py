"""Stacked experts in 4 bits: the same as their class over the values that the codes stand for."""

import copy

import pytest
import torch
import transformers
from torch import nn

import families
from chronicals import patch_model, unpatch_model
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.lora.merging import merge_adapters
from chronicals.models import count_values, quantise_experts
from chronicals.patching.experts import BY
from chronicals.quantization import Experts4bit

SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64, "num_experts_per_tok": 2}
SIZES |= {"experts_implementation": "eager", "head_dim": 16}
FAMILIES = {"Qwen3Moe": {"num_experts": 4}, "GptOss": {"num_local_experts": 4, "sliding_window": 4, "swiglu_limit": 0.7}}


def build(name):
    config = getattr(transformers, f"{name}Config")(**{**families.SIZES, **SIZES, **FAMILIES[name]})
    return families.randomise(getattr(transformers, f"{name}ForCausalLM")(config).train())


def quantised(name):
    """A model with its experts in 4 bits and adapters beside them, and a plain one of the same values; in fp64."""
    model = build(name)
    assert quantise_experts(model) == 2
    apply_lora(model, LoRAConfig(rank=3, dropout=0.0, target_modules=["q_proj", "o_proj"]))
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=0.3)
    plain = copy.deepcopy(model)
    for path, module in [(path, module) for path, module in plain.named_modules() if isinstance(module, Experts4bit)]:
        plain.set_submodule(path, module.plain())
    return model, plain


def loss_and_gradients(model):
    ids = torch.arange(2, 26).view(2, 12)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss.item(), dict(zip(trained, torch.autograd.grad(loss, list(trained.values()))))


def assert_same(got, expected, tolerance=2e-4):
    assert got[0] == pytest.approx(expected[0], rel=tolerance) and got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (got[1][name] - gradient).norm() <= tolerance * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("patched", [False, True], ids=["class", "patched"])
@pytest.mark.parametrize("name", FAMILIES)
def test_as_its_class_over_dequantised_weights(name, patched):
    model, plain = quantised(name)
    if patched:
        report = patch_model(model)
        assert report.counts()[BY] == 2
        assert all("forward" in vars(module.inner) for module in model.modules() if isinstance(module, Experts4bit))
    expected = loss_and_gradients(plain)
    assert_same(loss_and_gradients(model), expected)
    if patched:
        unpatch_model(model)
        assert not any("forward" in vars(module.inner) for module in model.modules() if isinstance(module, Experts4bit))
        assert_same(loss_and_gradients(model), expected)


def test_another_layer_may_use_the_buffer_before_the_backward_pass():
    """All layers of a shape share one; the second layer's weights are in it when the first one's gradient is computed."""
    model, plain = quantised("Qwen3Moe")
    patch_model(model)
    both = [module.stacks()["down_proj"].base for module in model.modules() if isinstance(module, Experts4bit)]
    assert both[0].buffer is both[1].buffer
    assert_same(loss_and_gradients(model), loss_and_gradients(plain))


def test_sizes_and_casts():
    model = build("Qwen3Moe")
    values, bytes_before = count_values(model), sum(p.nbytes for p in model.parameters())
    quantise_experts(model)
    assert count_values(model) == values and sum(p.nbytes for p in model.parameters()) < 0.5 * bytes_before
    experts = next(module for module in model.modules() if isinstance(module, Experts4bit))
    scales = experts.down_proj_absmax2.clone()
    model.to(torch.bfloat16)
    assert experts.dtype == torch.bfloat16 and torch.equal(experts.down_proj_absmax2, scales)
    assert experts.stacks()["down_proj"]().dtype == torch.bfloat16 and experts.down_proj.dtype == torch.uint8
    weight = experts.plain().down_proj
    exact = build("Qwen3Moe")
    assert weight.shape == exact.model.layers[0].mlp.experts.down_proj.shape and not weight.requires_grad


def test_values_are_those_of_four_bits():
    model = build("Qwen3Moe")
    dense = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    quantise_experts(model)
    got = model.model.layers[0].mlp.experts.stacks()["gate_up_proj"]()
    assert 0.05 < (got - dense).norm() / dense.norm() < 0.13


def test_what_cannot_be_quantised_or_merged_is_refused():
    with pytest.raises(ValueError, match="multiple of 64"):
        config = transformers.Qwen3MoeConfig(**{**families.SIZES, **SIZES, "moe_intermediate_size": 48, "num_experts": 4})
        quantise_experts(transformers.Qwen3MoeForCausalLM(config))
    with pytest.raises(ValueError, match="no stacked experts"):
        quantise_experts(families.build("llama"))
    with pytest.raises(ValueError, match="has adapters"):
        model = build("Qwen3Moe")
        apply_lora(model, LoRAConfig(rank=2, dropout=0.0, target_modules=["q_proj"], target_parameters=["down_proj"]))
        quantise_experts(model)
    with pytest.raises(ValueError, match="experts in 4 bits"):
        merge_adapters(quantised("Qwen3Moe")[0])
