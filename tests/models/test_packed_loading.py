"""Checkpoints that transformers and bitsandbytes wrote in 4 bits, loaded without bitsandbytes."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import generic_bitsandbytes  # noqa: F401
import tiny
from chronicals.models import load_model, packed_loading
from chronicals.quantization import Linear4bit, nf4
from comparison import equal

SKIPPED = ["lm_head", "model.layers.1.mlp", "o_proj"]
IDS = torch.arange(5, 38).view(3, 11)


def packed(folder, model=None, dtype=torch.float32, shards="50GB", **options):
    """Writes a model of theirs to a folder, and returns it."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = tiny.llama(attention_bias=True) if model is None else model
    model.to(dtype).save_pretrained(folder / "dense")
    usual = {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
    }
    four = BitsAndBytesConfig(load_in_4bit=True, **{**usual, **options})
    place = {"device_map": {"": "cpu"}, "dtype": dtype}
    model = AutoModelForCausalLM.from_pretrained(
        folder / "dense", quantization_config=four, **place
    ).train()
    model.save_pretrained(folder / "packed", max_shard_size=shards)
    return model


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    )


KINDS = {
    "nested": {},
    "plain": {"bnb_4bit_use_double_quant": False},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "bytes stored as bf16": {"bnb_4bit_quant_storage": torch.bfloat16},
    "some kept": {"llm_int8_skip_modules": SKIPPED},
    "files": {"shards": "40KB"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_theirs(tmp_path, kind, monkeypatch):
    theirs = packed(tmp_path, **KINDS[kind])
    with monkeypatch.context() as patched:
        patched.setattr(nf4, "dequantize_4bit", None)  # nothing is dequantized to be loaded
        ours = load_model(tmp_path / "packed", theirs.dtype)
    kinds = {path: type(layer).__name__ for path, layer in theirs.named_modules()}
    assert {path: type(layer).__name__ for path, layer in ours.named_modules()} == kinds
    assert sum(kind == "Linear4bit" for kind in kinds.values()) == (
        9 if kind == "some kept" else 14
    )
    assert equal(ours.train()(IDS).logits, theirs(IDS).logits)
    assert not any(parameter.is_meta for parameter in ours.parameters())
    assert not any(
        layer.weight.requires_grad for layer in ours.modules() if isinstance(layer, Linear4bit)
    )
    assert (
        getattr(ours, "hf_quantizer", None) is None
        and ours.config.quantization_config["load_in_4bit"]
    )


def test_what_describes_a_weight_is_not_taken_for_the_weight():
    """Older versions of transformers take the first pattern that is part of a tensor's name."""
    (conversion,) = packed_loading._Quantizer.get_weight_conversions(None)
    patterns = conversion.source_patterns
    assert len(patterns) > 1 and not any(
        early in late for n, late in enumerate(patterns) for early in patterns[:n]
    )


@pytest.mark.parametrize("kind", ["nested", "plain", "fp4"])
def test_the_files_are_written_again_byte_for_byte(tmp_path, kind):
    packed(tmp_path, **KINDS[kind])
    load_model(tmp_path / "packed", torch.float32).save_pretrained(tmp_path / "again")
    expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("packed", "again")
    )
    assert expected.keys() == found.keys()
    assert all(
        x.dtype == found[name].dtype and equal(x, found[name]) for name, x in expected.items()
    )
    assert (tmp_path / "packed" / "config.json").read_text() == (
        tmp_path / "again" / "config.json"
    ).read_text()


@pytest.mark.parametrize(
    "make", [lambda: tiny.llama(tie_word_embeddings=True), gpt2], ids=["tied", "gpt2"]
)
def test_other_classes(tmp_path, make):
    theirs = packed(tmp_path, make().eval())
    ours = load_model(tmp_path / "packed", torch.float32)
    assert equal(ours(IDS).logits, theirs.eval()(IDS).logits)
    assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight


def test_another_dtype_is_that_of_what_is_dense(tmp_path):
    packed(tmp_path, dtype=torch.bfloat16)
    ours = load_model(tmp_path / "packed", torch.float32)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32, torch.uint8}
    layer = ours.model.layers[0].mlp.down_proj
    assert (
        layer.dtype == torch.float32
        and layer.absmax.dtype == torch.uint8
        and layer.absmax2.dtype == torch.float32
    )
    assert ours.config.dtype == torch.float32


def test_tensors_that_are_renamed_while_read_get_that_dtype_too(tmp_path):
    """Of a file without the prefix of the language model, as its base class writes one."""
    packed(tmp_path, dtype=torch.bfloat16)
    file = tmp_path / "packed" / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    ours = load_model(tmp_path / "packed", torch.float32)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32, torch.uint8}


@pytest.mark.slow
def test_bitsandbytes_is_not_needed(tmp_path):
    theirs = packed(tmp_path)
    torch.save(theirs(IDS).logits, tmp_path / "logits")
    program = f"""
import sys
sys.modules["bitsandbytes"] = None
import torch
from chronicals.models import load_model
logits = load_model({str(tmp_path / "packed")!r}, torch.float32).train()(torch.arange(5, 38).view(3, 11)).logits
assert torch.equal(logits, torch.load({str(tmp_path / "logits")!r}))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


Q = "model.layers.0.self_attn.q_proj.weight"


def without(name):
    return lambda stored: {key: tensor for key, tensor in stored.items() if key != name}


DAMAGED = {
    "entry": (without(f"{Q}.absmax"), rf"{Q}\.absmax: not in the checkpoint"),
    "all": (
        lambda stored: {k: x for k, x in stored.items() if not k.startswith(Q)},
        f"{Q}: not in the checkpoint, and would",
    ),
    "codes": (
        lambda stored: stored | {Q: stored[Q][:-1]},
        f"{Q}: has 2047 bytes, its shape needs 2048",
    ),
    "dense": (
        lambda stored: without(f"{Q}.absmax")(
            {
                **{k: x for k, x in stored.items() if not k.startswith(f"{Q}.")},
                Q: torch.randn(64, 64),
            }
        ),
        f"{Q}: is not in 4 bits",
    ),
    "norm": (without("model.norm.weight"), "model.norm.weight: not in the checkpoint"),
    "other": (
        lambda stored: stored | {"model.layers.0.new.weight": torch.zeros(3)},
        "0.new.weight: in the checkpoint",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_is_damaged_or_missing_is_named(tmp_path, damage):
    packed(tmp_path)
    change, message = DAMAGED[damage]
    file = tmp_path / "packed" / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"^model='{tmp_path}/packed': .*{message}"):
        load_model(tmp_path / "packed", torch.float32)


def changed(folder, change):
    file = folder / "packed" / "config.json"
    described = json.loads(file.read_text())
    change(described)
    file.write_text(json.dumps(described))


CONFIGURED = {
    "sizes": (
        lambda c: c.update(intermediate_size=128),
        r"is \[64, 96\] in the checkpoint, \[64, 128\] by config",
    ),
    "skipped": (
        lambda c: c["quantization_config"].update(llm_int8_skip_modules=["lm_head", "q_proj"]),
        f"{Q}: is in 4 bits, and of no",
    ),
    "8 bits": (
        lambda c: c["quantization_config"].update(load_in_8bit=True, load_in_4bit=False),
        "take the model in 16 bits",
    ),
}


@pytest.mark.parametrize("kind", CONFIGURED)
def test_a_configuration_that_does_not_fit(tmp_path, kind):
    packed(tmp_path)
    change, message = CONFIGURED[kind]
    changed(tmp_path, change)
    with pytest.raises(ValueError, match=f"^model='{tmp_path}/packed': .*{message}"):
        load_model(tmp_path / "packed", torch.float32)


def test_a_dense_model_is_loaded_as_before(tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    ours = load_model(tmp_path, torch.float32)
    assert type(ours.model.layers[0].mlp.up_proj) is nn.Linear and not hasattr(
        ours.config, "quantization_config"
    )
