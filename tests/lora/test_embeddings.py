"""Tokens were added to the base: the embedding and the head go with the adapter, ours and
PEFT's, both ways.
"""

import pytest
import torch
import transformers
from adapted import llama, logits, randomise
from safetensors.torch import load_file

import tiny
from chronicals.lora import LoRAConfig, apply_lora, load_adapter, save_adapter
from chronicals.models import load_model
from chronicals.saving import SavedModel
from comparison import equal

ROWS = 303
NAMES = ["base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"]


@pytest.fixture
def base(tmp_path):
    """Saves a base of 300 rows, loads it, and gives it three more."""

    def made(tied=False, rows=ROWS, dtype=torch.float32):
        llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
        model = load_model(tmp_path / "base", dtype)
        model.resize_token_embeddings(rows, mean_resizing=False)
        return model

    return made


def tokens():
    return torch.cat((torch.randint(0, 300, (2, 9)), torch.tensor([[300, 301], [302, 300]])), dim=1)


def ours(model, targets=("q_proj",)):
    apply_lora(model, LoRAConfig(rank=4, alpha=12, target_modules=list(targets)))
    randomise(model)
    return model.eval()


def stored(folder):
    return sorted(
        name for name in load_file(folder / "adapter_model.safetensors") if "lora_" not in name
    )


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_rows_of_added_tokens_are_saved(tmp_path, base, tied, targets):
    peft = pytest.importorskip("peft")
    model = ours(base(tied), targets)
    ids = tokens()
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "mine")
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<{n}>" for n in range(ROWS - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path / "mine")  # by which PEFT knows how many rows there are
    loaded = load_adapter(load_model(tmp_path / "base", torch.float32), tmp_path / "mine").eval()
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "mine").eval()
    assert equal(logits(loaded, ids), expected) and torch.allclose(
        logits(theirs, ids), expected, rtol=1e-5, atol=1e-5
    )
    assert SavedModel.find(tmp_path / "mine").embedding_rows() == ROWS
    assert SavedModel.find(tmp_path / "base").embedding_rows() == 300
    assert (
        loaded.config.vocab_size == ROWS and not loaded.get_input_embeddings().weight.requires_grad
    )


def test_rows_are_counted_without_reading_the_tensors(tmp_path, base, monkeypatch):
    save_adapter(ours(base()), tmp_path / "mine")
    monkeypatch.delattr("chronicals.lora.loading.load_file")
    assert SavedModel.find(tmp_path / "mine").embedding_rows() == ROWS
    (tmp_path / "mine" / "adapter_model.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1"
    )
    with pytest.raises(ValueError, match=r"adapter_model.safetensors: cannot be read"):
        SavedModel.find(tmp_path / "mine").embedding_rows()


def test_that_vllm_takes_no_embedding_is_told(tmp_path, base, caplog):
    save_adapter(ours(base(rows=300)), tmp_path / "plain")
    assert "vLLM" not in caplog.text
    save_adapter(ours(base()), tmp_path / "mine")
    assert (
        "mine holds an embedding: PEFT loads it, vLLM does not; for vLLM save what "
        "merge_and_unload() gives" in caplog.text
    )


def test_what_is_written_is_what_peft_writes(tmp_path, base):
    peft = pytest.importorskip("peft")
    save_adapter(ours(base()), tmp_path / "ours")
    peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "theirs"
    )
    assert stored(tmp_path / "ours") == stored(tmp_path / "theirs") == NAMES
    save_adapter(ours(base(tied=True)), tmp_path / "tied")
    assert stored(tmp_path / "tied") == NAMES[1:]
    save_adapter(ours(base(rows=300)), tmp_path / "plain")
    assert not stored(tmp_path / "plain")


@pytest.mark.parametrize("rows", [ROWS, 300, 256], ids=["more", "as many", "fewer"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("targets", [["q_proj"], ["lm_head"]], ids=str)
def test_we_load_pefts_and_save_them_again(tmp_path, base, tied, targets, rows):
    """Where there are as many rows as before, they were changed and saved by
    ``save_embedding_layers=True``.
    """
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        base(tied, rows), peft.LoraConfig(r=4, target_modules=targets)
    ).eval()
    randomise(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[:3].normal_()
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    ids = tokens().clamp(max=rows - 1)
    if targets == ["lm_head"] and not tied:  # PEFT saves the head alone
        model.get_base_model().get_input_embeddings().weight.data[:] = (
            base(tied, rows).get_input_embeddings().weight.data
        )
        ids = ids.clamp(3, 255)
    expected = logits(model, ids)
    loaded = load_adapter(load_model(tmp_path / "base", torch.float32), tmp_path / "theirs").eval()
    assert equal(logits(loaded, ids), expected)
    loaded.save_pretrained(tmp_path / "again")
    again = load_adapter(load_model(tmp_path / "base", torch.float32), tmp_path / "again").eval()
    assert equal(logits(again, ids), expected)


def test_refilling_restores_the_embedding(tmp_path, base):
    """As a run that is resumed does, whose new rows were drawn anew."""
    model = ours(base())
    ids = tokens()
    save_adapter(model, tmp_path / "mine")
    other = ours(base())
    with torch.no_grad():
        other.get_input_embeddings().weight[300:].normal_()
    load_adapter(other, tmp_path / "mine")
    assert equal(logits(other, ids), logits(model, ids))
    with pytest.raises(
        ValueError, match="its embedding has 303 rows, the model's 300: add the tokens"
    ):
        load_adapter(ours(base(rows=300)), tmp_path / "mine")


def test_embeddings_of_another_type_are_of_the_same_base(tmp_path, base):
    """A run in bf16 is loaded over the base in fp32; with the head adapted, its weight is
    compared.
    """
    model = ours(base(dtype=torch.bfloat16), ["lm_head"])
    ids = tokens()
    save_adapter(model, tmp_path / "mine")
    loaded = load_adapter(load_model(tmp_path / "base", torch.float32), tmp_path / "mine").eval()
    assert torch.allclose(logits(loaded, ids), logits(model, ids).float(), atol=0.05)
    assert loaded.get_input_embeddings().weight.dtype == torch.float32


def by_us(folder):
    return load_model(folder, torch.float32)


def from_transformers(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("rows", [300, ROWS], ids=["as many", "more"])
@pytest.mark.parametrize("loader", [by_us, from_transformers])
def test_a_base_that_is_gone_when_the_adapter_is_saved(tmp_path, base, loader, rows, monkeypatch):
    """How many rows it has was read when it was loaded, or when the adapters were attached."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base()
    model = loader(tmp_path / "base")
    model.resize_token_embeddings(rows, mean_resizing=False)
    if loader is not from_transformers:
        (tmp_path / "base").rename(tmp_path / "moved")
    model = ours(model)
    if loader is from_transformers:
        (tmp_path / "base").rename(tmp_path / "moved")
    model.save_pretrained(tmp_path / "mine")
    assert stored(tmp_path / "mine") == (NAMES if rows == ROWS else [])
    ids = tokens().clamp(max=rows - 1)
    loaded = load_adapter(load_model(tmp_path / "moved", torch.float32), tmp_path / "mine").eval()
    assert equal(logits(loaded, ids), logits(model, ids))


def test_where_the_rows_of_the_base_are_not_known_the_embedding_is_saved(
    tmp_path, base, caplog, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base()
    model = from_transformers(tmp_path / "base")
    model.resize_token_embeddings(ROWS, mean_resizing=False)
    (tmp_path / "base").rename(tmp_path / "moved")
    save_adapter(ours(model), tmp_path / "mine")
    assert (
        "the embedding is saved with the adapter: whether that of its base has other rows"
        in caplog.text
    )
    assert stored(tmp_path / "mine") == NAMES


def test_nothing_is_resized_where_the_adapter_does_not_fit(tmp_path, base):
    save_adapter(ours(base()), tmp_path / "mine")
    file = tmp_path / "mine" / "adapter_config.json"
    file.write_text(file.read_text().replace('"r": 4', '"r": 5'))
    fresh = load_model(tmp_path / "base", torch.float32)
    with pytest.raises(ValueError, match="lora_A is missing or not"):
        load_adapter(fresh, tmp_path / "mine")
    assert fresh.get_input_embeddings().weight.shape[0] == 300
    assert isinstance(fresh, transformers.LlamaForCausalLM)
