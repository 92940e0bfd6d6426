"""linear_distillation against the definitions from whole logits of both sides, and against TRL's
loss.

On the CPU the long grid takes the plain rows, as a run without a card does;
``test_divergence_rows.py`` interprets the kernel.
"""

import contextlib
import itertools
import math
import sys

import pytest
import torch
import torch.nn.functional as F

from chronicals.kernels import linear_cross_entropy
from chronicals.kernels.launch import OPERATOR_FUNCTIONS, interpreting
from chronicals.kernels.linear_distillation import (
    DistillationSums,
    Divergence,
    StoredTokens,
    distillation_of_logits,
    linear_distillation,
    linear_distillation_reference,
)
from chronicals.kernels.linear_head import Adapter, LinearHead
from chronicals.kernels.logit_rows import IGNORE_INDEX
from comparison import assert_as_exact_as_plain
from mutants import mutant
from seen_shapes import Shapes

TYPES = [torch.float32, torch.bfloat16]
module = sys.modules[
    "chronicals.kernels.linear_distillation"
]  # the package has a function of that name
ROWS = 23
WIDTH = 19
TEACHERS_WIDTH = 29
VOCABULARY = 101
WEIGHT = 0.3  # logits of a standard deviation near 1.3


@pytest.fixture(autouse=True)
def kernels(request):
    interpreted = "interpreted" in request.keywords and not torch.cuda.is_available()
    with interpreting() if interpreted else contextlib.nullcontext():
        yield


def kl(p, q):
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def mix(one, other, share):
    return torch.logaddexp(one + math.log(share), other + math.log(1 - share))


DEFINITIONS = {
    "forward_kl": (Divergence.forward_kl(), lambda p, q: kl(p, q)),
    "reverse_kl": (Divergence.reverse_kl(), lambda p, q: kl(q, p)),
    "jsd": (
        Divergence.jsd(0.3),
        lambda p, q: 0.3 * kl(p, mix(p, q, 0.3)) + 0.7 * kl(q, mix(p, q, 0.3)),
    ),
    "skew_kl": (Divergence.skew_kl(0.1), lambda p, q: kl(p, mix(p, q, 0.1))),
    "skew_reverse_kl": (Divergence.skew_reverse_kl(0.1), lambda p, q: kl(q, mix(p, q, 0.9))),
}
"""By name: ours, and the definition from log-probabilities of teacher and student."""


def logits_of(hidden, weight, bias, scale, softcap):
    z = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
    z = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def plain(
    name,
    hidden,
    weight,
    targets,
    teacher_hidden,
    teacher_weight,
    bias=None,
    eighths=None,
    **options,
):
    """The loss by the book, with all logits at once; the teacher's have no gradient."""
    scale = options.get("scale", 1.0)
    softcap = options.get("softcap")
    temperature = options.get("temperature", 1.0)
    alpha = options.get("cross_entropy", 0.0)
    z = logits_of(hidden, weight, bias, scale, softcap)
    teacher = logits_of(teacher_hidden.detach(), teacher_weight.detach(), None, 0.9, 5.0)
    common = min(z.shape[1], teacher.shape[1])
    z = z[:, :common]
    teacher = teacher[:, :common]
    p, q = ((x / temperature).log_softmax(-1) for x in (teacher, z))
    kept = targets != IGNORE_INDEX
    own = -torch.log_softmax(z, -1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    losses = kept * (0.6 * DEFINITIONS[name][1](p, q) + alpha * own)
    return (losses if eighths is None else losses * eighths / 8).sum()


def ours(
    name,
    hidden,
    weight,
    targets,
    teacher_hidden,
    teacher_weight,
    bias=None,
    eighths=None,
    **options,
):
    function = options.get("function", linear_distillation)
    chunk_size = {"chunk_size": options.get("chunk_size", 7)}
    student = LinearHead(
        hidden, weight, bias, None, options.get("scale", 1.0), options.get("softcap")
    )
    return function(
        student,
        LinearHead(teacher_hidden, teacher_weight, None, None, 0.9, 5.0),
        targets,
        DEFINITIONS[name][0],
        temperature=options.get("temperature", 1.0),
        divergence_weight=0.6,
        cross_entropy_weight=options.get("cross_entropy", 0.0),
        weights=None if eighths is None else eighths / 8,
        **(chunk_size if function is not linear_distillation_reference else {}),
    ).loss


def inputs(
    dtype, device, rows=ROWS, bias=False, weighted=False, beyond=0, teachers_beyond=0, ignored=0.3
):
    """``beyond``: further ids of the student's vocabulary, or of the teacher's."""

    def draw():
        targets = torch.randint(0, VOCABULARY, (rows,), device=device)
        targets[torch.rand(rows, device=device) < ignored] = IGNORE_INDEX
        drawn = [
            torch.randn(rows, WIDTH, device=device).to(dtype),
            (torch.randn(VOCABULARY + beyond, WIDTH, device=device) * WEIGHT).to(dtype),
            targets,
            torch.randn(rows, TEACHERS_WIDTH, device=device).to(dtype),
            (torch.randn(VOCABULARY + teachers_beyond, TEACHERS_WIDTH, device=device) * WEIGHT).to(
                dtype
            ),
        ]
        if bias:
            drawn.append(torch.randn(VOCABULARY + beyond, device=device).to(dtype))
        if weighted:
            drawn.append(torch.randint(0, 24, (rows,), device=device))
        return drawn

    return draw


def compare(name, draw, bias=False, weighted=False, **options):
    """The loss and the gradients of the student's tensors; those of the teacher's are held
    constant on both sides.
    """

    def arrange(of, **more):
        def call(hidden, weight, targets, teacher_hidden, teacher_weight, *rest):
            rest = list(rest)
            b = rest.pop(0) if bias else None
            loss = of(
                name,
                hidden,
                weight,
                targets,
                teacher_hidden,
                teacher_weight,
                b,
                rest.pop(0) if weighted else None,
                **more,
            )
            return loss + 0 * (teacher_hidden.sum() + teacher_weight.sum()).to(
                loss.dtype
            )  # the helper asks for every gradient

        return call

    shared = {key: value for key, value in options.items() if key not in ("function", "chunk_size")}
    assert_as_exact_as_plain(arrange(ours, **options), arrange(plain, **shared), draw)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("bias", "weighted"), [(False, True), (True, False)], ids=["weighted", "bias"]
)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("temperature", "cross_entropy"), [(1.0, 0.0), (1.0, 0.4), (2.0, 0.4)])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_option(name, temperature, cross_entropy, softcap, weighted, bias, dtype, device):
    draw = inputs(dtype, device, bias=bias, weighted=weighted)
    compare(
        name,
        draw,
        bias,
        weighted,
        temperature=temperature,
        cross_entropy=cross_entropy,
        softcap=softcap,
        scale=0.7,
    )


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 2, ROWS - 1, ROWS, 4096])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_every_chunk_size(rows, chunk_size, device):
    compare("jsd", inputs(torch.float32, device, rows=rows, ignored=0.0), chunk_size=chunk_size)


@pytest.mark.parametrize("sizes", [{"beyond": 9}, {"teachers_beyond": 9}], ids=str)
def test_vocabularies_padded_to_different_sizes_meet_on_the_common_ids(sizes, device):
    for name in ("forward_kl", "jsd"):
        compare(
            name, inputs(torch.float32, device, bias=True, **sizes), bias=True, cross_entropy=0.4
        )


def test_the_reference_is_the_definition(device):
    for name in DEFINITIONS:
        compare(
            name,
            inputs(torch.float32, device),
            function=linear_distillation_reference,
            temperature=2.0,
        )


def test_non_contiguous(device):
    def draw():
        hidden = torch.randn(WIDTH, 2 * ROWS, device=device).t()[::2]
        weight = (torch.randn(WIDTH, VOCABULARY, device=device) * WEIGHT).t()
        teacher_hidden = torch.randn(TEACHERS_WIDTH, 2 * ROWS, device=device).t()[::2]
        teacher_weight = (torch.randn(TEACHERS_WIDTH, VOCABULARY, device=device) * WEIGHT).t()
        targets = torch.randint(0, VOCABULARY, (2 * ROWS,), device=device)[::2]
        return hidden, weight, targets, teacher_hidden, teacher_weight

    compare("jsd", draw, cross_entropy=0.4)


# --- other people's definitions
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_it_is_trls_generalized_jsd(beta, temperature, device):
    """Loss and gradients of GKDTrainer's loss, summed; both sides' heads included."""
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    hidden, weight, targets, teacher_hidden, teacher_weight = inputs(torch.float32, device)()
    found = []
    for theirs in (False, True):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        if theirs:
            loss = gkd.GKDTrainer.generalized_jsd_loss(
                (leaves[0] @ leaves[1].t())[None],
                (teacher_hidden @ teacher_weight.t())[None],
                targets[None],
                beta,
                temperature,
                reduction="sum",
            )
        else:
            loss = linear_distillation(
                LinearHead(*leaves),
                LinearHead(teacher_hidden, teacher_weight),
                targets,
                Divergence.jsd(beta),
                temperature=temperature,
                chunk_size=7,
            ).loss
        loss.backward()
        found.append([loss.detach(), *(x.grad for x in leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- what comes with the loss
# --------------------------------------------------------------------------------------


def test_sums_beside_the_loss(device):
    hidden, weight, targets, teacher_hidden, teacher_weight = inputs(torch.float32, device)()
    targets[0] = (hidden @ weight.t()).argmax(1)[0]
    teacher_weight[:, :WIDTH], teacher_hidden[:9, :WIDTH], teacher_hidden[:9, WIDTH:] = (
        weight,
        hidden[:9],
        0.0,
    )
    weights = torch.rand(ROWS, device=device)
    kept = targets != IGNORE_INDEX
    found = linear_distillation(
        LinearHead(hidden, weight),
        LinearHead(teacher_hidden, teacher_weight),
        targets,
        Divergence.forward_kl(),
        temperature=2.0,
        divergence_weight=3.0,
        cross_entropy_weight=0.5,
        weights=weights,
        chunk_size=7,
    )
    z = hidden @ weight.t()
    teacher = teacher_hidden @ teacher_weight.t()
    of_row = kept * weights
    expected = DistillationSums(
        torch.zeros(()),
        (of_row * kl((teacher / 2).log_softmax(-1), (z / 2).log_softmax(-1))).sum(),
        *((of_row * F.cross_entropy(x, targets, reduction="none")).sum() for x in (z, teacher)),
        (of_row * (z.argmax(1) == teacher.argmax(1))).sum(),
        (of_row * (z.argmax(1) == targets)).sum(),
    )
    expected = expected._replace(loss=3 * expected.divergence + 0.5 * expected.cross_entropy)
    assert found.accuracy > 0 and 0 < found.agreement < of_row.sum()
    for name, value in found._asdict().items():
        torch.testing.assert_close(value, getattr(expected, name), rtol=1e-5, atol=1e-5)
    again = distillation_of_logits(
        z,
        teacher,
        targets,
        Divergence.forward_kl(),
        temperature=2.0,
        divergence_weight=3.0,
        cross_entropy_weight=0.5,
        weights=weights,
    )
    torch.testing.assert_close(torch.stack(again), torch.stack(found), rtol=1e-5, atol=1e-5)


def test_without_a_divergence_it_is_the_cross_entropy(device):
    hidden, weight, targets, *teacher = inputs(torch.float32, device)()
    found = []
    for distilled in (True, False):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = (
            linear_distillation(
                LinearHead(*leaves),
                LinearHead(*teacher),
                targets,
                Divergence.jsd(),
                temperature=3.0,
                divergence_weight=0.0,
                cross_entropy_weight=1.0,
                chunk_size=7,
            ).loss
            if distilled
            else linear_cross_entropy(*leaves, targets, chunk_size=7)
        )
        loss.backward()
        found.append([loss.detach(), *(x.grad for x in leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_ignored_rows_are_as_if_absent(device):
    hidden, weight, targets, teacher_hidden, teacher_weight = inputs(torch.float32, device)()
    targets[0], targets[1] = IGNORE_INDEX, 5
    kept = targets != IGNORE_INDEX
    found = []
    for rows in (slice(None), kept):
        leaf = hidden[rows].clone().requires_grad_()
        linear_distillation(
            LinearHead(leaf, weight),
            LinearHead(teacher_hidden[rows], teacher_weight),
            targets[rows],
            Divergence.reverse_kl(),
            chunk_size=4,
        ).loss.backward()
        found.append(leaf.grad)
    assert not found[0][~kept].any()
    torch.testing.assert_close(found[0][kept], found[1], rtol=1e-5, atol=1e-6)


def test_a_known_count_changes_nothing(device):
    hidden, weight, targets, *teacher = inputs(torch.float32, device, rows=61)()
    found = []
    for count in (None, int((targets != IGNORE_INDEX).sum())):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = linear_distillation(
            LinearHead(*leaves),
            LinearHead(*teacher),
            targets,
            Divergence.jsd(),
            count=count,
            chunk_size=16,
        ).loss
        loss.backward()
        found.append([loss.detach(), *(x.grad for x in leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ignored", ["all", "no rows"])
def test_nothing_to_train_on(ignored, device):
    rows = 0 if ignored == "no rows" else ROWS
    hidden, weight, targets, *teacher = inputs(torch.float32, device, rows=rows, ignored=1.1)()
    hidden = hidden.requires_grad_()
    weight = weight.requires_grad_()
    found = linear_distillation(
        LinearHead(hidden, weight), LinearHead(*teacher), targets, Divergence.jsd()
    )
    found.loss.backward()
    assert not torch.stack(found).any() and not hidden.grad.any() and not weight.grad.any()


# --- a teacher whose predictions were stored
# -----------------------------------------------------------------------


def stored(teacher_hidden, teacher_weight, k):
    """The k likeliest tokens of a teacher, and one place that is not used."""
    log_p, ids = (teacher_hidden @ teacher_weight.t()).log_softmax(-1).topk(k, -1)
    return StoredTokens(F.pad(ids, (0, 1)), F.pad(log_p, (0, 1), value=-math.inf))


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if name != "reverse_kl"])
def test_stored_tokens_are_normalised_anew(name, device):
    """As by the definition of a teacher who gives all others no chance; the temperature is that
    of the whole teacher.
    """

    def with_teacher(function):
        def call(hidden, weight, targets, teacher_hidden, teacher_weight):
            teacher = stored(teacher_hidden.detach(), teacher_weight.detach(), 5)
            loss = function(hidden, weight, targets, teacher)
            return loss + 0 * (teacher_hidden.sum() + teacher_weight.sum())

        return call

    def call(hidden, weight, targets, teacher):
        return linear_distillation(
            LinearHead(hidden, weight),
            teacher,
            targets,
            DEFINITIONS[name][0],
            temperature=2.0,
            cross_entropy_weight=0.4,
            chunk_size=7,
        ).loss

    def definition(hidden, weight, targets, teacher):
        ids, log_p = (x[:, :5] for x in teacher)
        z = hidden @ weight.t()
        p = torch.zeros_like(z).scatter(1, ids, (log_p / 2).softmax(-1)).log().clamp(min=-1e4)
        own = F.cross_entropy(z, targets, reduction="none", ignore_index=IGNORE_INDEX)
        losses = DEFINITIONS[name][1](p, (z / 2).log_softmax(-1)) + 0.4 * own
        return ((targets != IGNORE_INDEX) * losses).sum()

    assert_as_exact_as_plain(
        with_teacher(call), with_teacher(definition), inputs(torch.float32, device)
    )


def test_all_tokens_stored_are_the_teacher_itself(device):
    hidden, weight, targets, *teacher = inputs(torch.float32, device)()
    found = []
    for given in (LinearHead(*teacher), stored(*teacher, VOCABULARY)):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        sums = linear_distillation(
            LinearHead(*leaves), given, targets, Divergence.jsd(0.3), temperature=2.0, chunk_size=7
        )
        sums.loss.backward()
        found.append([torch.stack(sums).detach(), *(x.grad for x in leaves)])
        again = linear_distillation_reference(
            LinearHead(*leaves), given, targets, Divergence.jsd(0.3), temperature=2.0
        )
        torch.testing.assert_close(torch.stack(again), torch.stack(sums), rtol=1e-5, atol=1e-6)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.interpreted
def test_stored_tokens_on_the_kernels(device):
    """The same as the rows in plain torch, in which a banned token's logarithm is infinite as
    well.
    """
    hidden, weight, targets, *teacher = inputs(torch.float32, device, rows=9)()
    teacher = stored(*teacher, 4)
    targets = torch.arange(9, device=device)
    for of in (Divergence.forward_kl(), Divergence.jsd(0.3), Divergence.skew_reverse_kl()):
        found = []
        for function, options in (
            (linear_distillation, {"chunk_size": 4}),
            (linear_distillation_reference, {}),
        ):
            leaf = hidden.clone().requires_grad_()
            loss = function(
                LinearHead(leaf, weight), teacher, targets, of, temperature=1.5, **options
            ).loss
            loss.backward()
            found.append((loss.detach(), leaf.grad))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_stored_tokens_that_do_not_fit_are_refused():
    student = LinearHead(torch.zeros(5, 4), torch.zeros(11, 4))
    targets = torch.zeros(5, dtype=torch.long)
    ids = torch.zeros(5, 3, dtype=torch.long)
    log_p = torch.zeros(5, 3)
    for wrong in (
        (ids[:4], log_p[:4]),
        (ids, log_p[:, :2]),
        (ids.int(), log_p),
        (ids[:, :0], log_p[:, :0]),
    ):
        with pytest.raises(ValueError, match=r"teacher: ids .*expected \[5, k\] both"):
            linear_distillation(student, StoredTokens(*wrong), targets, Divergence.jsd())
    for of in (Divergence.reverse_kl(), Divergence.jsd(1.0)):
        with pytest.raises(
            ValueError,
            match="divergence: the reverse KL from a teacher with k stored tokens",
        ):
            linear_distillation(student, StoredTokens(ids, log_p), targets, of)


# --- what is frozen, and what exists
# -------------------------------------------------------------------------------


def run_with_shapes(hidden, weight, targets, teacher, bias=None, chunk_size=7):
    with pytest.MonkeyPatch.context() as patch, Shapes() as shapes:
        patch.setattr(module, "_forward", OPERATOR_FUNCTIONS[module._forward])
        loss = linear_distillation(
            LinearHead(hidden, weight, bias),
            LinearHead(*teacher),
            targets,
            Divergence.jsd(),
            chunk_size=chunk_size,
            cross_entropy_weight=0.5,
        ).loss
        if loss.requires_grad:
            loss.backward()
    return loss.detach(), shapes.seen


@pytest.mark.parametrize("trained", list(itertools.product([True, False], repeat=3)), ids=str)
def test_frozen_inputs(trained, device):
    """What is frozen gets no gradient, and what is not gets the same as ever, bit for bit; the
    teacher gets none.
    """
    hidden, weight, targets, *teacher, bias = inputs(torch.float32, device, bias=True)()
    drawn = (hidden, weight, bias)
    teacher = [x.requires_grad_() for x in teacher]
    every = [x.clone().requires_grad_() for x in drawn]
    some = [x.clone().requires_grad_(flag) for x, flag in zip(drawn, trained)]
    full, full_shapes = run_with_shapes(*every[:2], targets, teacher, every[2])
    loss, shapes = run_with_shapes(*some[:2], targets, teacher, some[2])
    assert torch.equal(loss, full) and teacher[0].grad is None and teacher[1].grad is None
    for a, b, flag in zip(every, some, trained, strict=True):
        assert (b.grad is not None) == flag
        assert not flag or (torch.equal(a.grad, b.grad) and a.grad.any())
    assert torch.Size((VOCABULARY, WIDTH)) in full_shapes, "the count of shapes sees nothing"
    assert trained[1] or torch.Size((VOCABULARY, WIDTH)) not in shapes


@pytest.mark.parametrize("chunk_size", [1, 13])
def test_no_more_rows_of_logits_than_asked_for(chunk_size, device):
    rows = 61
    vocabulary = 211
    hidden = torch.randn(rows, 1, device=device, requires_grad=True)
    teacher_hidden = torch.randn(rows, 2, device=device)
    weight = torch.randn(vocabulary, 1, device=device, requires_grad=True)
    teacher_weight = torch.randn(vocabulary, 2)
    targets = torch.randint(0, vocabulary, (rows,), device=device)
    _, shapes = run_with_shapes(
        hidden, weight, targets, (teacher_hidden, teacher_weight.to(device)), chunk_size=chunk_size
    )
    assert weight.grad.any() and hidden.grad.any()
    of_rows = [shape for shape in shapes if vocabulary in shape]
    assert max(shape.numel() for shape in of_rows) == max(chunk_size, 2) * vocabulary


@pytest.mark.parametrize("frozen", [False, True])
def test_adapters_on_both_heads(frozen, device):
    def draw():
        drawn = inputs(torch.float32, device)()
        shapes = (4, WIDTH), (VOCABULARY, 4), (3, TEACHERS_WIDTH), (VOCABULARY, 3)
        return *drawn, *(torch.randn(shape, device=device) * 0.3 for shape in shapes)

    def call(function, hidden, weight, targets, teacher_hidden, teacher_weight, a, b, c, d, **more):
        weight = weight.detach() if frozen else weight
        student = LinearHead(hidden, weight, None, Adapter(a, b, 0.5))
        teacher = LinearHead(teacher_hidden, teacher_weight, None, Adapter(c, d, 2.0))
        loss = function(
            student, teacher, targets, Divergence.jsd(0.3), temperature=2.0, **more
        ).loss
        return loss + 0 * sum(x.sum() for x in (weight, teacher_hidden, teacher_weight, c, d)).to(
            loss.dtype
        )

    def merged(hidden, weight, targets, teacher_hidden, teacher_weight, a, b, c, d):
        weight = weight.detach() if frozen else weight
        z = hidden @ (weight + 0.5 * b @ a).t()
        teacher = teacher_hidden @ (teacher_weight + 2 * d @ c).t()
        p, q = ((x / 2).log_softmax(-1) for x in (teacher.detach(), z))
        loss = ((targets != IGNORE_INDEX) * DEFINITIONS["jsd"][1](p, q)).sum()
        return loss + 0 * sum(x.sum() for x in (weight, teacher_hidden, teacher_weight, c, d)).to(
            loss.dtype
        )

    if frozen:
        hidden, weight, *rest = draw()
        leaf = hidden.requires_grad_()
        call(linear_distillation, leaf, weight, *rest, chunk_size=7).backward()
        assert leaf.grad.any()
    else:
        assert_as_exact_as_plain(
            lambda *x: call(linear_distillation, *x, chunk_size=7), merged, draw
        )
        assert_as_exact_as_plain(lambda *x: call(linear_distillation_reference, *x), merged, draw)


# --- precision and errors
# ------------------------------------------------------------------------------------------


def test_autocast(device):
    """A student in fp32 under autocast has its products in bf16; the teacher's stay in its own
    type.
    """
    drawn = inputs(torch.float32, device)()
    hidden, weight, targets, *teacher = drawn
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = linear_distillation(
            LinearHead(hidden.requires_grad_(), weight),
            LinearHead(*teacher),
            targets,
            Divergence.jsd(),
        ).loss
    loss.backward()
    exact = linear_distillation_reference(
        LinearHead(hidden, weight), LinearHead(*teacher), targets, Divergence.jsd()
    ).loss
    assert hidden.grad.dtype == torch.float32 and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=2e-2)


@pytest.mark.slow
@pytest.mark.interpreted
def test_kernels_of_the_rows(device):
    """The whole way with the kernels, as on a card."""
    draw = inputs(torch.float32, device, rows=7, bias=True, weighted=True)
    compare("jsd", draw, True, True, temperature=2.0, cross_entropy=0.4, softcap=3.0, chunk_size=4)


def test_compiled(device):
    def call(hidden, weight, targets, teacher_hidden, teacher_weight):
        return linear_distillation(
            LinearHead(hidden, weight),
            LinearHead(teacher_hidden, teacher_weight),
            targets,
            Divergence.jsd(0.3),
            chunk_size=7,
        ).loss

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    hidden, weight, targets, *teacher = inputs(torch.float32, device)()
    found = []
    for function in (call, compiled):
        leaf = hidden.clone().requires_grad_()
        function(leaf, weight, targets, *teacher).backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


WRONG = {
    "teacher: hidden": {"teacher": (torch.zeros(5, 3), torch.zeros(11, 4))},
    "teacher: hidden (4, 4)": {"teacher": (torch.zeros(4, 4), torch.zeros(11, 4))},
    "student: hidden": {"student": (torch.zeros(5, 3), torch.zeros(11, 4))},
    "temperature=0.0": {"temperature": 0.0},
    "temperature=inf": {"temperature": math.inf},
    "chunk_size=0": {"chunk_size": 0},
    "weights has shape": {"weights": torch.ones(4)},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused(message):
    given = {
        "student": (torch.zeros(5, 4), torch.zeros(11, 4)),
        "teacher": (torch.zeros(5, 4), torch.zeros(11, 4)),
    }
    given |= WRONG[message]
    student, teacher = (LinearHead(*given.pop(side)) for side in ("student", "teacher"))
    with pytest.raises(ValueError) as error:
        linear_distillation(
            student, teacher, torch.zeros(5, dtype=torch.long), Divergence.jsd(), **given
        )
    assert message in str(error.value)


def test_a_target_outside_the_common_ids_is_refused(device):
    if device.type == "cuda":
        pytest.skip("a card is not asked")
    hidden, weight, targets, *teacher = inputs(torch.float32, device, beyond=9)()
    targets[0] = VOCABULARY + 3
    with pytest.raises(IndexError, match=f"targets hold {VOCABULARY + 3}"):
        linear_distillation(
            LinearHead(hidden, weight), LinearHead(*teacher), targets, Divergence.jsd()
        )


# --- planted faults
# ------------------------------------------------------------------------------------------------

MUTATIONS = {
    "no upstream gradient": (
        "scale_rows(gradient, upstream, torch.empty_like(gradient, dtype=kind))",
        "scale_rows(gradient, torch.ones_like(upstream), torch.empty_like(gradient, dtype=kind))",
    ),
    "chunks of hidden at the beginning": ("d_states[part]", "d_states[: len(x)]"),
    "chunks of the teacher at the beginning": (
        "chunk_logits(teacher_states[part], teacher_head, teacher_bias, teacher_buffer)",
        "chunk_logits(teacher_states[: len(x)], teacher_head, teacher_bias, teacher_buffer)",
    ),
    "token weights of the first rows": ("x if x is None or rows is None else x[rows]", "x"),
    "another row of the teacher": (
        "(hidden, teacher_hidden, targets)",
        "(hidden, teacher_hidden.roll(1, 0), targets)",
    ),
    "weights left out of the gradient": (
        "divergence_and_gradient_(x, y, kept[part], of_row, options, any(wanted))",
        "divergence_and_gradient_(x, y, kept[part], None, options, any(wanted))",
    ),
    "weights left out of the loss": (
        "results if row_weights is None else results * row_weights",
        "results",
    ),
}


@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_wrong_backward_is_noticed(fault, device):
    if device.type == "cuda" and fault == "token weights of the first rows":
        pytest.skip("without a count no rows are left out on a card")
    draw = inputs(torch.float32, device, bias=True, weighted=True)
    options = {"cross_entropy": 0.4, "softcap": 3.0}
    compare("jsd", draw, True, True, **options)
    with pytest.raises((AssertionError, RuntimeError), match=r"tensor \d+: .* error|shape"):
        compare(
            "jsd",
            draw,
            True,
            True,
            function=mutant(module, *MUTATIONS[fault]).linear_distillation,
            **options,
        )
