"""The kernels over rows of logits against fp64, row by row and element by element."""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from mutants import mutant

import chronicals.kernels.logit_rows as module
from chronicals.kernels import fused_cross_entropy, token_log_probability
from chronicals.kernels.logit_rows import IGNORED, Shape
from comparison import assert_as_exact_as_plain

ROWS, VOCABULARY = 11, 211
SHAPES = [
    Shape(scale, softcap, smoothing, z_loss)
    for scale, softcap, smoothing, z_loss in itertools.product((1.0, -0.7), (None, 3.0), (0.0, 0.1), (0.0, 0.01))
]
TYPES = [torch.float32, torch.bfloat16]


def rows_of_logits(dtype, device, rows=ROWS, vocabulary=VOCABULARY, spread=3.0):
    targets = torch.randint(0, vocabulary, (rows,), device=device)
    targets[1::4] = IGNORED
    return (torch.randn(rows, vocabulary, device=device) * spread).to(dtype), targets


def by_the_book(x, targets, weights, shape):
    """Losses and gradient from autograd, in the type of ``x``."""
    x = x.detach().requires_grad_()
    z = x * shape.scale
    z = z if shape.softcap is None else shape.softcap * torch.tanh(z / shape.softcap)
    losses = F.cross_entropy(z, targets, reduction="none", label_smoothing=shape.label_smoothing, ignore_index=IGNORED)
    losses = losses + shape.z_loss * torch.logsumexp(z, 1).square() * (targets != IGNORED)
    losses = losses if weights is None else losses * weights
    return losses.detach(), torch.autograd.grad(losses.sum(), x)[0]


def far(got, expected):
    return ((got.double().cpu() - expected).norm() / expected.norm()).item()


def compare_loss(of, shape, weighted, dtype, device, vocabulary=VOCABULARY):
    x, targets = rows_of_logits(dtype, device, vocabulary=vocabulary)
    weights = torch.rand(ROWS, device=device) if weighted else None
    at_home = None if weights is None else weights.cpu().double()
    exact = by_the_book(x.cpu().double(), targets.cpu(), at_home, shape)
    plain = by_the_book(x.float(), targets, weights, shape)
    losses = of.loss_and_gradient_(x, targets, weights, shape, True)
    for ours, theirs, e, kind in zip((losses, x), plain, exact, (torch.float32, dtype)):
        allowed = max(2 * far(theirs, e), 2 * torch.finfo(kind).eps)
        assert far(ours, e) <= allowed, f"error {far(ours, e):.2e}, allowed {allowed:.2e}"
    assert not losses[targets == IGNORED].any() and not x[targets == IGNORED].any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradient(shape, weighted, dtype, device):
    compare_loss(module, shape, weighted, dtype, device)


@pytest.mark.parametrize("vocabulary", [2, 127, 8192, 8193, 20011])
def test_vocabularies_of_every_size(vocabulary, device):
    """Narrower than a block, as wide, and several blocks."""
    compare_loss(module, Shape(label_smoothing=0.1, z_loss=0.01), False, torch.float32, device, vocabulary)


def test_without_the_gradient_the_logits_stay(device):
    x, targets = rows_of_logits(torch.float32, device)
    before = x.clone()
    module.loss_and_gradient_(x, targets, None, Shape(), False)
    assert torch.equal(x, before)


def test_a_growing_row_does_not_overflow(device):
    """The largest logit comes last, block after block; and first."""
    for row in (torch.linspace(-3e4, 3e4, 20000), torch.linspace(3e4, -3e4, 20000)):
        x, targets = row[None].to(device).clone(), torch.tensor([7], device=device)
        exact = F.cross_entropy(row[None].double(), targets.cpu())
        assert module.loss_and_gradient_(x, targets, None, Shape(), True).item() == pytest.approx(exact.item(), rel=1e-6)
        assert torch.isfinite(x).all()


def test_rows_with_a_stride(device):
    wide = torch.randn(ROWS, 2 * VOCABULARY, device=device)
    _, targets = rows_of_logits(torch.float32, device)
    left, right = wide.clone().chunk(2, 1)
    dense = left.contiguous()
    for x in (left, dense):
        module.loss_and_gradient_(x, targets, None, Shape(), True)
    assert torch.equal(left, dense)
    assert torch.equal(right, wide[:, VOCABULARY:])


MUTATIONS = {
    "no -1 at the target": ("rest) - tl.where(column == target, of_target, 0.0)", "rest)"),
    "no slope of the softcap": (
        "CAP:\n                    gradient *= 1.0 -",
        "CAP:\n                    gradient *= 1.0 - 0 *",
    ),
    "no scale": ("                gradient *= scale\n", "                gradient *= 1.0\n"),
    "no token weights": ("of_all, of_target = weight * (", "of_all, of_target = 1.0 * ("),
    "no z-loss in the gradient": ("(1.0 + 2.0 * z_loss * lse)", "(1.0 + 0.0 * lse)"),
    "no smoothing in the gradient": ("gradient -= of_each", "gradient -= 0.0"),
    "sums not shrunk": ("total = total * shrink", "total = total"),
    "last block forgotten": ("for back in range(blocks):", "for back in range(1, blocks):"),
}


@pytest.mark.parametrize("fault", MUTATIONS)
def test_planted_faults_are_found(fault, device):
    broken = mutant(module, *MUTATIONS[fault])
    with pytest.raises(AssertionError, match="error"):
        compare_loss(broken, Shape(0.7, 3.0, 0.1, 0.01), True, torch.float32, device, vocabulary=20011)


# --- log-probabilities and entropies ----------------------------------------------------------------------------------


def both(hidden, weight, targets, bias=None, scale=1.0, softcap=None):
    """By the definition; the entropies as well."""
    z = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
    z = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z, 1)
    at_target = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == IGNORED, 0.0, at_target), torch.distributions.Categorical(logits=z).entropy()


def draw_head(dtype, device, rows=ROWS, bias=False):
    def draw():
        _, targets = rows_of_logits(dtype, device, rows=rows)
        drawn = [torch.randn(rows, 19, device=device), torch.randn(VOCABULARY, 19, device=device) * 0.3]
        return [*(x.to(dtype) for x in drawn), targets, *([torch.randn(VOCABULARY, device=device).to(dtype)] if bias else [])]

    return draw


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

    assert_as_exact_as_plain(ours, plain, [x for x in draw_head(dtype, device, rows=5, bias=bias)()])


def test_entropies_that_are_not_wanted(device):
    hidden, weight, targets = (x.requires_grad_(x.is_floating_point()) for x in draw_head(torch.float32, device)())
    log_p, entropy = token_log_probability(hidden, weight, targets, chunk_size=4)
    assert not entropy.requires_grad and not entropy.any()
    expected = torch.autograd.grad(both(hidden, weight, targets)[0].square().sum(), (hidden, weight))
    for got, e in zip(torch.autograd.grad(log_p.square().sum(), (hidden, weight)), expected):
        torch.testing.assert_close(got, e, rtol=1e-4, atol=1e-5)


def test_certain_and_uniform_predictions(device):
    """Entropy 0 and log V."""
    weight = torch.eye(8, device=device) * 1e4
    hidden = torch.stack((torch.eye(8, device=device)[3], torch.zeros(8, device=device)))
    log_p, entropy = token_log_probability(hidden, weight, torch.tensor([3, 5], device=device), entropy=True)
    torch.testing.assert_close(entropy.cpu(), torch.tensor([0.0, 8.0]).log1p().cpu() * 0 + torch.tensor([0.0, 2.0794415]))
    torch.testing.assert_close(log_p.cpu(), torch.tensor([0.0, -2.0794415]))


def test_losses_of_tokens_are_log_probabilities(device):
    hidden, weight, targets = draw_head(torch.float32, device)()
    losses = fused_cross_entropy(hidden, weight, targets, chunk_size=4, reduction="none")
    torch.testing.assert_close(losses, -both(hidden, weight, targets)[0])


PROBABILITY_MUTATIONS = {
    "entropy of the wrong sign": ("gradient -= tl.load(d_entropy_ptr", "gradient += tl.load(d_entropy_ptr"),
    "no entropy in its own gradient": ("(z - lse + tl.load(entropy_ptr + row))", "(z - lse)"),
    "no share of the others": ("- of_target * p", "- 0 * p"),
    "mean not shrunk": ("(weighted + total * tl.where(total > 0, largest - new, 0.0)) * shrink", "weighted"),
}


@pytest.mark.parametrize("fault", PROBABILITY_MUTATIONS)
def test_planted_faults_of_log_probabilities_are_found(fault, device, monkeypatch):
    broken = mutant(module, *PROBABILITY_MUTATIONS[fault])
    user = sys.modules["chronicals.kernels.token_log_probability"]
    for name in ("log_probabilities", "log_probability_gradient_"):
        monkeypatch.setattr(user, name, getattr(broken, name))
    monkeypatch.setattr(broken, "_tile", lambda vocabulary: module.Tile(1, 64, 2))
    with pytest.raises(AssertionError, match="error"):
        assert_as_exact_as_plain(
            lambda *x: token_log_probability(*x, chunk_size=4, entropy=True), both, draw_head(torch.float32, device, rows=5)()
        )


def test_compiled(device):
    compiled = torch.compile(token_log_probability, backend="aot_eager", fullgraph=True)
    assert_as_exact_as_plain(
        lambda *x: compiled(*x, chunk_size=4, entropy=True), both, draw_head(torch.float32, device, rows=5)()
    )
