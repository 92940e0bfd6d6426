"""The plain arms of models in 4 bits multiply by the same values in fp32; those of runs in FP8 round
the same products: healthy runs pass, a scale that is wrong fails.
"""

import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import families
import generic_bitsandbytes  # noqa: F401
import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.kernels.fp8 import dequantize, fp8_quantize
from chronicals.kernels.fused_experts import ExpertWeights, fused_experts
from chronicals.patching import fp8_experts, layer_policies, patch_parts
from chronicals.patching.experts import recognise_experts
from chronicals.policies import facts
from chronicals.quantization import FP8Base, FP8Experts
from chronicals.verification import quantised, reference, verify
from chronicals.verification.quantised import rounded, rounded_experts, rounded_layer
from comparison import equal

COMPUTE = torch.bfloat16


class FourBits(nn.Linear):
    """As bitsandbytes has it: two codes a byte, a scale, products in 16 bits, and the format
    beside the weight in its state.
    """

    __module__ = "bitsandbytes.nn.modules"

    def __init__(self, like, rounds_inputs=False):
        nn.Module.__init__(self)
        self.in_features = like.in_features
        self.out_features = like.out_features
        self.bias = like.bias
        self.rounds_inputs = rounds_inputs
        self.compute_dtype = COMPUTE
        self.scale = like.weight.detach().abs().max() / 7
        codes = (
            (like.weight.detach() / self.scale)
            .round()
            .clamp(-7, 7)
            .add(8)
            .to(torch.uint8)
            .flatten()
        )
        self.weight = nn.Parameter(codes[::2] * 16 + codes[1::2], requires_grad=False)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.scale

    def dense(self):
        codes = torch.stack([self.weight // 16, self.weight % 16], 1).view(
            self.out_features, self.in_features
        )
        return (codes.float() - 8) * self.scale

    def forward(self, x):
        given = (x * 20).round() / 20 if self.rounds_inputs else x
        bias = None if self.bias is None else self.bias.to(COMPUTE)
        return F.linear(given.to(COMPUTE), self.dense().to(COMPUTE), bias).to(x.dtype)


def in_four_bits(**changes):
    model = tiny.llama(attention_bias=True)
    for layer in model.model.layers:
        for module in list(layer.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, FourBits(child, **changes))
    model.is_quantized = True
    return model


def test_the_weight_is_what_the_layer_multiplies_by():
    for bias in (True, False):
        layer = FourBits(nn.Linear(48, 32, bias))
        before = layer.bias
        assert equal(quantised.dense_weight("layer", layer), layer.dense().to(COMPUTE).float())
        assert layer.bias is before and layer.training


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_verify_takes_a_model_in_four_bits(tmp_path, mode):
    config = runs.config(tmp_path, mixed_precision=mode, use_lora=True, lora_rank=4)
    found = verify(in_four_bits(), tiny.tokenizer(), config, tiny.chat_rows())
    assert found.passed, found.failures


@pytest.mark.slow
def test_other_values_are_seen(tmp_path, plant):
    """Were the base of the plain arms another one, by a twentieth in every weight, the run would
    be wrong.
    """
    plant(reference, "dense_weight", lambda right, *given: right(*given) * 1.05)
    config = runs.config(tmp_path, use_lora=True, lora_rank=4)
    assert not verify(in_four_bits(), tiny.tokenizer(), config, tiny.chat_rows()).passed


def test_inputs_that_are_rounded_are_refused_in_words(tmp_path):
    config = runs.config(tmp_path, use_lora=True)
    with pytest.raises(
        ConfigurationError, match=r"q_proj \(FourBits\) does not multiply by its weight alone"
    ):
        verify(in_four_bits(rounds_inputs=True), tiny.tokenizer(), config, tiny.chat_rows())


@pytest.mark.slow
def test_verify_takes_what_bitsandbytes_made(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny.llama().save_pretrained(tmp_path / "base")
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    place = {"": 0 if torch.cuda.is_available() else "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=four, device_map=place
    )
    found = verify(model, tiny.tokenizer(), runs.config(tmp_path, use_lora=True), tiny.chat_rows())
    assert found.passed, found.failures


# --- runs in FP8
# ----------------------------------------------------------------------------------------

FORMAT = sys.modules["chronicals.quantization.fp8"]
ADAPTERS = {"use_lora": True, "lora_rank": 8}


@pytest.fixture
def fused_anywhere(let_return, set_constants):
    let_return(facts, why_not_fused=None)
    set_constants(layer_policies, MIN_FP8_WIDTH=16)


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


@pytest.mark.slow
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
def small_experts_too(set_constants):
    set_constants(fp8_experts, MIN_MEAN_WIDTH=1, MIN_EXPERT_ROWS=1)
    set_constants(layer_policies, MIN_FP8_WIDTH=4096)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, IN_EXPERTS], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.usefixtures("fused_anywhere", "small_experts_too")
def test_a_healthy_run_of_a_mixture_passes(tmp_path, name, changes):
    found = compare(tmp_path, mixture(name), **changes)
    assert found.passed, found.failures


@pytest.mark.slow
@pytest.mark.parametrize("where", ["rows", "columns"])
@pytest.mark.usefixtures("fused_anywhere", "small_experts_too")
def test_a_wrong_scale_of_experts_fails(tmp_path, plant, where):
    def wrong(right, *given):
        found = right(*given)
        return found._replace(scale=1.3 * found.scale)

    plant(FP8Experts, where, wrong)
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
    layer.forward = partial(rounded_experts, layer)
    plain = layer(leaves[0], chosen, leaves[1])
    both = ([y, *torch.autograd.grad(y, leaves, dy)] for y in (ours, plain))
    for number, (got, expected) in enumerate(zip(*both, strict=True)):
        allowed = (
            0.08 if number == 2 else 2e-3
        )  # of shares: dy's rounding in one, the unit's in the other
        assert (got - expected).norm() <= allowed * expected.norm(), number


def scale_wrongly(plant, factor, of_weights, where):
    """Scales of weights, or of what they are multiplied by, are off where this layout is asked
    for.
    """
    weights = set()

    def dense(right, self):
        weights.add(self.weight.matrix.data_ptr())
        return right(self)

    def quantize(right, x, layout="rows", **options):
        made = right(x, layout=layout, **options)
        if layout != where or (x.data_ptr() in weights) != of_weights:
            return made
        return tuple(part and part._replace(scale=part.scale * factor) for part in made)

    plant(FP8Base, "dense", dense)
    plant(FORMAT, "fp8_quantize", quantize)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_weights", "where", "changes"),
    [(False, "both", {}), (False, "columns", {}), (True, "columns", {}), (True, "both", ADAPTERS)],
    ids=["gradients", "x for dW", "weights for dX", "frozen weights"],
)
@pytest.mark.usefixtures("fused_anywhere")
def test_a_wrong_scale_fails(tmp_path, plant, of_weights, where, changes):
    scale_wrongly(plant, 1.3, of_weights, where)
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
    layer.forward = partial(rounded_layer, layer)
    y = layer(x)
    for ours, plain in zip([y, *torch.autograd.grad(y, leaves, dy)], expected):
        assert 0 <= (ours - plain).norm() <= 0.08 * plain.norm()
    assert not equal(y, exact)
