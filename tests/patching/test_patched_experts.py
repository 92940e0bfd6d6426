"""Experts of transformers' families through the grouped products: loss and every gradient as the
class's own.
"""

import copy

import pytest
import torch
from test_patch import assert_same, batch, loss_and_gradients
from torch import nn

import families
from chronicals import patch_model, unpatch_model
from chronicals.lora import LoRAConfig, apply_lora, stacked_experts
from chronicals.models.twin import build_twin, plain_surroundings, twin_config
from chronicals.patching import experts, patch_parts
from chronicals.patching.experts import FUSED_EXPERTS, recognise_experts
from chronicals.patching.patch import KEPT_EXPERTS, ON_RANKS
from interpreted import kernels_run

FAMILIES = families.ROUTED


def build(name, **changes):
    return families.routed(name, **changes).train()


def layers_of(model):
    return [
        module
        for module in model.modules()
        if "down_proj" in module._parameters and module.down_proj.ndim == 3
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_same_loss_and_gradients(name):
    plain = build(name).double()
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    assert report.counts()[FUSED_EXPERTS] == len(layers_of(plain)) and not [
        entry for entry in report.left if entry.reason == KEPT_EXPERTS
    ]
    inputs = batch()
    assert_same(loss_and_gradients(plain, **inputs), loss_and_gradients(patched, **inputs))


@pytest.mark.parametrize("name", FAMILIES)
def test_same_in_packs(name):
    """As the trainer runs them: documents end to end, halves of layers fused where they are
    known.
    """
    model = build(name).double()
    given = families.documents_batch()
    expected = families.states_and_gradients(copy.deepcopy(model), given)
    assert patch_parts(model, whole_layers=True).counts()[FUSED_EXPERTS] == len(layers_of(model))
    families.assert_same(expected, families.states_and_gradients(model, given))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_kernels_in_bf16(name):
    """The layer by its kernels, and by its class, both in bf16 and beside fp64; from the same
    choice of experts.
    """
    model = build(name).bfloat16()
    plain = copy.deepcopy(layers_of(model)[0])
    patch_model(model)
    chosen = torch.rand(23, 4).topk(2).indices
    shares = torch.rand(23, 2).bfloat16()
    x = torch.randn(23, 32).bfloat16()
    dy = torch.randn(23, 32).bfloat16()

    def run(layer, kind=torch.bfloat16):
        leaves = [
            x.to(kind).requires_grad_(),
            shares.to(kind).requires_grad_(),
            *layer.parameters(),
        ]
        out = layer(leaves[0], chosen, leaves[1])
        return [out, *torch.autograd.grad(out, leaves, dy.to(kind))]

    with kernels_run():
        got = run(layers_of(model)[0])
    usual = run(plain)
    exact = run(copy.deepcopy(plain).double(), torch.float64)
    for ours, own, expected in zip(got, usual, exact, strict=True):
        error, plain_error = ((found.double() - expected).norm() for found in (ours, own))
        assert error <= max(1.5 * plain_error, 8e-3 * expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_same_text(name):
    plain = build(name).double().eval()
    patched = copy.deepcopy(plain)
    assert patch_model(patched).counts()[FUSED_EXPERTS] == len(layers_of(plain))
    ids = torch.randint(1, families.VOCABULARY, (2, 7))
    given = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
    }
    texts = [model.generate(ids, eos_token_id=None, **given) for model in (plain, patched)]
    assert texts[0].shape == (2, 19) and torch.equal(*texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_take_part_in_the_products(name):
    """Of experts; those of routers change what they choose."""
    model = build(name)
    router = "router.weight" if name == "GptOss" else "mlp.gate.weight"
    parameters = ["gate_up_proj", "down_proj", router]
    config = LoRAConfig(
        rank=3, dropout=0.0, target_modules=["o_proj"], target_parameters=parameters
    )
    without = copy.deepcopy(model).double()
    apply_lora(model, config).double()
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=0.3)
    plain = copy.deepcopy(model)
    inputs = batch()
    patch_model(model)
    calls = []
    keep = experts._compute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_compute", lambda *given: (calls.append(given[5]), keep(*given))[1])
        got = loss_and_gradients(model, **inputs)
    assert len(calls) == len(layers_of(plain)) and all(len(factors) == 2 for factors in calls)
    expected = loss_and_gradients(plain, **inputs)
    learning = [adapted for adapted, g in expected[1].items() if "lora_A" in adapted and g.any()]
    assert sum("experts" in adapted for adapted in learning) == 2 * len(layers_of(plain))
    assert sum("gate." in adapted or "router." in adapted for adapted in learning) == len(
        layers_of(plain)
    )
    assert_same(expected, got)
    assert (loss_and_gradients(without, **inputs)[0] - got[0]).abs() > 1e-3


@pytest.mark.parametrize(
    ("then", "now"),
    [("grouped_mm", "batched_mm"), ("grouped_mm", "eager"), ("eager", "grouped_mm")],
)
def test_an_implementation_that_is_set_later_is_told_once(then, now, caplog):
    """But for what ``generate`` sets for its steps on a card."""
    model = build("Qwen3Moe", experts_implementation=then)
    patch_model(model)
    model(**batch())
    assert not caplog.text
    model.set_experts_implementation(now)
    for _ in range(2):
        model(**batch())
    told = (
        f"experts_implementation='{now}': set after patch_model and without effect on "
        "Qwen3MoeExperts"
    )
    assert caplog.text.count(told) == (now != "batched_mm")
    unpatch_model(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_compute", lambda *given: pytest.fail("they are computed"))
        model(**batch())


def test_undone():
    model = build("Qwen3Moe")
    before = dict(vars(layers_of(model)[0]))
    patch_model(model)
    assert "forward" in vars(layers_of(model)[0])
    unpatch_model(model)
    assert vars(layers_of(model)[0]).keys() == before.keys()


def test_what_it_cannot_compute_is_left_to_the_class(must_not_call):
    """Another activation than was proved, and autocast."""
    plain = build("Qwen3Moe")
    patched = copy.deepcopy(plain)
    patch_model(patched)
    for model in (plain, patched):
        for layer in layers_of(model):
            layer.act_fn = nn.Tanh()
    inputs = batch()
    assert_same(loss_and_gradients(plain, **inputs), loss_and_gradients(patched, **inputs))
    patched = build("Qwen3Moe")
    patch_model(patched)
    must_not_call(experts, "_compute", "they are computed")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(patched(**inputs).loss)


class _Squared:
    """A unit that no candidate computes."""

    def _apply_gate(self, both):
        gate, up = both.chunk(2, -1)
        return gate.relu().square() * up


def test_another_unit_is_not_proved_and_named():
    model = build("Qwen3Moe")
    kind = type(layers_of(model)[0])
    other = type("OtherExperts", (_Squared, kind), {})
    for layer in layers_of(model):
        layer.__class__ = other
        layer.config._experts_implementation = "grouped_mm"
    assert recognise_experts(layers_of(model)[0]) is None
    report = patch_model(model)
    assert [entry.reason for entry in report.left if entry.part == "OtherExperts"] == [
        KEPT_EXPERTS
    ] * 2


def test_numbers_of_a_unit_are_read_from_the_instance():
    """A limit or a slope of the twin's own would be another unit."""
    model = build("GptOss")
    with plain_surroundings():
        twin = build_twin(type(model), twin_config(model.config))
        form = recognise_experts(layers_of(twin)[0])
    layer = layers_of(model)[0]
    layer.limit = 0.2
    layer.alpha = 1.1
    gate_of = form.forward.args[0]
    assert (gate_of(layer).limit, gate_of(layer).alpha, gate_of(layer).interleaved) == (
        0.2,
        1.1,
        True,
    )


def first_four(model):
    """The first layer of experts, of which four are left."""
    layer = layers_of(model)[0]
    for name in ("gate_up_proj", "down_proj"):
        setattr(layer, name, nn.Parameter(getattr(layer, name)[:4].detach()))
    layer.num_experts = 4
    vars(layer).pop("_is_expert_parallel", None)
    return layer


@pytest.fixture(params=[True, False], ids=["newer", "older"])
def newer(request, let_return):
    """Whether transformers is taken for a newer version, which marks the experts of a rank."""
    let_return(stacked_experts, transformers_before=not request.param)
    return request.param


@pytest.mark.slow
def test_experts_of_a_rank_are_left_to_the_class(newer, must_not_call):
    """Newer versions of transformers say so of the experts; older ones that the model is
    divided.
    """

    def divided(model):
        layer = first_four(model)
        setattr(layer, "_is_expert_parallel" if newer else "_is_hooked", True)
        return layer

    model = build("Qwen3Moe", num_experts=8)
    other = build("Qwen3Moe", num_experts=8)
    patch_model(model)
    must_not_call(experts, "_compute", "they are computed")
    divided(model)(torch.randn(3, 32), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    divided(other)
    report = patch_model(other)
    assert report.counts()[FUSED_EXPERTS] == 1
    assert [entry.path for entry in report.left if entry.reason == ON_RANKS] == [
        "model.layers.0.mlp.experts"
    ]


@pytest.mark.usefixtures("newer")
def test_a_pruned_layer_is_of_no_rank():
    model = build("Qwen3Moe", num_experts=8)
    first_four(model)
    assert patch_model(model).counts()[FUSED_EXPERTS] == len(layers_of(model))


def test_older_versions_describe_experts_with_fewer_words():
    """Before 5.18 there was no ``has_post_expert_norm``."""
    layer = layers_of(build("Qwen3Moe"))[0]
    for name in ("has_post_expert_norm", "_is_expert_parallel"):
        vars(layer).pop(name, None)
    form = recognise_experts(layer)
    assert form is not None and form.by == FUSED_EXPERTS
