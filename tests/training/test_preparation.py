"""A tokenizer with more tokens than the embedding has rows: refused before the first step, or
given rows that are trained.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.export import export
from chronicals.formats.gguf.tokenizer import vocabulary_of
from chronicals.models import embedding_table, load_model, load_tokenizer
from chronicals.saving import SavedModel
from chronicals.training import ChronicalsTrainer
from chronicals.training.preparation import rows_needed

ROWS = 300
"""Of the tiny model's embedding."""

ADDED = ["<tool>", "</tool>"]


def with_more_tokens():
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<unused {n}>" for n in range(ROWS - len(tokenizer))] + ADDED)
    assert len(tokenizer) == ROWS + len(ADDED)
    return tokenizer


def rows_with_tools():
    rows = tiny.chat_rows(40)
    for row in rows:
        row["messages"][1]["content"] = "<tool> look </tool> " + row["messages"][1]["content"]
    return rows


def base(folder, **changes):
    tiny.llama(**changes).save_pretrained(folder / "base")
    with_more_tokens().save_pretrained(folder / "base")
    return load_model(folder / "base", torch.float32)


def train(folder, model, **changes):
    settings = runs.config(
        folder, max_steps=3, resize_embeddings=True, use_fused_kernels=False, **changes
    )
    return ChronicalsTrainer(model, with_more_tokens(), settings).train(rows_with_tools())


@pytest.mark.parametrize("rows", [tiny.chat_rows(20), rows_with_tools()], ids=["unused", "used"])
def test_without_it_training_ends_before_the_first_step(rows, tmp_path):
    said = r"has '</tool>' with id 301, the embedding of the model 300 rows; .* Set resize_embeddings=True"
    with pytest.raises(ConfigurationError, match=said):
        ChronicalsTrainer(tiny.llama(), with_more_tokens(), runs.config(tmp_path)).train(rows)
    assert not (tmp_path / "run" / "model").exists()


def test_the_padding_token_alone_needs_no_row(tmp_path):
    """Nothing reads it; GGUF leaves it out."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<unused {n}>" for n in range(ROWS - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert rows_needed(tokenizer, ROWS, runs.config(tmp_path)) == ROWS
    found = vocabulary_of(tokenizer, ROWS, [])
    assert len(found.tokens) == ROWS and "pad" not in found.special


@pytest.mark.slow
def test_new_rows_are_trained_whole_and_exported(tmp_path):
    model = base(tmp_path)
    before = embedding_table(model).detach().clone()
    result = train(tmp_path, model)
    weights = load_file(result.model_dir / "model.safetensors")
    assert json.loads((result.model_dir / "config.json").read_text())["vocab_size"] == ROWS + len(
        ADDED
    )
    assert len(weights["model.embed_tokens.weight"]) == ROWS + len(ADDED)
    mean = before.mean(0)
    spread = before.std(0).norm()
    assert (weights["model.embed_tokens.weight"][ROWS:] - mean).norm(dim=1).max() < 3 * spread
    made = export(tmp_path / "run", ["gguf-f16"], tmp_path / "artefacts")
    assert not any(exported.proof.failed for exported in made)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_new_rows_are_trained_beside_adapters_and_exported(tied, tmp_path):
    model = base(tmp_path, tie_word_embeddings=tied)
    result = train(tmp_path, model, use_lora=True, lora_dropout=0.0)
    described = json.loads((result.model_dir / "adapter_config.json").read_text())
    asked = described["trainable_token_indices"]
    lists = asked.values() if isinstance(asked, dict) else [asked]
    assert all(list(ids) == [ROWS, ROWS + 1] for ids in lists) and len(lists) == (1 if tied else 2)
    moved = [layer for name, layer in model.named_parameters() if name.endswith("lora_tokens")]
    assert len(moved) == len(lists) and all(layer.shape == (2, 64) for layer in moved)
    loaded = SavedModel.find(result.model_dir).model(torch.float32)
    assert (
        len(embedding_table(loaded)) == ROWS + len(ADDED) == len(load_tokenizer(result.model_dir))
    )
    made = export(tmp_path / "run", ["gguf-f32"], tmp_path / "artefacts")
    assert not any(exported.proof.failed for exported in made)


def test_rows_are_the_same_each_time_and_go_with_tokens_that_are_named(tmp_path):
    """Also where a token is named by its text; what is trained whole is not trained by rows,
    too.
    """
    from chronicals.distributed import Mesh
    from chronicals.training.preparation import fit_vocabulary

    tables = []
    for _ in range(2):
        model = tiny.llama()
        given = {
            "use_lora": True,
            "lora_trainable_tokens": ["<tool>", 5],
            "lora_modules_to_save": ["lm_head"],
        }
        config = runs.config(tmp_path, resize_embeddings=True, **given)
        fitted = fit_vocabulary(model, with_more_tokens(), config, Mesh())
        assert fitted.lora_trainable_tokens == {"model.embed_tokens": [ROWS, 5, ROWS + 1]}
        tables.append(embedding_table(model).detach())
    assert (
        torch.equal(*tables) and fit_vocabulary(model, with_more_tokens(), config, Mesh()) is config
    )


def test_adapters_that_are_there_are_not_resized(tmp_path):
    from chronicals.distributed import Mesh
    from chronicals.lora import LoRAConfig, apply_lora
    from chronicals.training.preparation import fit_vocabulary

    model = apply_lora(tiny.llama(), LoRAConfig(rank=2))
    with pytest.raises(
        ConfigurationError, match="resize_embeddings=True: the model has adapters already"
    ):
        fit_vocabulary(
            model, with_more_tokens(), runs.config(tmp_path, resize_embeddings=True), Mesh()
        )
