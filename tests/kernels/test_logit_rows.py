"""The kernels over rows of logits against fp64, row by row and element by element."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from mutants import mutant

import chronicals.kernels.logit_rows as module
from chronicals.kernels.logit_rows import IGNORED, Shape

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


@pytest.mark.parametrize("target", [-1, VOCABULARY, 10**6])
def test_a_target_outside_the_vocabulary_does_not_pass_unseen(target, device):
    x, targets = rows_of_logits(torch.float32, device)
    targets[0] = target
    log_p, _, _ = module.log_probabilities(x, targets, Shape(), False)
    losses = module.loss_and_gradient_(x, targets, None, Shape(), True)
    for rows in (log_p, losses, x.sum(1)):
        assert rows.isnan().nonzero().flatten().tolist() == [0]


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
