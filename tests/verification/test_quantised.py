"""Models in 4 bits: the plain arms multiply by the same values in fp32."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import generic_bitsandbytes  # noqa: F401
import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.verification import quantised, reference, verify
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


def test_other_values_are_seen(tmp_path, monkeypatch):
    """Were the base of the plain arms another one, by a twentieth in every weight, the run would
    be wrong.
    """
    right = reference.dense_weight
    monkeypatch.setattr(reference, "dense_weight", lambda *given: right(*given) * 1.05)
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
