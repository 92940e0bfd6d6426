"""The native model through transformers' and PEFT's own tools."""

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    pipeline,
)

import chronicals
import tiny
from comparison import equal
from mixtures import mixture, token_ids


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_it_is_the_same(dtype, tied, tmp_path, seed):
    model = mixture(seed, tie_word_embeddings=tied).to(dtype)
    ids = token_ids(2, 30)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and loaded.dtype == dtype and not loaded.training
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    with torch.no_grad():
        for given in ({}, {"output_lookahead": True}):
            before = model(ids, **given)
            after = loaded(ids, **given)
            assert equal(before.logits, after.logits)
    assert all(equal(a, b) for a, b in zip(before.lookahead.layers, after.lookahead.layers))
    assert equal(before.lookahead.tokens, after.lookahead.tokens)


def test_auto_classes_know_it(tmp_path):
    mixture(random=False).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)).__name__ == "ChronicalsMoeConfig"
    assert type(AutoModel.from_pretrained(tmp_path)).__name__ == "ChronicalsMoeModel"


@pytest.fixture
def folder(tmp_path):
    mixture(random=False, vocab_size=300).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_pipeline_generates(folder):
    generate = pipeline("text-generation", model=str(folder), max_new_tokens=20, do_sample=False)
    (found,) = generate("what is the answer")
    assert found["generated_text"].startswith("what is the answer") and len(
        found["generated_text"]
    ) > len("what is the answer")


@pytest.mark.slow
def test_transformers_trainer_trains_it(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = [{"input_ids": token_ids(24).tolist()} for _ in range(8)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    arguments = TrainingArguments(
        folder / "out",
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        gradient_checkpointing=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_peft_adapts_it(folder, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = token_ids(2, 20)
    targets = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj"]
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted(ids, labels=ids).loss.backward()
    adapted.eval()
    expected = adapted(ids).logits
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter"
    ).eval()
    assert equal(loaded(ids).logits, expected)
    generated = loaded.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    again = loaded.generate(
        ids, max_new_tokens=5, do_sample=False, eos_token_id=None, use_cache=False
    )
    assert equal(generated, again)


@pytest.mark.slow
@pytest.mark.interpreted
def test_patched_it_computes_the_same(seed):
    model = mixture(seed)
    ids = token_ids(2, 30)
    expected = model(ids, labels=ids)
    report = chronicals.patch_model(model)
    found = model(ids, labels=ids)
    rows = {line.split()[0]: line for line in str(report).splitlines() if line.strip()}
    assert "fused experts" in rows["RoutedExperts"] and "fused_qk_rope" in rows["LatentAttention"]
    assert (found.loss - expected.loss).abs() <= 1e-5
    chronicals.unpatch_model(model)
    assert equal(model(ids).logits, expected.logits)


def test_it_is_recomputed_alike(seed):
    ids = token_ids(2, 20)
    found = []
    for recompute in (False, True):
        model = mixture(seed).train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids, labels=ids, output_router_logits=True).loss.backward()
        found.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
