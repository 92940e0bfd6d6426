"""The attention seam: padded and packed rows as documents, whatever else as it was."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import families
from chronicals import patch_model, unpatch_model
from chronicals.models import PresentedModel
from chronicals.patching import attention
from chronicals.patching.lazy_mask import LazyMask
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
    """Four documents in one row, as transformers' collator lays them; with a cache, transformers
    looks at no positions.
    """
    lengths = torch.tensor([7, 1, 9, 4])
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    ids = torch.randint(1, families.VOCABULARY, positions.shape)
    rows = {
        "input_ids": ids,
        "position_ids": positions,
        "labels": ids.masked_fill(positions == 0, -100),
    }
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_documents(family, kind):
    plain, patched = pair(family)
    rows = ROWS[kind]()
    expected = loss_and_gradients(plain, **rows)
    before = attention.runs[0]
    assert_same(expected, loss_and_gradients(patched, **rows))
    assert attention.runs[0] - before == plain.config.num_hidden_layers


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "without",
    [("use_cache",), ("position_ids",), ("position_ids", "use_cache"), ("cu_seq_lens_q",)],
    ids=str,
)
def test_packs_are_what_transformers_takes_for_packs(implementation, trains, without):
    """It ignores positions where there is a cache, which is made by default, and the bounds that
    flash attention takes.
    """
    plain, patched = (model.train(trains) for model in pair("llama", implementation))
    rows = packed(bounds=True) | {"seq_idx": torch.zeros(1, 21, dtype=torch.int32)}
    for name in without:
        del rows[name]
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))
    expected, got = (model(**rows).past_key_values for model in (plain, patched))
    assert (expected is None) == (got is None) == ("use_cache" not in without)


POSITIONS = {
    "one document": torch.arange(10),
    "a document's end": torch.arange(5, 15),
    "a gap": torch.tensor([0, 1, 2, 3, 4, 50, 51, 52, 53, 54]),
    "a gap within packs": torch.tensor([0, 1, 2, 30, 31, 0, 1, 2, 3, 4]),
    "nothing but zeros": torch.zeros(10, dtype=torch.long),
    "downwards": torch.arange(10).flip(0),
}


@pytest.mark.slow
@pytest.mark.parametrize("cache", [{}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_of_every_kind_mean_what_they_did(kind, cache):
    """Without a cache any jump ends a document; with one, of which no word was said, there is a
    single one.
    """
    plain, patched = pair("mistral")
    ids = torch.randint(1, families.VOCABULARY, (2, 10))
    rows = {"input_ids": ids, "labels": ids, "position_ids": POSITIONS[kind].expand(2, -1), **cache}
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))
    assert (patched(**rows).past_key_values is None) == bool(cache)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_on_the_left_is_as_it_was(implementation):
    plain, patched = pair("llama", implementation)
    plain = plain.float()
    patched = patched.float()
    rows = padded(left=True)
    before = attention.runs[0]
    assert_same(
        loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows), tolerance=3e-5
    )
    assert attention.runs[0] == before


@pytest.mark.parametrize("shifted", [False, True])
def test_labels_at_padding_are_predicted_from_what_the_model_makes_there(shifted):
    """An old habit of tutorials: the labels are the ids."""
    plain, patched = pair("llama")
    rows = padded()
    rows["labels"] = rows["input_ids"]
    if shifted:
        rows["shift_labels"] = torch.nn.functional.pad(rows["labels"][:, 1:], (0, 1), value=-100)
    before = attention.runs[0]
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))
    assert attention.runs[0] == before + plain.config.num_hidden_layers


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2", "gpt_oss"])
def test_outputs_at_padding(family, implementation):
    """Logits and hidden states, which metrics take means of; in a window that holds nothing but
    padding, too.
    """
    if family == "gpt_oss" and implementation == "sdpa":
        pytest.skip("it has sinks, which SDPA does without")
    plain, patched = (
        model.eval().float() for model in pair(family, implementation)
    )  # eager makes no numbers there in fp64
    rows = padded()
    del rows["labels"]
    before = attention.runs[0]
    with torch.no_grad():
        expected, got = (model(**rows, output_hidden_states=True) for model in (plain, patched))
    assert attention.runs[0] - before == plain.config.num_hidden_layers
    for a, b in zip((expected.logits, *expected.hidden_states), (got.logits, *got.hidden_states)):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_only_rows_with_padding_run_the_models_own_attention(monkeypatch):
    plain, patched = (model.eval() for model in pair("llama"))
    rows = padded()
    seen = []
    own = torch.nn.functional.scaled_dot_product_attention

    def counted(query, *args, **options):
        seen.append(tuple(query.shape[::2][:2]))
        return own(query, *args, **options)

    monkeypatch.setattr(
        "transformers.integrations.sdpa_attention.torch.nn.functional.scaled_dot_product_attention",
        counted,
    )
    monkeypatch.setattr(attention, "document_attention", lambda q, *_, **__: torch.zeros_like(q))
    patched(**rows)
    assert seen == [(2, 10)] * plain.config.num_hidden_layers


class Waits(TorchDispatchMode):
    """Counts the calls for which the host waits for a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        self.count += by_mask or name in ("nonzero", "unique_consecutive", "_local_scalar_dense")
        return func(*args, **kwargs or {})


def test_the_host_waits_seldom_for_a_mask():
    """For whether padding is on the right, what documents there are, their lengths, and four
    numbers of them in one answer.
    """
    padding = padded()["attention_mask"]
    with Waits() as waits:
        mask = attention._mask("sdpa", 3, 11, 11, attention_mask=padding)
    assert (
        isinstance(mask, LazyMask) and waits.count <= 3 + 4
    )  # on the CPU each number of the answer is counted


def test_outputs_at_padding_can_be_skipped():
    plain = families.build("llama").double()
    patched = copy.deepcopy(plain)
    report = patch_model(patched, outputs_at_padding=False)
    assert "outputs at padding on the right of rows are zero (outputs_at_padding=False)" in str(
        report
    )
    rows = padded()
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))
    at_padding = rows["attention_mask"] == 0
    assert not torch.allclose(plain(**rows).logits[at_padding], patched(**rows).logits[at_padding])
    with pytest.raises(
        ValueError,
        match="labels stand at padding.*outputs_at_padding=False: set these labels to -100",
    ):
        patched(**rows | {"labels": rows["input_ids"]})
    with pytest.raises(ValueError, match="patched with False already; call unpatch_model"):
        patch_model(patched)
    unpatch_model(patched)
    assert not patched._forward_pre_hooks and not patched._forward_pre_hooks_with_kwargs
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_under_autocast(implementation):
    """Rotation leaves queries and keys in fp32 beside values in bf16; SDPA takes all in bf16."""
    plain, patched = (model.float() for model in pair("llama", implementation))
    rows = padded()
    before = attention.runs[0]
    exact = loss_and_gradients(plain, **rows)[0]
    found = []
    for model in (plain, patched):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(loss_and_gradients(model, **rows))
    assert attention.runs[0] - before == plain.config.num_hidden_layers
    assert abs(found[1][0] - exact) <= 2 * abs(found[0][0] - exact) + 5e-3
    for name, gradient in found[0][1].items():
        assert (found[1][1][name] - gradient).norm() <= 5e-2 * gradient.norm().clamp(min=1e-3), name


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
    """The documents' attention knows none, so the mask the model would have had is made after
    all.
    """
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
    for expected, got in zip(
        *(model(**rows, output_attentions=True).attentions for model in (plain, patched))
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=4 * torch.finfo(torch.float32).eps)


def names_in(model):
    """What the configurations of all modules say of attention."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return {
        config._attn_implementation
        for config in [*configs, *(c.get_text_config() for c in configs)]
    }


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_configurations_keep_the_name_of_their_attention(implementation):
    """Before, while and after the model runs, as transformers' own tests ask."""
    _, patched = pair("llama", implementation)
    seen = set()
    for module in patched.modules():
        module.register_forward_hook(lambda *_: seen.update(names_in(patched)))
    loss_and_gradients(patched, **padded())
    assert seen == names_in(patched) == {implementation}
    assert (
        patched._check_and_adjust_attn_implementation(patched.config._attn_implementation)
        == implementation
    )
    unpatch_model(patched)
    assert names_in(patched) == {implementation}


COPIES = {
    "a model of its configuration": lambda model: AutoModelForCausalLM.from_config(model.config),
    "a model of a copy of its configuration": lambda model: AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config)
    ),
    "a model that shares its configuration": lambda model: type(model)(model.config),
    "a model of its decoder's configuration": lambda model: type(model)(model.get_decoder().config),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", COPIES)
@pytest.mark.parametrize("kind", ROWS)
def test_a_model_that_was_never_patched_computes_what_it_did(make, kind):
    plain, patched = pair("llama")
    other = COPIES[make](patched).double().train()
    other.load_state_dict(plain.state_dict())
    rows = ROWS[kind]() | {
        "labels": torch.randint(1, families.VOCABULARY, ROWS[kind]()["input_ids"].shape)
    }
    expected = loss_and_gradients(plain, **rows)
    for _ in range(2):
        before = attention.runs[0]
        assert_same(expected, loss_and_gradients(other, **rows), tolerance=0)
        assert attention.runs[0] == before
        loss_and_gradients(patched, **rows)
        assert attention.runs[0] > before


def two_of_one_configuration():
    config = families.configuration("llama")
    return config, *(families.randomise(LlamaForCausalLM(config).double()) for _ in range(2))


def test_a_model_of_the_same_configuration_is_left_alone():
    config, patched, other = two_of_one_configuration()
    rows = padded()
    before = attention.runs[0]
    expected = loss_and_gradients(other, **rows)
    patch_model(patched)
    assert other.config is patched.config is config and config._attn_implementation == "sdpa"
    assert_same(expected, loss_and_gradients(other, **rows), tolerance=0)
    assert attention.runs[0] == before
    patch_model(other)
    unpatch_model(other)
    loss_and_gradients(patched, **rows)
    assert attention.runs[0] > before, "the first lost its attention with the second's"


def test_the_towers_of_a_larger_model():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sees = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    text = families.configuration("gemma3").to_dict()
    config = Gemma3Config(
        text_config=text, vision_config={**sees, "image_size": 28, "patch_size": 14}
    )
    patched = Gemma3ForConditionalGeneration(config)
    attention.install_document_attention(patched)
    changed = {type(module).__name__ for module in patched.modules() if "forward" in vars(module)}
    assert changed == {"Gemma3Model", "Gemma3TextModel", "Gemma3Attention"}
    assert names_in(patched) == {"sdpa"}
    attention.remove_document_attention(patched)
    assert not any(
        "forward" in vars(module) or "_chronicals_seams" in vars(module)
        for module in patched.modules()
    )


def with_a_copied_layer(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[-1].self_attn.layer_idx = 2
    model.config.num_hidden_layers = 3
    return model


def with_layers_of_peft(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj"], layer_replication=[(0, 2), (0, 2)])
    )


@pytest.mark.slow
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
    rows = padded()
    before = attention.runs[0]
    expected = loss_and_gradients(plain, **rows)
    assert_same(expected, loss_and_gradients(patched, **rows))
    assert attention.runs[0] - before == plain.config.num_hidden_layers
    unpatch_model(patched)
    assert all(
        module.config._attn_implementation == "sdpa"
        for module in patched.modules()
        if hasattr(module, "config")
    )
    assert_same(expected, loss_and_gradients(patched, **rows))


def test_a_copy_of_a_patched_model_is_unpatched_by_itself():
    plain, patched = pair("llama")
    twin = copy.deepcopy(patched)
    unpatch_model(twin)
    assert not any(
        name.startswith("_chronicals") for module in twin.modules() for name in vars(module)
    )
    assert not any("forward" in vars(module) for module in twin.modules())
    rows = padded()
    before = attention.runs[0]
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(twin, **rows))
    assert attention.runs[0] == before
    loss_and_gradients(patched, **rows)
    assert attention.runs[0] > before


@pytest.mark.parametrize("first,then", [("sdpa", "eager"), ("eager", "sdpa")])
def test_given_another_implementation_since_it_goes_by_that_one(first, then):
    plain, patched = (model.float() for model in pair("gemma3", first))
    for model in (plain, patched):
        model.set_attn_implementation(then)
    rows = padded()
    before = attention.runs[0]
    assert_same(
        loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows), tolerance=3e-5
    )
    assert attention.runs[0] - before == plain.config.num_hidden_layers
    unpatch_model(patched)
    assert patched.config._attn_implementation == then
    assert not patched._forward_pre_hooks and not patched._forward_pre_hooks_with_kwargs


@pytest.mark.slow
def test_given_an_implementation_that_knows_documents_since_it_takes_that_one():
    plain, patched = pair("llama")
    for model in (plain.float(), patched.float()):
        model.config._attn_implementation = "flex_attention"
    rows = padded()
    before = attention.runs[0]
    with torch.no_grad():
        torch.testing.assert_close(patched(**rows).loss, plain(**rows).loss)
    assert attention.runs[0] == before


def test_attention_weights_can_be_asked_for_in_the_configuration():
    _, patched = pair("llama", "eager")
    patched.config.output_attentions = True
    assert len(patched(**padded()).attentions) == patched.config.num_hidden_layers


def new_layer(model):
    made = type(model.model.layers[0])(model.config, 1).to(model.dtype).train()
    made.load_state_dict(model.model.layers[1].state_dict())
    model.model.layers[1] = made


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ROWS)
def test_a_layer_that_came_later_is_given_the_mask_it_needs(implementation, kind):
    """The mask that stands for documents is made for whoever looks at it."""
    plain, patched = pair("llama", implementation)
    new_layer(patched)
    rows = ROWS[kind]()
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))


def test_attention_whose_forward_was_replaced_is_left_alone():
    plain = families.build("llama").double()
    patched = copy.deepcopy(plain)
    module = patched.model.layers[1].self_attn
    module.forward = lambda *args, own=module.forward, **kwargs: own(*args, **kwargs)
    report = patch_model(patched)
    assert any(
        entry.part == "attention" and "LlamaAttention was replaced" in entry.reason
        for entry in report.left
    )
    rows = padded()
    before = attention.runs[0]
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))
    assert attention.runs[0] == before


def test_attention_with_hooks_of_accelerate():
    from accelerate.hooks import ModelHook, add_hook_to_module

    plain = families.build("llama").double()
    patched = copy.deepcopy(plain)
    called = []

    class Seen(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            called.append(module)
            return args, kwargs

    for module in (patched.model, patched.model.layers[1].self_attn):
        add_hook_to_module(module, Seen())
    patch_model(patched)
    rows = padded()
    before = attention.runs[0]
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))
    assert len(called) == 2 and attention.runs[0] - before == plain.config.num_hidden_layers
    unpatch_model(patched)
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))
    assert len(called) == 4 and attention.runs[0] - before == plain.config.num_hidden_layers


def test_a_patched_model_can_be_presented():
    """As the trainer does; before and after, it attends as patched."""
    plain, patched = pair("gemma3")
    batch = families.documents_batch()
    rows = padded()
    expected = families.states_and_gradients(plain, batch)
    of_rows = loss_and_gradients(plain, **rows)
    before = attention.runs[0]
    families.assert_same(expected, families.states_and_gradients(patched, batch))
    assert attention.runs[0] == before, "the bounds that it is given are all that it needs"
    assert_same(of_rows, loss_and_gradients(patched, **rows))
    assert attention.runs[0] == before + plain.config.num_hidden_layers
    with PresentedModel(patched, packed=True, head_is_read=False).attending_documents():
        attention.remove_document_attention(patched)
    assert_same(of_rows, loss_and_gradients(patched, **rows))
    assert attention.runs[0] == before + plain.config.num_hidden_layers


def test_saved_it_does_not_know_us(tmp_path):
    _, patched = pair("llama")
    patched.save_pretrained(tmp_path)
    assert "chronicals" not in (tmp_path / "config.json").read_text()


def test_an_implementation_that_knows_documents_is_left_alone():
    model = families.build("llama")
    model.config._attn_implementation_internal = "flex_attention"
    report = patch_model(model)
    assert "document_attention" not in report.counts()
    assert any(
        entry.part == "attention" and "flex_attention" in entry.reason for entry in report.left
    )


def test_unknown_patterns_are_not_taken_for_documents():
    from transformers.masking_utils import (
        and_masks,
        causal_mask_function,
        or_masks,
        sliding_window_overlay,
    )

    window = and_masks(sliding_window_overlay(4), causal_mask_function)
    assert attention._pattern(causal_mask_function) == attention.Pattern()
    assert attention._pattern(window) == attention.Pattern(window=4)
    assert attention._pattern(or_masks(causal_mask_function, window)) is None
    assert attention._pattern(and_masks(causal_mask_function, lambda b, h, q, k: q - k < 3)) is None


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["plain", "padded"])
def test_sparse_attention_is_as_it_was(implementation, kind):
    """Its class adds a mask of blocks to the mask that it is given; the documents' attention
    would attend to everything.
    """
    plain = families.minimax_m3(
        index_block_size=4, index_topk_blocks=1, attn_implementation=implementation
    )
    patched = copy.deepcopy(plain)
    patch_model(patched)
    rows = ROWS[kind]()
    assert_same(
        loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows), tolerance=3e-5
    )
