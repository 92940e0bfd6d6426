"""base.gguf with adapter.gguf in llama.cpp is the model that was trained over base.gguf."""

import pytest
import torch

import gguf_files
import gguf_models
import runs
from chronicals.export import NotProved, adapter, export
from chronicals.formats.gguf import tensors as gguf_tensors
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import gguf_loading, load_model, load_tokenizer
from chronicals.saving import save_model, text_files
from mutants import mutant

pytestmark = pytest.mark.llama_cpp
LOGITS = "logits beside the trained model's"


def wide():
    """A Llama whose rows are blocks of every kind, and whose attention matters."""
    return gguf_models.build("llama", hidden_size=256, intermediate_size=256)


def adapted(folder, path):
    """An adapter over a file, far from zero."""
    model = apply_lora(load_model(path, torch.float32), LoRAConfig(rank=4, dropout=0.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    save_model(folder / "adapter", model, text_files(model, load_tokenizer(path)), {})
    return folder / "adapter"


def compared(folder, path):
    (exported,) = export(adapted(folder, path), "gguf-adapter", output=folder / "out")
    return {check.name: check for check in exported.proof.checks}


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_k_m", "q6_k"])
def test_llama_cpp_computes_what_was_trained(kind, tmp_path):
    found = compared(tmp_path, gguf_files.write(tmp_path, wide(), kind))
    assert (
        found[LOGITS].passed and found[LOGITS].client == "llama.cpp" and found[LOGITS].value < 0.05
    )
    assert found["the adapter changes logits"].passed


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_over_weights_that_are_not_quantised_it_is_exact(kind, tmp_path):
    found = compared(tmp_path, gguf_files.write(tmp_path, wide(), kind))
    assert found[LOGITS].value < {"f32": 1e-5, "f16": 5e-3}[kind]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "phi3",
        "smollm3",
        "olmo2",
        "glm4",
        "granite",
        "llama 3",
    ],
)
def test_every_family(name, tmp_path):
    assert compared(tmp_path, gguf_files.write(tmp_path, gguf_models.build(name), "q8_0"))[
        LOGITS
    ].passed


def test_a_trained_run(tmp_path):
    path = gguf_files.write(tmp_path, gguf_files.wide(), "q4_k_m")
    result = runs.train(
        tmp_path, model=load_model(path, torch.float32), use_lora=True, lora_rank=4, lora_alpha=4
    )
    (exported,) = export(result.model_dir, "gguf-adapter", output=tmp_path / "out")
    assert {check.name: check for check in exported.proof.checks}[LOGITS].passed


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "pair.piece.forward([pair.b * (pair.scale * len(pair.a) / alpha)])",
            "pair.b * (pair.scale * len(pair.a) / alpha)",
            "what is added",
        ),
        (
            "writer.add_float32(Keys.Adapter.LORA_ALPHA, alpha)",
            "writer.add_float32(Keys.Adapter.LORA_ALPHA, 3 * alpha)",
            "what is added",
        ),
    ],
    ids=["rows of B not reordered", "another scale"],
)
def test_a_planted_fault_is_found(old, new, said, tmp_path, monkeypatch):
    wrong = mutant(adapter, old, new).GGUFAdapter.write
    monkeypatch.setattr(adapter.GGUFAdapter, "write", wrong)
    path = gguf_files.write(tmp_path, wide(), "q8_0")
    with pytest.raises(NotProved, match=said):
        compared(tmp_path, path)


def test_a_base_that_is_read_wrongly_is_found(tmp_path, monkeypatch):
    """Rows of q and k as they lie in the file: llama.cpp's logits are others."""
    old = "changed(written, -offset, (half, 2))"
    new = "changed(written, -offset, (1, 2 * half))"
    monkeypatch.setattr(gguf_loading, "pieces_of", mutant(gguf_tensors, old, new).pieces_of)
    path = gguf_files.write(tmp_path, wide(), "q8_0")
    with pytest.raises(NotProved, match="logits beside the trained model's"):
        compared(tmp_path, path)
