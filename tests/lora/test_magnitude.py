"""DoRA against the real PEFT, and its norms against those of the whole weight."""

import pytest
import torch
from adapted import MODELS, TARGETS, llama, logits, randomise, tokens
from safetensors.torch import load_file, save_file

import chronicals.lora.magnitude as module
from chronicals.lora import LoRAConfig, LoRALinear, adapters, apply_lora, load_adapter, save_adapter
from chronicals.lora.model_methods import merge_adapters
from mutants import mutant

RANK = 4
ALPHA = 12
KINDS = [{}, {"use_rslora": True}, {"use_dora": True}, {"use_dora": True, "use_rslora": True}]


def away_from_the_start(model):
    """Adapters as if they had been trained; magnitudes stay near the norms they belong to."""
    randomise(model)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, LoRALinear) and layer.lora_magnitude_vector is not None:
                layer.lora_magnitude_vector.copy_(
                    layer.norms() * (1 + 0.2 * torch.rand(layer.out_features))
                )


def ours(name="llama", **options):
    options = {
        "rank": RANK,
        "alpha": ALPHA,
        "dropout": 0.0,
        "target_modules": TARGETS[name],
        **options,
    }
    model = apply_lora(MODELS[name](), LoRAConfig(**options))
    away_from_the_start(model)
    return model


def train(model, ids, steps=4):
    """Logits after each of some steps of AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(logits(model, ids))
    return found


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_goes_on_in_peft_and_comes_back(tmp_path, name, kind):
    """In fp64: AdamW's first steps take a gradient's sign, which rounding decides where it is
    next to zero.
    """
    peft = pytest.importorskip("peft")
    model = ours(name, **kind).double()
    ids = tokens()
    save_adapter(model, tmp_path / "ours")
    base = MODELS[name]().double()
    theirs = peft.PeftModel.from_pretrained(
        base, tmp_path / "ours", is_trainable=True, autocast_adapter_dtype=False
    ).double()
    for got, expected in zip(train(model, ids), train(theirs, ids), strict=True):
        assert (got - expected).norm() <= 1e-9 * expected.norm()
    theirs.float().double().save_pretrained(tmp_path / "theirs")  # adapters are read in fp32
    again = load_adapter(MODELS[name]().double(), tmp_path / "theirs").double()
    for got, expected in zip(train(again, ids), train(theirs, ids), strict=True):
        assert (got - expected).norm() <= 1e-9 * expected.norm()


def test_an_adapter_changes_nothing_at_first():
    bare = llama()
    ids = tokens()
    expected = logits(bare, ids)
    model = apply_lora(bare, LoRAConfig(rank=RANK, use_dora=True))
    assert (logits(model, ids) - expected).norm() <= 1e-6 * expected.norm()
    assert (
        sum(
            "lora_magnitude_vector" in name
            for name, p in model.named_parameters()
            if p.requires_grad
        )
        == 14
    )


def test_a_file_names_the_magnitudes_as_peft_does(tmp_path):
    peft = pytest.importorskip("peft")
    options = {"target_modules": TARGETS["llama"], "use_dora": True}
    save_adapter(ours(use_dora=True), tmp_path / "ours")
    peft.get_peft_model(llama(), peft.LoraConfig(r=RANK, **options)).save_pretrained(
        tmp_path / "theirs"
    )
    own, other = (
        load_file(tmp_path / place / "adapter_model.safetensors") for place in ("ours", "theirs")
    )
    assert {name: x.shape for name, x in own.items()} == {
        name: x.shape for name, x in other.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_merged_it_is_the_same_model(name):
    model = ours(name, use_dora=True)
    ids = tokens()
    expected = logits(model, ids)
    merge_adapters(model)
    assert not list(adapters(model))
    assert (logits(model, ids) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("dora", [True, False])
def test_adapters_of_the_other_kind_are_refused(tmp_path, dora):
    save_adapter(ours(use_dora=dora), tmp_path)
    with pytest.raises(
        ValueError, match="is DoRA, the model" if dora else "is not DoRA, the model"
    ):
        load_adapter(ours(use_dora=not dora), tmp_path)


def test_magnitudes_that_are_not_saved_are_missed(tmp_path):
    save_adapter(ours(use_dora=True), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    stored = load_file(file)
    save_file({name: x for name, x in stored.items() if "magnitude" not in name}, file)
    with pytest.raises(
        ValueError, match=r"down_proj.lora_magnitude_vector is missing or not \(64,\)"
    ):
        load_adapter(llama(), tmp_path)


def random_norms(of=module):
    """The norms of a weight with an adapter, by the formula and of the whole, in fp64."""
    weight, down, up = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((23, 19), (3, 19), (23, 3))
    )
    found = of.adapted_norms(of.squared_norms(weight), weight @ down.t(), down, up)
    return found, (weight + up @ down).norm(dim=1)


def test_norms_are_those_of_the_whole_weight():
    torch.testing.assert_close(*random_norms(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("old", "new"),
    [("2 * crossed.to(kind)", "crossed.to(kind)"), ("down @ down.t()", "down @ down.t() * 0")],
)
def test_norms_without_a_part_are_found(old, new):
    with pytest.raises(AssertionError):
        torch.testing.assert_close(*random_norms(mutant(module, old, new)), rtol=1e-12, atol=0)


def test_a_weight_that_is_written_has_other_norms():
    """They are kept for a weight that stays what it is."""
    layer = LoRALinear(torch.nn.Linear(19, 23), LoRAConfig(rank=3, use_dora=True), 19, 23)
    torch.nn.init.normal_(layer.lora_B)
    for change in (lambda w: w.mul_(2), lambda w: w.neg_(), lambda w: w.add_(1)):
        with torch.no_grad():
            change(layer.base_layer.weight)
            whole = layer.base_layer.weight + layer.scale * layer.lora_B @ layer.lora_A
        torch.testing.assert_close(layer.norms(), whole.norm(dim=1))


def test_in_16_bit_a_small_change_of_a_magnitude_is_seen():
    """By 0.3 %: in bf16 the factor would still be 1."""
    layer = LoRALinear(
        torch.nn.Linear(64, 512, bias=False).bfloat16(), LoRAConfig(rank=3, use_dora=True), 64, 512
    )
    x = torch.randn(256, 64).bfloat16()
    before = layer(x).float().detach()
    with torch.no_grad():
        layer.lora_magnitude_vector.mul_(1.003)
    assert float((layer(x).detach() * before).sum() / before.square().sum()) == pytest.approx(
        1.003, abs=1e-3
    )


@pytest.mark.slow
def test_compiled():
    layer = LoRALinear(
        torch.nn.Linear(19, 23), LoRAConfig(rank=3, dropout=0.0, use_dora=True), 19, 23
    )
    torch.nn.init.normal_(layer.lora_B)
    x = torch.randn(5, 19, requires_grad=True)
    leaves = x, *layer.parameters(recurse=False)
    expected = torch.autograd.grad(layer(x).square().sum(), leaves)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(x).square().sum(), leaves), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
