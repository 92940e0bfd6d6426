"""Models in 4 bits are saved as transformers and bitsandbytes save them, and load them."""

import pytest
import torch
from torch import nn

import generic_bitsandbytes  # noqa: F401
import tiny
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import describe_packed, load_model
from chronicals.quantization import Linear4bit, Packed
from chronicals.saving.model_files import save_model
from comparison import equal

IDS = torch.arange(5, 38).view(3, 11)


def in_four_bits(kept=("model.layers.1.mlp.up_proj",), dtype=torch.bfloat16, **options):
    model = tiny.llama(attention_bias=True).to(dtype).train()
    for path, layer in list(model.model.named_modules(prefix="model")):
        if type(layer) is nn.Linear and path not in kept:
            model.set_submodule(
                path, Linear4bit(Packed.of(layer.weight.detach(), **options), layer.bias)
            )
    return model


def theirs(folder):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"}).train()


@pytest.mark.parametrize("options", [{}, {"nested": False}, {"block": 128}], ids=str)
def test_they_load_what_was_quantized_here(tmp_path, options):
    """In fp32, where their products are as exact as ours."""
    ours = in_four_bits(dtype=torch.float32, **options)
    save_model(tmp_path, ours, {}, {})
    other = theirs(tmp_path)
    assert type(other.model.layers[0].mlp.up_proj).__module__ == "bitsandbytes.nn.modules"
    assert type(other.model.layers[1].mlp.up_proj) is nn.Linear
    assert torch.allclose(other(IDS).logits, ours(IDS).logits, atol=1e-6)
    assert equal(load_model(tmp_path, torch.float32).train()(IDS).logits, ours(IDS).logits)


def test_bf16(tmp_path):
    ours = in_four_bits()
    save_model(tmp_path, ours, {}, {})
    assert theirs(tmp_path).dtype == torch.bfloat16
    assert torch.allclose(theirs(tmp_path)(IDS).logits, ours(IDS).logits, atol=0.02, rtol=0.02)


def test_a_model_that_is_dense_again_does_not_say_otherwise(tmp_path):
    model = in_four_bits(dtype=torch.float32)
    describe_packed(model)
    assert model.config.quantization_config["llm_int8_skip_modules"] == [
        "model.layers.1.mlp.up_proj",
        "lm_head",
    ]
    for path, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit):
            model.set_submodule(path, layer.plain())
    save_model(tmp_path, model, {}, {})
    assert not hasattr(model.config, "quantization_config")
    assert equal(load_model(tmp_path, torch.float32).train()(IDS).logits, model(IDS).logits)


def test_an_adapter_names_the_base_in_four_bits(tmp_path):
    save_model(tmp_path / "base", in_four_bits(dtype=torch.float32), {}, {})
    model = apply_lora(
        load_model(tmp_path / "base", torch.float32), LoRAConfig(rank=2, dropout=0.0)
    )
    nn.init.normal_(model.model.layers[0].mlp.down_proj.lora_B)
    model.save_pretrained(tmp_path / "adapter")
    peft = pytest.importorskip("peft")
    other = peft.PeftModel.from_pretrained(theirs(tmp_path / "base"), tmp_path / "adapter").train()
    assert other.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    assert torch.allclose(other(IDS).logits, model.train()(IDS).logits, atol=1e-5)
