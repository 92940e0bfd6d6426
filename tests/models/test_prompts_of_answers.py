"""A model's hidden states of answers that share a prompt are those of each document by itself,
packed, padded and fused.
"""

import copy
from dataclasses import replace

import pytest
import torch
import transformers

import families
import preferences
import tiny
from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, Tokenizer, build_store
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import present, prove_packability
from chronicals.patching import decoder_layer, fuse_weights, patch_parts
from chronicals.patching.decoder_layer import FUSED_LAYER
from chronicals.versions import transformers_before

WIDTH = 96
ROWS = [
    {
        "prompt": [{"role": "user", "content": "what is the answer " * (n % 3 + 1)}],
        "chosen": [{"role": "assistant", "content": "forty two " * (n % 4 + 1)}],
        "rejected": [{"role": "assistant", "content": f"{n}"}],
    }
    for n in range(7)
]


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    config = ChronicalsConfig(max_seq_length=WIDTH, batch_size=4, gradient_accumulation_steps=1)
    store = build_store(
        ROWS,
        Tokenizer(tiny.tokenizer(), kinds=("preference",)),
        WIDTH,
        tmp_path_factory.mktemp("tokens"),
    )
    (step,) = BatchStream(store, config, epochs=1, shuffle=False).steps(count=1)
    batch = step.batches[0]
    assert batch.keys is not None
    return replace(batch, input_ids=batch.input_ids % (families.VOCABULARY - 1) + 1)


def alone(model, batch):
    """States of the targets' positions, each document by itself behind its prompt."""
    bounds = batch.cu_seqlens.tolist()
    ends = batch.keys.cu_seqlens.tolist()
    found = []
    for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
        row = batch.keys.index[ends[n] : ends[n + 1]]
        if end > start and (batch.targets[start:end] >= 0).any():
            states = model.get_decoder()(
                batch.input_ids[row][None], use_cache=False
            ).last_hidden_state[0, start - end :]
            found.append(states[batch.targets[start:end] >= 0])
    return torch.cat(found)


def assert_equal(model, presented, batch):
    with presented.attending_documents():
        states = presented.hidden_states(batch)[batch.targets >= 0]
        gradients = gradients_of(model, states)
    expected = alone(model, batch)
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients_of(model, expected).items():
        deviation = (gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-9)
        assert deviation < 1e-4, (name, float(deviation))


def gradients_of(model, states):
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(states.shape, generator=generator).to(states)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(states, [p for _, p in trained], upstream, allow_unused=True)
    return {name: g for (name, _), g in zip(trained, found) if g is not None and g.norm() > 1e-6}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "phi3", "granite"])
def test_packs(family, batch):
    model = families.build(family)
    presented = present(model, pack_width=WIDTH)
    assert presented.packed
    assert_equal(model, presented, batch)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_padded_rows(family, batch):
    model = families.build(family)
    presented = present(model, pack_width=WIDTH)
    presented.packed = False
    assert_equal(model, presented, batch)


def with_masks_of_positions(name, vocabulary=families.VOCABULARY):
    """Of a class that attends by itself, with a mask that transformers makes of the positions of
    packed documents.
    """
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    kinds = {
        "falcon": ("Falcon", {"alibi": False}),
        "gpt_neox_japanese": ("GPTNeoXJapanese", {"attention_dropout": 0.0}),
    }
    cls, more = kinds[name]
    config = getattr(transformers, f"{cls}Config")(**sizes, **families.IDS, **more)
    return families.randomise(getattr(transformers, f"{cls}ForCausalLM")(config).float().eval())


@pytest.mark.parametrize("name", ["falcon", "gpt_neox_japanese"])
def test_a_class_whose_answers_do_not_see_the_prompt_takes_padded_rows_of_them(name, batch, caplog):
    if name == "falcon" and transformers_before("5.24"):
        pytest.skip(
            "its class makes no mask of positions before transformers 5.24 and takes padded rows"
        )
    model = with_masks_of_positions(name)
    assert present(model, pack_width=WIDTH).packed and not caplog.text
    presented = present(model, pack_width=WIDTH, shared_prompts=True)
    assert not presented.packed
    assert (
        "takes padded rows, not packs: its answers do not attend to a prompt that they share"
        in caplog.text
    )
    assert_equal(model, presented, batch)


@pytest.mark.parametrize("family", [*families.PACKABLE, "gpt_oss"])
def test_answers_are_proved_to_see_their_prompt(family):
    assert prove_packability(families.build(family)).sees_prompts


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["cpo", "reward"])
def test_such_a_class_trains_as_with_each_prompt_in_a_row_of_its_own(objective, tmp_path):
    given = preferences.rows(4)
    model = with_masks_of_positions("falcon", 300)
    found, expected = (
        preferences.one_step(
            tmp_path / str(padded),
            given,
            objective,
            {},
            copy.deepcopy(model),
            padded=padded,
            max_seq_length=1024,
        )[0]
        for padded in (False, True)
    )
    assert found == pytest.approx(expected, rel=1e-5)


def twins(family, how):
    """A model and the plain one that it stands for, in fp64, with the same adapters where there
    are some.
    """
    if how == "LoRA over NF4":
        return families.four_bit_pair(family, adapted=True)
    model = families.build(family).double()
    if how == "LoRA":
        apply_lora(model, LoRAConfig(rank=4, dropout=0.0))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model, copy.deepcopy(model)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["all weights", "LoRA", "LoRA over NF4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_fused_layers(family, how, batch):
    """States and every gradient, of weights and of adapters."""
    model, plain = twins(family, how)
    presented = present(model, pack_width=WIDTH)
    patch_parts(model, whole_layers=True)
    fuse_weights(model)
    before = decoder_layer.runs[FUSED_LAYER]
    with presented.attending_documents():
        states = presented.hidden_states(batch)[batch.targets >= 0]
        found = gradients_of(model, states)
    assert decoder_layer.runs[FUSED_LAYER] > before
    expected_states = alone(plain, batch)
    expected = gradients_of(plain, expected_states)
    assert any("lora_A" in name for name in expected) == ("LoRA" in how)
    families.assert_same({"states": expected_states, **expected}, {"states": states, **found})
