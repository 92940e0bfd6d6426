"""Trained heads as ``predictor=``: they name experts of the next layer, and change no bit."""

import copy

import pytest
import torch

import chronicals
import families
import mixtures
from chronicals.moe.lookahead.choosing import Choice
from chronicals.moe.lookahead.predictor import ExpertPredictor, HeadSizes
from chronicals.moe.offload import heads as module
from chronicals.patching.patch import patch_parts
from mutants import mutant

EXPERTS, EACH = 8, 2
HOST = {"ram": "1GiB", "device": "cpu"}
NAMES = ["native", "Qwen3Moe", "DeepseekV3"]


def build(name, **changes):
    layers = {"num_hidden_layers": 4, **changes}
    if name == "native":
        return mixtures.mixture(num_experts=EXPERTS, moe_intermediate_size=16, **layers)
    count = "n_routed_experts" if name == "DeepseekV3" else "num_experts"
    return families.routed(name, **{count: EXPERTS, **layers})


def heads_of(model, name="Qwen3Moe", **sizes):
    """Heads with random weights, so that they predict something else than gates alone."""
    rule = Choice("sigmoid", corrected=True) if name == "DeepseekV3" else Choice()
    made = ExpertPredictor.beside(
        model, HeadSizes(**{"furthest": 2, "tokens": 0, "rank": 4, **sizes}), rule
    )
    with torch.no_grad():
        made.layer_ahead.up.normal_(std=0.3)
        made.layer_ahead.bias.normal_(std=0.3)
    return made


def offloaded(model, slots, predictor):
    streamed = chronicals.offload(copy.deepcopy(model), vram="64MiB", **HOST)
    size = streamed.offload.engine.slot_bytes
    streamed.offload.close()
    return chronicals.offload(copy.deepcopy(model), vram=slots * size, predictor=predictor, **HOST)


def ids_of(tokens):
    return torch.randint(2, families.VOCABULARY, (1, tokens))


def named_by(streamed):
    """A list that gets what heads named for each layer of later passes."""
    seen = []
    predictor = streamed.offload.engine.predictor
    expect = predictor.expect

    def noting(layer, chosen, told):
        found = expect(layer, chosen, told)
        seen.append(found)
        return found

    predictor.expect = noting
    return seen


@torch.no_grad()
def by_formula(model, made, ids):
    """For each layer the experts that its head names, from inputs of attention."""
    inputs = []
    layers = [layer for layer in model.get_decoder().layers if hasattr(layer.mlp, "experts")]
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, named: inputs.append(named["hidden_states"]), with_kwargs=True
        )
        for layer in layers
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    found = []
    for number, x in enumerate(inputs[:-1]):
        logits = made.layers(number, x[0])[:, 1]
        order = made.choice.order(logits, made.corrections[number + 1])
        chosen = order.topk(EACH).indices
        if len(chosen) == 1:
            found.append(chosen[0].tolist())
            continue
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        ranked = sorted(range(EXPERTS), key=lambda expert: -counts[expert])
        found.append([expert for expert in ranked if counts[expert]])
    return found


def compare(name, streamed, model, made):
    seen = named_by(streamed)
    for tokens in (1, 9, 1):
        ids = ids_of(tokens)
        expected = by_formula(model, made, ids)
        seen.clear()
        with torch.no_grad():
            streamed(ids)
        assert seen[: len(expected)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("whole", [False, True])
def test_they_name_what_their_formula_says(name, whole, tmp_path):
    model = build(name)
    made = heads_of(model, name)
    made.save(tmp_path, {})
    streamed = offloaded(model, 12, tmp_path)
    if whole:
        patch_parts(streamed, whole_layers=True)
    compare(name, streamed, model, made)
    report = streamed.offload.report()
    assert sum(layer.prefetched for layer in report.layers) > 0
    streamed.offload.close()
    assert not any(layer._forward_pre_hooks for layer in streamed.get_decoder().layers)


@torch.no_grad()
def test_no_bit_changes(tmp_path):
    """Layers run fused with them as without."""
    model = build("native")
    heads_of(model).save(tmp_path, {})
    for whole in (False, True):
        expected = copy.deepcopy(model)
        plan = patch_parts(expected, whole_layers=whole)
        for slots in (EACH + 2, 12):
            streamed = offloaded(model, slots, str(tmp_path))
            told = patch_parts(streamed, whole_layers=whole)
            for form in ("fused decoder layer", "fused attention half"):
                assert str(told).count(form) == str(plan).count(form)
            for tokens in (1, 1, 7, 1):
                ids = ids_of(tokens)
                assert torch.equal(streamed(ids).logits, expected(ids).logits)
            streamed.offload.close()


@torch.no_grad()
def test_the_native_model_has_heads_of_its_own():
    model = build("native", lookahead_layers=1)
    trained = [p for p in model.model.layer_ahead.parameters() if p.requires_grad]
    assert trained
    streamed = offloaded(model, 12, "heads")
    compare("native", streamed, model, ExpertPredictor.within(model))
    assert all(p.requires_grad for p in streamed.model.layer_ahead.parameters())
    streamed.offload.close()


def test_a_wrong_layer_is_found(tmp_path):
    model = build("native")
    made = heads_of(model)
    wrong = mutant(
        module,
        "self.heads.layers(layer, features)[:, 1]",
        "self.heads.layers(layer, features)[:, 0]",
    )
    streamed = offloaded(model, 12, None)
    engine = streamed.offload.engine
    engine.predictor = wrong.FromHeads(made, streamed)
    with pytest.raises(AssertionError):
        compare("native", streamed, model, made)
    streamed.offload.close()


def test_what_does_not_fit_is_refused(tmp_path):
    model = build("Qwen3Moe")
    other = build("Qwen3Moe", num_hidden_layers=3)
    heads_of(other).save(tmp_path / "other", {})
    heads_of(model, furthest=0).save(tmp_path / "near", {})

    def refused(predictor, words):
        with pytest.raises(ValueError, match=words):
            chronicals.offload(model, vram="1MiB", predictor=predictor, **HOST)
        assert not hasattr(model, "offload")

    refused(
        tmp_path / "other", r"heads are for .* \[3, 8, 32\], and Qwen3MoeForCausalLM has \[4, 8"
    )
    refused(tmp_path / "near", r"predict no later layer .*--layers-ahead 1 or more")
    refused("heads", "Qwen3MoeForCausalLM has no heads of its own")
    refused(
        tmp_path / "nothing", "expected 'last', 'none', 'heads', or a folder with trained heads"
    )
