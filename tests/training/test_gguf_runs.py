"""Runs over a base in a GGUF file, from the command to the adapter for llama.cpp: they train
what LoRA trains over the weights that the file's blocks stand for."""

import hashlib
import json
import shutil

import pytest
import torch

import gguf_files
import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.export.merge import merge
from chronicals.generation import load_trained
from chronicals.memory import StepShape, WeightBytes, estimate
from chronicals.models import count_values, load_model
from chronicals.models.gguf_loading import load_gguf
from chronicals.quantization import LinearGGUF
from chronicals.saving import SavedModel
from chronicals.verification import reference, verify
from comparison import equal

pytest.importorskip("gguf")
KINDS = ["q8_0", "q4_0", pytest.param("q4_k_m", marks=pytest.mark.llama_cpp)]


def base(folder, kind="q8_0"):
    return gguf_files.write(folder, gguf_files.wide() if kind == "q4_k_m" else tiny.llama(), kind)


def in_blocks(model):
    return [layer for layer in model.modules() if isinstance(layer, LinearGGUF)]


# --- training
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_that_of_adapters_over_the_dequantised_weights(kind, dora, tmp_path):
    path = base(tmp_path, kind)
    given = {
        "use_lora": True,
        "lora_rank": 8,
        "lora_dropout": 0.0,
        "use_dora": dora,
        "max_steps": 4,
    }
    ours = load_model(path, torch.float32)
    plain = load_gguf(path, torch.float32, packed=False)
    assert len(in_blocks(ours)) == 14 and not in_blocks(plain)
    before = [layer.weight.clone() for layer in in_blocks(ours)]
    runs.train(tmp_path / "ours", model=ours, **given)
    runs.train(tmp_path / "plain", model=plain, **given)
    found, expected = (runs.trajectory(tmp_path / name) for name in ("ours", "plain"))
    for (step, *one), (_, *two) in zip(found, expected, strict=True):
        assert one == pytest.approx(two, rel=1e-5 if step == 1 else 2e-4), step
    weights = runs.weights(tmp_path / "ours")
    others = runs.weights(tmp_path / "plain")
    assert weights.keys() == others.keys()
    assert all(
        equal(layer.weight.cpu(), kept.cpu()) for layer, kept in zip(in_blocks(ours), before)
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits(precision, tmp_path):
    path = base(tmp_path)
    model = load_model(path, torch.bfloat16 if precision == "bf16" else torch.float32)
    runs.train(tmp_path, model=model, use_lora=True, lora_dropout=0.0, mixed_precision=precision)
    assert {layer.dtype for layer in in_blocks(model)} == {
        torch.bfloat16 if precision == "bf16" else torch.float16
    }
    found = runs.trajectory(tmp_path)
    assert found[-1][1] < found[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute_layers", "tiled_mlp"])
def test_what_saves_memory_changes_no_step(policy, tmp_path):
    path = base(tmp_path)
    for name, changes in (("plain", {}), ("saving", {"memory": [policy]})):
        model = load_model(path, torch.float32)
        runs.train(
            tmp_path / name, model=model, use_lora=True, max_steps=3, lora_dropout=0.0, **changes
        )
    runs.assert_same_steps(tmp_path / "saving", tmp_path / "plain", 1e-4)


@pytest.mark.slow
def test_it_resumes_bit_by_bit(tmp_path):
    path = base(tmp_path)

    def train(name, steps, **changes):
        given = {"save_steps": 2, "lr_scheduler": "constant", "warmup_steps": 0, "use_lora": True}
        return runs.train(
            tmp_path / name,
            model=load_model(path, torch.float32),
            max_steps=steps,
            **given,
            **changes,
        )

    train("whole", 4), train("parts", 2), train("parts", 4, resume=True)
    assert runs.trajectory(tmp_path / "parts") == runs.trajectory(tmp_path / "whole")
    whole, parts = (runs.weights(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(equal(x, parts[name]) for name, x in whole.items())


# --- afterwards
# --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_adapter_says_over_which_bits_it_was_trained(tmp_path):
    path = base(tmp_path)
    result = runs.train(
        tmp_path, model=load_model(path, torch.float32), use_lora=True, lora_dropout=0.0
    )
    saved = SavedModel.find(result.model_dir)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (
        saved.base == str(path)
        and saved.about["gguf"] == {"file": path.name, "sha256": digest}
        and not saved.about["base"]
    )
    loaded = saved.model(torch.float32)
    assert len(in_blocks(loaded)) == 14 and in_blocks(load_trained(result.model_dir).model)
    ids = torch.arange(1, 20)[None]
    merged = saved.model(torch.float32).merge_and_unload()
    assert not in_blocks(merged) and torch.allclose(
        merged(ids).logits, loaded(ids).logits, rtol=1e-4, atol=1e-4
    )
    merge(result.model_dir, tmp_path / "merged")
    stored = load_model(tmp_path / "merged", torch.float32)
    assert torch.allclose(stored(ids).logits, loaded(ids).logits, rtol=0.05, atol=0.05), (
        "merged in bf16"
    )
    moved = shutil.copy(path, tmp_path / "moved.gguf")
    assert SavedModel.find(result.model_dir, str(moved)).model(torch.float32) is not None
    other = gguf_files.write(tmp_path, tiny.llama(seed=1), "q4_0")
    with pytest.raises(
        ValueError,
        match=r"trained over model-q8_0\.gguf with SHA-256 .*; give that file \(--base-model\)",
    ):
        SavedModel.find(result.model_dir, str(other)).model(torch.float32)


@pytest.mark.slow
def test_it_is_not_trained_whole_nor_quantised_again(tmp_path):
    path = base(tmp_path)
    with pytest.raises(
        ConfigurationError, match="quantised and cannot be trained; set use_lora=True"
    ):
        runs.train(tmp_path, model=load_model(path, torch.float32))
    with pytest.raises(
        ConfigurationError,
        match=r"the weights of model-q8_0\.gguf stay as they are in the file; leave it out",
    ):
        runs.train(tmp_path, model=load_model(path, torch.float32), quantization="nf4")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_verify_compares_with_the_dequantised_model(kind, tmp_path, monkeypatch):
    path = base(tmp_path, kind)
    right = reference.dense_weight
    given = runs.config(tmp_path, use_lora=True, lora_rank=4), tiny.chat_rows()
    found = verify(load_model(path, torch.float32), tiny.tokenizer(), *given)
    assert found.passed, found.failures
    monkeypatch.setattr(reference, "dense_weight", lambda *of: right(*of) * 1.05)
    assert not verify(load_model(path, torch.float32), tiny.tokenizer(), *given).passed


def test_values_and_bytes_are_counted(tmp_path):
    path = base(tmp_path)
    packed = load_model(path, torch.bfloat16)
    plain = load_gguf(path, torch.bfloat16, packed=False)
    assert count_values(packed) == count_values(plain)
    values = sum(layer.out_features * layer.in_features for layer in in_blocks(packed))
    for model in (packed, plain):
        model.requires_grad_(False)
    ours, whole = (
        estimate(model, StepShape(64, False, 2, 16), WeightBytes(2, 12)).fixed
        for model in (packed, plain)
    )
    assert (
        ours
        == whole
        - 2 * values
        + sum(layer.packed.bytes for layer in in_blocks(packed))
        + values // 2 * 2
    )


@pytest.mark.slow
def test_the_command_takes_nothing_else(tmp_path, chronicals):
    """Trained, asked, scored, verified, exported; and the next run over the adapter has the same
    base.
    """
    path = base(tmp_path)
    given = ["--data", "data.jsonl", "--use-lora"]
    said = chronicals(
        "train", "--model", "base/model-q8_0.gguf", *given, "--output-dir", "out", *runs.SHORT
    )
    assert "packed base weights (14 linear layers in Q8_0 of GGUF" in said
    shutil.rmtree(tmp_path / "source")
    described = json.loads((tmp_path / "out/model/adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(path)
    (
        chronicals("evaluate", "out", "--data", "data.jsonl"),
        chronicals("generate", "out", "--prompt", "what is 3?"),
    )
    chronicals("train", "--model", "out", *given, "--output-dir", "on", *runs.SHORT)
    chronicals("train", "--model", "base", *given, "--output-dir", "folder", *runs.SHORT)
    chronicals("evaluate", "base", "--data", "data.jsonl")
    chronicals("export", "out", "--to", "gguf-adapter")
    assert list((tmp_path / "out").rglob("*.gguf"))
