"""token_log_probability against the definition, with upstream gradients of each token."""

import sys

import pytest
import torch

import chronicals.kernels.logit_rows as module
from chronicals.kernels import fused_cross_entropy, linear_cross_entropy, token_log_probability
from chronicals.kernels.linear_head import Adapter
from chronicals.kernels.logit_rows import IGNORE_INDEX
from chronicals.kernels.token_log_probability import token_log_probability_reference
from comparison import assert_as_exact_as_plain
from mutants import mutant

ROWS = 11
VOCABULARY = 211
TYPES = [torch.float32, torch.bfloat16]


def both(hidden, weight, targets, bias=None, scale=1.0, softcap=None):
    """By the definition; the entropies as well."""
    z = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
    z = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z, 1)
    at_target = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == IGNORE_INDEX, 0.0, at_target), torch.distributions.Categorical(
        logits=z
    ).entropy()


def draw_head(dtype, device, rows=ROWS, bias=False):
    def draw():
        targets = torch.randint(0, VOCABULARY, (rows,), device=device)
        targets[1::4] = IGNORE_INDEX
        drawn = [
            torch.randn(rows, 19, device=device),
            torch.randn(VOCABULARY, 19, device=device) * 0.3,
        ]
        return [
            *(x.to(dtype) for x in drawn),
            targets,
            *([torch.randn(VOCABULARY, device=device).to(dtype)] if bias else []),
        ]

    return draw


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_log_probabilities_and_entropies(bias, softcap, dtype, device):
    """Each token has upstream gradients of its own."""

    def ours(hidden, weight, targets, *rest):
        options = {"bias": rest[0] if rest else None, "scale": 0.8, "softcap": softcap}
        return token_log_probability(hidden, weight, targets, chunk_size=4, entropy=True, **options)

    def plain(hidden, weight, targets, *rest):
        return both(hidden, weight, targets, rest[0] if rest else None, 0.8, softcap)

    assert_as_exact_as_plain(ours, plain, draw_head(dtype, device, rows=5, bias=bias))


def test_entropies_that_are_not_wanted(device):
    hidden, weight, targets = (
        x.requires_grad_(x.is_floating_point()) for x in draw_head(torch.float32, device)()
    )
    log_p, entropy = token_log_probability(hidden, weight, targets, chunk_size=4)
    assert not entropy.requires_grad and not entropy.any()
    expected = torch.autograd.grad(
        both(hidden, weight, targets)[0].square().sum(), (hidden, weight)
    )
    for got, e in zip(torch.autograd.grad(log_p.square().sum(), (hidden, weight)), expected):
        torch.testing.assert_close(got, e, rtol=1e-4, atol=1e-5)


def with_head_adapter(*x):
    """By the definition, the adapter's product in the dtype of the others."""
    hidden, weight, targets, a, b = x
    return token_log_probability_reference(
        hidden, weight, targets, adapter=Adapter(a, b, 0.7), scale=0.8
    )


def draw_adapter(dtype, device):
    def draw():
        hidden, weight, targets = draw_head(dtype, device)()
        a = torch.randn(3, hidden.shape[1], device=device)
        b = torch.randn(len(weight), 3, device=device)
        return [hidden, weight, targets, (a * 0.3).to(dtype), (b * 0.3).to(dtype)]

    return draw


@pytest.mark.slow
@pytest.mark.parametrize("counted", [False, True], ids=["", "counted"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_an_adapter_on_the_head(dtype, counted, device):
    """Of the states, the weight and both matrices; with a count the entropies are those of the
    targets.
    """

    def ours(hidden, weight, targets, a, b):
        count = int((targets != IGNORE_INDEX).sum()) if counted else None
        given = {"adapter": Adapter(a, b, 0.7), "scale": 0.8, "count": count}
        return token_log_probability(hidden, weight, targets, chunk_size=4, entropy=True, **given)

    def plain(*x):
        log_p, entropies = with_head_adapter(*x)
        return log_p, torch.where(x[2] == IGNORE_INDEX, 0.0, entropies) if counted else entropies

    assert_as_exact_as_plain(ours, plain, draw_adapter(dtype, device))


@pytest.mark.slow
def test_a_count_leaves_rows_without_a_target_out(device):
    """They have no gradient, and a bound that is larger than their number changes nothing."""
    hidden, weight, targets = (
        x.requires_grad_(x.is_floating_point()) for x in draw_head(torch.float32, device)()
    )
    trained = int((targets != IGNORE_INDEX).sum())
    found = []
    for count in (None, trained, trained + 2):
        log_p, _ = token_log_probability(hidden, weight, targets, chunk_size=3, count=count)
        upstream = torch.arange(ROWS, device=device)
        found.append(
            [log_p.detach(), *torch.autograd.grad((log_p * upstream).sum(), (hidden, weight))]
        )
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert (
        not found[1][1][targets == IGNORE_INDEX].any()
        and not found[1][0][targets == IGNORE_INDEX].any()
    )


def test_an_adapter_of_other_shapes_is_refused(device):
    hidden, weight, targets = draw_head(torch.float32, device)()
    with pytest.raises(ValueError, match=r"adapter is \(2, 4\), \(10, 2\): expected \[r, 19\]"):
        token_log_probability(
            hidden, weight, targets, adapter=Adapter(torch.zeros(2, 4), torch.zeros(10, 2), 1.0)
        )


def test_certain_and_uniform_predictions(device):
    """Entropy 0 and log V."""
    weight = torch.eye(8, device=device) * 1e4
    hidden = torch.stack((torch.eye(8, device=device)[3], torch.zeros(8, device=device)))
    log_p, entropy = token_log_probability(
        hidden, weight, torch.tensor([3, 5], device=device), entropy=True
    )
    torch.testing.assert_close(
        entropy.cpu(), torch.tensor([0.0, 8.0]).log1p().cpu() * 0 + torch.tensor([0.0, 2.0794415])
    )
    torch.testing.assert_close(log_p.cpu(), torch.tensor([0.0, -2.0794415]))


def test_losses_of_tokens_are_log_probabilities(device):
    hidden, weight, targets = draw_head(torch.float32, device)()
    losses = fused_cross_entropy(hidden, weight, targets, chunk_size=4, reduction="none")
    torch.testing.assert_close(losses, -both(hidden, weight, targets)[0])


@pytest.mark.parametrize("head", [token_log_probability, linear_cross_entropy])
@pytest.mark.parametrize("softcap", [0.0, -3.0, float("nan"), float("inf")])
def test_a_softcap_that_is_no_bound_is_refused(softcap, head, device):
    """0 was a bound of 1 to the kernels, and of 0 without them."""
    with pytest.raises(ValueError, match=f"softcap={softcap}: must be a positive number"):
        head(*draw_head(torch.float32, device)(), softcap=softcap)


@pytest.mark.parametrize("head", [token_log_probability, linear_cross_entropy])
def test_targets_of_another_type_are_refused(head, device):
    hidden, weight, targets = draw_head(torch.float32, device)()
    with pytest.raises(ValueError, match=r"targets are torch.float32: .*targets.long\(\)"):
        head(hidden, weight, targets.float())


PROBABILITY_MUTATIONS = {
    "entropy of the wrong sign": (
        "gradient -= tl.load(d_entropy_ptr + row) * p * (z - lse + tl.load(entropy_ptr + row))",
        "gradient += tl.load(d_entropy_ptr + row) * p * (z - lse + tl.load(entropy_ptr + row))",
    ),
    "no entropy in its own gradient": ("(z - lse + tl.load(entropy_ptr + row))", "(z - lse)"),
    "no share of the others": ("of_target * p", "0 * p"),
    "mean of the wrong logits": ("below * share", "z * share"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", PROBABILITY_MUTATIONS)
def test_planted_faults_of_log_probabilities_are_found(fault, device, monkeypatch, let_return):
    broken = mutant(module, *PROBABILITY_MUTATIONS[fault])
    user = sys.modules["chronicals.kernels.token_log_probability"]
    for name in ("target_log_probabilities", "log_probability_gradient_"):
        monkeypatch.setattr(user, name, getattr(broken, name))
    let_return(broken, tile_of=module.Tile(1, 64, 2))
    with pytest.raises(AssertionError, match="error"):
        assert_as_exact_as_plain(
            lambda *x: token_log_probability(*x, chunk_size=4, entropy=True),
            both,
            draw_head(torch.float32, device, rows=5),
        )


@pytest.mark.slow
def test_compiled(device):
    compiled = torch.compile(token_log_probability, backend="aot_eager", fullgraph=True)
    assert_as_exact_as_plain(
        lambda *x: compiled(*x, chunk_size=4, entropy=True),
        both,
        draw_head(torch.float32, device, rows=5),
    )
