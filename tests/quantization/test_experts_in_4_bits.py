"""Stacked experts in 4 bits: the same as their class over the values that the codes stand for,
with adapters or without.
"""

import copy

import pytest
import torch
import transformers
from torch import nn

import families
from chronicals import patch_model, unpatch_model
from chronicals.lora import LoRAConfig, adapters, apply_lora
from chronicals.lora.model_methods import merge_adapters
from chronicals.lora.parameter_layer import LoRAParameter
from chronicals.models import count_values, quantise_experts
from chronicals.patching.experts import FUSED_EXPERTS
from chronicals.quantization import Experts4bit, PackedStorage
from interpreted import kernels_run

SIZES = {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "intermediate_size": 64,
    "num_experts_per_tok": 2,
}
SIZES |= {"experts_implementation": "eager", "head_dim": 16}
FAMILIES = {
    "Qwen3Moe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4, "sliding_window": 4, "swiglu_limit": 0.7},
}
ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def build(name, **changes):
    config = getattr(transformers, f"{name}Config")(
        **{**families.SIZES, **SIZES, **FAMILIES[name], **changes}
    )
    return families.randomise(getattr(transformers, f"{name}ForCausalLM")(config).train())


def quantised(name, parameters=None, **changes):
    """A model with its experts in 4 bits and adapters, and a plain one of the same values.

    Args:
        parameters: of experts, that have adapters too.
    """
    model = build(name, **changes)
    assert quantise_experts(model) == 2
    apply_lora(
        model,
        LoRAConfig(
            rank=3, dropout=0.0, target_modules=["q_proj", "o_proj"], target_parameters=parameters
        ),
    )
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=0.3)
    plain = copy.deepcopy(model)
    for path, module in [
        (path, module) for path, module in plain.named_modules() if isinstance(module, Experts4bit)
    ]:
        plain.set_submodule(path, module.plain())
    return model, plain


@pytest.mark.slow
@pytest.mark.parametrize("adapters_on", [False, True], ids=["weights", "adapters"])
def test_few_tokens_are_multiplied_without_the_dense_values(adapters_on, record_calls, device):
    """As by the dense weights, with the gradient of all; beyond 64 tokens by dense values."""
    model, plain = quantised("Qwen3Moe", ON_EXPERTS if adapters_on else None)
    model.bfloat16().to(device), plain.bfloat16().to(device)
    for one in (model, plain):
        patch_model(one)
    ours, dense = (one.model.layers[0].mlp.experts for one in (model, plain))
    calls = record_calls(PackedStorage, "filled")
    for tokens, few in ((9, True), (65, False)):
        x = torch.randn(tokens, 64, device=device).bfloat16()
        shares, chosen = torch.rand(tokens, 4, device=device).topk(2)
        calls.clear()
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        dy = torch.randn_like(x)
        with kernels_run():
            with torch.no_grad():
                got = ours(x, chosen, shares)
            assert bool(calls) != few
            out = ours(leaves[0], chosen, shares)
            assert torch.equal(out, got)
            (gradient,) = torch.autograd.grad(out, leaves[0], dy)
        plain_out = dense(leaves[1], chosen, shares)  # by references, where there is no card
        (plain_gradient,) = torch.autograd.grad(plain_out, leaves[1], dy)
        for found, expected in ((out, plain_out), (gradient, plain_gradient)):
            difference = (found.double() - expected.double()).norm()
            assert difference <= 2**-6 * expected.double().norm()


def test_experts_whose_layout_is_transposed_are_dequantised_first():
    model, _ = quantised("GptOss")
    stack = model.bfloat16().model.layers[0].mlp.experts.stack("gate_up_proj")
    assert stack.expert_stack(True) is None


def loss_and_gradients(model):
    ids = torch.arange(2, 26).view(2, 12)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss.item(), dict(zip(trained, torch.autograd.grad(loss, list(trained.values()))))


def assert_same(got, expected, tolerance=2e-4):
    assert (
        got[0] == pytest.approx(expected[0], rel=tolerance) and got[1].keys() == expected[1].keys()
    )
    for name, gradient in expected[1].items():
        assert (got[1][name] - gradient).norm() <= tolerance * gradient.norm() + 1e-7, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters", [None, ON_EXPERTS, ON_EXPERTS[1:]], ids=["frozen", "adapted", "down adapted"]
)
@pytest.mark.parametrize("patched", [False, True], ids=["class", "patched"])
@pytest.mark.parametrize("name", FAMILIES)
def test_as_its_class_over_dequantised_weights(name, patched, parameters):
    model, plain = quantised(name, parameters)
    assert len(
        [layer for _, layer in adapters(model) if isinstance(layer, LoRAParameter)]
    ) == 2 * len(parameters or ())
    if patched:
        report = patch_model(model)
        assert report.counts()[FUSED_EXPERTS] == 2
        assert all(
            "forward" in vars(module.inner)
            for module in model.modules()
            if isinstance(module, Experts4bit)
        )
    expected = loss_and_gradients(plain)
    assert all(gradient.any() for gradient in expected[1].values())
    assert_same(loss_and_gradients(model), expected)
    if patched:
        unpatch_model(model)
        assert not any(
            "forward" in vars(module.inner)
            for module in model.modules()
            if isinstance(module, Experts4bit)
        )
        assert_same(loss_and_gradients(model), expected)


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [None, ON_EXPERTS], ids=["frozen", "adapted"])
def test_under_autocast(parameters):
    """Where patched experts run as their class does. What is around them is patched in both:
    kernels round elsewhere, and a router chooses by what is rounded."""
    model, plain = quantised("Qwen3Moe", parameters)
    patch_model(model)
    patch_model(plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(loss_and_gradients(model), loss_and_gradients(plain), 2e-2)


@pytest.mark.parametrize("parameters", [None, ON_EXPERTS], ids=["frozen", "adapted"])
def test_sizes_that_are_no_multiple_of_a_block(parameters):
    """As linear layers: blocks go on over the ends of rows and experts."""
    model, plain = quantised(
        "Qwen3Moe", parameters, hidden_size=36, moe_intermediate_size=11, num_experts=3
    )
    assert_same(loss_and_gradients(model), loss_and_gradients(plain))


def test_a_hook_on_experts_with_adapters_sees_them(monkeypatch):
    """They run as a call of the module, then, with adapted weights in the place of its own."""
    model, plain = quantised("Qwen3Moe", ON_EXPERTS)
    seen = []
    expected = loss_and_gradients(plain)
    for module in model.modules():
        if isinstance(module, Experts4bit):
            module.register_forward_hook(lambda module, *_: seen.append(module))
    assert_same(loss_and_gradients(model), expected)
    assert len(seen) == 2


def test_another_layer_may_use_the_buffer_before_the_backward_pass():
    """All layers of a shape share one; the second layer's weights are in it when the first one's
    gradient is computed.
    """
    model, plain = quantised("Qwen3Moe")
    patch_model(model)
    both = [
        module.stacks()["down_proj"].base
        for module in model.modules()
        if isinstance(module, Experts4bit)
    ]
    assert both[0].buffer is both[1].buffer
    assert_same(loss_and_gradients(model), loss_and_gradients(plain))


def test_what_is_loaded_is_read_although_the_buffer_holds_what_was_there():
    ours, other = (
        next(module for module in model.modules() if isinstance(module, Experts4bit))
        for model in (quantised("Qwen3Moe")[0] for _ in range(2))
    )
    before = ours.stack("gate_up_proj")().clone()
    ours.load_state_dict(other.state_dict())
    loaded = ours.stack("gate_up_proj")()
    assert torch.equal(loaded, other.stack("gate_up_proj").dense())
    assert not torch.equal(loaded, before)


def test_sizes_and_casts():
    model = build("Qwen3Moe")
    values = count_values(model)
    bytes_before = sum(p.nbytes for p in model.parameters())
    quantise_experts(model)
    assert (
        count_values(model) == values
        and sum(p.nbytes for p in model.parameters()) < 0.5 * bytes_before
    )
    experts = next(module for module in model.modules() if isinstance(module, Experts4bit))
    scales = {
        name: buffer.clone() for name, buffer in experts.named_buffers(remove_duplicate=False)
    }
    assert len(scales) == 8
    model.to(torch.bfloat16)
    assert experts.dtype == torch.bfloat16
    for name, buffer in experts.named_buffers(remove_duplicate=False):
        assert buffer.dtype == scales[name].dtype and torch.equal(buffer, scales[name]), name
    assert (
        experts.stacks()["down_proj"]().dtype == torch.bfloat16
        and experts.down_proj.dtype == torch.uint8
    )
    weight = experts.plain().down_proj
    exact = build("Qwen3Moe")
    assert (
        weight.shape == exact.model.layers[0].mlp.experts.down_proj.shape
        and not weight.requires_grad
    )


def test_values_are_those_of_four_bits():
    model = build("Qwen3Moe")
    dense = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    quantise_experts(model)
    got = model.model.layers[0].mlp.experts.stacks()["gate_up_proj"]()
    assert 0.05 < (got - dense).norm() / dense.norm() < 0.13


@pytest.mark.parametrize("parameters", [None, ON_EXPERTS], ids=["frozen", "adapted"])
@pytest.mark.parametrize("name", FAMILIES)
def test_merged_they_are_plain(name, parameters):
    """Over the values that the codes stand for, those of experts without adapters too."""
    model, plain = quantised(name, parameters)
    expected = model(torch.arange(2, 26).view(2, 12), use_cache=False).logits
    for each in (model, plain):
        merge_adapters(each)
    assert not any(isinstance(module, Experts4bit) for module in model.modules())
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(
        torch.equal(tensor, plain.state_dict()[key]) for key, tensor in model.state_dict().items()
    )
    got = model(torch.arange(2, 26).view(2, 12), use_cache=False).logits
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(ValueError, match="no stacked experts"):
        quantise_experts(families.build("llama"))
    with pytest.raises(ValueError, match="has adapters"):
        model = build("Qwen3Moe")
        apply_lora(
            model,
            LoRAConfig(
                rank=2, dropout=0.0, target_modules=["q_proj"], target_parameters=["down_proj"]
            ),
        )
        quantise_experts(model)
