"""A model's hidden states of answers that share a prompt are those of each document by itself, packed, padded and fused."""

import copy
from dataclasses import replace

import pytest
import torch

import families
import tiny
from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, Tokenizer, build_store
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import present
from chronicals.patching import decoder_layer, fuse_weights, patch_parts
from chronicals.patching.decoder_layer import BY

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
    store = build_store(ROWS, Tokenizer(tiny.tokenizer(), kinds=("preference",)), WIDTH, tmp_path_factory.mktemp("tokens"))
    (step,) = BatchStream(store, config, epochs=1, shuffle=False).steps(count=1)
    batch = step.batches[0]
    assert batch.keys is not None
    return replace(batch, input_ids=batch.input_ids % (families.VOCABULARY - 1) + 1)


def alone(model, batch):
    """States of the targets' positions, each document by itself behind its prompt."""
    bounds, ends, found = batch.cu_seqlens.tolist(), batch.keys.cu_seqlens.tolist(), []
    for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
        row = batch.keys.index[ends[n] : ends[n + 1]]
        if end > start and (batch.targets[start:end] >= 0).any():
            states = model.get_decoder()(batch.input_ids[row][None], use_cache=False).last_hidden_state[0, start - end :]
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


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_padded_rows(family, batch):
    model = families.build(family)
    presented = present(model, pack_width=WIDTH)
    presented.packed = False
    assert_equal(model, presented, batch)


def twins(family, how):
    """A model and the plain one that it stands for, in fp64, with the same adapters where there are some."""
    if how == "LoRA over NF4":
        return families.four_bit_pair(family, adapted=True)
    model = families.build(family).double()
    if how == "LoRA":
        apply_lora(model, LoRAConfig(rank=4, dropout=0.0))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("how", ["all weights", "LoRA", "LoRA over NF4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_fused_layers(family, how, batch):
    """States and every gradient, of weights and of adapters."""
    model, plain = twins(family, how)
    presented = present(model, pack_width=WIDTH)
    patch_parts(model, whole_layers=True)
    fuse_weights(model)
    before = decoder_layer.runs[BY]
    with presented.attending_documents():
        states = presented.hidden_states(batch)[batch.targets >= 0]
        found = gradients_of(model, states)
    assert decoder_layer.runs[BY] > before
    expected_states = alone(plain, batch)
    expected = gradients_of(plain, expected_states)
    assert any("lora_A" in name for name in expected) == ("LoRA" in how)
    families.assert_same({"states": expected_states, **expected}, {"states": states, **found})
