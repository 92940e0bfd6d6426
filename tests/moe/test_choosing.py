"""How routers choose: found from what was recorded, for the families of transformers; heads
learn it and rank by it.
"""

import pytest
import torch

import runs
import tiny
from choosers import CLASSES, E, K, batch, build
from chronicals.models import present
from chronicals.moe import router_losses as losses
from chronicals.moe.lookahead.choosing import FORMULAS, Choice
from chronicals.moe.lookahead.distil_heads import HeadDistillation, prediction_losses
from chronicals.moe.lookahead.predictor import ExpertPredictor, HeadSizes, hits
from chronicals.moe.lookahead.recording import record
from chronicals.moe.lookahead.train_predictor import train_predictor
from chronicals.moe.routers import mixture_layers
from comparison import equal
from mixtures import mixture


@pytest.mark.parametrize("family", CLASSES)
def test_the_rule_is_found(family):
    model = build(family)
    expected = CLASSES[family][2]
    (recorded,) = record(present(model), [batch()], features=True)
    assert Choice.found(model, [recorded]) == expected
    for layer, logits, experts in zip(mixture_layers(model), recorded.logits, recorded.experts):
        order = expected.order(logits, layer.correction)
        assert equal(order.topk(K).indices.sort(-1).values, experts.sort(-1).values)
        if expected.corrected or expected.groups > 1:
            assert hits(logits, experts, K).mean() < 0.9
    predictor = ExpertPredictor.beside(model, HeadSizes(0, 0, 8), expected)
    for n, layer in enumerate(mixture_layers(model)):
        with torch.no_grad():
            router = layer.router(recorded.features[n])
        early = next(x for x in router if not x.is_floating_point())
        assert (
            hits(
                predictor.choice.order(
                    predictor.reuse(n, recorded.features[n])[:, 0], predictor.corrections[n]
                ),
                early,
                K,
            ).mean()
            == 1
        )


@pytest.mark.slow
def test_a_choice_that_follows_no_rule_is_refused():
    model = build("deepseek_v3")
    (recorded,) = record(present(model), [batch()])
    recorded.experts.copy_(recorded.experts.roll(1, dims=1))
    with pytest.raises(
        ValueError,
        match="DeepseekV3ForCausalLM: its routers choose experts in a way that is not known",
    ):
        Choice.found(model, [recorded])


def test_the_order_is_its_formula():
    for scores, groups, best in (
        ("sigmoid", 4, 2),
        ("softmax", 4, 1),
        ("sqrtsoftplus", 1, 1),
        ("logits", 2, 2),
    ):
        rule = Choice(scores, True, groups, max(1, groups // 2), best)
        logits = torch.randn(50, 8, dtype=torch.float64)
        correction = torch.randn(8, dtype=torch.float64)
        order = rule.order(logits, correction)
        for z, found in zip(logits, order):
            values = (FORMULAS[scores](z) + correction).tolist()
            size = 8 // groups
            parts = [range(g * size, (g + 1) * size) for g in range(groups)]
            of_group = [
                sum(sorted((values[e] for e in part), reverse=True)[:best]) for part in parts
            ]
            kept = sorted(range(groups), key=lambda g: -of_group[g])[: rule.kept_groups]
            expected = sorted(range(8), key=lambda e: (e // size not in kept, -values[e]))
            assert found.argsort(descending=True).tolist() == expected


def test_shares_are_those_of_scores():
    z = torch.randn(9, 5, dtype=torch.float64)
    for scores in ("softmax", "sigmoid", "sqrtsoftplus"):
        share = FORMULAS[scores](z) / FORMULAS[scores](z).sum(-1, keepdim=True)
        torch.testing.assert_close(
            Choice(scores).log_scores(z).softmax(-1), share, rtol=1e-10, atol=0
        )


def test_losses_are_their_formula():
    """Of a router with groups and a correction, and of a plain one."""
    how = HeadDistillation(temperature=0.7, ranking=0.4, of_set=0.9, margin=0.8)
    predicted, target, correction = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((6, 8), (6, 8), (8,))
    )
    experts = target.topk(K).indices
    plain = prediction_losses(Choice(), predicted, target, experts, correction, how)
    expected = losses.lookahead_losses(predicted, target, K, 0.7, 0.4, 0.9, 0.8)
    torch.testing.assert_close(plain, expected, rtol=1e-12, atol=0)

    rule = Choice("sigmoid", True, 4, 2, 2)
    experts = rule.order(target, correction).topk(K).indices
    found = prediction_losses(rule, predicted, target, experts, correction, how)
    for t in range(6):
        p, q = (s.log().div(0.7).softmax(-1) for s in (target[t].sigmoid(), predicted[t].sigmoid()))
        values = 4 * (predicted[t].sigmoid() + correction)
        aims = target[t].sigmoid() + correction
        kept = aims.view(4, 2).sum(-1).topk(2).indices.tolist()
        among = [e for e in range(8) if e // 2 in kept]

        def of_set(values, those, among):
            share = (values / 0.7).exp()
            least = min(values[e] for e in those)
            most = max((values[e] for e in among if e not in those), default=-torch.inf)
            inside = sum(share[e] for e in those) / sum(share[e] for e in among)
            return 0.4 * max(0.0, 0.8 - least + most) - 0.9 * inside.log() / len(those)

        total = (p * (p / q).log()).sum() + of_set(values, experts[t].tolist(), among)
        total = total + of_set(values.view(4, 2).sum(-1), kept, range(4))
        torch.testing.assert_close(found[t], total, rtol=1e-10, atol=0)


LEARNS = ["deepseek_v3", "deepseek_v2 in groups", "glm4_moe", "ernie4_5_moe", "qwen3_moe"]


@pytest.fixture(scope="module")
def recalls(tmp_path_factory):
    """Of heads for their own layer and the next, after the same training."""
    found = {}
    for family in LEARNS:
        torch.manual_seed(2)
        config = runs.config(tmp_path_factory.mktemp("run"), objective="pretraining", batch_size=2)
        how = HeadDistillation(learning_rate=2e-2, rows=256, temperature=0.5)
        data = tiny.chat_rows(300), tiny.chat_rows(20)
        given = build(family), tiny.tokenizer(), *data, config, HeadSizes(1, 1, 32), how, 12000, 400
        found[family] = train_predictor(*given)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", LEARNS)
def test_heads_learn_what_is_chosen(family, recalls):
    found = recalls[family]
    plain = recalls["qwen3_moe"].recalls
    assert found.predictor.choice == CLASSES[family][2]
    for d in (0, 1):
        assert found.recalls.mean(d) > max(
            0.65, plain.mean(d) - 0.08, 0.1 + found.recalls.mean(d, "gate_reuse")
        )
    assert min(found.recalls.token_ahead[0]) > 0.5


def test_they_are_saved_with_their_rule(recalls, tmp_path):
    found = recalls["deepseek_v3"]
    found.predictor.save(tmp_path, found.about())
    loaded = ExpertPredictor.load(tmp_path)
    assert loaded.choice == found.predictor.choice
    logits = torch.randn(20, E)
    for layer in range(2):
        assert equal(
            *(
                made.choice.order(logits, made.corrections[layer])
                for made in (loaded, found.predictor)
            )
        )
    assert bool(loaded.corrections.any()) and mixture_layers(mixture())[0].correction is None
