"""The attention seam: padded and packed rows as documents, whatever else as it was."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

import families
from chronicals import patch_model, unpatch_model
from chronicals.models.attention_names import who_asks
from chronicals.models.twin import build_twin, plain_surroundings, twin_config
from chronicals.patching import attention, plan
from patching.test_patch import assert_same, loss_and_gradients

FAMILIES = ["llama", "gemma3", "mistral", "qwen3", "gpt2", "granite"]


def pair(family="llama", implementation="sdpa"):
    """A model in fp64, and a patched copy of it."""
    plain = families.build(family, attn_implementation=implementation).double()
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    assert report.counts().get("document_attention") == 1, str(report)
    return plain, patched


def padded(left=False):
    """Three rows of lengths 11, 1 and 6."""
    ids = torch.randint(1, families.VOCABULARY, (3, 11))
    mask = (torch.arange(11) < torch.tensor([11, 1, 6])[:, None]).long()
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(bounds=False):
    """Four documents in one row, as transformers' collator lays them; with a cache, transformers looks at no positions."""
    lengths = torch.tensor([7, 1, 9, 4])
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    ids = torch.randint(1, families.VOCABULARY, positions.shape)
    rows = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    rows["use_cache"] = False
    if bounds:
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        rows |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
    return rows


ROWS = {
    "plain": lambda: {key: value for key, value in padded().items() if key != "attention_mask"},
    "padded": padded,
    "packed": packed,
    "flattened": lambda: packed(bounds=True),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_documents(family, kind):
    plain, patched = pair(family)
    rows = ROWS[kind]()
    expected = loss_and_gradients(plain, **rows)
    before = attention.runs[0]
    assert_same(expected, loss_and_gradients(patched, **rows))
    assert attention.runs[0] - before == plain.config.num_hidden_layers


def test_flattened_rows_without_positions():
    """The bounds alone say where a document ends, as the flash implementations take them, cache or not."""
    plain, patched = pair("llama")
    rows = packed(bounds=True)
    with_positions = loss_and_gradients(plain, **rows)
    del rows["position_ids"], rows["use_cache"]  # rotary embedding sees distances only
    assert_same(with_positions, loss_and_gradients(patched, **rows))


def test_packed_rows_without_a_word_of_a_cache():
    """Unpatched, with the cache that is made by default, documents would see each other."""
    plain, patched = pair("llama")
    rows = packed()
    expected = loss_and_gradients(plain, **rows)
    del rows["use_cache"]
    assert_same(expected, loss_and_gradients(patched, **rows))
    assert patched(**rows, use_cache=True).past_key_values is not None
    unpatch_model(patched)
    assert not patched._forward_pre_hooks and not patched._forward_pre_hooks_with_kwargs


POSITIONS = {
    "one document": torch.arange(10),
    "a document's end": torch.arange(5, 15),
    "a gap": torch.tensor([0, 1, 2, 3, 4, 50, 51, 52, 53, 54]),
    "a gap within packs": torch.tensor([0, 1, 2, 30, 31, 0, 1, 2, 3, 4]),
    "nothing but zeros": torch.zeros(10, dtype=torch.long),
    "downwards": torch.arange(10).flip(0),
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_that_are_no_packs_are_as_they_were(kind):
    """The same results, and the cache, which no word was said of."""
    plain, patched = pair("llama")
    ids = torch.randint(1, families.VOCABULARY, (2, 10))
    rows = {"input_ids": ids, "labels": ids, "position_ids": POSITIONS[kind].expand(2, -1)}
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))
    assert patched(**rows).past_key_values is not None


def test_positions_are_looked_at_where_they_are_given(monkeypatch):
    """What is looked at is waited for, on a card."""
    _, patched = pair("llama")
    looked = []
    monkeypatch.setattr(attention, "_are_packs", lambda positions: looked.append(positions))
    for make in ROWS.values():
        patched(**make())
    assert not looked, "they say use_cache, or give no positions"
    rows = packed()
    del rows["use_cache"]
    patched(**rows)
    assert len(looked) == 1


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_on_the_left_is_as_it_was(implementation):
    plain, patched = pair("llama", implementation)
    plain, patched = plain.float(), patched.float()
    rows = padded(left=True)
    before = attention.runs[0]
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows), tolerance=3e-5)
    assert attention.runs[0] == before


@pytest.mark.parametrize("shifted", [False, True])
def test_labels_at_padding_are_predicted_from_what_the_model_makes_there(shifted, caplog):
    """An old habit of tutorials: the labels are the ids."""
    attention._say_labels_at_padding.cache_clear()
    plain, patched = pair("llama")
    rows, right = padded(), padded()
    rows["labels"] = rows["input_ids"]
    if shifted:
        rows["shift_labels"] = torch.nn.functional.pad(rows["labels"][:, 1:], (0, 1), value=-100)
    expected, before = loss_and_gradients(plain, **rows), attention.runs[0]
    for _ in range(2):
        assert_same(expected, loss_and_gradients(patched, **rows))
    assert attention.runs[0] == before and caplog.text.count("labels stand at padding") == 1
    assert_same(loss_and_gradients(plain, **right), loss_and_gradients(patched, **right))
    assert attention.runs[0] == before + plain.config.num_hidden_layers


@pytest.mark.parametrize("left", [False, True])
def test_generation_of_padded_rows(left):
    plain, patched = (model.float().eval() for model in pair("gemma3"))
    rows = padded(left)
    del rows["labels"]
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(*(model.generate(**rows, **arguments) for model in (plain, patched)))
    cacheless = arguments | {"use_cache": False}
    assert torch.equal(*(model.generate(**rows, **cacheless) for model in (plain, patched)))


def test_a_mask_of_ones_own_is_kept():
    plain, patched = pair("llama")
    ids = torch.randint(1, families.VOCABULARY, (2, 8))
    mask = (torch.rand(2, 1, 8, 8) < 0.5) | torch.eye(8, dtype=torch.bool)
    rows = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    before = attention.runs[0]
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))
    assert attention.runs[0] == before


def test_dropout_is_as_it_was():
    """The documents' attention knows none, so the mask the model would have had is made after all."""
    plain, patched = pair("llama")
    rows = padded()
    for model in (plain, patched):
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
    found = []
    before = attention.runs[0]
    for model in (plain, patched):
        torch.manual_seed(3)
        found.append(loss_and_gradients(model, **rows))
    assert_same(*found)
    assert attention.runs[0] == before


def test_attention_weights_are_still_to_be_had():
    """The same in fp64 but for a rounding of transformers' softmax, which is in fp32."""
    plain, patched = pair("llama", "eager")
    rows = padded()
    for expected, got in zip(*(model(**rows, output_attentions=True).attentions for model in (plain, patched))):
        torch.testing.assert_close(got, expected, rtol=0, atol=4 * torch.finfo(torch.float32).eps)


def test_unpatched_it_attends_as_before():
    _, patched = pair("llama")
    assert patched.config._attn_implementation == "chronicals_over_sdpa"
    again = patch_model(patched)
    assert again.counts()["document_attention"] == 1 and patched.config._attn_implementation == "chronicals_over_sdpa"
    unpatch_model(patched)
    assert patched.config._attn_implementation == "sdpa"


def two_of_one_configuration():
    config = families.configuration("llama")
    return config, *(families.randomise(LlamaForCausalLM(config).double()) for _ in range(2))


def test_a_model_of_the_same_configuration_is_left_alone():
    config, patched, other = two_of_one_configuration()
    rows, before = padded(), attention.runs[0]
    expected = loss_and_gradients(other, **rows)
    patch_model(patched)
    assert other.config is config and config._attn_implementation == "sdpa"
    assert_same(expected, loss_and_gradients(other, **rows), tolerance=0)
    assert attention.runs[0] == before
    patch_model(other)
    unpatch_model(other)
    loss_and_gradients(patched, **rows)
    assert attention.runs[0] > before, "the first lost its attention with the second's"


def test_unpatched_it_has_the_configuration_it_had():
    config, patched, _ = two_of_one_configuration()
    patch_model(patched)
    assert patched.model.config is patched.config is not config
    patched.resize_token_embeddings(families.VOCABULARY + 3, mean_resizing=False)
    patched.config.use_cache = False
    unpatch_model(patched)
    assert all(getattr(module, "config", config) is config for module in patched.modules())
    assert config.vocab_size == families.VOCABULARY + 3 and not config.use_cache
    assert config._attn_implementation == "sdpa"


def test_the_text_within_a_larger_model_has_a_configuration_of_its_own():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sees = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = families.configuration("gemma3").to_dict()
    config = Gemma3Config(text_config=text, vision_config={**sees, "image_size": 28, "patch_size": 14})
    patched, other = (Gemma3ForConditionalGeneration(config) for _ in range(2))
    attention.install(patched)
    assert patched.config.text_config is patched.model.language_model.config
    assert patched.config.text_config._attn_implementation == "chronicals_over_sdpa"
    assert patched.model.vision_tower.config is other.model.vision_tower.config
    assert config.vision_config._attn_implementation == config.text_config._attn_implementation == "sdpa"
    attention.remove(patched)
    assert patched.config is config and patched.model.language_model.config is config.text_config


def with_a_copied_layer(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[-1].self_attn.layer_idx = 2
    model.config.num_hidden_layers = 3
    return model


def with_layers_of_peft(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], layer_replication=[(0, 2), (0, 2)]))


@pytest.mark.parametrize("grow", [with_a_copied_layer, with_layers_of_peft])
@pytest.mark.parametrize("first", ["grown", "patched"])
def test_layers_with_a_configuration_of_their_own(grow, first):
    model = families.build("llama").double()
    plain = grow(copy.deepcopy(model))
    if first == "patched":
        patch_model(model)
    patched = grow(model)
    patch_model(patched)
    patched.load_state_dict(plain.state_dict())
    rows, before = padded(), attention.runs[0]
    expected = loss_and_gradients(plain, **rows)
    assert_same(expected, loss_and_gradients(patched, **rows))
    assert attention.runs[0] - before == plain.config.num_hidden_layers
    unpatch_model(patched)
    assert all(module.config._attn_implementation == "sdpa" for module in patched.modules() if hasattr(module, "config"))
    assert_same(expected, loss_and_gradients(patched, **rows))


def test_a_copy_of_a_patched_model_is_unpatched_by_itself():
    plain, patched = pair("llama")
    twin = copy.deepcopy(patched)
    unpatch_model(twin)
    assert twin.config._attn_implementation == twin.model.config._attn_implementation == "sdpa"
    assert not any(name.startswith("_chronicals") for name in vars(twin))
    rows, before = padded(), attention.runs[0]
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(twin, **rows))
    assert attention.runs[0] == before
    loss_and_gradients(patched, **rows)
    assert attention.runs[0] > before


def test_given_another_implementation_since_it_keeps_that_one():
    _, patched = pair("llama")
    patched.set_attn_implementation("eager")
    unpatch_model(patched)
    assert patched.config._attn_implementation == "eager"
    assert not patched._forward_pre_hooks and not patched._forward_pre_hooks_with_kwargs


def test_saved_it_does_not_know_us(tmp_path):
    _, patched = pair("llama")
    patched.save_pretrained(tmp_path)
    assert "chronicals" not in (tmp_path / "config.json").read_text()


def test_an_implementation_that_knows_documents_is_left_alone():
    model = families.build("llama")
    model.config._attn_implementation_internal = "flex_attention"
    report = patch_model(model)
    assert "document_attention" not in report.counts()
    assert any(entry.part == "attention" and "flex_attention" in entry.reason for entry in report.left)


def test_unknown_patterns_are_not_taken_for_documents():
    from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sliding_window_overlay

    window = and_masks(sliding_window_overlay(4), causal_mask_function)
    assert attention._pattern(causal_mask_function) == attention.Pattern()
    assert attention._pattern(window) == attention.Pattern(window=4)
    assert attention._pattern(or_masks(causal_mask_function, window)) is None
    assert attention._pattern(and_masks(causal_mask_function, lambda b, h, q, k: q - k < 3)) is None


def test_sparse_attention_stays():
    """Its class makes the mask of blocks for eager and SDPA by name; the documents' attention would attend to everything."""
    plain = families.minimax_m3(index_block_size=16, index_topk_blocks=1).double()
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    assert any(entry.part == "attention" and "MiniMaxM3VLAttention asks" in entry.reason for entry in report.left), str(report)
    ids = torch.randint(1, families.VOCABULARY, (1, 64))
    rows = {"input_ids": ids, "labels": ids}
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))


def test_a_twin_sees_sparse_attention(monkeypatch):
    """Its blocks are shorter than its rows, whatever the model's are."""
    model = families.minimax_m3(hidden_size=256, head_dim=64)
    assert model.config.index_block_size * model.config.index_topk_blocks > 2000
    monkeypatch.setattr(plan, "who_asks", lambda modules: "")
    with plain_surroundings():
        twin = build_twin(type(model), twin_config(model.config)).train().double()
        assert plan._why_not_documents(twin)


def test_who_asks_by_what_name_it_attends():
    """GPT-2 asks for eager alone, to round in its own way."""
    assert who_asks(families.minimax_m3().modules()) == "MiniMaxM3VLAttention"
    assert not any(who_asks(families.build(family).modules()) for family in FAMILIES)
