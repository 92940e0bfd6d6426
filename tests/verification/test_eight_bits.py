"""Runs in FP8 beside a plain arm that rounds the same products: healthy ones pass, a scale that
is wrong fails.
"""

import sys

import pytest
import torch
from torch import nn

import families
import runs
import tiny
from chronicals.kernels.fp8 import dequantize, fp8_quantize
from chronicals.kernels.fused_experts import ExpertWeights, fused_experts
from chronicals.patching import fp8_experts, layer_policies, patch_parts
from chronicals.patching.experts import recognise_experts
from chronicals.policies import facts
from chronicals.quantization import FP8Base, FP8Experts
from chronicals.verification import verify
from chronicals.verification.eight_bits import round_experts, round_products, rounded
from comparison import equal

FORMAT = sys.modules["chronicals.quantization.fp8"]
ADAPTERS = {"use_lora": True, "lora_rank": 8}


@pytest.fixture
def fused_anywhere(monkeypatch):
    monkeypatch.setattr(facts, "why_not_fused", lambda *given: None)
    monkeypatch.setattr(layer_policies, "MIN_FP8_WIDTH", 16)


def compare(folder, model=None, **changes):
    model = model or tiny.llama(3)
    patch_parts(model, whole_layers=True)
    given = {
        "learning_rate": 2e-4,
        "batch_size": 1,
        "mixed_precision": "bf16",
        "use_fp8": True,
        **changes,
    }
    return verify(model, tiny.tokenizer(), runs.config(folder, **given), tiny.chat_rows())


@pytest.mark.parametrize(
    "changes", [{}, ADAPTERS, {**ADAPTERS, "memory": ["tiled_mlp"]}], ids=["full", "lora", "tiles"]
)
@pytest.mark.usefixtures("fused_anywhere")
def test_a_healthy_run_passes(tmp_path, changes):
    found = compare(tmp_path, **changes)
    assert found.passed, found.failures


IN_EXPERTS = {
    **ADAPTERS,
    "lora_target_modules": "q_proj",
    "lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj",
}


def mixture(name):
    """Its experts in FP8, whatever their sizes; attention's products stay in 16 bit."""
    sizes = {"moe_intermediate_size": 32} if name == "qwen3_moe" else {}
    return families.mixture(name, seed=3, vocab_size=300, max_position_embeddings=512, **sizes)


@pytest.fixture
def small_experts_too(monkeypatch):
    for limit in ("MIN_MEAN_WIDTH", "MIN_EXPERT_ROWS"):
        monkeypatch.setattr(fp8_experts, limit, 1)
    monkeypatch.setattr(layer_policies, "MIN_FP8_WIDTH", 4096)


@pytest.mark.parametrize("changes", [{}, IN_EXPERTS], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.usefixtures("fused_anywhere", "small_experts_too")
def test_a_healthy_run_of_a_mixture_passes(tmp_path, name, changes):
    found = compare(tmp_path, mixture(name), **changes)
    assert found.passed, found.failures


@pytest.mark.parametrize("where", ["rows", "columns"])
@pytest.mark.usefixtures("fused_anywhere", "small_experts_too")
def test_a_wrong_scale_of_experts_fails(tmp_path, monkeypatch, where):
    usual = getattr(FP8Experts, where)

    def wrong(self, *given):
        found = usual(self, *given)
        return found._replace(scale=1.3 * found.scale)

    monkeypatch.setattr(FP8Experts, where, wrong)
    assert not compare(tmp_path, mixture("qwen3_moe"), **IN_EXPERTS).passed


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_plain_experts_round_as_the_products_do(name):
    """Output and every gradient of a layer, in fp32."""
    layer = next(
        m for m in mixture(name).modules() if "down_proj" in m._parameters and m.down_proj.ndim == 3
    )
    leaves = [
        torch.randn(23, layer.down_proj.shape[2 if layer.is_transposed else 1]),
        torch.rand(23, 2),
    ]
    leaves = [*(x.requires_grad_() for x in leaves), *layer.parameters()]
    chosen = torch.rand(23, len(layer.down_proj)).topk(2).indices
    dy = torch.randn_like(leaves[0])
    products = []
    for weight in ("gate_up_proj", "down_proj"):
        parameter = layer.get_parameter(weight)
        bias = getattr(layer, f"{weight}_bias", None)
        stands = FP8Experts(parameter, layer.is_transposed, parameter.device)
        products.append(ExpertWeights(parameter, layer.is_transposed, bias, in_fp8=stands))
    gate = recognise_experts(layer).forward.args[0](layer)
    ours = fused_experts(leaves[0], chosen, leaves[1], *products, gate)
    round_experts(layer)
    plain = layer(leaves[0], chosen, leaves[1])
    both = ([y, *torch.autograd.grad(y, leaves, dy)] for y in (ours, plain))
    for number, (got, expected) in enumerate(zip(*both, strict=True)):
        allowed = (
            0.08 if number == 2 else 2e-3
        )  # of shares: dy's rounding in one, the unit's in the other
        assert (got - expected).norm() <= allowed * expected.norm(), number


def scale_wrongly(monkeypatch, factor, of_weights, where):
    """Scales of weights, or of what they are multiplied by, are off where this layout is asked
    for.
    """
    weights = set()
    usual = FORMAT.fp8_quantize
    usual_weight = FP8Base.dense

    def quantize(x, layout="rows", **options):
        made = usual(x, layout=layout, **options)
        if layout != where or (x.data_ptr() in weights) != of_weights:
            return made
        return tuple(part and part._replace(scale=part.scale * factor) for part in made)

    monkeypatch.setattr(
        FP8Base,
        "dense",
        lambda self: weights.add(self.weight.matrix.data_ptr()) or usual_weight(self),
    )
    monkeypatch.setattr(FORMAT, "fp8_quantize", quantize)


@pytest.mark.parametrize(
    ("of_weights", "where", "changes"),
    [(False, "both", {}), (False, "columns", {}), (True, "columns", {}), (True, "both", ADAPTERS)],
    ids=["gradients", "x for dW", "weights for dX", "frozen weights"],
)
@pytest.mark.usefixtures("fused_anywhere")
def test_a_wrong_scale_fails(tmp_path, monkeypatch, of_weights, where, changes):
    scale_wrongly(monkeypatch, 1.3, of_weights, where)
    assert not compare(tmp_path, **changes).passed


def test_the_plain_rounding_is_that_of_the_formula():
    x = torch.randn(40, 50)
    torch.testing.assert_close(rounded(x), dequantize(fp8_quantize(x)[0]), rtol=1e-6, atol=0)


def test_a_rounded_layer_is_linear_up_to_rounding():
    layer = nn.Linear(64, 48)
    x = torch.randn(2, 30, 64, requires_grad=True)
    exact = layer(x)
    dy = torch.randn(2, 30, 48)
    leaves = [x, *layer.parameters()]
    expected = [exact, *torch.autograd.grad(exact, leaves, dy)]
    round_products(layer)
    y = layer(x)
    for ours, plain in zip([y, *torch.autograd.grad(y, leaves, dy)], expected):
        assert 0 <= (ours - plain).norm() <= 0.08 * plain.norm()
    assert not equal(y, exact)
