"""The kernel over rows of a student's and a teacher's logits against autograd of the
definitions, in fp64.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import chronicals.kernels.divergence_rows as module
from chronicals.kernels.divergence_rows import ROW_RESULTS, DistillationOptions, Divergence
from chronicals.kernels.logit_rows import IGNORE_INDEX, LossOptions, Tile
from comparison import ATTEMPTS, LARGER
from mutants import mutant

ROWS = 7
VOCABULARY = 149
TYPES = [torch.float32, torch.bfloat16]
DIVERGENCES = {
    "forward_kl": (Divergence.forward_kl(), lambda p, q: kl(p, q)),
    "reverse_kl": (Divergence.reverse_kl(), lambda p, q: kl(q, p)),
    "jsd": (
        Divergence.jsd(0.3),
        lambda p, q: 0.3 * kl(p, mix(p, q, 0.3)) + 0.7 * kl(q, mix(p, q, 0.3)),
    ),
    "skew_kl": (Divergence.skew_kl(0.2), lambda p, q: kl(p, mix(p, q, 0.2))),
    "skew_reverse_kl": (Divergence.skew_reverse_kl(0.2), lambda p, q: kl(q, mix(q, p, 0.2))),
}
"""By name: ours, and the definition as each paper has it."""


def kl(p, q):
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def mix(one, other, share):
    """The logarithm of ``share`` of one and the rest of the other."""
    return torch.logaddexp(one + math.log(share), other + math.log(1 - share))


def options_of(name, temperature=1.0, softcap=None, cross_entropy=0.0, scale=1.0):
    return DistillationOptions(
        DIVERGENCES[name][0],
        LossOptions(scale, softcap),
        LossOptions(0.8, None),
        temperature,
        0.7,
        cross_entropy,
    )


def by_the_book(x, y, targets, weights, options, name):
    """Found values and the gradient, from autograd, in the type of ``x``."""
    x = x.detach().requires_grad_()
    z = x * options.student.scale
    z = (
        z
        if options.student.softcap is None
        else options.student.softcap * torch.tanh(z / options.student.softcap)
    )
    teacher = y * options.teacher.scale
    p, q = ((logits / options.temperature).log_softmax(-1) for logits in (teacher, z))
    d = DIVERGENCES[name][1](p, q).masked_fill(targets == IGNORE_INDEX, 0.0)
    own, theirs = (
        F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE_INDEX)
        for logits in (z, teacher)
    )
    losses = options.of_divergence * d + options.of_cross_entropy * own
    total = (losses if weights is None else losses * weights).sum()
    same = [
        (z.argmax(1) == other).to(x.dtype) * (targets != IGNORE_INDEX)
        for other in (teacher.argmax(1), targets)
    ]
    return torch.stack([d, own, theirs, *same]).detach(), torch.autograd.grad(total, x)[0]


def draw(dtype, device, rows=ROWS, spread=2.0):
    targets = torch.randint(0, VOCABULARY, (rows,), device=device)
    x, y = (torch.randn(rows, VOCABULARY, device=device) * spread for _ in range(2))
    y[::2] = x[::2] + 0.1 * torch.randn_like(
        x[::2]
    )  # a student that is near is where divergences cancel
    targets[::3] = x[::3].argmax(1)
    targets[1::4] = IGNORE_INDEX
    return x.to(dtype), y.to(dtype), targets


def far(got, expected):
    return ((got.double().cpu() - expected).norm() / expected.norm()).item()


def compare(of, name, dtype, device, weighted=False, teachers=None, **changes):
    """An excess by chance does not come in so many fresh draws one after the other, each larger
    than the one before.
    """
    for attempt in range(ATTEMPTS):
        try:
            x, y, targets = draw(dtype, device, ROWS * LARGER**attempt)
            compare_rows(
                of, name, x, y.to(teachers or dtype), targets, options_of(name, **changes), weighted
            )
        except AssertionError:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return


def compare_rows(of, name, x, y, targets, options, weighted):
    device = x.device
    dtype = x.dtype
    weights = torch.rand(len(x), device=device) if weighted else None
    at_home = None if weights is None else weights.cpu().double()
    exact = by_the_book(x.cpu().double(), y.cpu().double(), targets.cpu(), at_home, options, name)
    plain = by_the_book(x.float(), y.float(), targets, weights, options, name)
    found = of.divergence_and_gradient_(x, y, targets, weights, options, True)
    for ours, theirs, e, kind in zip((found, x), plain, exact, (torch.float32, dtype)):
        allowed = max(2 * far(theirs, e), 2 * torch.finfo(kind).eps)
        assert far(ours, e) <= allowed, f"error {far(ours, e):.2e}, allowed {allowed:.2e}"
    assert torch.equal(found[3:].double().cpu(), exact[0][3:]), "likeliest tokens: error"
    for row, ours, e, theirs in zip(ROW_RESULTS[:3], found, exact[0], plain[0]):
        allowed = max(2 * far(theirs, e), 4 * torch.finfo(torch.float32).eps)
        assert far(ours, e) <= allowed, f"{row}: error {far(ours, e):.2e}, allowed {allowed:.2e}"
    assert not x[targets == IGNORE_INDEX].any() and not found[:, targets == IGNORE_INDEX].any()


@pytest.fixture(params=["kernel", "reference"])
def way(request, let_return):
    """The module, whose kernel works through rows in several blocks, or in plain torch."""
    if request.param == "reference":
        let_return(module, runs_triton=False)
    let_return(module, tile_of=Tile(1, 64, 2))
    return module


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("temperature", "cross_entropy"), [(1.0, 0.0), (1.0, 0.4), (2.5, 0.4), (0.5, 0.0)]
)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_divergence(name, temperature, cross_entropy, dtype, way, device):
    compare(way, name, dtype, device, temperature=temperature, cross_entropy=cross_entropy)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name", ["forward_kl", "jsd"])
def test_scale_softcap_and_weights(name, softcap, weighted, way, device):
    compare(
        way,
        name,
        torch.float32,
        device,
        weighted,
        softcap=softcap,
        scale=-0.7,
        temperature=2.0,
        cross_entropy=0.3,
    )


@pytest.mark.parametrize("name", DIVERGENCES)
def test_types_may_differ(name, way, device):
    """A teacher in bf16 beside a student in fp32."""
    compare(way, name, torch.float32, device, teachers=torch.bfloat16)


@pytest.mark.slow
def test_without_a_gradient_the_logits_stay(way, device):
    for name in DIVERGENCES:
        x, y, targets = draw(torch.float32, device)
        before = x.clone()
        found = way.divergence_and_gradient_(x, y, targets, None, options_of(name, 2.0), False)
        assert torch.equal(x, before)
        again = way.divergence_and_gradient_(x, y, targets, None, options_of(name, 2.0), True)
        torch.testing.assert_close(found, again, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_equal_sides_have_no_divergence_and_no_gradient(name, way, device):
    x, _, targets = draw(torch.float32, device)
    y = x.clone() / 0.8
    found = way.divergence_and_gradient_(x, y, targets, None, options_of(name, 1.5), True)
    assert found[0].abs().max() < 1e-5 and x.abs().max() < 1e-6
    assert (found[3] == (targets != IGNORE_INDEX)).all()


@pytest.mark.parametrize("name", ["jsd", "skew_kl", "skew_reverse_kl"])
def test_tokens_that_are_banned_on_one_side(name, way, device):
    """A logit of minus infinity is a chance of zero, which a mixture can stand; JSD is then at
    most log 2.
    """
    x = torch.full((4, 8), -math.inf, device=device)
    y = x.clone()
    x[:, :2], y[:, 2:4], x[3], y[3] = 0.0, 0.0, torch.arange(8.0), torch.arange(8.0)
    y[2, :3] = 1.0  # one token in common
    targets = torch.tensor([0, 1, 0, 3], device=device)
    options = DistillationOptions(DIVERGENCES[name][0], LossOptions(), LossOptions())
    exact = DIVERGENCES[name][1](
        *(logits.double().cpu().clamp(min=-1e5).log_softmax(-1) for logits in (y, x))
    )
    found = way.divergence_and_gradient_(x, y, targets, None, options, True)
    torch.testing.assert_close(found[0].double().cpu(), exact, rtol=1e-5, atol=1e-6)
    assert torch.isfinite(x).all()


def test_logits_far_apart_do_not_overflow(way, device):
    """A student that holds impossible what the teacher is sure of: the divergence is the
    distance of the logits.
    """
    for name, expected in (
        ("forward_kl", 3e4),
        ("reverse_kl", 3e4),
        ("jsd", 0.3 * -math.log(0.3) + 0.7 * -math.log(0.7)),
    ):
        x = torch.tensor([[0.0, 3e4, 0.0]], device=device)
        y = torch.tensor([[3e4, 0.0, 0.0]], device=device)
        options = DistillationOptions(DIVERGENCES[name][0], LossOptions(), LossOptions())
        found = way.divergence_and_gradient_(
            x, y, torch.tensor([1], device=device), None, options, True
        )
        assert found[0].item() == pytest.approx(expected, rel=1e-5)
        assert torch.isfinite(x).all()


@pytest.mark.slow
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_what_is_no_number_is_not_hidden(side, way, device):
    for name in DIVERGENCES:
        x, y, targets = draw(torch.float32, device)
        (x if side == "student" else y)[0, 7] = math.nan
        found = way.divergence_and_gradient_(x, y, targets, None, options_of(name), True)
        assert math.isnan(found[0, 0]) and torch.isfinite(found[0, 1:]).all()


def test_the_ends_of_the_jsd_are_the_divergences_themselves():
    assert (
        Divergence.jsd(0.0) == Divergence.forward_kl()
        and Divergence.jsd(1.0) == Divergence.reverse_kl()
    )
    assert (
        Divergence.skew_kl(0.0) == Divergence.forward_kl()
        and Divergence.skew_reverse_kl(0.0) == Divergence.reverse_kl()
    )
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=f"beta={wrong}"):
            Divergence.jsd(wrong)
        with pytest.raises(ValueError, match=f"skew={wrong}"):
            Divergence.skew_kl(wrong)


MUTATIONS = {
    "the other sign": (
        "gradient = of_d * (h - q * sum_of_h)",
        "gradient = of_d * (q * sum_of_h - h)",
    ),
    "temperature lost in the gradient": (
        "weight * of_divergence / temperature",
        "weight * of_divergence",
    ),
    "teacher at temperature 1": (
        (
            "log_p = (shaped(y, y_scale, y_softcap, Y_SOFTCAP) - y_top) / temperature - "
            "y_tempered\n"
            "q, divergence, h = _parts(log_q, log_p, of_teacher, of_student, share, KIND)"
        ),
        (
            "log_p = (shaped(y, y_scale, y_softcap, Y_SOFTCAP) - y_top) - y_rest\n"
            "q, divergence, h = _parts(log_q, log_p, of_teacher, of_student, share, KIND)"
        ),
    ),
    "chances of the cross-entropy at the temperature": (
        "tl.exp(z - x_top - x_rest) if TEMPERED else q",
        "tl.exp(z - x_top - x_rest) if not TEMPERED else q",
    ),
    "the other side of the mixture": ("of_teacher * (1.0 - share)", "of_teacher * share"),
    "no mean is taken off": ("(h - q * sum_of_h)", "(h + q)"),
    "another likeliest token": ("top > largest", "top < largest"),
}


@pytest.mark.parametrize("fault", MUTATIONS)
def test_planted_faults_are_found(fault, device, let_return):
    broken = mutant(module, *MUTATIONS[fault])
    let_return(broken, tile_of=Tile(1, 64, 2))
    with pytest.raises(AssertionError, match="error"):
        compare_rows(
            broken, "jsd", *draw(torch.float32, device), options_of("jsd", 2.0, None, 0.4), False
        )
