"""What a user of transformers or PEFT does with a model that has our adapters: save, copy,
merge, add others.
"""

import copy
import gc
import io
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from adapted import MODELS, TARGETS, llama, logits, randomise, tokens

import tiny
from chronicals import patch_model, unpatch_model
from chronicals.lora import (
    LoRAConfig,
    adapters,
    apply_lora,
    load_adapter,
    merge_and_unload,
    save_adapter,
)
from chronicals.models import load_model
from comparison import equal

FILES = ["adapter_config.json", "adapter_model.safetensors"]


def again(folder, name="mine", dtype=torch.float32):
    """What is loaded over the base."""
    return load_adapter(load_model(folder / "base", dtype), folder / name).eval()


def close(got, expected, tolerance=1e-5):
    return (got - expected).abs().max() <= tolerance * expected.abs().max()


def adapted(folder, name="llama", dtype=torch.float32, targets=None, **changes):
    """A trained adapter over a base that lies in a folder."""
    MODELS[name](**changes).save_pretrained(folder / "base")
    model = load_model(folder / "base", dtype)
    apply_lora(model, LoRAConfig(rank=4, alpha=12, target_modules=targets or TARGETS[name]))
    randomise(model)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_save_pretrained_writes_is_the_model(tmp_path, name, dtype):
    peft = pytest.importorskip("peft")
    model = adapted(tmp_path, name, dtype)
    ids = tokens()
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "mine")
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == FILES
    assert not torch.allclose(
        logits(load_model(tmp_path / "base", dtype), ids), expected, rtol=0.02
    )
    for loader in (transformers.AutoModelForCausalLM, peft.AutoPeftModelForCausalLM):
        loaded = loader.from_pretrained(tmp_path / "mine", dtype=dtype).eval()
        assert close(logits(loaded, ids), expected, 1e-5 if dtype == torch.float32 else 2e-2), (
            loader.__name__
        )
    assert equal(logits(again(tmp_path, dtype=dtype), ids), expected)


def test_values_of_a_state_dict_are_written(tmp_path):
    """transformers' Trainer gathers one where the model is spread over ranks."""
    model = adapted(tmp_path)
    ids = tokens()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits(model, ids)
    randomise(model)
    model.save_pretrained(tmp_path / "mine", state_dict=values)
    assert equal(logits(again(tmp_path), ids), expected)
    model.load_state_dict(values)
    assert equal(logits(model, ids), expected)


def test_what_save_pretrained_takes(tmp_path):
    model = adapted(tmp_path)
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="safe_serialization=False: .* safetensors only"):
        model.save_pretrained(tmp_path / "none", safe_serialization=False)


def test_what_has_no_meaning_for_an_adapter_is_ignored_by_name(tmp_path, caplog):
    """The folder is written all the same: training is over when it is asked for."""
    model = adapted(tmp_path)
    usual = {
        "save_peft_format": True,
        "save_original_format": True,
        "distributed_checkpoint": False,
        "token": "t",
    }
    model.save_pretrained(tmp_path / "mine", max_shard_size="1GB", **usual)
    assert "ignores" not in caplog.text
    accelerate = {
        "is_main_process": True,
        "save_function": torch.save,
        "state_dict": model.state_dict(),
    }
    model.save_pretrained(
        tmp_path / "theirs", **accelerate, variant="fp16", save_peft_format=False, private=True
    )
    assert "ignores private, save_function, save_peft_format, variant" in caplog.text
    assert all(
        sorted(path.name for path in (tmp_path / name).iterdir()) == FILES
        for name in ("mine", "theirs")
    )


@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_the_adapter_is_what_is_pushed(tmp_path, let_return, way):
    model = adapted(tmp_path)
    uploaded = {}

    def upload(folder, repo_id, **_):
        uploaded[repo_id] = sorted(path.name for path in Path(folder).iterdir())

    hub = transformers.utils.hub
    api = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
    card = SimpleNamespace(save=lambda path: None)
    let_return(hub, hf_api=api, create_and_tag_model_card=card)
    model._upload_modified_files = upload
    if way == "push_to_hub":
        model.push_to_hub("me/mine")
    else:
        model.save_pretrained(tmp_path / "mine", push_to_hub=True, repo_id="me/mine")
    assert uploaded == {"me/mine": FILES}


def by_pickle(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copy_saves_and_merges_itself(tmp_path, copied):
    model = adapted(tmp_path)
    ids = tokens()
    expected = logits(model, ids)
    other = copied(model)
    randomise(model)
    other.save_pretrained(tmp_path / "other")
    merged = other.merge_and_unload()
    assert merged is other and close(logits(merged, ids), expected)
    assert len(list(adapters(model))) == 4 and not close(logits(model, ids), expected)
    assert equal(logits(again(tmp_path, "other"), ids), expected)


@pytest.mark.slow
def test_a_model_that_nothing_refers_to_is_freed_at_once(tmp_path):
    """Not when the garbage collector comes: another model may be loaded into its memory; a copy
    lives on.
    """
    model = adapted(tmp_path)
    ids = tokens()
    other = copy.deepcopy(model)
    expected = logits(model, ids)
    gc.collect()
    gc.disable()
    try:
        gone = [weakref.ref(model), weakref.ref(model.model.layers[0].self_attn.q_proj)]
        del model
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()
    assert type(other).__name__ == "LlamaForCausalLM" and isinstance(
        other, transformers.LlamaForCausalLM
    )
    assert (
        close(logits(other.merge_and_unload(), ids), expected)
        and type(other) is transformers.LlamaForCausalLM
    )


@pytest.mark.parametrize("targets", [None, ["lm_head"]], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_merged_it_is_a_plain_model(tmp_path, name, tied, targets, caplog):
    changes = {"tie_word_embeddings": tied} if name == "llama" else {}
    model = adapted(tmp_path, name, targets=targets, **changes)
    ids = tokens()
    tells = targets == ["lm_head"] and (tied or name == "gpt2")
    assert ("PEFT's merge_and_unload would change both" in caplog.text) == tells
    expected = logits(model, ids)
    assert merge_and_unload(model) is model and close(logits(model, ids), expected)
    model.save_pretrained(tmp_path / "merged")
    assert close(logits(load_model(tmp_path / "merged", torch.float32), ids), expected)
    assert not hasattr(model, "chronicals_lora") and not list(adapters(model))
    with pytest.raises(ValueError, match="has no adapters of apply_lora or load_adapter to merge"):
        merge_and_unload(model)


def test_sums_are_made_in_fp32_and_rounded_once(tmp_path):
    model = adapted(tmp_path, dtype=torch.bfloat16)
    layer = model.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.float() + layer.lora_B @ layer.lora_A * 3
    model.merge_and_unload()
    assert equal(model.model.layers[0].self_attn.q_proj.weight, exact.bfloat16())


def test_adapters_over_merged_weights_name_no_base(tmp_path, caplog):
    """The folder that the model came from holds other weights."""
    model = apply_lora(
        adapted(tmp_path).merge_and_unload(), LoRAConfig(rank=2, target_modules=["v_proj"])
    )
    model.save_pretrained(tmp_path / "second")
    assert '"base_model_name_or_path": null' in (tmp_path / "second" / FILES[0]).read_text()
    assert "the adapter names no base" in caplog.text


def test_quantised_weights_are_not_merged(tmp_path):
    model = adapted(tmp_path)
    layer = model.model.layers[1].self_attn.q_proj
    layer.base_layer.weight = torch.nn.Parameter(
        torch.zeros(64, 64, dtype=torch.int8), requires_grad=False
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        ValueError,
        match=r"model.layers.1.self_attn.q_proj are quantised .* load the base in 16 bit",
    ):
        model.merge_and_unload()
    assert all(equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_adapters_of_peft_are_refused_beside_ours(tmp_path):
    peft = pytest.importorskip("peft")
    model = adapted(tmp_path)
    ids = tokens()
    expected = logits(model, ids)
    config = peft.LoraConfig(r=2, target_modules="all-linear")
    for add in (lambda: model.add_adapter(config), lambda: model.load_adapter("anywhere")):
        with pytest.raises(ValueError, match=r"adapters of chronicals.*merge_and_unload\(\) first"):
            add()
    with pytest.raises(ValueError, match=r"PEFT's Linear would go into an adapter of ours"):
        peft.get_peft_model(model, config)
    assert equal(logits(model, ids), expected)
    plain = adapted(tmp_path / "again").merge_and_unload()
    assert peft.get_peft_model(plain, config).peft_config


@pytest.mark.slow
def test_transformers_trainer_saves_the_adapter(tmp_path):
    pytest.importorskip("accelerate")
    model = adapted(tmp_path)
    ids = tokens()
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 300, (4, 8))]
    arguments = transformers.TrainingArguments(
        tmp_path / "out",
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(tmp_path / "mine")
    expected = logits(model.eval(), ids)
    for folder in (tmp_path / "mine", tmp_path / "out" / "checkpoint-2"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert close(logits(loaded, ids), expected)


@pytest.mark.slow
@pytest.mark.parametrize("undone", [False, True], ids=["patched", "unpatched"])
def test_a_patched_model_saves_and_merges(tmp_path, undone):
    model = adapted(tmp_path)
    ids = tokens()
    expected = logits(model, ids)
    patch_model(model)
    if undone:
        unpatch_model(model)
    model.save_pretrained(tmp_path / "mine")
    assert close(
        logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine").eval(), ids),
        expected,
    )
    assert close(logits(model.merge_and_unload(), ids), expected)
    model.save_pretrained(tmp_path / "merged")
    assert close(logits(load_model(tmp_path / "merged", torch.float32), ids), expected)


def test_a_model_made_in_memory_is_saved_without_a_base_and_this_is_told(tmp_path, caplog):
    model = apply_lora(llama(), LoRAConfig(rank=2))
    save_adapter(model, tmp_path)
    assert "no folder or hub name is known to hold the model's weights" in caplog.text
    assert (
        tiny.llama().save_pretrained.__func__ is transformers.PreTrainedModel.save_pretrained
    )  # the class is as it was
