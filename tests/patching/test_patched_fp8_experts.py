"""Experts whose products run in FP8: the same but for rounding, near with it, and undone without
a trace.
"""

import copy
import sys

import pytest
import torch
from test_patch import assert_same, batch, loss_and_gradients
from test_patched_experts import build, layers_of
from torch import nn

from chronicals import patch_model, unpatch_model
from chronicals.kernels.expert_glu import expert_glu_gradient_reference, expert_glu_reference
from chronicals.kernels.fp8 import Scaled
from chronicals.kernels.grouped_product import grouped_product_reference
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import enable_gradient_checkpointing
from chronicals.models import quantise_experts
from chronicals.patching import (
    experts_in_fp8,
    forget_policies,
    fp8_experts,
    offload_frozen_experts,
    run_experts_in_fp8,
    unfuse_weights,
)
from chronicals.patching.fp8_experts import IN_FP8
from interpreted import kernels_run

FUSED = sys.modules["chronicals.kernels.fused_experts"]
FORMAT = sys.modules["chronicals.quantization.fp8"]
NAMES = ["Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3"]


@pytest.fixture(autouse=True)
def small_products_too(set_constants):
    set_constants(fp8_experts, MIN_MEAN_WIDTH=16)


def patched(name, adapted=False, kind=torch.float32):
    model = build(name)
    if adapted:
        config = LoRAConfig(
            rank=3,
            dropout=0.0,
            target_modules=["q_a_proj" if name == "DeepseekV3" else "q_proj"],
            target_parameters=["gate_up_proj", "down_proj"],
        )
        apply_lora(model, config)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                nn.init.normal_(parameter, std=0.3)
    model = model.to(kind)
    patch_model(model)
    return model


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(
        a.double().flatten(), b.double().flatten(), 0
    ).item()


@pytest.fixture
def without_rounding(monkeypatch):
    """What would be FP8 is as it was: all that is done around it is left."""

    def of_rows(x, scaling):
        return Scaled(x, x.new_ones(len(x), 1)), None

    def of_experts(w, layout="rows", scale=None):
        assert scale is None or torch.equal(scale, torch.arange(1, len(w) + 1))
        found = torch.arange(1, len(w) + 1)
        rows, columns = (Scaled(x / found[:, None, None], found) for x in (w, w.mT))
        return rows if layout != "columns" else None, columns if layout != "rows" else None

    def product(
        x, weight, to, of_tokens, bias=None, adapted=None, dtype=None, fast=False, slots=None
    ):
        assert slots is None
        dense = weight.values * weight.scale[:, None, None]
        return grouped_product_reference(x.values * x.scale, dense, to, of_tokens, bias, adapted)

    def unit(h, gate, dense, in_fp8):
        u = expert_glu_reference(h, gate)
        return u if dense else None, Scaled(u, u.new_ones(len(u), 1)) if in_fp8 else None

    def gradient(g, h, shares, order, gate, has_unit, dense, in_fp8):
        d_h, u, d_shares = expert_glu_gradient_reference(g, h, shares, order, gate)
        return (
            d_h if dense else None,
            Scaled(d_h, h.new_ones(len(h), 1)) if in_fp8 else None,
            u if has_unit else None,
            d_shares,
        )

    for name, instead in {
        "fp8_quantize": of_rows,
        "fp8_grouped_product": product,
        "expert_glu": unit,
        "expert_glu_gradient": gradient,
    }.items():
        monkeypatch.setattr(FUSED, name, instead)
    monkeypatch.setattr(FORMAT, "fp8_quantize_experts", of_experts)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("without_rounding")
def test_but_for_rounding_it_is_the_same(name, adapted):
    model = patched(name, adapted, torch.float64)
    inputs = batch()
    expected = loss_and_gradients(model, **inputs)
    found = run_experts_in_fp8(model)
    assert found.layers == len(layers_of(model)) == len(experts_in_fp8(model)) and not found.left
    assert_same(expected, loss_and_gradients(model, **inputs))


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("name", NAMES)
def test_rounded_it_stays_near(name, adapted):
    """8 bits are 2.6 % of a value in the root mean square; gradients of weights are of 16 bits,
    and of rounded activations.
    """
    model = patched(name, adapted)
    inputs = batch()
    loss, exact = loss_and_gradients(model, **inputs)
    run_experts_in_fp8(model)
    our_loss, got = loss_and_gradients(model, **inputs)
    assert (our_loss - loss).abs() < 0.02 * loss and not all(
        torch.equal(exact[key], got[key]) for key in exact
    )
    names = {"all": sorted(exact), "experts": sorted(key for key in exact if ".experts." in key)}
    of = {
        part: cosine(*(torch.cat([found[key].flatten() for key in keys]) for found in (exact, got)))
        for part, keys in names.items()
    }
    assert of["all"] > 0.9 and 0.9 < of["experts"] < 0.999999


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_the_layer_by_its_kernels(name):
    """Every gradient of one layer beside that in fp64, from the same choice of experts."""
    model = patched(name).bfloat16()
    layer = layers_of(model)[0]
    plain = copy.deepcopy(layers_of(build(name))[0]).double()
    plain.load_state_dict({key: value.double() for key, value in layer.state_dict().items()})
    chosen = torch.rand(53, 4).topk(2).indices
    shares = torch.rand(53, 2).bfloat16()
    x = torch.randn(53, 32).bfloat16()
    dy = torch.randn(53, 32).bfloat16()
    run_experts_in_fp8(model)

    def run(layer, kind):
        leaves = [
            x.to(kind).requires_grad_(),
            shares.to(kind).requires_grad_(),
            *layer.parameters(),
        ]
        out = layer(leaves[0], chosen, leaves[1])
        return [out, *torch.autograd.grad(out, leaves, dy.to(kind))]

    with kernels_run():
        got = run(layer, torch.bfloat16)
    for ours, expected in zip(got, run(plain, torch.float64), strict=True):
        assert ours.dtype == torch.bfloat16
        assert 1e-4 * expected.norm() < (ours.double() - expected).norm() <= 0.08 * expected.norm()


@pytest.mark.parametrize("forget", [forget_policies, unfuse_weights, unpatch_model])
def test_forgotten_it_is_as_before(forget):
    model = patched("Qwen3Moe")
    inputs = batch()
    before = loss_and_gradients(model, **inputs)
    run_experts_in_fp8(model)
    assert experts_in_fp8(model)
    forget(model)
    assert not any(IN_FP8 in vars(module) for module in model.modules())
    patch_model(model)
    after = loss_and_gradients(model, **inputs)
    assert before[0] == after[0] and all(
        torch.equal(before[1][name], after[1][name]) for name in before[1]
    )


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
def test_layers_made_again_are_the_same(adapted):
    model = patched("Qwen3Moe", adapted)
    inputs = batch()
    run_experts_in_fp8(model)
    kept = loss_and_gradients(model, **inputs)
    enable_gradient_checkpointing(model)
    again = loss_and_gradients(model, **inputs)
    assert kept[0] == again[0] and all(
        torch.equal(kept[1][name], again[1][name]) for name in kept[1]
    )


class SameUnit(nn.SiLU):
    """The activation that was proved, of another class."""


class TestFrozenWeights:
    """Under adapters."""

    def test_are_quantised_once(self, record_calls):
        model = patched("Qwen3Moe", True)
        inputs = batch()
        made = record_calls(FORMAT, "fp8_quantize_experts")
        run_experts_in_fp8(model)
        for _ in range(2):
            loss_and_gradients(model, **inputs)
        assert [given[1] for given in made] == ["both"] * 2 * len(layers_of(model))

    def test_are_quantised_again_once_written_to(self):
        """Into the memory that graphs read."""
        model = patched("GptOss", True)
        inputs = batch()
        run_experts_in_fp8(model)
        loss_and_gradients(model, **inputs)
        layer = layers_of(model)[0]
        stands = vars(layer)[IN_FP8]["down_proj"]
        places = [scaled.values.data_ptr() for scaled in stands._layouts()]
        with torch.no_grad():
            layer.down_proj.mul_(3)
        changed = loss_and_gradients(model, **inputs)
        assert [scaled.values.data_ptr() for scaled in stands._layouts()] == places
        forget_policies(model)
        run_experts_in_fp8(model)
        fresh = loss_and_gradients(model, **inputs)
        assert changed[0] == fresh[0] and all(
            torch.equal(changed[1][name], fresh[1][name]) for name in fresh[1]
        )

    @pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
    def test_that_wait_in_host_memory_change_nothing(self, name):
        model = patched(name, True)
        inputs = batch()
        weights = {
            name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
        }
        run_experts_in_fp8(model)
        here = loss_and_gradients(model, **inputs)
        assert offload_frozen_experts(model) == sum(
            p.nbytes for layer in layers_of(model) for p in (layer.gate_up_proj, layer.down_proj)
        )
        assert offload_frozen_experts(model) == 0
        away = loss_and_gradients(model, **inputs)
        assert here[0] == away[0] and all(
            torch.equal(here[1][name], away[1][name]) for name in here[1]
        )
        stands = [x for layer in layers_of(model) for x in vars(layer)[IN_FP8].values()]
        assert all(len(x._layouts()) == 1 for x in stands)
        forget_policies(model)
        assert all(
            torch.equal(p, weights[name]) for name, p in model.named_parameters() if name in weights
        )

    def test_that_are_trained_stay(self):
        model = patched("Qwen3Moe")
        run_experts_in_fp8(model)
        assert offload_frozen_experts(model) == 0

    def test_that_wait_are_brought_where_the_class_computes(self):
        """As it does with another activation than was proved, whatever this one computes."""
        model = patched("Qwen3Moe")
        inputs = batch()
        model.requires_grad_(False)
        model.model.embed_tokens.requires_grad_(True)
        expected = loss_and_gradients(model, **inputs)
        run_experts_in_fp8(model)
        offload_frozen_experts(model)
        for layer in layers_of(model):
            layer.act_fn = SameUnit()
        assert_same(expected, loss_and_gradients(model, **inputs), 1e-5)


def test_trained_weights_are_quantised_at_each_use(record_calls):
    """By columns with the scales of the forward pass."""
    model = patched("Qwen3Moe")
    inputs = batch()
    made = record_calls(FORMAT, "fp8_quantize_experts")
    run_experts_in_fp8(model)
    loss_and_gradients(model, **inputs)
    products = 2 * len(layers_of(model))
    found = [(layout, scale is not None) for _, layout, scale in made]
    assert found == [("rows", False)] * products + [("columns", True)] * products


def test_x_is_quantised_once_a_token(record_calls):
    """Not once for each of its experts; so is dy."""
    model = patched("Qwen3Moe")
    inputs = batch()
    quantised = record_calls(FUSED, "fp8_quantize")
    run_experts_in_fp8(model)
    loss_and_gradients(model, **inputs)
    rows = [(len(x), scaling) for x, scaling in quantised]
    assert rows == [(inputs["input_ids"].numel(), "row")] * 2 * len(layers_of(model))


def test_a_parameter_that_was_replaced_is_seen():
    model = patched("Qwen3Moe", True)
    inputs = batch()
    run_experts_in_fp8(model)
    before = loss_and_gradients(model, **inputs)[0]
    layer = layers_of(model)[0]
    layer.down_proj = nn.Parameter(2 * layer.down_proj.detach(), requires_grad=False)
    after = loss_and_gradients(model, **inputs)[0]
    forget_policies(model)
    run_experts_in_fp8(model)
    assert before != after == loss_and_gradients(model, **inputs)[0]


@pytest.mark.slow
def test_what_stays_in_16_bit_is_said_by_name(set_constants):
    set_constants(fp8_experts, MIN_MEAN_WIDTH=512)
    model = patched("Qwen3Moe")
    found = run_experts_in_fp8(model)
    assert found.layers == 0 and found.left == (
        "Qwen3MoeExperts (their widths 32 and 16 have a harmonic mean below 512)",
    )
    set_constants(fp8_experts, MIN_MEAN_WIDTH=16)
    assert (
        "100 rows an expert; quantising trained weights" in run_experts_in_fp8(model, 400).left[0]
    )
    assert run_experts_in_fp8(model, 8192).layers == 2
    adapted = patched("Qwen3Moe", True)
    assert run_experts_in_fp8(adapted, 400).layers == 2, "frozen weights are quantised once"
    plain = build("Qwen3Moe")
    assert run_experts_in_fp8(plain).left == ("Qwen3MoeExperts (their class computes them)",)
    odd = build("Qwen3Moe", moe_intermediate_size=24)
    patch_model(odd)
    assert "one of their widths 32 and 24 is no multiple of 16" in run_experts_in_fp8(odd).left[0]


@pytest.mark.slow
def test_experts_in_4_bits_are_named():
    model = build("Qwen3Moe", hidden_size=64, moe_intermediate_size=64)
    quantise_experts(model)
    patch_model(model)
    assert run_experts_in_fp8(model).left == ("Qwen3MoeExperts (they are in 4 bits)",)
