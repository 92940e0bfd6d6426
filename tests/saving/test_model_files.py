"""A model's files: what transformers itself would write, by one process or several, in any number
of files; models in 4 bits as transformers and bitsandbytes save and load them.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import families
import generic_bitsandbytes  # noqa: F401
import tiny
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import attach_score, describe_packed, load_model
from chronicals.quantization import Linear4bit, Packed
from chronicals.saving import (
    ModelParts,
    model_files,
    save_model,
    save_without_weights,
    stored_weights,
)
from chronicals.saving.model_files import PARTS_INDEX, WHOLE_FILE
from comparison import equal

MODELS = {
    "untied": lambda: tiny.llama(tie_word_embeddings=False),
    "tied": lambda: tiny.llama(tie_word_embeddings=True),
    "mixture, whose experts are split": lambda: families.mixture("qwen3_moe"),
    "mixture, whose names change": lambda: families.mixture("mixtral"),
}


def scored():
    model = tiny.llama()
    attach_score(model, 0)
    torch.nn.init.normal_(model.score.weight)
    return model


def written(model, folder, turns=3):
    """By so many processes, one after the other."""
    parts = ModelParts(model)
    folder.mkdir()
    values = {name: value.detach() for name, value in model.state_dict().items()}
    for turn in reversed(range(turns)):
        parts.write(folder, turn, turns, lambda names: {name: values[name] for name in names})
    save_without_weights(folder, parts.form, {"beside.txt": b"x"}, {"about": 1})
    parts.name_files(folder)
    return parts


def tensors(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 1 << 15, 1 << 40])
@pytest.mark.parametrize("make", [*MODELS.values(), scored], ids=[*MODELS, "with a score"])
def test_the_files_hold_what_transformers_writes(tmp_path, set_constants, make, size):
    set_constants(model_files, FILE_BYTES=size)
    model = make()
    save_model(tmp_path / "whole", model, {"beside.txt": b"x"}, {"about": 1})
    parts = written(model, tmp_path / "parts")
    expected = tensors(tmp_path / "whole")
    found = tensors(tmp_path / "parts")
    assert expected.keys() == found.keys() and all(
        equal(x, found[name]) for name, x in expected.items()
    )
    own = [
        {file.name for file in folder.iterdir() if file.suffix != ".safetensors"}
        for folder in tmp_path.iterdir()
    ]
    assert own[0] - {PARTS_INDEX} == own[1] - {PARTS_INDEX} and (
        PARTS_INDEX in {*own[0], *own[1]}
    ) == (len(parts.files) > 1)
    kind = AutoModelForSequenceClassification if make is scored else AutoModelForCausalLM
    one, other = (kind.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(equal(x, other[name]) for name, x in one.items())


def test_files_are_of_bounded_size_and_have_an_index(tmp_path, set_constants):
    model = tiny.llama(num_hidden_layers=4)
    layer = sum(p.numel() for p in model.model.layers[0].parameters()) * 4
    rest = sum(p.numel() for p in model.parameters()) * 4 - 4 * layer
    set_constants(model_files, FILE_BYTES=max(rest, 2 * layer))
    parts = written(model, tmp_path / "parts")
    assert (
        len(parts.files) == (3 if rest + layer > max(rest, 2 * layer) else 2)
        and not (tmp_path / "parts" / WHOLE_FILE).exists()
    )
    index = json.loads((tmp_path / "parts" / PARTS_INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())
    places = index["weight_map"]
    assert {name: load_file(tmp_path / "parts" / file)[name].shape for name, file in places.items()}
    assert len({places[name] for name in places if ".layers.1." in name}) == 1


def test_a_file_that_nobody_wrote_is_missed(tmp_path, set_constants):
    set_constants(model_files, FILE_BYTES=1)
    model = tiny.llama()
    parts = ModelParts(model)
    parts.write(tmp_path, 0, 2, lambda names: {name: model.state_dict()[name] for name in names})
    with pytest.raises(FileNotFoundError):
        parts.name_files(tmp_path)


def test_weights_are_read_when_they_are_asked_for(tmp_path, set_constants):
    """Of a model in several files, too; where names are others in the files, all at once."""
    set_constants(model_files, FILE_BYTES=1)
    model = tiny.llama(tie_word_embeddings=True)
    written(model, tmp_path / "parts")
    found = stored_weights(tmp_path / "parts", model)
    assert not isinstance(found, dict) and {*found} == {
        name for name, _ in model.named_parameters()
    }
    assert all(equal(found[name], p) for name, p in model.named_parameters())
    mixture = families.mixture("qwen3_moe")
    written(mixture, tmp_path / "mixture")
    found = stored_weights(tmp_path / "mixture", mixture)
    assert isinstance(found, dict) and all(
        equal(found[name], p) for name, p in mixture.named_parameters()
    )


# --- models in 4 bits, as transformers and bitsandbytes save them
# ------------------------------------------------------------------------------------------------

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


@pytest.mark.slow
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


@pytest.mark.slow
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
