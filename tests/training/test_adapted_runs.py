"""Runs with adapters end to end: what a run leaves, on disk and in memory, is the model that it trained."""

import copy

import pytest
import torch

import runs
import tiny
from chronicals.generation import load_trained
from chronicals.lora import load_adapter
from chronicals.models import load_model
from chronicals.training.evaluation import evaluate_data

ROWS = [
    {"messages": [{"role": "user", "content": f"<alpha> {n}"}, {"role": "assistant", "content": f"<beta> {n} <gamma>"}]}
    for n in range(30)
]
ADDED = ["<alpha>", "<beta>", "<gamma>"]


def with_added_tokens(folder, seed, tied=False, dtype=torch.float32):
    """A base from a folder, and its tokenizer, with three tokens more than its files have."""
    if not (folder / "base").exists():
        tiny.llama(tie_word_embeddings=tied).save_pretrained(folder / "base")
    model, tokenizer = load_model(folder / "base", dtype), tiny.tokenizer()
    tokenizer.add_tokens([f"<{n}>" for n in range(300 - len(tokenizer))] + ADDED)
    torch.manual_seed(seed)
    model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def wrapped(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def train(folder, model, tokenizer, resume=False, **changes):
    from chronicals.training import ChronicalsTrainer

    fields = {"learning_rate": 1e-2, "use_lora": True, "save_steps": 3, "trackers": [], **changes}
    return ChronicalsTrainer(model, tokenizer, runs.config(folder, **fields)).train(ROWS, resume=resume)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("whose", ["ours", "peft"])
def test_a_run_with_added_tokens_is_read_and_resumed(tmp_path, whose, tied):
    if whose == "peft":
        pytest.importorskip("peft")
    lora = {"lora_rank": 8} if whose == "ours" else {"use_lora": False}

    def fresh(seed):
        model, tokenizer = with_added_tokens(tmp_path, seed, tied)
        return (model if whose == "ours" else wrapped(model)), tokenizer

    model, tokenizer = fresh(1)
    train(tmp_path, model, tokenizer, **lora)
    scored = runs.config(tmp_path, output_dir=tmp_path / "scored")
    live = evaluate_data(model, tokenizer, ROWS, scored).loss
    read = load_trained(tmp_path / "run")
    assert evaluate_data(read.model, read.tokenizer, ROWS, scored).loss == pytest.approx(live, rel=1e-5)
    for folder in (tmp_path / "run" / "checkpoints").glob("*6"):
        folder.rename(tmp_path / "set-aside")
    other, tokenizer = fresh(2)
    assert not torch.equal(other.get_input_embeddings().weight, model.get_input_embeddings().weight)
    train(tmp_path, other, tokenizer, resume=True, **lora)
    assert torch.equal(other.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert evaluate_data(other, tokenizer, ROWS, scored).loss == live


def test_after_a_run_the_model_is_copied_and_trained_on(tmp_path):
    """A second run goes on with the same adapters; a copy from between is what it was."""
    model, tokenizer = with_added_tokens(tmp_path, 1)
    train(tmp_path, model, tokenizer, lora_rank=8, output_dir=tmp_path / "first")
    scored = runs.config(tmp_path, output_dir=tmp_path / "scored")
    first, kept = evaluate_data(model, tokenizer, ROWS, scored).loss, copy.deepcopy(model)
    train(tmp_path, model, tokenizer, lora_rank=8, output_dir=tmp_path / "second")
    second = evaluate_data(model, tokenizer, ROWS, scored).loss
    assert second < first and evaluate_data(kept, tokenizer, ROWS, scored).loss == first
    kept.save_pretrained(tmp_path / "kept")
    loaded = load_adapter(load_model(tmp_path / "base", torch.float32), tmp_path / "kept")
    assert evaluate_data(loaded, tokenizer, ROWS, scored).loss == pytest.approx(first, rel=1e-5)
    assert evaluate_data(model.merge_and_unload(), tokenizer, ROWS, scored).loss == pytest.approx(second, rel=1e-4)
