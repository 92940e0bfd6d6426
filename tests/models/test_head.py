"""Reading a model's head: with it, the hidden states give the model's own logits."""

import pytest
import torch
from torch import nn

import tiny
from chronicals.lora import LoRAConfig, LoRALinear
from chronicals.models import Head, UnknownHead, present, read_head
from chronicals.objectives import NextToken
from families import build, distance, hand_made_batch

HEADS = {
    "llama": {"scale": 1.0, "softcap": None, "bias": False},
    "gpt2": {"scale": 1.0, "softcap": None, "bias": False},
    "phi": {"scale": 1.0, "softcap": None, "bias": True},
    "gemma2": {"scale": 1.0, "softcap": 1.5, "bias": False},
    "cohere": {"scale": 0.3, "softcap": None, "bias": False},
    "granite": {"scale": 1 / 3, "softcap": None, "bias": False},
}


@pytest.mark.parametrize("family", HEADS)
def test_linear_logits_equal_the_models(family):
    """``softcap · tanh(scale · (h Wᵀ + b) / softcap)``; large enough that each of these shows."""
    model, expected = build(family).eval(), HEADS[family]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_f" in name:
                parameter.mul_(3)
    head = read_head(model)
    assert head.weight is model.get_output_embeddings().weight
    assert head.scale == pytest.approx(expected["scale"]) and head.softcap == expected["softcap"]
    assert (head.bias is not None) == expected["bias"]
    ids = torch.randint(1, 61, (3, 17))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        bare = model.get_decoder()(input_ids=ids).last_hidden_state @ head.weight.t()
        ours = (bare if head.bias is None else bare + head.bias) * head.scale
        if head.softcap is not None:
            ours = head.softcap * torch.tanh(ours / head.softcap)
    assert distance(ours, logits) <= 1e-5
    plain = expected == {"scale": 1.0, "softcap": None, "bias": False}
    assert (distance(bare, logits) <= 1e-5) == plain, "the head's own part cannot be seen"


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "phi"])
def test_it_reaches_the_objective(family):
    """The loss through the head without whole logits is that of the model's own logits."""
    model, batch = build(family), hand_made_batch([torch.randint(1, 61, (n,)) for n in (9, 4)])
    fused, whole = present(model), present(model, fused_head=False)
    assert fused.head is not None and whole.head is None
    with torch.no_grad(), fused.attending_documents():
        ours, theirs = (NextToken()(m, batch)["cross_entropy"].sum for m in (fused, whole))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_a_tied_head_is_the_embedding():
    model = build("llama", tie_word_embeddings=True)
    assert read_head(model).weight is model.get_input_embeddings().weight


def test_several_factors_multiply():
    model = build("cohere")
    model.config.logits_scaling = 4.0
    assert read_head(model).scale == pytest.approx(0.3 / 4)


class Quantised(nn.Linear):
    pass


UNKNOWN = {
    "Quantised": lambda layer: Quantised(32, 61, bias=False),
    "Sequential": lambda layer: nn.Sequential(layer),
    "LoRALinear": lambda layer: LoRALinear(layer, LoRAConfig(rank=2), 32, 61),
    "NoneType": lambda layer: None,
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_head_of_unknown_kind_is_refused_by_name(kind):
    model = build("llama")
    model.lm_head = UNKNOWN[kind](model.lm_head)
    with pytest.raises(UnknownHead, match=f"output layer of LlamaForCausalLM is {kind}, not a plain torch.nn.Linear"):
        read_head(model)


def test_with_an_unknown_head_the_models_own_logits_are_used(caplog):
    model = tiny.llama()
    model.lm_head = nn.Sequential(model.lm_head)
    presented = present(model)
    assert presented.packed and presented.head is None
    assert "Sequential, not a plain torch.nn.Linear: the model's own logits are used" in caplog.text


def test_a_head_is_a_value():
    weight = torch.zeros(3, 2)
    assert Head(weight, None, 1.0, None).weight is weight
    with pytest.raises(AttributeError):
        Head(weight, None, 1.0, None).scale = 2.0
