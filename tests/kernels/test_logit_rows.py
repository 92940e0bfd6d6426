"""The kernels over rows of logits against fp64, row by row and element by element."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F

import chronicals.kernels.logit_rows as module
from chronicals.kernels.logit_rows import IGNORE_INDEX, LossOptions
from comparison import ATTEMPTS, LARGER
from mutants import mutant

ROWS = 11
VOCABULARY = 211
OPTIONS = [
    LossOptions(scale, softcap, smoothing, z_loss)
    for scale, softcap, smoothing, z_loss in itertools.product(
        (1.0, -0.7), (None, 3.0), (0.0, 0.1), (0.0, 0.01)
    )
]
TYPES = [torch.float32, torch.bfloat16]


def rows_of_logits(dtype, device, rows=ROWS, vocabulary=VOCABULARY, spread=3.0):
    targets = torch.randint(0, vocabulary, (rows,), device=device)
    targets[1::4] = IGNORE_INDEX
    return (torch.randn(rows, vocabulary, device=device) * spread).to(dtype), targets


def by_the_book(x, targets, weights, options):
    """Losses and gradient from autograd, in the type of ``x``."""
    x = x.detach().requires_grad_()
    z = x * options.scale
    z = z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)
    losses = F.cross_entropy(
        z,
        targets,
        reduction="none",
        label_smoothing=options.label_smoothing,
        ignore_index=IGNORE_INDEX,
    )
    losses = losses + options.z_loss * torch.logsumexp(z, 1).square() * (targets != IGNORE_INDEX)
    losses = losses if weights is None else losses * weights
    return losses.detach(), torch.autograd.grad(losses.sum(), x)[0]


def far(got, expected):
    return ((got.double().cpu() - expected).norm() / expected.norm()).item()


def loss_and_gradient(of, x, targets, weights, options):
    """The losses, and the gradient that ``x`` and the factors stand for."""
    losses, factors = of.loss_and_gradient_(x, targets, weights, options, True)
    return losses, x.float() * factors[:, None]


def compare_loss(of, options, weighted, dtype, device, vocabulary=VOCABULARY):
    """An excess by chance does not come in so many fresh draws one after the other, each larger
    than the one before.
    """
    for attempt in range(ATTEMPTS):
        try:
            compare_rows(
                of,
                *rows_of_logits(dtype, device, ROWS * LARGER**attempt, vocabulary),
                options,
                weighted,
            )
        except AssertionError:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return


def compare_rows(of, x, targets, options, weighted):
    device = x.device
    dtype = x.dtype
    weights = torch.rand(len(x), device=device) if weighted else None
    at_home = None if weights is None else weights.cpu().double()
    exact = by_the_book(x.cpu().double(), targets.cpu(), at_home, options)
    plain = by_the_book(x.float(), targets, weights, options)
    found = loss_and_gradient(of, x, targets, weights, options)
    for ours, theirs, e, kind in zip(found, plain, exact, (torch.float32, dtype)):
        allowed = max(2 * far(theirs, e), 2 * torch.finfo(kind).eps)
        assert far(ours, e) <= allowed, f"error {far(ours, e):.2e}, allowed {allowed:.2e}"
    for ours in (*found, x):
        assert not ours[targets == IGNORE_INDEX].any()


def target_errors(of, device):
    """Relative errors of the gradient at the targets, from bf16 logits; no logit is likely, so
    that nothing cancels there.
    """
    x, targets = rows_of_logits(torch.bfloat16, device, rows=64, spread=1.0)
    exact = by_the_book(x.cpu().double(), targets.cpu(), None, LossOptions())[1]
    _, gradient = loss_and_gradient(of, x, targets, None, LossOptions())
    there = targets != IGNORE_INDEX
    at = targets[there].unsqueeze(1)
    expected = exact[there.cpu()].gather(1, at.cpu())
    return (gradient[there].gather(1, at).cpu().double() - expected).abs() / expected.abs()


@pytest.mark.slow
def test_the_target_of_a_row_is_exact(device):
    """Of a gradient that cancels over rows, what each row's target is off by would be left."""
    assert target_errors(module, device).max() < 1e-5
    wrong = mutant(
        module, "weight * scale * steepness / whole * off", "weight * scale * steepness / whole"
    )
    assert target_errors(wrong, device).max() > 1e-3


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradient(options, weighted, dtype, device):
    compare_loss(module, options, weighted, dtype, device)


@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["one pass", "two passes"])
@pytest.mark.parametrize("vocabulary", [2, 127, 8192, 8193, 20011])
def test_vocabularies_of_every_size(vocabulary, smoothing, device):
    """Narrower than a block, as wide, and several blocks."""
    compare_loss(
        module,
        LossOptions(label_smoothing=smoothing, z_loss=0.01),
        False,
        torch.float32,
        device,
        vocabulary,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["one pass", "two passes"])
def test_half_precision(smoothing, device):
    """Where numbers e^40 times as large as others have no place."""
    compare_loss(module, LossOptions(label_smoothing=smoothing), False, torch.float16, device, 8193)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 200.0])
def test_a_reference_that_is_raised(softcap, dtype, device):
    """Likelier by far than all before, in one later block, in several, by a little more than
    what is let pass, by all.
    """
    x, targets = rows_of_logits(dtype, device, rows=ROWS, vocabulary=20011)
    x[0, 5000], x[2, 20010], x[3, 19999], x[4, 0] = 60.0, 170.0, 39.0, 190.0
    x[6, 4096], x[6, 9000], x[6, 17000] = 50.0, 100.0, 101.0
    x[7] -= 150.0
    x[8, :4096] = -float("inf")
    targets[[0, 2, 3, 6, 8]] = torch.tensor([5, 5, 5, 9000, 4097], device=device)
    compare_rows(module, x, targets, LossOptions(softcap=softcap), False)


def test_without_the_gradient_the_logits_stay(device):
    x, targets = rows_of_logits(torch.float32, device)
    before = x.clone()
    module.loss_and_gradient_(x, targets, None, LossOptions(), False)
    assert torch.equal(x, before)


def test_a_growing_row_does_not_overflow(device):
    """The largest logit comes last, block after block; and first."""
    for row in (torch.linspace(-3e4, 3e4, 20000), torch.linspace(3e4, -3e4, 20000)):
        x = row[None].to(device).clone()
        targets = torch.tensor([7], device=device)
        exact = F.cross_entropy(row[None].double(), targets.cpu())
        loss, gradient = loss_and_gradient(module, x, targets, None, LossOptions())
        assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
        assert torch.isfinite(gradient).all() and torch.isfinite(x).all()


def test_rows_with_a_stride(device):
    wide = torch.randn(ROWS, 2 * VOCABULARY, device=device)
    _, targets = rows_of_logits(torch.float32, device)
    left, right = wide.clone().chunk(2, 1)
    dense = left.contiguous()
    for x in (left, dense):
        module.loss_and_gradient_(x, targets, None, LossOptions(), True)
    assert torch.equal(left, dense)
    assert torch.equal(right, wide[:, VOCABULARY:])


@pytest.mark.parametrize("target", [-1, VOCABULARY, 10**6])
def test_a_target_outside_the_vocabulary_does_not_pass_unseen(target, device):
    x, targets = rows_of_logits(torch.float32, device)
    targets[0] = target
    log_p, _, _ = module.target_log_probabilities(x, targets, LossOptions(), False)
    losses, gradient = loss_and_gradient(module, x, targets, None, LossOptions())
    for rows in (log_p, losses, gradient.sum(1)):
        assert rows.isnan().nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("target", [-1, -99, VOCABULARY, 10**6])
def test_without_a_kernel_a_target_outside_the_vocabulary_is_refused_on_the_cpu(target):
    """Not taken for the first word of the vocabulary, neither by log-probabilities nor by their
    gradient.
    """
    x, targets = rows_of_logits(torch.float32, torch.device("cpu"))
    targets[2], nothing = target, torch.zeros(len(x))
    refused = pytest.raises(
        IndexError, match=f"targets hold {target}: outside the vocabulary of {VOCABULARY}"
    )
    with refused:
        module.target_log_probabilities_reference(x, targets, LossOptions(), False)
    with refused:
        module.log_probability_gradient_reference_(
            x, targets, nothing, None, nothing, nothing, LossOptions()
        )
    with refused:
        module.loss_and_gradient_reference_(x, targets, None, LossOptions(), True)


MUTATIONS_OF_ONE_PASS = {
    "no -1 at the target": (
        "tl.exp(at_target - reference) - whole / steepness",
        "tl.exp(at_target - reference)",
    ),
    "no slope of the softcap": (
        "numerator *= 1.0 - (z / softcap) * (z / softcap)",
        "numerator *= 1.0 - 0 * (z / softcap) * (z / softcap)",
    ),
    "no slope of the softcap at the target": (
        "(at_target / softcap) * (at_target / softcap)",
        "0 * (at_target / softcap) * (at_target / softcap)",
    ),
    "no scale": ("weight * scale * steepness", "weight * steepness"),
    "no token weights": ("weight * scale", "scale"),
    "no z-loss in the gradient": (
        "steepness = 1.0 + 2.0 * z_loss * lse",
        "steepness = 1.0 + 0.0 * lse",
    ),
    "sums not shrunk": ("total *= tl.exp(reference - raised)", "total *= 1.0"),
    "earlier blocks not shrunk": ("written * tl.exp(of_block - reference)", "written * 1.0"),
    "reference never raised": ("top > reference + 40.0", "top > reference + 4000.0"),
    "last block forgotten": (
        "for start in range(0, vocabulary, BLOCK):\n    column = start + lane\n    ...",
        "for start in range(0, vocabulary - BLOCK, BLOCK):\n    column = start + lane\n    ...",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", MUTATIONS_OF_ONE_PASS)
def test_planted_faults_in_one_pass_are_found(fault, device):
    x, targets = rows_of_logits(torch.float32, device, vocabulary=20011)
    x[0, 9000], x[2, 7], targets[0], targets[2] = 190.0, -100.0, 5, 7
    for of in (module, mutant(module, *MUTATIONS_OF_ONE_PASS[fault])):
        with (
            pytest.raises(AssertionError, match="error")
            if of is not module
            else contextlib.nullcontext()
        ):
            compare_rows(of, x.clone(), targets, LossOptions(0.7, 200.0, 0.0, 0.01), True)


MUTATIONS = {
    "no -1 at the target": (
        "of_all * tl.exp(z - largest - rest) - tl.where(column == target, of_target, 0.0)",
        "of_all * tl.exp(z - largest - rest)",
    ),
    "no slope of the softcap": (
        "(z / softcap) * (z / softcap)",
        "0 * (z / softcap) * (z / softcap)",
        "_loss_and_gradient_kernel",
    ),
    "no scale": ("gradient *= scale", "gradient *= 1.0", "_loss_and_gradient_kernel"),
    "no token weights": ("weight * (1.0 + 2.0 * z_loss * lse)", "1.0 * (1.0 + 2.0 * z_loss * lse)"),
    "no z-loss in the gradient": (
        "weight * (1.0 + 2.0 * z_loss * lse)",
        "weight * (1.0 + 0.0 * lse)",
    ),
    "no smoothing in the gradient": ("gradient -= of_each", "gradient -= 0.0"),
    "sums not shrunk": ("total * shrink + tl.sum(share, axis=1)", "total + tl.sum(share, axis=1)"),
    "sums of neighbours not shrunk": ("tl.sum(total * shrink, axis=0)", "tl.sum(total, axis=0)"),
    "last block forgotten": (
        "for back in range(blocks):\n    ...",
        "for back in range(1, blocks):\n    ...",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", MUTATIONS)
def test_planted_faults_are_found(fault, device):
    broken = mutant(module, *MUTATIONS[fault])
    with pytest.raises(AssertionError, match="error"):
        compare_rows(
            broken,
            *rows_of_logits(torch.float32, device, vocabulary=20011),
            LossOptions(0.7, 3.0, 0.1, 0.01),
            True,
        )
