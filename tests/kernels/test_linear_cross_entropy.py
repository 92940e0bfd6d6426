"""linear_cross_entropy and fused_cross_entropy against log-softmax by the book and torch's own
cross_entropy.

On the CPU the long grid takes the plain rows, as a run without a card does; ``test_logit_rows.py``
interprets the kernels.
"""

import contextlib
import itertools
import math
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels import fused_cross_entropy, linear_cross_entropy, products
from chronicals.kernels.launch import OPERATOR_FUNCTIONS, interpreting
from chronicals.kernels.linear_cross_entropy import linear_cross_entropy_reference
from chronicals.kernels.linear_head import Adapter, true_places_first
from comparison import assert_as_exact_as_plain
from mutants import mutant
from seen_shapes import Shapes

TYPES = [torch.float32, torch.bfloat16]
module = sys.modules[
    "chronicals.kernels.linear_cross_entropy"
]  # the package has a function of that name
ROWS = 23
WIDTH = 19
VOCABULARY = 101
WEIGHT = 0.3  # logits of a standard deviation near 1.3
IGNORED = -100


@pytest.fixture(autouse=True)
def kernels(request):
    interpreted = "interpreted" in request.keywords and not torch.cuda.is_available()
    with interpreting() if interpreted else contextlib.nullcontext():
        yield


def plain(hidden, weight, targets, bias=None, eighths=None, scale=1.0, softcap=None) -> Tensor:
    """All logits at once, by the definition; ``eighths`` are token weights as whole numbers."""
    z = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
    z = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    chances = torch.log_softmax(z, -1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    losses = torch.where(targets == IGNORED, 0.0, -chances)
    return (losses if eighths is None else losses * eighths / 8).sum()


def fused(function=linear_cross_entropy, chunk_size=7, scale=1.0, softcap=None):
    def call(hidden, weight, targets, bias=None, eighths=None):
        return function(
            hidden,
            weight,
            targets,
            bias=bias,
            scale=scale,
            softcap=softcap,
            chunk_size=chunk_size,
            weights=None if eighths is None else eighths / 8,
        )

    return call


def draw_targets(rows, device, ignored=0.3):
    targets = torch.randint(0, VOCABULARY, (rows,), device=device)
    targets[torch.rand(rows, device=device) < ignored] = IGNORED
    return targets


def inputs(dtype, device, rows=ROWS, bias=False, weighted=False, ignored=0.3):
    def draw():
        drawn = [
            torch.randn(rows, WIDTH, device=device).to(dtype),
            (torch.randn(VOCABULARY, WIDTH, device=device) * WEIGHT).to(dtype),
            draw_targets(rows, device, ignored),
        ]
        if bias:
            drawn.append(torch.randn(VOCABULARY, device=device).to(dtype))
        if weighted:
            drawn.append(torch.randint(0, 24, (rows,), device=device))
        return drawn

    return draw


def compare(draw, bias=False, weighted=False, scale=1.0, softcap=None, **options):
    def arrange(function):
        def call(hidden, weight, targets, *rest):
            rest = list(rest)
            b = rest.pop(0) if bias else None
            return function(hidden, weight, targets, b, rest.pop(0) if weighted else None)

        return call

    def definition(*tensors):
        return plain(*tensors, scale=scale, softcap=softcap)

    assert_as_exact_as_plain(
        arrange(fused(scale=scale, softcap=softcap, **options)), arrange(definition), draw
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.25, -1.5])
def test_every_option(scale, softcap, weighted, bias, dtype, device):
    draw = inputs(dtype, device, bias=bias, weighted=weighted)
    compare(draw, bias=bias, weighted=weighted, scale=scale, softcap=softcap)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 2, 7, ROWS - 1, ROWS, 4096])
@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_every_chunk_size(rows, chunk_size, dtype, device):
    compare(inputs(dtype, device, rows=rows), chunk_size=chunk_size)


def test_no_target_ignored(device):
    compare(inputs(torch.float32, device, ignored=0.0))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_non_contiguous(dtype, device):
    def draw():
        hidden = torch.randn(WIDTH, 2 * ROWS, device=device).to(dtype).t()[::2]
        weight = (torch.randn(WIDTH, VOCABULARY, device=device) * WEIGHT).to(dtype).t()
        targets = torch.stack((draw_targets(ROWS, device), draw_targets(ROWS, device)), 1)[:, 0]
        bias = torch.randn(VOCABULARY, 2, device=device).to(dtype)[:, 0]
        eighths = torch.randint(0, 24, (2 * ROWS,), device=device)[::2]
        assert not any(x.is_contiguous() for x in (hidden, weight, targets, bias, eighths))
        return hidden, weight, targets, bias, eighths

    compare(draw, bias=True, weighted=True, scale=0.5, softcap=4.0)


@pytest.mark.parametrize("ignored", ["all", "no rows"])
def test_nothing_to_train_on(ignored, device):
    rows = 0 if ignored == "no rows" else ROWS
    hidden, weight, targets = inputs(torch.float32, device, rows=rows, ignored=1.1)()
    hidden = hidden.requires_grad_()
    weight = weight.requires_grad_()
    loss = linear_cross_entropy(
        hidden, weight, targets, softcap=3.0, weights=torch.ones(rows, device=device)
    )
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.isnan(fused_cross_entropy(hidden, weight, targets))
    assert torch.equal(
        fused_cross_entropy(hidden, weight, targets, reduction="none"),
        torch.zeros(rows, device=device),
    )


def test_ignored_rows_are_as_if_absent(device):
    """Their hidden states get no gradient, and a loss over the others alone is the same."""
    hidden, weight, targets = inputs(torch.float32, device)()
    targets[0], targets[1] = IGNORED, 5
    here = hidden.clone().requires_grad_()
    linear_cross_entropy(here, weight, targets, chunk_size=4).backward()
    kept = targets != IGNORED
    there = hidden[kept].requires_grad_()
    linear_cross_entropy(there, weight, targets[kept], chunk_size=4).backward()
    assert not here.grad[~kept].any()
    torch.testing.assert_close(here.grad[kept], there.grad, rtol=1e-5, atol=1e-6)


def test_likely_targets_keep_their_small_losses(device):
    """Where the model is sure and right, loss and gradient are small differences of large
    logits. The logits themselves are exact here (whole numbers), so that only what is made of
    them counts."""

    def draw():
        weight = torch.randint(-3, 4, (VOCABULARY, WIDTH), device=device).float()
        targets = torch.randint(0, VOCABULARY, (ROWS,), device=device)
        return weight[targets] / 8, weight, targets

    compare(draw)


def test_far_logits_do_not_overflow(device):
    hidden = torch.full((3, 2), 100.0, device=device, requires_grad=True)
    weight = torch.tensor([[1e3, 0.0], [0.0, 1e3], [-1e3, 0.0]], device=device, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2], device=device))
    loss.backward()
    assert loss.item() == pytest.approx(2e5 + 3 * math.log(2), rel=1e-7)
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


# --- fused_cross_entropy against torch
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(ROWS,), (1,), (3, 5), (2, 1, 4)], ids=str)
def test_reductions_equal_torch(shape, reduction, dtype, device):
    """Upstream gradients are random: for ``none`` every token has its own."""

    def draw():
        rows = torch.Size(shape).numel()
        targets = draw_targets(rows, device)
        targets[0] = 3  # a mean over nothing is not a number
        return (
            torch.randn(*shape, WIDTH, device=device).to(dtype),
            (torch.randn(VOCABULARY, WIDTH, device=device) * WEIGHT).to(dtype),
            targets.view(shape),
        )

    def ours(hidden, weight, targets):
        return fused_cross_entropy(hidden, weight, targets, chunk_size=4, reduction=reduction)

    def torchs(hidden, weight, targets):
        logits = (hidden @ weight.t()).flatten(0, -2)
        losses = F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)),
            targets.flatten(),
            reduction=reduction,
        )
        return losses.view(targets.shape) if reduction == "none" else losses

    assert_as_exact_as_plain(ours, torchs, draw)


def test_mean_is_the_default_and_float32(device):
    hidden, weight, targets = inputs(torch.bfloat16, device)()
    targets[0] = 3
    loss = fused_cross_entropy(hidden, weight, targets)
    assert loss.shape == () and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(
        F.cross_entropy((hidden @ weight.t()).float(), targets).item(), rel=1e-5
    )
    assert fused_cross_entropy(hidden, weight, targets, reduction="none").dtype == torch.float32


def test_none_is_zero_where_ignored(device):
    hidden, weight, targets = inputs(torch.float32, device)()
    losses = fused_cross_entropy(hidden, weight, targets, reduction="none")
    assert not losses[targets == IGNORED].any() and (losses[targets != IGNORED] > 0).all()


def test_upstream_gradient_scales(device):
    """Three times the loss has three times the gradient, of every input."""

    def gradients(factor):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        (
            linear_cross_entropy(*leaves[:2], targets, bias=leaves[2], chunk_size=5) * factor
        ).backward()
        return [x.grad for x in leaves]

    hidden, weight, targets, bias = inputs(torch.float32, device, bias=True)()
    for once, thrice in zip(gradients(1.0), gradients(-3.0), strict=True):
        assert once.abs().max() > 0
        torch.testing.assert_close(thrice, once * -3, rtol=1e-6, atol=0)


# --- what is frozen, and what exists
# -------------------------------------------------------------------------------


@contextlib.contextmanager
def operators_seen_through():
    """Our operators replaced by what they do, whose tensors a dispatch mode sees."""
    with pytest.MonkeyPatch.context() as patch:
        for of in (module, sys.modules["chronicals.kernels.token_log_probability"]):
            for name in ("_forward", "_backward"):
                if hasattr(of, name):
                    patch.setattr(of, name, OPERATOR_FUNCTIONS[getattr(of, name)])
        yield


def run_with_shapes(hidden, weight, targets, bias=None):
    with operators_seen_through(), Shapes() as shapes:
        loss = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_size=7)
        if loss.requires_grad:
            loss.backward()
    return loss.detach(), shapes.seen


@pytest.mark.parametrize("trained", list(itertools.product([True, False], repeat=3)), ids=str)
def test_frozen_inputs(trained, device):
    """What is frozen gets no gradient, and what is not gets the same as ever, bit for bit."""
    drawn = inputs(torch.float32, device, bias=True)()
    targets = drawn.pop(2)
    every = [x.clone().requires_grad_() for x in drawn]
    some = [x.clone().requires_grad_(flag) for x, flag in zip(drawn, trained)]
    full, full_shapes = run_with_shapes(*every[:2], targets, every[2])
    loss, shapes = run_with_shapes(*some[:2], targets, some[2])
    assert torch.equal(loss, full)
    for a, b, flag in zip(every, some, trained, strict=True):
        assert (b.grad is not None) == flag
        assert not flag or (torch.equal(a.grad, b.grad) and a.grad.any())
    size_of_head = torch.Size((VOCABULARY, WIDTH))
    assert size_of_head in full_shapes, "the count of shapes sees nothing"
    if not trained[1]:  # the fp32 gradient of a frozen head must not even be allocated
        assert size_of_head not in shapes


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_size", [1, 6, 13])
def test_no_more_rows_of_logits_than_asked_for(chunk_size, reduction, device):
    """Of all that is made, forward and backward, nothing as wide as the vocabulary has more rows
    than a chunk.
    """
    rows, width, vocabulary = (
        61,
        1,
        211,
    )  # so narrow that the head itself is no larger than one row of logits
    hidden = torch.randn(rows, width, device=device, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=device, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,), device=device)
    with operators_seen_through(), Shapes() as shapes:
        loss = fused_cross_entropy(
            hidden, weight, targets, chunk_size=chunk_size, reduction=reduction
        )
        loss.backward(torch.rand_like(loss))
    assert weight.grad.any() and hidden.grad.any()
    sizes = [shape.numel() for shape in shapes.seen if vocabulary in shape]
    assert max(sizes) == chunk_size * vocabulary
    assert max(shape.numel() for shape in shapes.seen) == chunk_size * vocabulary


# --- errors
# --------------------------------------------------------------------------------------------------------

GOOD = {"hidden": (5, 4), "weight": (11, 4), "targets": (5,)}
WRONG = {
    "narrow weight": {"weight": (11, 3)},
    "weight of one dimension": {"weight": (11,)},
    "weight of three dimensions": {"weight": (1, 11, 4)},
    "too few targets": {"targets": (4,)},
    "one target": {"targets": (1,)},
    "targets of two dimensions": {"targets": (5, 1)},
    "hidden of one dimension": {"hidden": (4,)},
}


def tensors(shapes):
    shapes = {**GOOD, **shapes}
    targets = torch.zeros(shapes["targets"], dtype=torch.long)
    return torch.randn(shapes["hidden"]), torch.randn(shapes["weight"]), targets


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("function", [linear_cross_entropy, fused_cross_entropy])
def test_shapes_that_do_not_fit_are_refused(function, case):
    with pytest.raises(ValueError):
        function(*tensors(WRONG[case]))


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("chunk_size", [0, -1])
def test_chunk_size_must_be_positive(chunk_size, reduction):
    with pytest.raises(ValueError, match=f"chunk_size={chunk_size}"):
        fused_cross_entropy(*tensors({}), chunk_size=chunk_size, reduction=reduction)


@pytest.mark.parametrize("reduction", ["avg", "", None, "Mean"])
def test_unknown_reduction_is_refused(reduction):
    with pytest.raises(ValueError, match=r"reduction=.*expected 'mean', 'sum' or 'none'"):
        fused_cross_entropy(*tensors({}), reduction=reduction)


MISFITS = [
    ("weights", (5, 1)),
    ("weights", (1,)),
    ("weights", (4,)),
    ("bias", (1,)),
    ("bias", (10,)),
]


@pytest.mark.parametrize("name, shape", MISFITS)
def test_token_weights_and_bias_that_do_not_fit_are_refused(name, shape):
    """Broadcast, they would give another loss without a word."""
    with pytest.raises(ValueError, match=name):
        linear_cross_entropy(*tensors({}), **{name: torch.ones(shape)})


@pytest.mark.parametrize("target", [-1, -99, 11])
def test_targets_outside_the_vocabulary_are_refused(target):
    """As torch refuses them; only -100 is ignored. On a card this is an assertion of the device."""
    hidden, weight, targets = tensors({})
    targets[2] = target
    with pytest.raises((IndexError, ValueError, RuntimeError)):
        F.cross_entropy(hidden @ weight.t(), targets)
    with pytest.raises((IndexError, ValueError, RuntimeError)):
        linear_cross_entropy(hidden, weight, targets)


@pytest.mark.slow
def test_compiled(device):
    """As exact; on the CPU the choice of the trained rows breaks the graph."""
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager")
    compare(
        inputs(torch.float32, device, bias=True, weighted=True),
        function=compiled,
        bias=True,
        weighted=True,
    )


def test_under_autocast(device):
    """fp32 weights, products in bf16: as exact as torch's under the same autocast."""

    def autocast(function):
        def call(*tensors):
            narrow = tensors[0].dtype == torch.float32
            with torch.autocast(tensors[0].device.type, dtype=torch.bfloat16, enabled=narrow):
                return function(*tensors)

        return call

    assert_as_exact_as_plain(autocast(fused()), autocast(plain), inputs(torch.float32, device))


# --- planted faults
# ------------------------------------------------------------------------------------------------

MUTATIONS = {
    "last chunk only": ("beta = 0 if first else 1", "beta = 0"),
    "no upstream gradient": (
        "scale_rows(gradient, upstream, torch.empty_like(gradient, dtype=kind))",
        "scale_rows(gradient, torch.ones_like(upstream), torch.empty_like(gradient, dtype=kind))",
    ),
    "bias of one chunk": (
        "_add_product(d_bias[:, None], x.t(), factors[:, None].to(x.dtype), first)",
        "_add_product(d_bias[:, None], x.t(), factors[:, None].to(x.dtype), True)",
    ),
    "chunks of hidden at the beginning": ("d_states[part]", "d_states[: len(x)]"),
    "token weights of the first rows": (
        "weights if weights is None or rows is None else weights[rows]",
        "weights",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_wrong_backward_is_noticed(fault, device):
    if device.type == "cuda" and fault == "token weights of the first rows":
        pytest.skip("without a count no rows are left out on a card")
    draw = inputs(torch.float32, device, bias=True, weighted=True)
    options = {"bias": True, "weighted": True, "scale": 0.5, "softcap": 3.0}
    compare(draw, **options)
    with pytest.raises((AssertionError, RuntimeError), match=r"tensor [0123]: .* error|shape"):
        compare(draw, function=mutant(module, *MUTATIONS[fault]).linear_cross_entropy, **options)


# --- smoothing, z-loss, adapters, counts
# -----------------------------------------------------------------------------


WITH_KERNELS = {"bias": True, "weighted": True, "scale": 0.5, "softcap": 3.0, "chunk_size": 4}


@pytest.mark.slow
@pytest.mark.interpreted
def test_kernels_of_the_rows(device):
    """The whole way with the kernels, as on a card, whose rows of gradients still want their
    factors.
    """
    compare(inputs(torch.float32, device, rows=11, bias=True, weighted=True), **WITH_KERNELS)


FACTORS = {
    "hidden states without factors": (
        "scale_rows(product(x, weight, factors.dtype), factors, out)",
        "scale_rows(product(x, weight, factors.dtype), torch.ones_like(factors), out)",
    ),
    "head without factors": (
        "scale_rows(hidden, factors, torch.empty_like(hidden))",
        "scale_rows(hidden, torch.ones_like(factors), torch.empty_like(hidden))",
    ),
    "bias without factors": (
        "factors[:, None].to(x.dtype)",
        "torch.ones_like(factors)[:, None].to(x.dtype)",
    ),
    "factors of another row": ("at // width * factor_stride", "at // width // 2 * factor_stride"),
    "one factor for all": ("factors.stride(0) if factors.ndim else 0", "0"),
}


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("fault", FACTORS)
def test_forgotten_factors_are_noticed(fault, device):
    broken = mutant(module, *FACTORS[fault])
    with pytest.raises(AssertionError, match=r"tensor [0123]: .* error"):
        compare(
            inputs(torch.float32, device, rows=11, bias=True, weighted=True),
            function=broken.linear_cross_entropy,
            **WITH_KERNELS,
        )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothing_and_z_loss(smoothing, z_loss, dtype, device):
    def torchs(hidden, weight, targets):
        logits = hidden @ weight.t()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        return (losses + z_loss * torch.logsumexp(logits, 1).square() * (targets != IGNORED)).sum()

    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    for ours in (partial(linear_cross_entropy, chunk_size=7), linear_cross_entropy_reference):
        assert_as_exact_as_plain(partial(ours, **options), torchs, inputs(dtype, device))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_adapter_on_the_head(dtype, frozen, device):
    def draw():
        hidden, weight, targets = inputs(dtype, device)()
        a, b = (
            torch.randn(shape, device=device).to(dtype) * 0.3
            for shape in ((4, WIDTH), (VOCABULARY, 4))
        )
        return hidden, weight, targets, a, b

    def ours(hidden, weight, targets, a, b):
        return linear_cross_entropy(
            hidden, weight, targets, adapter=Adapter(a, b, 0.5), chunk_size=7
        )

    def torchs(hidden, weight, targets, a, b):
        logits = hidden @ weight.t() + 0.5 * (hidden @ a.t()) @ b.t()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, reduction="sum")

    if not frozen:
        assert_as_exact_as_plain(ours, torchs, draw)
        return
    hidden, weight, targets, a, b = draw()
    trained = [x.requires_grad_() for x in (hidden, a, b)]
    full = torch.autograd.grad(
        linear_cross_entropy(
            hidden,
            weight.clone().requires_grad_(),
            targets,
            adapter=Adapter(a, b, 0.5),
            chunk_size=7,
        ),
        trained,
    )
    with operators_seen_through(), Shapes() as shapes:
        some = torch.autograd.grad(
            linear_cross_entropy(hidden, weight, targets, adapter=Adapter(a, b, 0.5), chunk_size=7),
            trained,
        )
    assert all(torch.equal(x, y) for x, y in zip(full, some))
    assert torch.Size((VOCABULARY, WIDTH)) not in shapes.seen


def test_adapter_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="adapter is"):
        linear_cross_entropy(
            *tensors({}), adapter=Adapter(torch.zeros(2, 4), torch.zeros(10, 2), 1.0)
        )


# --- rows of the weight that others stand for
# ------------------------------------------------------------------------

REPLACED = [5, 0, VOCABULARY - 1, 40]


def with_rows(function=linear_cross_entropy, **options):
    def call(hidden, values, weight, bias, eighths, targets):
        rows = module.Rows(torch.tensor(REPLACED, device=hidden.device), values)
        return function(
            hidden, weight, targets, rows=rows, bias=bias, weights=eighths / 8, **options
        )

    return call


def rows_and_the_rest(dtype, device):
    def draw():
        hidden, weight, targets, bias, eighths = inputs(dtype, device, bias=True, weighted=True)()
        targets[:4] = torch.tensor(REPLACED)
        return (
            hidden,
            torch.randn(len(REPLACED), WIDTH, device=device).to(dtype),
            weight,
            bias,
            eighths,
            targets,
        )

    return draw


def rows_by_the_book(hidden, values, weight, bias, eighths, targets):
    whole = weight.index_copy(0, torch.tensor(REPLACED, device=hidden.device), values)
    return plain(hidden, whole, targets, bias, eighths, scale=0.5, softcap=3.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_replaced_rows(dtype, device):
    """Targets, bias and weights of rows among them, in chunks."""
    options = {"scale": 0.5, "softcap": 3.0}
    for ours in (
        with_rows(chunk_size=7, **options),
        with_rows(linear_cross_entropy_reference, **options),
    ):
        assert_as_exact_as_plain(ours, rows_by_the_book, rows_and_the_rest(dtype, device))


ROW_FAULTS = {
    "the frozen row has a part": ("x.index_fill_(1, replaced.ids, 0)", "pass"),
    "logits of the frozen rows": (
        "x.index_copy_(1, replaced.ids, logits)",
        "pass",
    ),
    "states without the rows": (
        "product(x, weight, factors.dtype) + product(theirs, rows.values, factors.dtype)",
        "product(x, weight, factors.dtype)",
    ),
    "a bias of the first rows": ("bias[replaced.ids]", "bias[: len(replaced.ids)]"),
    "no bias of the rows": ("theirs is not None and index is not None", "False"),
    "rows of the last chunk": (
        "_add_product(d_rows, theirs.t(), scaled, first)",
        "_add_product(d_rows, theirs.t(), scaled, True)",
    ),
}


@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_a_wrong_gradient_of_rows_is_noticed(fault, device):
    broken = mutant(module, *ROW_FAULTS[fault]).linear_cross_entropy
    with pytest.raises((AssertionError, RuntimeError), match=r"tensor [0-4]: .* error|shape"):
        ours = with_rows(broken, chunk_size=7, scale=0.5, softcap=3.0)
        assert_as_exact_as_plain(ours, rows_by_the_book, rows_and_the_rest(torch.float32, device))


def test_replaced_rows_copy_no_weight(device):
    hidden, values, weight, bias, eighths, targets = rows_and_the_rest(torch.float32, device)()
    with operators_seen_through(), Shapes() as shapes:
        leaves = [hidden.requires_grad_(), values.requires_grad_()]
        torch.autograd.grad(
            with_rows(chunk_size=7)(*leaves, weight, bias, eighths, targets), leaves
        )
    assert torch.Size((VOCABULARY, WIDTH)) not in shapes.seen


def test_rows_that_do_not_fit_are_refused():
    rows = module.Rows(torch.tensor([1, 2]), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="rows are"):
        linear_cross_entropy(*tensors({}), rows=rows)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_smoothing_outside_of_its_range_is_refused(smoothing):
    with pytest.raises(ValueError, match="label_smoothing"):
        linear_cross_entropy(*tensors({}), label_smoothing=smoothing)


def test_a_known_count_changes_nothing(device):
    """Rows left out beforehand: the same loss and gradients, zero for those left out."""
    hidden, weight, targets = inputs(torch.float32, device, rows=61)()
    targets[0], targets[-1] = IGNORED, 3
    found = []
    for count in (None, int((targets != IGNORED).sum())):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = linear_cross_entropy(*leaves, targets, count=count, chunk_size=16)
        loss.backward()
        found.append([loss.detach(), *(x.grad for x in leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not found[1][1][targets == IGNORED].any()


def test_places_of_the_trained_rows_without_asking_the_device(device):
    """What a card does with a known count, here on any device."""
    targets = draw_targets(61, torch.device("meta") if device.type == "meta" else device)
    expected = (targets != IGNORED).nonzero().squeeze(1)
    assert torch.equal(true_places_first(targets != IGNORED, len(expected)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("trained", ["both", "states", "head"])
@pytest.mark.parametrize("count", [None, 2000])
def test_gradients_made_at_once_are_those_made_in_turn(count, trained, device):
    """Bit for bit, from several chunks, captured and replayed too."""
    torch.manual_seed(3)
    hidden, weight = (
        torch.randn(n, 896, device=device, dtype=torch.bfloat16) for n in (2999, 30011)
    )
    targets = torch.randint(0, len(weight), (len(hidden),), device=device)
    targets[2000:] = IGNORED
    stream = torch.cuda.Stream(priority=products.HIGH_PRIORITY)
    found = []
    replayed = None

    def gradients():
        leaves = (
            hidden.detach().requires_grad_(trained != "head"),
            weight.detach().requires_grad_(trained != "states"),
        )
        loss = linear_cross_entropy(
            *leaves, targets, count=count, chunk_size=700, gradient_type=torch.bfloat16
        )
        return loss, *torch.autograd.grad(loss, [x for x in leaves if x.requires_grad])

    expected = gradients()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(10):
            found.append(gradients())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        replayed = gradients()
    for _ in range(10):
        for tensor in replayed:
            tensor.detach().fill_(7.0)
        graph.replay()
        found.append([x.clone() for x in replayed])
    for got in found:
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.gpu
def test_gradient_of_the_head_in_bf16(device):
    """Rounded once a chunk, and so a little further from the truth than the sum in fp32."""
    hidden, weight, targets = inputs(torch.bfloat16, device, rows=301)()
    exact_weight = weight.cpu().double().requires_grad_()
    exact = torch.autograd.grad(
        plain(hidden.cpu().double(), exact_weight, targets.cpu()), exact_weight
    )[0]
    errors = []
    for kind in (torch.float32, torch.bfloat16):
        leaf = weight.clone().requires_grad_()
        linear_cross_entropy(hidden, leaf, targets, chunk_size=64, gradient_type=kind).backward()
        errors.append(((leaf.grad.cpu().double() - exact).norm() / exact.norm()).item())
    assert errors[0] < 4e-3
    assert errors[1] < 3 * errors[0]


@pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"),
    reason="torch older than 2.13 has no linear_cross_entropy",
)
def test_equals_the_one_of_torch(device):
    hidden, weight, targets = inputs(torch.float32, device)()
    torch.testing.assert_close(
        linear_cross_entropy(hidden, weight, targets, chunk_size=7),
        F.linear_cross_entropy(hidden, weight, targets, reduction="sum"),
    )


def test_without_gradients(device):
    hidden, weight, targets = inputs(torch.float32, device)()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden.requires_grad_(), weight, targets, chunk_size=7)
    torch.testing.assert_close(loss, plain(hidden, weight, targets).detach())
    assert not loss.requires_grad
