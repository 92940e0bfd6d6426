"""Which activations are recomputed: the fastest policy that fits, by an estimate of what a run holds."""

import pytest
import torch
import transformers

import families
import tiny
from chronicals.memory import (
    CHEAP,
    LAYERS,
    NOTHING,
    Estimate,
    decoder_layers,
    draws_numbers,
    enable_gradient_checkpointing,
    estimate,
)
from chronicals.models import load_by_bitsandbytes, load_model
from chronicals.models.four_bits import linear_layers
from chronicals.quantization import Linear4bit, Packed

GIB = 2**30


KEPT = {NOTHING: 10 * GIB, CHEAP: 6 * GIB, LAYERS: 1 * GIB}
"""Of a layer; there are ten, beside 20 GiB."""


@pytest.mark.parametrize(
    ("total", "choice", "needed"),
    [
        (0, (NOTHING, 0), 120),
        (134, (NOTHING, 0), 120),
        (133, (CHEAP, 0), 80),
        (89, (CHEAP, 0), 80),
        (88, (CHEAP, 1), 75),
        (60, (CHEAP, 6), 20 + 6 + 4 * 6),
        (45, (CHEAP, 8), 20 + 8 + 12),
        (44, (CHEAP, 9), 20 + 9 + 10),
        (10, (CHEAP, 9), 39),
    ],
    ids=str,
)
def test_the_fastest_that_fits(total, choice, needed):
    """The last of ten saves nothing: while any is recomputed, it is there as a whole."""
    estimated = Estimate(20 * GIB, 10, KEPT, total * GIB)
    assert estimated.choice() == choice and estimated.needed(*choice) == needed * GIB


@pytest.mark.parametrize(("gradients", "again", "needed"), [(5, 0, 120), (85, 0, 120), (95, 0, 125), (95, 6, 20 + 6 + 105)])
def test_gradients_come_as_activations_go(gradients, again, needed):
    """Ten layers keep 10 each: all before the backward pass, all gradients and one layer at its end."""
    found = Estimate(20 * GIB, 10, KEPT, 0, gradients * GIB)
    assert found.needed(NOTHING, again) == needed * GIB


def test_without_fused_layers_nothing_is_cheap():
    kept = {name: size for name, size in KEPT.items() if name != CHEAP}
    assert Estimate(20 * GIB, 10, kept, 100 * GIB).choice() == (NOTHING, 4)


@pytest.mark.parametrize(
    ("total", "words"),
    [
        (0, "not on a card"),
        (200, "estimated 120.0 of 200.0 GiB, nothing recomputed"),
        (100, "estimated 80.0 of 100.0 GiB, norms and gated units recomputed"),
        (60, "estimated 50.0 of 60.0 GiB, 6 of 10 layers recomputed, norms and gated units recomputed"),
        (10, "estimated 39.0 of 10.0 GiB, 9 of 10 layers recomputed, norms and gated units recomputed"),
    ],
    ids=str,
)
def test_what_is_said(total, words):
    assert Estimate(20 * GIB, 10, KEPT, total * GIB).words() == words


def test_what_is_counted():
    """A token and layer of width 64, 4 query and 2 key heads of 16, inner width 96, in 16 bit; 300 tokens of vocabulary."""
    model = tiny.llama()
    model.get_input_embeddings().requires_grad_(False)
    found = estimate(model, 1000, True, 2, 2, 14, 4352)
    frozen = model.get_input_embeddings().weight.numel()
    loss = 300 * 64 * 4 + 1000 * 300 * 2
    assert found.fixed == 2 * frozen + 14 * (sum(p.numel() for p in model.parameters()) - frozen) + loss
    attended = 16 * (2 * 4 + 2 * 2)
    assert found.kept == {
        NOTHING: 2000 * (4 * 64 + attended + 3 * 96), CHEAP: 2000 * (2 * 64 + attended + 2 * 96), LAYERS: 2000 * 64,
    }  # fmt: skip
    assert CHEAP not in estimate(model, 1000, False, 2, 2, 14, 4352).kept
    for least, inputs in ((0, 2 * 64 + 96), (161, 2 * 64), (193, 64), (257, 0)):
        narrow = estimate(model, 1000, True, 2, 2, 14, 4352, in_fp8=lambda i, o, least=least: i + o >= least)
        assert found.kept[NOTHING] - narrow.kept[NOTHING] == 1000 * inputs and narrow.kept[CHEAP] == found.kept[CHEAP]
    scaled = estimate(model, 1000, True, 2, 2, 14, 4352, magnitudes=True)
    returned = 16 * (4 + 2 * 2) + 2 * 64
    assert {scaled.kept[policy] - found.kept[policy] for policy in (NOTHING, CHEAP)} == {2000 * returned}
    assert scaled.kept[LAYERS] == found.kept[LAYERS]
    wide = estimate(model, 1000, True, 4, 2, 14, 4352)
    assert wide.kept[NOTHING] == 2 * found.kept[NOTHING] and wide.fixed - found.fixed == 1000 * 300 * 2 + 2 * frozen
    assert found.fixed - estimate(model, 1000, True, 2, 2, 14, 100).fixed == 900 * 300 * 2
    assert found.choice() == (NOTHING, 0) and found.layers == 2
    early = estimate(model, 1000, True, 2, 2, 10, 4352, gradient=4.0)
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.fixed - early.fixed == early.gradients == 4 * weights and not found.gradients
    model.get_decoder().layers.requires_grad_(False)
    others = sum(p.numel() for p in model.get_decoder().layers.parameters())
    assert found.fixed - estimate(model, 1000, True, 2, 1, 14, 4352).fixed == 13 * others


@pytest.mark.parametrize("nested", [False, True])
def test_scales_of_bitsandbytes_are_counted_as_ours(tmp_path, nested):
    """But for its tables of codes, which each layer has."""
    pytest.importorskip("bitsandbytes")
    tiny.llama(intermediate_size=128).save_pretrained(tmp_path)
    kind, cpu = transformers.LlamaForCausalLM, torch.device("cpu")
    theirs, ours = load_by_bitsandbytes(kind, tmp_path, torch.float32, cpu, nested), load_model(tmp_path, torch.float32)
    for path, layer in linear_layers(ours).items():
        ours.set_submodule(path, Linear4bit(Packed.of(layer.weight.detach(), nested=nested)))
    one, two = (estimate(model.requires_grad_(False), 64, False, 2, 2, 14, 16).fixed for model in (theirs, ours))
    assert 0 <= one - two <= 14 * (16 + 256) * 4


def test_the_first_layers_alone():
    model = tiny.llama()
    enable_gradient_checkpointing(model, first=1)
    assert [layer.gradient_checkpointing for layer in model.get_decoder().layers] == [True, False]


CHANCES = {
    "Starcoder2": {"residual_dropout": 0.2, "attention_dropout": 0.0, "embedding_dropout": 0.0},
    "Mixtral": {"router_jitter_noise": 0.2, "num_local_experts": 4},
    "Phimoe": {"input_jitter_noise": 0.2, "num_local_experts": 4},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.2},
}


@pytest.mark.parametrize("family", CHANCES)
def test_what_is_left_to_chance_is_drawn_again_as_it_was(family):
    sizes = {**families.SIZES, "num_hidden_layers": 2, **CHANCES[family]}
    sizes = sizes if family != "GPT2" else {**CHANCES[family], **families.IDS, "vocab_size": families.VOCABULARY}
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**sizes)
    kind = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family}{kind}")(config).train()
    ids = torch.randint(1, families.VOCABULARY, (2, 9))
    found = []
    for recomputed in (False, False, True):
        if recomputed:
            enable_gradient_checkpointing(model)
        model.zero_grad()
        torch.manual_seed(2 if found else 3)
        model(input_ids=ids, labels=ids).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert not torch.equal(found[0], found[1]), "nothing is left to chance"
    assert torch.equal(found[1], found[2])


def test_what_is_left_to_no_chance():
    for family in ("llama", "qwen3", "gemma3", "gpt_oss"):
        assert not draws_numbers(families.build(family))


def test_layers_have_other_names_too():
    assert [len(decoder_layers(families.build(family))) for family in ("llama", "gpt2", "bloom")] == [2, 2, 2]


def test_layers_of_the_decoder_are_counted_not_those_of_a_tower():
    """The tower's come first among the modules; a layer's own inner layer goes with it."""
    model = families.build("gemma3")
    layers = model.get_decoder().layers
    model.tower = torch.nn.ModuleList([type(layers[0])(model.config.get_text_config(), 0) for _ in range(3)])
    layers[1].inner = type(layers[0])(model.config.get_text_config(), 0)
    model._modules = {"tower": model.tower, **model._modules}
    enable_gradient_checkpointing(model, first=1)
    assert [layer.gradient_checkpointing for layer in layers] == [True] + [False] * (len(layers) - 1)
    assert not layers[1].inner.gradient_checkpointing and all(layer.gradient_checkpointing for layer in model.tower)


def test_nothing_is_left_at_the_embedding():
    """No gradient is asked of a frozen one, which re-entrance would need."""
    model = tiny.llama()
    enable_gradient_checkpointing(model)
    assert not model.get_input_embeddings()._forward_hooks


def test_a_class_that_cannot_is_named():
    model = tiny.llama()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot recompute"):
        enable_gradient_checkpointing(model)
