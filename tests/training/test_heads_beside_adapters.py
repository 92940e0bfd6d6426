"""Heads that predict experts, trained whole beside adapters on the rest of the native mixture,
in 16 or in 4 bits.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import mixtures
import preferences
import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.export.merge import merge
from chronicals.lora import adapters, load_adapter, save_adapter
from chronicals.models import load_model
from chronicals.models.routed_experts import is_of_head, lookahead_heads
from chronicals.saving import SavedModel
from chronicals.training import session
from chronicals.training.run.callbacks import read_metrics
from comparison import equal

pytestmark = [pytest.mark.of_file(4), pytest.mark.slow]

ROUTER = {"layer_ahead": 0.3, "token_ahead": 0.1}
FIELDS = {
    "use_lora": True,
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "lora_target_modules": "q_proj,o_proj",
    "trackers": [],
}
FIELDS |= {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-3, "router": ROUTER}
FORMATS = [{}, {"quantization": "nf4"}]


def base(folder):
    if not (folder / "base").exists():
        mixtures.mixture(random=False, vocab_size=300).save_pretrained(folder / "base")
        tiny.tokenizer().save_pretrained(folder / "base")
    return folder / "base"


def loaded(folder, fields=(), dtype=torch.float32):
    return load_model(base(folder), dtype, quantization=dict(fields).get("quantization"))


def heads_of(model):
    return {
        name: p.detach().to("cpu", copy=True)
        for name, p in model.named_parameters()
        if is_of_head(name)
    }


def lookahead(model, ids):
    with torch.no_grad():
        out = model.eval()(input_ids=ids, output_lookahead=True).lookahead
    return [*out.layers, out.tokens]


def ids():
    return torch.randint(2, 300, (2, 13), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("fields", FORMATS, ids=["16 bits", "4 bits"])
def test_they_train_as_on_a_frozen_base(tmp_path, fields, monkeypatch):
    """With adapters that do not learn: the same values of heads, and of their losses; bit by bit
    but for products of 4 bits, and of fused layers on a card."""
    exact = not fields and not torch.cuda.is_available()
    keep = session.build_optimizer

    def without_adapters(model, *given):
        optimizer = keep(model, *given)
        own = {
            id(p)
            for _, layer in adapters(model)
            for name, p in layer.named_parameters()
            if name.startswith("lora_")
        }
        split = []
        for group in optimizer.param_groups:
            still, others = (
                [p for p in group["params"] if (id(p) in own) is inside] for inside in (True, False)
            )
            split += [{**group, "params": still, "lr": 0.0, "peak": 0.0}] if still else []
            split += [{**group, "params": others}] if others else []
        optimizer.param_groups[:] = split
        return optimizer

    given = {**FIELDS, "max_grad_norm": None, "weight_decay": 0.0}
    with monkeypatch.context() as patch:
        patch.setattr(session, "build_optimizer", without_adapters)
        beside = loaded(tmp_path, fields)
        runs.train(tmp_path / "beside", model=beside, **given, **fields)
    frozen = loaded(tmp_path, fields)
    if (
        fields
    ):  # the plain model of the same values, for a base in 4 bits is trained by adapters alone
        from test_expert_four_bit_runs import dequantised

        frozen = dequantised(frozen)
    before = heads_of(frozen)
    alone = {name: value for name, value in given.items() if "lora" not in name}
    runs.train(tmp_path / "alone", model=frozen.requires_grad_(False), **alone)
    one = heads_of(beside)
    two = heads_of(frozen)
    assert one.keys() == two.keys() == before.keys() and all(
        not equal(one[name], before[name]) for name in one
    )
    for name, value in one.items():
        assert (
            equal(value, two[name])
            if exact
            else torch.allclose(value, two[name], rtol=2e-4, atol=1e-6)
        ), name
    assert not any(p.detach().any() for name, p in beside.named_parameters() if "lora_B" in name)
    lines = [
        [x for x in read_metrics(tmp_path / name / "run/metrics.jsonl") if "loss" in x]
        for name in ("beside", "alone")
    ]
    for ours, theirs in zip(*lines, strict=True):
        for name in ROUTER:
            assert ours[f"router/{name}"] == pytest.approx(
                theirs[f"router/{name}"], rel=1e-12 if exact else 1e-5
            )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fields", FORMATS, ids=["16 bits", "4 bits"])
def test_resumed_to_the_bit_and_saved_with_the_adapter(tmp_path, fields, precision):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    given = {**FIELDS, **fields, "mixed_precision": precision}
    model = loaded(tmp_path, fields, dtype)
    runs.train(whole, model=model, **given)
    shutil.copytree(
        whole / "run/checkpoints/step-00000002", broken / "run/checkpoints/step-00000002"
    )
    runs.train(broken, model=loaded(tmp_path, fields, dtype), resume=True, **given)
    once = runs.weights(whole)
    twice = runs.weights(broken)
    assert once.keys() == twice.keys() and all(equal(once[name], twice[name]) for name in once)
    assert runs.trajectory(whole)[2:] == runs.trajectory(broken)
    named = {f"base_model.model.{name}" for name in heads_of(loaded(tmp_path))}
    assert len(named) == 7 and {name for name in once if ".lora_" not in name} == named
    described = json.loads((whole / "run/model/adapter_config.json").read_text())
    assert described["modules_to_save"] == ["layer_ahead", "token_ahead"]
    start = heads_of(loaded(tmp_path, (), dtype))
    assert all(not equal(once[f"base_model.model.{name}"], value) for name, value in start.items())


@pytest.mark.parametrize("fields", FORMATS, ids=["16 bits", "4 bits"])
def test_loaded_merged_and_continued(tmp_path, fields):
    result = runs.train(tmp_path, model=(model := loaded(tmp_path, fields)), **FIELDS, **fields)
    expected = lookahead(model.cpu(), ids())
    untrained = lookahead(loaded(tmp_path), ids())
    saved = SavedModel.find(result.model_dir)
    merge(result.model_dir, tmp_path / "merged")
    unloaded = saved.model(torch.float32).merge_and_unload()
    merged = load_model(tmp_path / "merged", torch.float32)
    for other in (saved.model(torch.float32), unloaded, merged):
        found = lookahead(other, ids())
        for x, right, before in zip(found, expected, untrained, strict=True):
            assert torch.allclose(x, right, rtol=1e-4, atol=1e-4) and not torch.allclose(
                before, right, rtol=1e-2, atol=1e-2
            )
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == 300
    again = saved.model(torch.float32)
    kept = heads_of(again)
    runs.train(tmp_path / "on", model=again, **{**FIELDS, "router": {"layer_ahead": 0.3}}, **fields)
    now = heads_of(again)
    assert all(equal(now[name], value) == ("token_ahead" in name) for name, value in kept.items())
    assert any("token_ahead" in name for name in runs.weights(tmp_path / "on"))


def test_peft_loads_them(tmp_path):
    peft = pytest.importorskip("peft")
    model = loaded(tmp_path)
    result = runs.train(tmp_path, model=model, **FIELDS)
    theirs = peft.PeftModel.from_pretrained(loaded(tmp_path), result.model_dir, is_trainable=True)
    trained = {
        name for name, p in theirs.named_parameters() if p.requires_grad and ".lora_" not in name
    }
    assert len(trained) == 7 and all(".modules_to_save.default." in name for name in trained)
    for x, right in zip(lookahead(theirs, ids()), lookahead(model.cpu(), ids()), strict=True):
        assert torch.allclose(x, right, rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    first, second = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (result.model_dir, tmp_path / "theirs")
    )
    assert first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)
    back = load_adapter(loaded(tmp_path), tmp_path / "theirs")
    assert all(equal(value, heads_of(model)[name]) for name, value in heads_of(back).items())


def test_a_checkpoint_without_a_weight_of_theirs_is_named(tmp_path):
    from safetensors.torch import save_file

    model = loaded(tmp_path)
    result = runs.train(tmp_path, model=model, **FIELDS)
    tensors = load_file(result.model_dir / "adapter_model.safetensors")
    del tensors["base_model.model.model.layer_ahead.up"]
    shutil.copytree(result.model_dir, tmp_path / "cut")
    save_file(tensors, tmp_path / "cut" / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match=r"model\.layer_ahead is in modules_to_save, and its up is missing"
    ):
        load_adapter(loaded(tmp_path), tmp_path / "cut")


def test_heads_without_a_loss_do_not_train(tmp_path, caplog):
    caplog.set_level("INFO")
    model = loaded(tmp_path)
    before = heads_of(model)
    runs.train(tmp_path, model=model, **{**FIELDS, "router": {"layer_ahead": 0.3}})
    assert "lookahead heads without a loss are not trained: router.token_ahead" in caplog.text
    assert "holds an embedding" not in caplog.text
    after = heads_of(model)
    assert all(
        equal(after[name], value) == ("token_ahead" in name) for name, value in before.items()
    )
    assert not any("token_ahead" in name for name in runs.weights(tmp_path))


def test_preferences_have_the_base_as_their_reference(tmp_path):
    """Logits do not depend on heads: the base is still there without its adapters."""
    given = {**FIELDS, "objective": "dpo", "max_steps": 3}
    runs.train(tmp_path / "with", preferences.rows(24), loaded(tmp_path), **given)
    runs.train(
        tmp_path / "without",
        preferences.rows(24),
        loaded(tmp_path),
        **{**given, "router": {"z": 1e-12}},
    )
    first, other = (
        read_metrics(tmp_path / name / "run/metrics.jsonl")[0] for name in ("with", "without")
    )
    added = sum(weight * first[f"router/{name}"] for name, weight in ROUTER.items())
    assert first["loss"] - other["loss"] == pytest.approx(added, rel=1e-4)


def test_the_embedding_beside_them_has_its_rows(tmp_path):
    """In a file with heads, whose tensors have other numbers of rows, and more."""
    mixtures.mixture(random=False, vocab_size=300, num_experts=24).save_pretrained(
        tmp_path / "base"
    )
    model = loaded(tmp_path)
    model.resize_token_embeddings(310)
    assert len(model.get_decoder().layer_ahead.up) > 310
    result = runs.train(tmp_path, model=model, **FIELDS)
    assert SavedModel.find(result.model_dir).embedding_rows() == 310
    again = SavedModel.find(result.model_dir).model(torch.float32)
    assert len(again.get_input_embeddings().weight) == 310 and len(lookahead_heads(again)) == 2
    save_adapter(again, tmp_path / "again")
    assert (
        load_file(tmp_path / "again" / "adapter_model.safetensors").keys()
        == runs.weights(tmp_path).keys()
    )


def test_models_without_heads_are_named(tmp_path):
    import families

    model = families.mixture("qwen3_moe", vocab_size=300, max_position_embeddings=512)
    with pytest.raises(
        ConfigurationError, match=r"router\.layer_ahead=0\.3: Qwen3MoeForCausalLM has no such heads"
    ):
        runs.train(tmp_path, model=model, **FIELDS)
