"""Runs over a base in 4 bits, from loading to merging: they train what LoRA trains over the
weights that it stands for.
"""

import json

import pytest
import torch
from torch import nn

import runs
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.export.merge import merge
from chronicals.generation import load_trained
from chronicals.models import load_model, present
from chronicals.models.four_bits import has_4bit_layers, quantise_layers
from chronicals.policies import Facts, decide
from chronicals.quantization import Linear4bit
from chronicals.saving import SavedModel
from chronicals.verification import reference, verify
from comparison import equal


def base(folder, dtype=torch.float32, **changes):
    """A saved model in several shards."""
    tiny.llama(**changes).to(dtype).save_pretrained(folder / "base", max_shard_size="100KB")
    tiny.tokenizer().save_pretrained(folder / "base")
    return folder / "base"


def dequantised(model):
    """The plain model that a model in 4 bits stands for."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit):
            model.set_submodule(path, layer.plain())
    return model


# --- reading
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_quantised_while_it_is_read_is_what_is_quantised_afterwards(tmp_path, dtype):
    place = base(tmp_path, dtype, attention_bias=True)
    read = load_model(place, dtype, quantization="nf4")
    after = load_model(place, dtype)
    if (
        torch.cuda.is_available()
    ):  # the mean of the scales is summed in another order there, where both are quantised then
        read = read.cuda()
        after = after.cuda()
    assert quantise_layers(after) == 14 and quantise_layers(after) == 0
    ours = read.state_dict()
    theirs = after.state_dict()
    assert ours.keys() == theirs.keys() and all(equal(x, theirs[name]) for name, x in ours.items())
    assert not [m for m in read.get_decoder().layers.modules() if isinstance(m, nn.Linear)]
    assert type(read.lm_head) is nn.Linear and read.lm_head.weight.dtype == dtype
    plain = load_model(place, dtype).config.to_dict()
    assert read.config.to_dict() == plain and not getattr(read, "is_quantized", False)


def test_no_weight_waits_for_another_while_they_are_read(tmp_path, monkeypatch):
    place = base(tmp_path)
    set_submodule = nn.Module.set_submodule
    waiting = []

    def counting(model, *others):
        layers = [m for m in model.get_decoder().layers.modules() if isinstance(m, nn.Linear)]
        waiting.append(sum(m.weight.device.type != "meta" for m in layers))
        return set_submodule(model, *others)

    monkeypatch.setattr(nn.Module, "set_submodule", counting)
    load_model(place, torch.float32, quantization="nf4")
    assert waiting == [0] * 14


def test_what_cannot_be_quantised_is_said(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    place = base(tmp_path)
    described = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(
        json.dumps({**described, "quantization_config": {"quant_method": "awq"}})
    )
    with pytest.raises(ValueError, match=r"quantised already \(awq\); leave it out"):
        load_model(place, torch.float32, quantization="nf4")
    (place / "config.json").write_text(json.dumps({**described, "intermediate_size": 64}))
    with pytest.raises(ValueError, match="of another shape than config.json says"):
        load_model(place, torch.float32, quantization="nf4")
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)).save_pretrained(
        tmp_path / "gpt2"
    )
    with pytest.raises(
        ValueError, match="GPT2LMHeadModel has no list of decoder layers with plain linear layers"
    ):
        load_model(tmp_path / "gpt2", torch.float32, quantization="nf4")


# --- training
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_is_that_of_adapters_over_the_dequantised_weights(tmp_path, precision):
    place = base(tmp_path)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    given = {"mixed_precision": precision, "lora_rank": 8, "lora_dropout": 0.0}
    runs.train(
        tmp_path / "ours",
        model=load_model(place, dtype, quantization="nf4"),
        quantization="nf4",
        **given,
    )
    plain = dequantised(load_model(place, dtype, quantization="nf4"))
    runs.train(tmp_path / "plain", model=plain, use_lora=True, **given)
    runs.train(tmp_path / "sixteen", model=load_model(place, dtype), use_lora=True, **given)
    ours, expected, other = (
        runs.trajectory(tmp_path / name) for name in ("ours", "plain", "sixteen")
    )
    tolerance = 1e-5 if precision == "fp32" else 4e-3
    for (step, *one), (_, *two) in zip(ours, expected, strict=True):
        count = (
            2 if step == 1 or precision == "fp32" else 1
        )  # roundings grow, in the norms of gradients first
        assert one[:count] == pytest.approx(
            two[:count], rel=tolerance if step == 1 else 20 * tolerance
        ), step
    if precision == "fp32":
        assert abs(ours[0][1] - other[0][1]) > 20 * abs(ours[0][1] - expected[0][1]), (
            "4 bits make a difference"
        )


@pytest.mark.slow
def test_a_model_in_memory_is_quantised_by_the_run(tmp_path):
    place = base(tmp_path)
    for name, model in (
        ("read", load_model(place, torch.float32, quantization="nf4")),
        ("here", load_model(place, torch.float32)),
    ):
        runs.train(tmp_path / name, model=model, load_in_4bit=True, max_steps=2)
        assert has_4bit_layers(model)
    assert runs.trajectory(tmp_path / "read") == runs.trajectory(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ["recompute_layers", "tiled_mlp", pytest.param("offload_activations", marks=pytest.mark.gpu)],
)
def test_what_saves_memory_changes_no_step(tmp_path, policy):
    place = base(tmp_path)
    for name, changes in (("plain", {}), ("saving", {"memory": [policy]})):
        model = load_model(place, torch.float32, quantization="nf4")
        runs.train(
            tmp_path / name,
            model=model,
            quantization="nf4",
            max_steps=3,
            lora_dropout=0.0,
            **changes,
        )
    runs.assert_same_steps(tmp_path / "saving", tmp_path / "plain", 1e-4)


@pytest.mark.slow
def test_it_resumes_bit_by_bit(tmp_path):
    place = base(tmp_path)

    def train(name, steps, **changes):
        model = load_model(place, torch.float32, quantization="nf4")
        given = {"save_steps": 2, "lr_scheduler": "constant", "warmup_steps": 0}
        return runs.train(
            tmp_path / name, model=model, quantization="nf4", max_steps=steps, **given, **changes
        )

    train("whole", 4), train("parts", 2), train("parts", 4, resume=True)
    assert runs.trajectory(tmp_path / "parts") == runs.trajectory(tmp_path / "whole")
    whole, parts = (runs.weights(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(equal(x, parts[name]) for name, x in whole.items())


# --- afterwards
# --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, ["q_proj", "down_proj"]], ids=["all", "some"])
def test_what_was_trained_is_loaded_and_merged_over_the_same_base(tmp_path, targets):
    """Also where the run was in bf16, of weights that are stored in fp32; layers without an
    adapter are those of the base.
    """
    place = base(tmp_path)
    given = {
        "quantization": "nf4",
        "mixed_precision": "bf16",
        "lora_target_modules": targets,
        "lora_dropout": 0.0,
    }
    model = load_model(place, torch.bfloat16, quantization="nf4")
    result = runs.train(tmp_path, model=model, use_lora_plus=False, **given)
    saved = SavedModel.find(result.model_dir)
    group = dict(*saved.about["base"]["in_4_bits"])
    assert len(group.pop("layers")) == 14 and group.pop("experts") == []
    usual = {"code": "nf4", "block": 64, "scale_block": 256}
    assert group == {**usual, "quantized_from": "bfloat16", "products": "bfloat16"}
    loaded = saved.model(torch.float32)
    codes = {name: x for name, x in loaded.named_parameters() if x.dtype == torch.uint8}
    assert codes and all(
        equal(x.cpu(), model.get_parameter(name).cpu()) for name, x in codes.items()
    )
    ids = torch.arange(1, 20)[None]
    merge(result.model_dir, tmp_path / "merged")
    merged = load_model(tmp_path / "merged", torch.float32)
    seen = saved.model(torch.bfloat16)
    for path, layer in list(seen.named_modules()):
        if isinstance(layer, Linear4bit):
            owner = seen.get_submodule(path.removesuffix(".base_layer"))
            update = owner.scale * owner.lora_B @ owner.lora_A if owner is not layer else 0
            weight = merged.get_parameter(f"{path.removesuffix('.base_layer')}.weight")
            assert equal(weight, layer.packed.dense().float() + update), path
    sixteen = load_model(place, torch.float32)
    assert not torch.allclose(
        sixteen.get_decoder().layers[0].self_attn.k_proj.weight,
        merged.get_decoder().layers[0].self_attn.k_proj.weight,
        rtol=1e-2,
    )
    assert has_4bit_layers(load_trained(result.model_dir).model)
    unloaded = saved.model(torch.float32).merge_and_unload()
    assert (
        not has_4bit_layers(unloaded)
        and type(unloaded.get_decoder().layers[0].self_attn.k_proj) is nn.Linear
    )
    assert torch.allclose(
        unloaded(ids).logits, saved.model(torch.float32)(ids).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
def test_verify_compares_with_the_dequantised_model(tmp_path, monkeypatch):
    place = base(tmp_path)
    right = reference.dense_weight
    given = runs.config(tmp_path, quantization="nf4", lora_rank=4), tiny.chat_rows()
    found = verify(load_model(place, torch.float32, quantization="nf4"), tiny.tokenizer(), *given)
    assert found.passed, found.failures
    monkeypatch.setattr(reference, "dense_weight", lambda *of: right(*of) * 1.05)
    assert not verify(
        load_model(place, torch.float32, quantization="nf4"), tiny.tokenizer(), *given
    ).passed


@pytest.mark.slow
def test_the_command_takes_nothing_else(tmp_path, chronicals, caplog):
    """Trained, asked, scored, merged; and the next run over the adapter has the same base."""
    base(tmp_path)
    said = chronicals(
        "train",
        "--model",
        "base",
        "--data",
        "data.jsonl",
        "--load-in-4bit",
        "--output-dir",
        "out",
        *runs.SHORT,
    )
    assert "packed base weights (14 linear layers in nf4" in said
    caplog.clear()
    assert (tmp_path / "out/model/adapter_model.safetensors").exists()
    (
        chronicals("evaluate", "out", "--data", "data.jsonl"),
        chronicals("generate", "out", "--prompt", "what is 3?"),
    )
    chronicals("merge", "out", "--output", "merged")
    said = chronicals(
        "train", "--model", "out", "--data", "data.jsonl", "--output-dir", "on", *runs.SHORT
    )
    assert "14 linear layers" in said
    weight = load_model("merged", torch.float32).get_decoder().layers[0].mlp.up_proj.weight
    assert equal(weight, merged_weight("out"))


def merged_weight(folder):
    """Of the same layer, over its base in 4 bits."""
    layer = SavedModel.find(folder).model(torch.bfloat16).get_decoder().layers[0].mlp.up_proj
    return layer.base_layer.packed.dense().float() + layer.scale * layer.lora_B @ layer.lora_A


# --- what is asked
# -----------------------------------------------------------------------------------------------------


def test_4_bits_mean_adapters():
    for given in ({"quantization": "nf4"}, {"load_in_4bit": True}):
        config = ChronicalsConfig(**given)
        assert config.quantization == "nf4" and config.use_lora and config.explicit == given.keys()
        assert config.replace(lora_rank=4).use_lora
    config = ChronicalsConfig()
    config.load_in_4bit = True
    assert config.use_lora and config.quantization == "nf4"
    for wrong, said in {
        ("quantization", "use_lora"): "use_lora=False trains all; leave out use_lora",
        ("quantization", "use_fp8"): "a weight has one format",
        ("quantization", "load_in_4bit"): "they contradict; keep one",
    }.items():
        with pytest.raises(ConfigurationError, match=said):
            ChronicalsConfig(**dict(zip(wrong, ("nf4", wrong[1] == "use_fp8"))))
    with pytest.raises(ConfigurationError, match="quantization='int4': Input should be 'nf4'"):
        ChronicalsConfig(quantization="int4")


@pytest.mark.slow
def test_a_base_in_4_bits_is_not_trained_whole(tmp_path):
    model = load_model(base(tmp_path), torch.float32, quantization="nf4")
    with pytest.raises(
        ConfigurationError, match="quantised and cannot be trained; set use_lora=True"
    ):
        runs.train(tmp_path, model=model)


def test_the_log_says_it_and_the_estimate_counts_4_bits(tmp_path):
    from chronicals.memory import StepShape, WeightBytes, estimate

    config = runs.config(tmp_path, quantization="nf4")
    model = tiny.llama()
    sixteen = estimate(model, StepShape(64, False, 2, 16), WeightBytes(2, 12))
    quantise_layers(model)
    model.requires_grad_(False)
    made = decide(Facts.of(config, present(model, False, False, pack_width=128)))["quantization"]
    assert made.runs and "14 linear layers" in made.reason
    four = estimate(model, StepShape(64, False, 2, 16), WeightBytes(2, 12))
    values = sum(
        m.in_features * m.out_features for m in model.modules() if isinstance(m, Linear4bit)
    )
    packed = sum(m.packed.bytes for m in model.modules() if isinstance(m, Linear4bit))
    others = 2 * sum(p.numel() for p in model.parameters() if p.is_floating_point())
    assert (
        packed + others + values + 16 * 300 * 2
        <= four.fixed
        <= packed + others + values + 16 * 300 * 2 + 14 * 1100
    )
    assert four.fixed < sixteen.fixed
