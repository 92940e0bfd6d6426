"""Embedding and head trained whole beside adapters, beside the real PEFT, both ways."""

import json

import pytest
import torch
from adapted import changed, close, gpt2, llama, logits, randomise, tokens, train_on
from safetensors.torch import load_file, save_file

import runs
import tiny
from chronicals.lora import (
    LoRAConfig,
    apply_lora,
    load_adapter,
    merge_and_unload,
    save_adapter,
    without_adapters,
)
from chronicals.models import load_model
from comparison import equal

peft = pytest.importorskip("peft")

WHOLE = [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]]
TARGETS = ["q_proj", "down_proj"]


def ours(names, **fields):
    model = apply_lora(
        llama(), LoRAConfig(4, 12, 0.0, TARGETS, modules_to_save=names, **fields)
    ).eval()
    randomise(model)
    return model


@pytest.mark.parametrize("names", WHOLE, ids=str)
def test_there_and_back(tmp_path, names):
    model = ours(names)
    ids = tokens()
    bare = logits(model, ids)
    expected = train_on(model, ids)
    save_adapter(model, tmp_path / "ours")
    assert (
        json.loads((tmp_path / "ours" / "adapter_config.json").read_text())["modules_to_save"]
        == names
    )
    other = peft.PeftModel.from_pretrained(llama(), tmp_path / "ours", is_trainable=True).eval()
    assert changed(expected, bare) and close(logits(other, ids), expected)
    trained = sum(p.requires_grad for p in model.parameters())
    assert trained == sum(p.requires_grad for p in other.parameters()) == 8 + len(names)
    other.save_pretrained(tmp_path / "theirs")
    again = load_adapter(llama(), tmp_path / "theirs").eval()
    assert equal(logits(again, ids), expected)
    save_adapter(again, tmp_path / "again")
    files = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "again")
    )
    assert len({frozenset(file) for file in files}) == 1
    assert close(train_on(again, ids), train_on(other, ids), 1e-4)


def test_what_peft_excludes_from_the_targets_is_not_adapted(tmp_path):
    described = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "lm_head"], modules_to_save=["lm_head"]
    )
    other = peft.get_peft_model(llama(), described).eval()
    ids = tokens()
    randomise(other)
    expected = train_on(other, ids)
    other.save_pretrained(tmp_path)
    assert close(logits(load_adapter(llama(), tmp_path).eval(), ids), expected)


def test_the_trained_weights_are_those_that_differ(tmp_path):
    """A weight that is trained must be in the file; one that is in it must be trained."""
    model = ours(["lm_head"])
    ids = tokens()
    train_on(model, ids)
    save_adapter(model, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert [name for name in tensors if "lora_" not in name] == ["base_model.model.lm_head.weight"]
    tensors.pop("base_model.model.lm_head.weight")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match="lm_head is in modules_to_save, and its weight is missing"
    ):
        load_adapter(llama(), tmp_path)


def test_merged_it_is_a_plain_model(tmp_path):
    model = ours(["embed_tokens", "lm_head"])
    ids = tokens()
    expected = train_on(model, ids)
    assert close(logits(merge_and_unload(model), ids), expected)


REFUSED = {
    "neither embedding nor head": (llama, ["norm"], "'norm' is neither the embedding nor the head"),
    "one weight": (
        lambda: llama(tie_word_embeddings=True),
        ["lm_head"],
        "embedding and head are one weight here",
    ),
    "one weight of gpt2": (gpt2, ["wte"], "embedding and head are one weight here"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_whole_is_refused(case):
    build, names, message = REFUSED[case]
    model = build()
    with pytest.raises(ValueError, match=message):
        apply_lora(model, LoRAConfig(4, 12, 0.0, None, modules_to_save=names))
    assert all(p.requires_grad for p in model.parameters()) and not hasattr(
        model, "chronicals_lora"
    )


def test_without_adapters_there_is_no_base():
    with (
        pytest.raises(ValueError, match="lm_head is trained whole"),
        without_adapters(ours(["lm_head"])),
    ):
        pass


@pytest.mark.slow
def test_a_run_trains_saves_and_resumes_them(tmp_path):
    """In bf16, whose whole weights have exact masters: a resumed run ends bit-equal, and PEFT's
    model is the trained one.
    """
    import shutil

    tiny.llama().save_pretrained(tmp_path / "base")
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    fields = {
        "use_lora": True,
        "lora_rank": 4,
        "lora_dropout": 0.0,
        "mixed_precision": "bf16",
        "save_steps": 3,
        "trackers": [],
    }
    fields |= {"lora_modules_to_save": "embed_tokens,lm_head", "learning_rate": 1e-3}

    def train(folder, **more):
        model = load_model(tmp_path / "base", torch.bfloat16)
        runs.train(folder, model=model, **fields, **more)
        return model

    model = train(whole)
    first = "run/checkpoints/step-00000003"
    shutil.copytree(whole / first, broken / first)
    train(broken, resume=True)
    once, twice = (
        load_file(folder / "run" / "model" / "adapter_model.safetensors")
        for folder in (whole, broken)
    )
    assert once.keys() == twice.keys() and all(equal(once[name], twice[name]) for name in once)
    base = load_model(tmp_path / "base", torch.bfloat16)
    ids = tokens()
    for name in ("model.embed_tokens", "lm_head"):
        own = model.get_submodule(name).weight
        assert own.dtype == torch.bfloat16 and not equal(own, base.get_submodule(name).weight)
        assert equal(own.cpu(), once[f"base_model.model.{name}.weight"])
    theirs = peft.PeftModel.from_pretrained(base, whole / "run" / "model").float().eval()
    assert close(logits(theirs, ids), logits(model.float().eval(), ids), 1e-2)
