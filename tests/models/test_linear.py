"""Reading a model's head: with it, the hidden states give the model's own logits."""

import pytest
import torch
from torch import nn

import tiny
from chronicals.lora import LoRAConfig, LoRALinear, apply_lora
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
    model = build(family).eval()
    expected = HEADS[family]
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
    model = build(family)
    batch = hand_made_batch([torch.randint(1, 61, (n,)) for n in (9, 4)])
    fused = present(model)
    whole = present(model, fused_head=False)
    assert fused.head is not None and whole.head is None
    with torch.no_grad(), fused.attending_documents():
        ours, theirs = (NextToken()(m, batch)["cross_entropy"].sum for m in (fused, whole))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_the_objective_is_in_the_type_of_logits_that_are_wider_than_fp32(fused):
    model = build("llama").double()
    batch = hand_made_batch([torch.randint(1, 61, (n,)) for n in (9, 4)])
    presented = present(model, fused_head=fused)
    with torch.no_grad(), presented.attending_documents():
        loss = NextToken()(presented, batch)["cross_entropy"].sum
        exact = torch.nn.functional.cross_entropy(
            presented.logits(batch), batch.targets, reduction="sum"
        )
    assert loss.item() == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding(tied):
    model = build("llama", tie_word_embeddings=tied)
    head = read_head(model)
    assert tied == (head.weight is model.get_input_embeddings().weight)


# --- LoRA on the head
# ------------------------------------------------------------------------------------------------


def ours(model, dropout):
    return apply_lora(
        model, LoRAConfig(rank=3, alpha=6, dropout=dropout, target_modules=["lm_head", "q_proj"])
    )


def pefts(model, dropout):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=3, lora_alpha=6, lora_dropout=dropout, target_modules=["lm_head", "q_proj"]
    )
    return peft.get_peft_model(model, config)


def with_adapters(family, adapt, dropout=0.0, **changes):
    model = adapt(build(family, **changes), dropout)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return model


def sums(model, batch, fused):
    """The loss, and the gradients by name, through the head as tensors or through the model's
    own logits.
    """
    torch.manual_seed(3)
    presented = present(getattr(model, "get_base_model", lambda: model)(), fused_head=fused)
    assert (presented.head is not None) == fused
    with presented.attending_documents():
        total = NextToken()(presented, batch)["cross_entropy"].sum
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return total.item(), dict(zip(trained, torch.autograd.grad(total, list(trained.values()))))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
@pytest.mark.parametrize("adapt", [ours, pefts])
def test_lora_on_the_head_reaches_the_objective(adapt, family, tied):
    """The same loss and gradients as through the whole logits of the wrapped layer; the base
    stays frozen.
    """
    model = with_adapters(family, adapt, tie_word_embeddings=tied).double()
    batch = hand_made_batch([torch.randint(1, 61, (n,)) for n in (9, 4)])
    head = read_head(model)
    assert not head.weight.requires_grad and tied == (
        head.weight is model.get_input_embeddings().weight
    )
    assert head.adapter.scale == 2 and head.adapter.a.shape == (3, 32)
    (loss, gradients) = sums(model, batch, fused=True)
    (expected, theirs) = sums(model, batch, fused=False)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert any("lm_head" in name for name in gradients) and gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        assert distance(gradient, theirs[name]) <= 1e-6, name


@pytest.mark.parametrize("adapt", [ours, pefts])
def test_dropout_of_the_adapter_is_that_of_training(adapt):
    model = with_adapters("llama", adapt, dropout=0.4)
    assert read_head(model.train()).adapter.dropout == 0.4
    assert read_head(model.eval()).adapter.dropout == 0.0
    hidden = torch.randn(200, 32)
    torch.manual_seed(5)
    expected = model.train().get_output_embeddings()(hidden)
    torch.manual_seed(5)
    assert distance(read_head(model).logits(hidden), expected) <= 1e-5
    assert distance(read_head(model.eval()).logits(hidden), expected) > 1e-2


def test_pefts_adapters_as_they_are_now():
    """Switched off, merged, or more than one."""
    model = with_adapters("llama", pefts)
    bare = read_head(model.get_base_model()).adapter
    assert bare is not None
    with model.disable_adapter():
        assert read_head(model).adapter is None
    assert read_head(model).adapter is not None
    model.merge_adapter()
    assert read_head(model).adapter is None
    model.unmerge_adapter()
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(UnknownHead, match="more than one plain LoRA: default, second"):
        read_head(model)


def test_dora_on_the_head_is_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        build("llama"), peft.LoraConfig(r=3, use_dora=True, target_modules=["lm_head"])
    )
    with pytest.raises(UnknownHead, match="plain LoRA"):
        read_head(model)


def test_several_factors_multiply():
    model = build("cohere")
    model.config.logits_scaling = 4.0
    assert read_head(model).scale == pytest.approx(0.3 / 4)


class Quantised(nn.Linear):
    pass


class Wrapped(LoRALinear):
    pass


UNKNOWN = {
    "Quantised": lambda layer: Quantised(32, 61, bias=False),
    "Sequential": lambda layer: nn.Sequential(layer),
    "Wrapped": lambda layer: Wrapped(layer, LoRAConfig(rank=2), 32, 61),
    "NoneType": lambda layer: None,
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_head_of_unknown_kind_is_refused_by_name(kind):
    model = build("llama")
    model.lm_head = UNKNOWN[kind](model.lm_head)
    with pytest.raises(
        UnknownHead,
        match=f"output layer of LlamaForCausalLM is {kind}, not a plain torch.nn.Linear",
    ):
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
