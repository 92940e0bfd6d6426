"""Losses and metrics of the routers of every published mixture, beside plain torch on what its
routers gave.
"""

from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.nn.functional as F

import families
from chronicals import versions
from chronicals.batch import IGNORED
from chronicals.lora import LoRAConfig, apply_lora, parameter_layer
from chronicals.models import PresentedModel, quantise_layers, routed_experts, times_trained
from chronicals.models.routed_experts import called_for_experts
from chronicals.moe import routers
from chronicals.moe.router_settings import RouterSettings
from chronicals.moe.router_terms import RouterTerms
from chronicals.moe.routers import check_routers, mixture_layers, routing_of
from chronicals.patching import patch_parts
from chronicals.patching.experts import FUSED_EXPERTS
from chronicals.versions import transformers_before
from comparison import equal

MADE = {name: (name, {}) for name in families.ROUTED} | {
    f"{name} in groups": (name, sizes) for name, sizes in families.GROUPED.items()
}
SIGMOID = ("DeepseekV3", "Glm4Moe")
LOSSES = {"balance": 1.0, "z": 0.3, "temporal": 2.0, "locality": 0.7}


def build(kind):
    name, sizes = MADE[kind]
    return families.routed(name, **sizes)


def documents():
    """One of them has no target."""
    batch = families.documents_batch((9, 1, 12, 7, 5))
    batch.targets[10:22] = IGNORED
    return batch


def terms_of(model, batch, **settings):
    presented = PresentedModel(
        model, packed=True, head_is_read=False, experts=called_for_experts(model)
    )
    presented.additions = (RouterTerms(RouterSettings(**settings), routing_of(model)),)
    with presented.attending_documents():
        return presented.states(batch)[1]


@contextmanager
def routers_watched(model):
    """What the routers themselves return: logits, weights and experts of each layer."""
    seen = []
    with ExitStack() as hooks:
        for layer in mixture_layers(model):
            hooks.callback(
                layer.router.register_forward_hook(lambda _, args, out: seen.append(out)).remove
            )
        yield seen


def in_plain_torch(seen, batch, count, sigmoid):
    """Losses and metrics of one pack, in fp64."""
    counted = times_trained(batch) > 0
    bounds = batch.cu_seqlens.tolist()
    pairs = [t for a, b in zip(bounds, bounds[1:]) for t in range(a, b - 1) if counted[t]]
    found = {name: [] for name in (*LOSSES, "busiest", "idle", "entropy")}
    for logits, _, experts in seen:
        z = logits.double()
        s = z.sigmoid() if sigmoid else z.exp()
        p = s / s.sum(-1, keepdim=True)
        f = (
            torch.stack([(experts[counted] == e).sum() for e in range(count)])
            / experts[counted].numel()
        )
        found["balance"].append(count * (f * p[counted].mean(0)).sum())
        found["z"].append(z[counted].exp().sum(-1).log().square().mean())
        found["temporal"].append(
            torch.stack([(p[t + 1] - p[t]).square().sum() for t in pairs]).mean()
        )
        found["locality"].append(
            torch.stack([-p[t + 1][experts[t]].sum().log() for t in pairs]).mean()
        )
        found["busiest"].append(count * f.max())
        found["idle"].append((f == 0).double().mean())
        found["entropy"].append(-(p * p.log()).sum(-1)[counted].mean())
    worst = {f"{name}_worst": max(found[name]) for name in ("busiest", "idle")} | {
        "entropy_worst": min(found["entropy"])
    }
    return (
        {name: torch.stack(values).mean() for name, values in found.items()}
        | worst
        | {"dropped": 0, "dropped_worst": 0}
    )


@pytest.mark.parametrize("patched", [False, True], ids=["as it is", "patched"])
@pytest.mark.parametrize("kind", MADE)
def test_terms_and_gradients_of_routers(kind, patched):
    model = build(kind).double()
    batch = documents()
    if patched:
        patch_parts(model, whole_layers=True)
    sigmoid = kind.startswith(SIGMOID)
    assert routing_of(model).scores == ("sigmoid" if sigmoid else "softmax")
    check_routers(model, RouterSettings(**LOSSES, anchor=1.0))
    weights = [layer.gate for layer in mixture_layers(model)]
    with routers_watched(model) as seen:
        got = terms_of(model, batch, **LOSSES)
    assert len(seen) == len(weights)
    expected = in_plain_torch(seen, batch, routing_of(model).experts, sigmoid)
    in_fp32 = (
        seen[0][0].dtype == torch.float32
    )  # some classes compute logits so whatever the model is in
    assert {name.removeprefix("router/") for name in got} == expected.keys()
    for name, value in expected.items():
        term = got[f"router/{name}"]
        torch.testing.assert_close(
            term.sum.double(),
            torch.as_tensor(value).double(),
            rtol=1e-5 if in_fp32 else 1e-7,
            atol=1e-6,
        )
        if name in LOSSES:
            ours, exact = (
                torch.autograd.grad(x, weights, retain_graph=True) for x in (term.sum, value)
            )
            for one, other in zip(ours, exact):
                assert (
                    other.norm() > 0
                    and (one - other).norm() <= (1e-4 if in_fp32 else 1e-6) * other.norm()
                ), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", MADE)
def test_what_experts_got_is_what_their_router_chose(kind):
    """By the hooks and by our dispatch, also within adapters and in 4 bits; nothing of it stays."""
    batch = documents()
    for way in ("plain", "patched", "adapters", "4 bits"):
        model = build(kind)
        if way == "4 bits":
            quantise_layers(model)
        if way in ("adapters", "4 bits"):
            parameters = ["experts.gate_up_proj", "experts.down_proj"]
            apply_lora(model, LoRAConfig(2, 4, 0.0, ["o_proj"], target_parameters=parameters))
        if way != "plain":
            assert patch_parts(model, whole_layers=True).counts()[FUSED_EXPERTS] == len(
                mixture_layers(model)
            ), way
        presented = PresentedModel(
            model, packed=True, head_is_read=False, experts=called_for_experts(model)
        )
        hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        with presented.attending_documents(), routers_watched(model) as seen, torch.no_grad():
            received = presented.computed(batch, lookahead=False).received
        assert len(received) == len(seen) > 0
        for got, (_, _, chosen) in zip(received, seen):
            assert equal(got, chosen), way
        assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize("kind", MADE)
def test_logits_are_read_from_routers_where_the_class_does_not_record_them(
    kind, monkeypatch, let_return
):
    """As DeepSeek's and GLM's do not under older versions of transformers; nothing of it stays."""
    model = build(kind)
    batch = documents()
    apply_lora(
        model,
        LoRAConfig(
            2, 4, 0.0, ["o_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
        ),
    )
    let_return(routed_experts, transformers_before=True)
    monkeypatch.setattr(type(model.get_decoder()), "_can_record_outputs", {})
    presented = PresentedModel(model, packed=True, head_is_read=False)
    routers = routed_experts.unrecorded_routers(model)
    hooks = [len(router._forward_hooks) for router in routers]
    with (
        presented.attending_documents(),
        routers_watched(model) as seen,
        routed_experts.reading_logits(routers) as read,
    ):
        presented.hidden_states(batch)
    assert len(read) == len(seen) == len(mixture_layers(model))
    assert all(equal(got, logits) for got, (logits, *_) in zip(read, seen))
    assert [len(router._forward_hooks) for router in routers] == hooks


def test_adapters_take_part_in_products_where_it_is_recorded(record_calls):
    model = build("Qwen3Moe")
    apply_lora(
        model,
        LoRAConfig(
            2, 4, 0.0, ["o_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
        ),
    )
    calls = record_calls(parameter_layer, "adapted_experts")
    terms_of(model, documents(), metrics=True)
    assert len(calls) == len(mixture_layers(model))


@pytest.mark.slow
@pytest.mark.parametrize("patched", [False, True], ids=["as it is", "patched"])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "DeepseekV3 in groups", "Mixtral"])
def test_rows_that_are_lost_are_seen(kind, patched):
    """As with a capacity: of one layer, an expert takes no more than two of the tokens that want
    it.
    """
    if transformers_before("5.21"):
        pytest.skip("the classes take no pair without an expert")
    model = build(kind)
    batch = documents()
    if patched:
        patch_parts(model, whole_layers=True)
    layer = mixture_layers(model)[-1]
    count = routing_of(model).experts
    counted = times_trained(batch) > 0
    lost = []

    def with_a_capacity(_, args):
        hidden, chosen, weights = args
        over = (
            F.one_hot(chosen.flatten(), count)
            .cumsum(0)
            .gather(1, chosen.view(-1, 1))
            .view_as(chosen)
            > 2
        )
        lost.append(float((over & counted[:, None]).sum() / (counted.sum() * chosen.shape[1])))
        return hidden, chosen.masked_fill(over, count), weights.masked_fill(over, 0.0)

    with layer.experts.register_forward_pre_hook(with_a_capacity):
        got = terms_of(model, batch, metrics=True)
    assert lost[0] > 0.2
    assert float(got["router/dropped_worst"].sum) == pytest.approx(lost[0], abs=1e-6)
    assert float(got["router/dropped"].sum) == pytest.approx(
        lost[0] / len(mixture_layers(model)), abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", families.ROUTED)
def test_logits_have_the_type_that_the_class_computes_them_in(kind):
    """``docs/moe.md`` says which; patched it is the same."""
    model = build(kind).bfloat16()
    batch = documents()
    wide = torch.float32 if kind in ("DeepseekV2", *SIGMOID) else torch.bfloat16
    presented = PresentedModel(model, packed=True, head_is_read=False)
    for patched in (False, True):
        if patched:
            patch_parts(model, whole_layers=True)
        with presented.attending_documents(), torch.no_grad():
            assert {x.dtype for x in presented.router_logits(batch)} == {wide}


def test_losses_that_mean_nothing_are_named(monkeypatch):
    from transformers.models.olmoe import modeling_olmoe

    theirs = modeling_olmoe.OlmoeTopKRouter.forward

    def squared(router, hidden):
        logits, _, experts = theirs(router, hidden)
        return logits, logits.gather(-1, experts).square(), experts

    monkeypatch.setattr(modeling_olmoe.OlmoeTopKRouter, "forward", squared)
    model = families.routed(
        "Olmoe", rms_norm_eps=0.0123
    )  # of a configuration that is not proved yet
    assert routing_of(model).scores is None
    for name in ("balance", "temporal", "locality", "anchor"):
        with pytest.raises(
            ValueError,
            match=rf"router\.{name}=0\.1: OlmoeForCausalLM weighs its experts by none of softmax",
        ):
            check_routers(model, RouterSettings(**{name: 0.1}))
    check_routers(model, RouterSettings(z=0.1))
    assert terms_of(model, documents(), z=0.1).keys() >= {"router/z", "router/busiest"}


def test_models_without_router_logits_are_named(monkeypatch, let_return):
    model = families.routed("Olmoe", rms_norm_eps=0.0124)
    monkeypatch.setattr(type(model.get_decoder()), "_can_record_outputs", {})
    let_return(routers, unrecorded_routers=())
    with pytest.raises(
        ValueError,
        match=r"router\.z=0\.1: OlmoeForCausalLM does not give the logits of its routers",
    ):
        check_routers(model, RouterSettings(z=0.1))
    check_routers(model, RouterSettings(metrics=True))
    let_return(versions, transformers_before=True)
    with pytest.raises(
        ValueError,
        match=r"transformers \d.* is installed, and from 5\.19 on all classes of it record them",
    ):
        check_routers(model, RouterSettings(z=0.1))
