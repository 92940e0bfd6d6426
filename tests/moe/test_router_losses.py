"""Every loss of routers against loops in plain NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from chronicals.batch import IGNORED, Batch
from chronicals.models import Computed, PresentedModel
from chronicals.moe import router_losses as losses
from chronicals.moe.router_losses import CountedTokens
from chronicals.moe.router_settings import RouterSettings
from chronicals.moe.router_terms import Anchor, RouterTerms, Routing, replayed

E = 7
K = 3
L = 3
W = 20
LENGTHS = [(9, 4, 7), (13, 1, 6), (20,)]
"""Of the documents of three packs; the last of the first two packs has no target."""

ALL = {
    "balance": 1.0,
    "z": 0.5,
    "temporal": 2.0,
    "locality": 0.3,
    "layer_ahead": 0.7,
    "token_ahead": 0.2,
}
OF_HEADS = {
    "lookahead_ranking": 0.4,
    "lookahead_set": 0.9,
    "lookahead_margin": 0.8,
    "lookahead_temperature": 1.7,
}


def batch() -> Batch:
    lengths = [n for pack in LENGTHS for n in pack]
    total = sum(lengths)
    ids = torch.randint(1, 50, (total,))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    targets = ids.roll(-1)
    targets[bounds[1:].long() - 1] = IGNORED
    for n, (a, b) in enumerate(zip(bounds, bounds[1:])):
        if n in (2, 5):
            targets[a:b] = IGNORED
    targets[13 + 9 + 4 + 7] = 5  # the document of one token has a target, too
    positions = torch.cat([torch.arange(n) for n in lengths])
    return Batch(ids, targets, positions, bounds, max(lengths))


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def largest(z, k=K):
    return set(np.argsort(-z)[:k].tolist())


class Packs:
    """Means over packs of what a function gives of tokens, in plain Python."""

    def __init__(self, of: Batch):
        bounds = of.cu_seqlens.tolist()
        spans = [(a, b) for a, b in zip(bounds, bounds[1:]) if (of.targets[a:b] != IGNORED).any()]
        self.tokens = [
            [t for a, b in spans for t in range(a, b) if t // W == p] for p in range(len(of) // W)
        ]
        self.end = {t: b for a, b in spans for t in range(a, b)}

    def sum(self, value, ahead=0):
        """``value(t)``, of the tokens with a token ``ahead`` in their document."""
        total = 0.0
        for tokens in self.tokens:
            found = [value(t) for t in tokens if t + ahead < self.end[t]]
            total += np.mean(found) if found else 0.0
        return total


def lookahead(predicted, target):
    aim, q = (softmax(z / OF_HEADS["lookahead_temperature"]) for z in (target, predicted))
    those = largest(target)
    least = min(predicted[e] for e in those)
    most = max(predicted[e] for e in range(E) if e not in those)
    kl = sum(a * (np.log(a) - np.log(b)) for a, b in zip(aim, q))
    ranking = max(0.0, OF_HEADS["lookahead_margin"] - least + most)
    mass = sum(q[e] for e in those)
    return (
        kl + OF_HEADS["lookahead_ranking"] * ranking - OF_HEADS["lookahead_set"] * np.log(mass) / K
    )


@pytest.fixture
def made():
    of = batch()
    logits = [torch.randn(len(of), E, dtype=torch.float64, requires_grad=True) for _ in range(L)]
    ahead = [
        torch.randn(len(of), min(2, L - n), E, dtype=torch.float64, requires_grad=True)
        for n in range(L)
    ]
    tokens = torch.randn(len(of), 2, L, E, dtype=torch.float64, requires_grad=True)
    received = [
        torch.rand(len(of), E).topk(K).indices for _ in range(L)
    ]  # not those with the largest logits
    return of, Computed(torch.zeros(len(of), 1), logits, ahead, tokens, received)


def terms_of(of, computed, scores="softmax", **settings):
    model = PresentedModel(None, True, True, pack_width=W)
    return RouterTerms(RouterSettings(**settings), Routing(K, E, scores)).terms(model, computed, of)


def by_sigmoid(z):
    s = 1 / (1 + np.exp(-z))
    return s / s.sum()


def by_sqrtsoftplus(z):
    s = np.sqrt(np.log(1 + np.exp(z)))
    return s / s.sum()


PROBABILITIES = {"softmax": softmax, "sigmoid": by_sigmoid, "sqrtsoftplus": by_sqrtsoftplus}


@pytest.mark.parametrize("scores", PROBABILITIES)
def test_every_term_is_its_formula(made, scores):
    of, computed = made
    p = PROBABILITIES[scores]
    packs = Packs(of)
    z = [x.detach().numpy() for x in computed.router_logits]
    got = [x.tolist() for x in computed.received]
    ahead = [x.detach().numpy() for x in computed.layers_ahead]
    tokens = computed.tokens_ahead.detach().numpy()

    def balance(layer, experts):
        total = 0.0
        for some in packs.tokens:
            f = [sum(e in experts[t] for t in some) / (K * len(some)) for e in range(E)]
            total += E * float(np.dot(f, np.mean([p(layer[t]) for t in some], axis=0)))
        return total

    entropies = np.array(
        [
            [np.mean([-(p(x[t]) * np.log(p(x[t]))).sum() for t in some]) for some in packs.tokens]
            for x in z
        ]
    )
    expected = {
        "balance": np.mean([balance(x, experts) for x, experts in zip(z, got)]),
        "z": np.mean([packs.sum(lambda t, x=x: np.log(np.exp(x[t]).sum()) ** 2) for x in z]),
        "temporal": np.mean(
            [packs.sum(lambda t, x=x: ((p(x[t + 1]) - p(x[t])) ** 2).sum(), 1) for x in z]
        ),
        "locality": np.mean(
            [
                packs.sum(lambda t, x=x, s=s: -np.log(sum(p(x[t + 1])[e] for e in s[t])), 1)
                for x, s in zip(z, got)
            ]
        ),
        "layer_ahead": np.mean(
            [
                packs.sum(lambda t, n=n, d=d: lookahead(ahead[n][t, d], z[n + d][t]))
                for n in range(L)
                for d in range(ahead[n].shape[1])
            ]
        ),
        "token_ahead": np.mean(
            [
                packs.sum(lambda t, k=k, n=n: lookahead(tokens[t, k - 1, n], z[n][t + k]), k)
                for k in (1, 2)
                for n in range(L)
            ]
        ),
        "layer_ahead_recall_1": np.mean(
            [
                packs.sum(lambda t, n=n: len(largest(ahead[n][t, 1]) & largest(z[n + 1][t])) / K)
                for n in range(L - 1)
            ]
        ),
        "token_ahead_recall_2": np.mean(
            [
                packs.sum(
                    lambda t, n=n: len(largest(tokens[t, 1, n]) & largest(z[n][t + 2])) / K, 2
                )
                for n in range(L)
            ]
        ),
        "entropy": entropies.mean(0).sum(),
        "entropy_worst": entropies.min(0).sum(),
        "dropped": 0.0,
        "dropped_worst": 0.0,
    }
    found = terms_of(of, computed, scores, **ALL, **OF_HEADS)
    for name, value in expected.items():
        term = found[f"router/{name}"]
        assert abs(float(term.sum) - value) <= 1e-6 * max(1.0, abs(value)), name
        assert term.coefficient == ALL.get(name, 0.0) and term.per == "packs"


def test_loads_are_counted(made):
    """Of what experts got; ids that no expert has are rows that are lost."""
    of, computed = made
    layers = [ids.clone() for ids in computed.received]
    layers[1][::3, 0], layers[1][1::4, 1], layers[2][5::7, 2] = E, -1, E + 4
    found = terms_of(of, replace(computed, received=layers), metrics=True)
    packs = Packs(of)
    shown = {"busiest": [], "idle": [], "dropped": []}
    for ids in layers:
        counts = [
            [sum(e in ids[t].tolist() for t in some) for e in range(E)] for some in packs.tokens
        ]
        choices = [K * len(some) for some in packs.tokens]
        shown["busiest"].append([E * max(c) / n for c, n in zip(counts, choices)])
        shown["idle"].append([np.mean([n == 0 for n in c]) for c in counts])
        shown["dropped"].append([1 - sum(c) / n for c, n in zip(counts, choices)])
    assert max(shown["dropped"][1]) > 0.1
    for name, values in shown.items():
        assert float(found[f"router/{name}"].sum) == pytest.approx(
            np.mean(values, 0).sum(), abs=1e-5
        )
        assert float(found[f"router/{name}_worst"].sum) == pytest.approx(
            np.max(values, 0).sum(), abs=1e-5
        )
        assert (
            found[f"router/{name}"].coefficient == found[f"router/{name}_worst"].coefficient == 0.0
        )


def test_tokens_that_no_expert_got_are_near_nothing(made):
    of, computed = made
    lost = [torch.full_like(ids, E) for ids in computed.received]
    found = terms_of(of, replace(computed, received=lost), balance=1.0, locality=1.0)
    assert (
        float(found["router/locality"].sum) == pytest.approx(0.0, abs=1e-9)
        and found["router/balance"].sum == 0
    )
    sum(term.sum * term.coefficient for term in found.values()).backward()
    assert all(torch.isfinite(x.grad).all() for x in computed.router_logits)
    assert float(found["router/dropped"].sum) == len(LENGTHS)


def test_routers_without_probabilities_show_what_experts_got(made):
    of, computed = made
    found = terms_of(of, computed, None, z=1.0)
    assert found.keys() == {"router/z"} | {
        f"router/{name}{end}" for name in ("busiest", "idle", "dropped") for end in ("", "_worst")
    }
    model = PresentedModel(None, True, True, pack_width=W)
    none = RouterTerms(RouterSettings(metrics=True), Routing(K, E, None, False)).terms(
        model, computed, of
    )
    assert none["router/busiest"].sum == found["router/busiest"].sum


@pytest.mark.slow
@pytest.mark.parametrize("scores", PROBABILITIES)
def test_gradients_are_right(made, scores):
    of, computed = made
    free = [*computed.router_logits, *computed.layers_ahead, computed.tokens_ahead]

    def loss(*given):
        some = Computed(computed.states, given[:L], given[L : 2 * L], given[-1], computed.received)
        found = terms_of(of, some, scores, **ALL, **OF_HEADS)
        return sum(term.sum * term.coefficient for term in found.values())

    fixed = [y.detach() for y in computed.router_logits]
    assert torch.autograd.gradcheck(lambda *x: loss(*fixed, *x), free[L:], fast_mode=True)
    some = [x.detach() for x in free[L:]]

    def of_routers(*logits):
        given = Computed(computed.states, logits, some[:L], some[-1], computed.received)
        found = terms_of(of, given, scores, **{n: ALL[n] for n in list(ALL)[:4]})
        return sum(term.sum * term.coefficient for term in found.values())

    assert torch.autograd.gradcheck(of_routers, free[:L], fast_mode=True)


def test_heads_do_not_move_their_targets(made):
    of, computed = made
    found = terms_of(of, computed, layer_ahead=1.0, token_ahead=1.0)
    sum(term.sum * term.coefficient for term in found.values()).backward()
    assert all(x.grad is None for x in computed.router_logits)
    assert all(x.grad.abs().sum() > 0 for x in (*computed.layers_ahead, computed.tokens_ahead))


@pytest.mark.slow
def test_terms_never_wait_for_the_device(made):
    """Tensors without values: whatever asks for one fails."""
    of, computed = made
    with FakeTensorMode() as mode:
        fake = mode.from_tensor
        some = Computed(
            fake(computed.states),
            [fake(x) for x in computed.router_logits],
            [fake(x) for x in computed.layers_ahead],
            fake(computed.tokens_ahead),
            [fake(x) for x in computed.received],
        )
        found = terms_of(of._map(fake), some, **ALL, **OF_HEADS)
        sum(term.sum * term.coefficient for term in found.values()).backward()
    assert found.keys() >= {f"router/{name}" for name in ALL}


def test_a_pack_without_documents_adds_nothing(made):
    of, computed = made
    emptied = of.targets.clone()
    emptied[40:] = IGNORED
    some = Batch(of.input_ids, emptied, of.position_ids, of.cu_seqlens, of.max_seqlen)
    both = [terms_of(x, computed, **ALL) for x in (of, some)]
    alone = Packs(some)
    z = computed.router_logits[0].detach().numpy()
    assert len(alone.tokens[2]) == 0
    expected = alone.sum(lambda t: np.log(np.exp(z[t]).sum()) ** 2)
    assert float(
        CountedTokens.of(some, W)
        .means(losses.z_losses(computed.router_logits[0]), CountedTokens.of(some, W).counted)
        .sum()
    ) == (pytest.approx(expected, rel=1e-6))
    for name in both[0]:
        assert torch.isfinite(both[1][name].sum)


def test_packs_without_a_token_that_counts_show_nothing(made):
    """No loss, no recall, and no expert that is idle for want of tokens."""
    of, computed = made
    none = Batch(
        of.input_ids,
        torch.full_like(of.targets, IGNORED),
        of.position_ids,
        of.cu_seqlens,
        of.max_seqlen,
    )
    found = terms_of(none, computed, **ALL)
    assert (
        "router/idle_worst" in found
        and {name: float(term.sum) for name, term in found.items() if term.sum} == {}
    )


@pytest.mark.parametrize("scores", PROBABILITIES)
def test_the_anchor_is_zero_where_it_began_and_pulls_back(scores):
    p = PROBABILITIES[scores]
    ids = torch.arange(3, 15)
    tokens = replayed(ids, torch.tensor([0, 5, 12], dtype=torch.int32))
    weight = torch.randn(L, E, 50, requires_grad=True)

    class Model:
        pack_width = W

        def router_logits(self, batch):
            return [layer[:, batch.input_ids].T for layer in weight]

    began = [x.detach() for x in Model().router_logits(tokens)]
    anchor = Anchor(0.5, tokens, began, scores=scores)
    term = anchor.terms(Model(), Computed(torch.zeros(60, 1)), batch())["router/anchor"]
    assert term.sum == 0 and term.coefficient == 0.5 and term.sum.requires_grad
    with torch.no_grad():
        weight += 0.3 * torch.randn_like(weight)
    term = anchor.terms(Model(), Computed(torch.zeros(60, 1)), batch())["router/anchor"]
    now = [x.detach().double().numpy() for x in Model().router_logits(tokens)]
    expected = np.mean(
        [
            np.mean(
                [(p(a) * np.log(p(a) / p(b))).sum() for a, b in zip(layer, before.double().numpy())]
            )
            for layer, before in zip(now, began)
        ]
    )
    assert float(term.sum) == pytest.approx(3 * expected, rel=1e-5)  # three packs have documents
    (gradient,) = torch.autograd.grad(term.sum, weight)
    with torch.no_grad():
        weight -= 1e-2 * gradient
    after = anchor.terms(Model(), Computed(torch.zeros(60, 1)), batch())["router/anchor"]
    assert after.sum < term.sum


@pytest.mark.parametrize(
    "given", [{}, {"balance": -1.0}, {"balanse": 1.0}, {"anchor": 0.1, "anchor_tokens": 0}]
)
def test_wrong_settings_are_refused(given):
    with pytest.raises(ValueError):
        RouterSettings(**given)
