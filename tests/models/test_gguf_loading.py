"""Models out of GGUF files: every family as it was written, its weights in the file's very
blocks.
"""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import gguf_files
import gguf_models
import tiny
from chronicals.formats.gguf import tensors as gguf_tensors
from chronicals.formats.gguf.configuration import config_of
from chronicals.formats.gguf.reader import GGUFFile, NotExpressible, gguf_of
from chronicals.models import gguf_loading, load_config, load_model, load_tokenizer
from chronicals.models.gguf_loading import load_gguf
from chronicals.quantization import LinearGGUF
from comparison import equal
from mutants import mutant

gguf = pytest.importorskip("gguf")
IDS = torch.arange(1, 60)[None]


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


def changed(path, target, change):
    """A copy of a file with other settings: ``change`` gets and gives them by their keys."""
    file = GGUFFile(path)
    keys = [key for key in file.reader.fields if not key.startswith("GGUF.")]
    settings = {key: file.value(key) for key in keys}
    kinds = {key: file.reader.fields[key].types for key in settings}
    writer = gguf.GGUFWriter(target, settings.pop("general.architecture"))
    for key, value in change(dict(settings)).items():
        given = kinds.get(key, [gguf.GGUFValueType.get_type(value)])
        writer.add_key_value(key, value, given[0], given[1] if len(given) > 1 else None)
    for name, tensor in file.tensors.items():
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.slow
@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_every_family_comes_back_from_its_file(name, tmp_path):
    """In fp32 the model's own logits; in blocks the dequantised model's, bit by bit."""
    model = gguf_models.build(name)
    exact = load_model(gguf_files.write(tmp_path, model, "f32"), torch.float32)
    as_written, _ = gguf_models_as_computed(model)
    assert off(logits(exact), logits(as_written)) < 2e-6
    path = gguf_files.write(tmp_path, model, "q8_0")
    packed = load_model(path, torch.float32)
    plain = load_gguf(path, torch.float32, packed=False)
    assert any(isinstance(layer, LinearGGUF) for layer in packed.modules())
    assert off(logits(packed), logits(plain)) < 1e-6


def gguf_models_as_computed(model):
    """The model as llama.cpp computes it, where that rounds the ends of YaRN's ramp."""
    from chronicals.formats.gguf.rotation import as_computed

    config, notes = as_computed(model.config)
    again = type(model)(config).float().eval()
    again.load_state_dict(model.state_dict())
    return again, notes


@pytest.mark.parametrize(
    "kind", ["q8_0", "q4_0", pytest.param("q4_k_m", marks=pytest.mark.llama_cpp)]
)
def test_layers_have_the_blocks_of_the_file(kind, tmp_path):
    """Byte for byte; rows of q and k in the model's order, which is whole rows moved."""
    path = gguf_files.write(tmp_path, gguf_files.wide(), kind)
    file = GGUFFile(path)
    model = load_model(path, torch.bfloat16)
    kinds = {layer.packed.kind for layer in model.modules() if isinstance(layer, LinearGGUF)}
    assert kinds == {"q8_0": {"Q8_0"}, "q4_0": {"Q4_0"}, "q4_k_m": {"Q4_K", "Q6_K"}}[kind]
    layer = model.get_decoder().layers[1]
    assert equal(layer.mlp.down_proj.weight, file.blocks("blk.1.ffn_down.weight"))
    heads = 4
    theirs = file.blocks("blk.1.attn_q.weight")
    ours = layer.self_attn.q_proj.weight.view(heads, 64, -1)
    half = 32
    for i in range(half):
        assert equal(ours[:, i], theirs.view(heads, 64, -1)[:, 2 * i])
        assert equal(ours[:, i + half], theirs.view(heads, 64, -1)[:, 2 * i + 1])
    assert layer.mlp.down_proj.dtype == model.dtype == model.lm_head.weight.dtype == torch.bfloat16
    assert not model.training and model.config._name_or_path == str(path)


def test_rows_of_queries_left_as_they_lie_are_seen(tmp_path, monkeypatch):
    model = gguf_models.build("llama")
    path = gguf_files.write(tmp_path, model, "q8_0")
    right = off(logits(load_model(path, torch.float32)), logits(model))
    old = "changed(written, -offset, (half, 2))"
    new = "changed(written, -offset, (1, 2 * half))"
    wrong = mutant(gguf_tensors, old, new)
    monkeypatch.setattr(gguf_loading, "pieces_of", wrong.pieces_of)
    assert off(logits(load_model(path, torch.float32)), logits(model)) > 5 * right


def test_what_is_not_in_blocks_is_said(tmp_path, caplog):
    caplog.set_level("INFO", "chronicals")
    load_model(gguf_files.write(tmp_path, gguf_models.build("qwen3_moe"), "q8_0"), torch.bfloat16)
    assert "8 linear layers stay as they are (8 in Q8_0)" in caplog.text
    assert (
        "dequantised once, to bfloat16: " in caplog.text
        and "token_embd.weight (Q8_0)" in caplog.text
    )
    assert "blk.*.ffn_down_exps.weight (Q8_0)" in caplog.text
    caplog.clear()
    model = load_model(gguf_files.write(tmp_path, tiny.llama(), "q5_0"), torch.float32)
    assert not any(isinstance(layer, LinearGGUF) for layer in model.modules())
    assert (
        "blk.*.attn_q.weight (Q5_0)" in caplog.text
        and "(none is quantised)" not in caplog.text.split("dequantised")[1]
    )


# --- names
# -------------------------------------------------------------------------------------------------------------


def test_a_folder_stands_for_its_one_file(tmp_path):
    path = gguf_files.write(tmp_path, tiny.llama(), "q8_0")
    (path.parent / "mmproj-f16.gguf").write_bytes(b"")
    assert gguf_of(path.parent) == gguf_of(str(path)) == path
    assert equal(
        logits(load_model(path.parent, torch.float32)), logits(load_model(path, torch.float32))
    )
    assert load_config(path.parent).hidden_size == 64
    (path.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="holds 2 GGUF files .*; give the path of one"):
        load_model(path.parent, torch.float32)
    (tmp_path / "source" / "model.gguf").write_bytes(b"")
    assert gguf_of(tmp_path / "source") is None, "a model in safetensors is taken from those"
    assert gguf_of("someone/model") is None


@pytest.mark.slow
def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    path = gguf_files.write(tmp_path, tiny.llama(), "q8_0")
    cases = {
        "architecture": (
            lambda s: {"general.architecture": "mamba", **s},
            "architecture 'mamba' is not one of llama, qwen2",
        ),
        "setting": (
            lambda s: {**s, "llama.attention.sliding_window": 7},
            "llama.attention.sliding_window=7 is a setting that",
        ),
        "value": (
            lambda s: {**s, "llama.rope.dimension_count": 8},
            "rope.dimension_count is not the 16 of a head",
        ),
        "adapter": (
            lambda s: {**s, "general.type": "adapter"},
            "general.type='adapter': is no model by itself",
        ),
        "parts": (lambda s: {**s, "split.count": 3}, "is one of 3 parts; join them"),
        "blocks": (lambda s: {**s, "llama.block_count": 1}, r"has blk\.1\.attn_k\.weight"),
        "missing": (
            lambda s: {k: v for k, v in s.items() if "head_count" not in k},
            "says no llama.attention.head_count",
        ),
    }
    for name, (change, said) in cases.items():
        target = tmp_path / f"{name}.gguf"
        if name == "architecture":
            writer = gguf.GGUFWriter(target, "mamba")
            writer.add_tensor("x", GGUFFile(path).read("output_norm.weight").numpy())
            (
                writer.write_header_to_file(),
                writer.write_kv_data_to_file(),
                writer.write_tensors_to_file(),
                writer.close(),
            )
        else:
            changed(path, target, change)
        with pytest.raises(ValueError, match=said):
            load_model(target, torch.float32)
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is no GGUF file, or one that is cut"):
        load_model(tmp_path / "cut.gguf", torch.float32)
    with pytest.raises(ValueError, match="GGUF file, whose weights stay as they are; leave it out"):
        load_model(path, torch.float32, quantization="nf4")


def test_frequencies_that_are_no_llama_3s_are_refused(tmp_path):
    path = gguf_files.write(tmp_path, gguf_models.build("llama 3"), "f32")
    file = GGUFFile(path)
    assert config_of(file).rope_parameters == gguf_models.LLAMA3
    factors = torch.tensor([1.0, 3.0, 1.0, 5.0, 2.0, 8.0, 1.0, 8.0, 2.0, 8.0, 4.0, 8.0])
    read, file.read = file.read, lambda name: factors if name == "rope_freqs.weight" else read(name)
    with pytest.raises(NotExpressible, match=r"rope_freqs\.weight divides frequencies otherwise"):
        config_of(file)


# --- tokenizers
# --------------------------------------------------------------------------------------------------------

TEXTS = [
    "hello world",
    "  what is\n\nthe answer 12345?",
    "Naïve café — 漢字 🙂",
    "<|im_start|>user\nhello<|im_end|>",
]


def test_a_tokenizer_comes_back_from_the_file(tmp_path):
    own = tiny.tokenizer()
    own.add_tokens(["<tool>"], special_tokens=True), own.add_tokens(["plainword"])
    found = load_tokenizer(gguf_files.write(tmp_path, tiny.llama(vocab_size=310), "q8_0", own))
    for text in [*TEXTS, "a plainword<tool> and so on"]:
        ids = own(text)["input_ids"]
        assert found(text)["input_ids"] == ids and found.decode(ids) == own.decode(ids)
    assert (
        found.chat_template == own.chat_template
        and found.special_tokens_map == own.special_tokens_map
    )
    assert len(found) == len(own)


def test_one_beside_the_file_is_taken_if_it_is_the_files(tmp_path):
    path = gguf_files.write(tmp_path, tiny.llama(), "q8_0")
    own = tiny.tokenizer()
    own.model_max_length = 77
    own.save_pretrained(path.parent)
    assert load_tokenizer(path).model_max_length == 77
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    )
    other.save_pretrained(path.parent)
    with pytest.raises(ValueError, match="token '.' is not that of model-q8_0.gguf at its id"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model", "t5", "its tokenizer is of kind 't5'"),
        ("pre", "falcon", "tokenizer.ggml.pre='falcon': how it splits"),
    ],
)
def test_a_tokenizer_that_is_not_known_names_the_remedy(key, value, said, tmp_path):
    path = gguf_files.write(tmp_path, tiny.llama(), "q8_0")
    other = changed(
        path, tmp_path / "base" / "other.gguf", lambda s: {**s, f"tokenizer.ggml.{key}": value}
    )
    with pytest.raises(ValueError, match=f"{said}.*put the model's own tokenizer.json"):
        load_tokenizer(other)
