"""fused_adamw_ against the update by the book in fp64 and against its own reference, with the
masters of bf16 weights.
"""

import copy

import pytest
import torch
from torch import Tensor

import chronicals.kernels.adamw as module
from chronicals.kernels.adamw import (
    Tensors,
    fused_adamw_,
    fused_adamw_reference_,
    join_master,
    split_master,
)
from chronicals.kernels.tensor_lists import LIST_BLOCK, LIST_CHUNK
from mutants import mutant

SHAPES = [(17, 5), (), (1,), (LIST_CHUNK + 3,), (2, LIST_BLOCK), (3, 7, 11)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CHANGED = ("weights", "means", "squares", "lows", "steps")
KINDS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


def drawn(kind, gradient_kind, device, shapes=SHAPES):
    """Random weights and states as after some steps, each tensor after a number of its own."""
    tensors = Tensors()
    for number, shape in enumerate(shapes):
        value = torch.randn(shape, device=device)
        high, low = split_master(value)
        tensors.weights.append(value if kind == torch.float32 else high)
        if kind == torch.bfloat16:
            tensors.lows.append(low)
        tensors.gradients.append(
            (torch.randn(shape, device=device) * 10.0 ** (number - 3)).to(gradient_kind)
        )
        tensors.means.append(torch.randn(shape, device=device) * 0.1)
        tensors.squares.append(torch.rand(shape, device=device) * 0.1)
        tensors.steps.append(torch.tensor(float(number), device=device))
    return tensors


def values(tensors):
    """Weights, in fp32 as their masters stand for them, and states, flat in fp64."""
    whole = (
        [join_master(w, low) for w, low in zip(tensors.weights, tensors.lows)]
        if tensors.lows
        else tensors.weights
    )
    return [
        torch.cat([x.double().flatten().cpu() for x in row])
        for row in (whole, tensors.means, tensors.squares, tensors.steps)
    ]


def by_the_book(tensors, lr, betas, eps, weight_decay, factor=1.0):
    wide = Tensors(
        *(
            [x.double().cpu() for x in row]
            for row in (
                [join_master(w, low) for w, low in zip(tensors.weights, tensors.lows)]
                or tensors.weights,
                tensors.gradients,
                tensors.means,
                tensors.squares,
                [],
                tensors.steps,
            )
        )
    )
    for w, g, m, v, t in zip(wide.weights, wide.gradients, wide.means, wide.squares, wide.steps):
        g *= factor
        t += 1
        m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
        v.mul_(betas[1]).add_(g * g, alpha=1 - betas[1])
        w.mul_(1 - lr * weight_decay).sub_(
            lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        )
    return values(wide)


def compare(tensors, function=fused_adamw_, factor=None):
    exact = by_the_book(
        tensors, **OPTIONS, factor=1.0 if factor is None else factor.double().item()
    )
    plain = copy.deepcopy(tensors)
    fused_adamw_reference_(plain, **OPTIONS, factor=factor)
    function(tensors, **OPTIONS, factor=factor)
    for name, e, ours, theirs in zip(
        ("weights", "means", "squares", "steps"), exact, values(tensors), values(plain)
    ):
        for norm, times in ((torch.linalg.vector_norm, 1.5), (lambda x: x.abs().max(), 2.0)):
            error = norm(ours - e)
            allowed = max(times * norm(theirs - e), 2**-23 * norm(e))
            assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_one_update(kinds, factor, device):
    compare(
        drawn(*kinds, device),
        factor=None if factor is None else torch.tensor(factor, device=device),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_a_rate_on_the_device(kinds, device):
    """The same update, bit for bit, as from a number."""
    tensors = drawn(*kinds, device)
    other = copy.deepcopy(tensors)
    fused_adamw_(tensors, **OPTIONS)
    fused_adamw_(other, **OPTIONS | {"lr": torch.tensor(OPTIONS["lr"], device=device)})
    assert all(torch.equal(a, b) for a, b in zip(values(tensors), values(other)))


@pytest.mark.parametrize("function", [fused_adamw_, fused_adamw_reference_])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_states_in_bf16(kinds, function, device):
    """Weights as with wide states that begin alike; states one of the two neighbours, and right
    in the mean.
    """
    tensors = drawn(*kinds, device, shapes=[(LIST_CHUNK, 3), (5, 7)])
    tensors.means, tensors.squares = (
        [x.bfloat16() for x in row] for row in (tensors.means, tensors.squares)
    )
    exact = by_the_book(tensors, **OPTIONS)
    function(tensors, **OPTIONS)
    for e, ours in zip(exact[1:3], values(tensors)[1:3]):
        assert ((ours - e).abs() <= e.abs() * 2**-7 + e.abs().max() * 2**-23).all()
        assert (ours != e.bfloat16().double()).any()  # to the nearest would never go the other way
        share = ((ours - e) / e.abs().clamp(min=1e-12)).clamp(-(2**-7), 2**-7).mean().abs()
        assert share < 6 * 2**-7 / 12**0.5 / len(e) ** 0.5
    assert (values(tensors)[0] - exact[0]).norm() <= 2**-20 * exact[0].norm()


def without_master(tensors):
    """bf16 weights alone."""
    tensors.lows = []
    return tensors


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [fused_adamw_, fused_adamw_reference_])
def test_bf16_weights_without_a_master(function, states, device):
    """One of the two neighbours of what they should be, and right in the mean."""
    tensors = without_master(
        drawn(torch.bfloat16, torch.bfloat16, device, shapes=[(LIST_CHUNK, 3), (5, 7)])
    )
    tensors.means, tensors.squares = (
        [x.to(states) for x in row] for row in (tensors.means, tensors.squares)
    )
    exact = by_the_book(tensors, **OPTIONS)[0]
    function(tensors, **OPTIONS)
    ours = values(tensors)[0]
    assert ((ours - exact).abs() <= exact.abs() * 2**-7 + exact.abs().max() * 2**-23).all()
    assert (ours != exact.bfloat16().double()).any()
    share = ((ours - exact) / exact.abs().clamp(min=1e-12)).clamp(-(2**-7), 2**-7).mean().abs()
    assert share < 6 * 2**-7 / 12**0.5 / len(exact) ** 0.5


@pytest.mark.slow
def test_small_updates_of_weights_without_a_master_add_up(device):
    """A hundredth of a spacing a step, by decay, arrives in the mean where it should."""
    weight = torch.ones(1 << 13, device=device).bfloat16()
    zeros = [torch.zeros(len(weight), device=device) for _ in range(3)]
    tensors = Tensors(
        [weight], [zeros[0]], [zeros[1]], [zeros[2]], [], [torch.zeros((), device=device)]
    )
    for _ in range(40):
        fused_adamw_(tensors, 1.0, (0.9, 0.99), 1e-8, 2**-14)
    assert abs(weight.float().mean().item() - (1 - 2**-14) ** 40) < 3e-4
    assert weight.unique().numel() > 1


def test_a_weight_without_a_master_that_is_no_number_stays_none(device):
    bits = torch.tensor(
        [0x7FC0, 0x7FFF, -1, 0x7F80, -0x80], dtype=torch.int16
    )  # NaN, NaN, NaN, inf, -inf
    weight = bits.view(torch.bfloat16).to(device)
    state = [torch.zeros(len(weight), device=device) for _ in range(3)]
    tensors = Tensors(
        [weight], [state[0]], [state[1]], [state[2]], [], [torch.zeros((), device=device)]
    )
    for _ in range(3):
        fused_adamw_(tensors, **OPTIONS)
    assert weight.isnan().tolist() == [True, True, True, False, False] and weight[3:].tolist() == [
        float("inf"),
        -float("inf"),
    ]


@pytest.mark.slow
def test_small_changes_of_bf16_states_add_up(device):
    """An average that moves by a hundredth of a spacing a step arrives where it should; rounded
    to the nearest it stays.
    """
    value = torch.ones(4096, device=device)
    tensors = Tensors(
        [value],
        [torch.full_like(value, 2.0)],
        [value.bfloat16()],
        [value.bfloat16()],
        [],
        [torch.tensor(0.0, device=device)],
    )
    for _ in range(40):
        fused_adamw_(tensors, 0.0, (1 - 2**-14, 0.5), 1e-8, 0.0)
    assert abs(tensors.means[0].float().mean().item() - (2 - (1 - 2**-14) ** 40)) < 6e-4


def test_each_place_and_step_has_dice_of_its_own(device):
    """Chunks, tensors and steps are not rounded alike, or what is lost in one is lost in all."""
    size = 2 * LIST_CHUNK
    third = 1 + 2**-9 + 2**-10
    ups = []
    for step in (1.0, 2.0):
        ones = [torch.ones(size, device=device) for _ in range(2)]
        states = [[torch.ones(size, device=device).bfloat16() for _ in ones] for _ in range(2)]
        steps = [torch.tensor(step, device=device) for _ in ones]
        tensors = Tensors(ones, [torch.full_like(x, third) for x in ones], *states, [], steps)
        fused_adamw_(tensors, 0.0, (0.0, 0.0), 1e-8, 0.0)
        ups += [(x > 1).cpu() for state in states for mean in state for x in mean.split(LIST_CHUNK)]
    for n, one in enumerate(ups):
        for other in ups[:n]:
            alike = (one == other).double().mean().item()
            by_chance = (
                one.double().mean() * other.double().mean()
                + (~one).double().mean() * (~other).double().mean()
            )
            assert abs(alike - by_chance.item()) < 6 * 0.5 / LIST_CHUNK**0.5


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_sizes_and_addresses_that_suit_a_card(kinds, device):
    """Loads are 16 bytes wide then."""
    compare(drawn(*kinds, device, shapes=[(16, 8), (LIST_CHUNK + 8,), (24,)]))


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_many_updates(kinds, device):
    """As the reference does them, whose errors grow as fast."""
    ours = drawn(*kinds, device, shapes=[(5, 3), (31,)])
    theirs = copy.deepcopy(ours)
    for _ in range(10):
        for a, b in zip(ours.gradients, theirs.gradients):
            b.copy_(a.copy_(torch.randn_like(a)))
        fused_adamw_(ours, **OPTIONS)
        fused_adamw_reference_(theirs, **OPTIONS)
    for a, b in zip(values(ours), values(theirs)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_a_step_that_does_not_count_changes_nothing(kinds, master, device):
    """Not a bit, whatever the gradients are."""
    tensors = drawn(*kinds, device) if master else without_master(drawn(*kinds, device))
    tensors.gradients[0].fill_(float("nan"))
    before = copy.deepcopy(tensors)
    fused_adamw_(tensors, **OPTIONS, apply=torch.tensor(False, device=device))
    for row in CHANGED:
        assert all(
            torch.equal(a, b) for a, b in zip(getattr(tensors, row), getattr(before, row))
        ), row
    fused_adamw_(tensors, **OPTIONS, apply=torch.tensor(True, device=device))
    assert not torch.equal(tensors.weights[3], before.weights[3]) and tensors.steps[0].item() == 1


@pytest.mark.parametrize("function", [fused_adamw_, fused_adamw_reference_])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_weights_of_which_some_stay(kinds, function, device):
    """As where no rank had a gradient of them: not a bit changes of these, the others change as
    without them.
    """
    tensors = drawn(*kinds, device)
    for number in (1, 3):
        tensors.gradients[number].fill_(float("nan"))
    before = copy.deepcopy(tensors)
    alone = copy.deepcopy(tensors)
    applies = torch.tensor([number not in (1, 3) for number in range(len(SHAPES))], device=device)
    function(tensors, **OPTIONS, apply=applies)
    function(alone, **OPTIONS)
    for row in CHANGED:
        for number, tensor in enumerate(getattr(tensors, row)):
            expected = getattr(alone if applies[number] else before, row)[number]
            assert torch.equal(tensor, expected), f"{row} {number}"
    with pytest.raises(ValueError, match="a value for each of 6"):
        fused_adamw_(tensors, **OPTIONS, apply=applies[:2])


def test_the_reference_reads_no_flag_that_is_not_on_the_host():
    """It serves tensors on a card that no kernel takes, also while a graph is captured."""
    tensors = drawn(torch.float32, torch.float32, "meta")
    for shape in ((), (len(SHAPES),)):
        fused_adamw_reference_(
            tensors, **OPTIONS, apply=torch.empty(shape, dtype=torch.bool, device="meta")
        )


@pytest.mark.slow
def test_a_master_is_kept_in_every_half(device):
    """With a rate of zero the value stays: all lower halves under one upper half, many under
    others, zeros, subnormals, infinities."""
    low = torch.arange(1 << 16, dtype=torch.int32)
    bits = torch.cat(
        [
            (0x3F80 << 16) + low,
            *((high << 16) + low[::7] for high in (0x0000, 0x0001, 0x7F7E, 0x4049)),
        ]
    )
    value = torch.cat(
        [
            bits.view(torch.float32),
            -bits.view(torch.float32),
            torch.tensor([float("inf"), -float("inf")]),
        ]
    )
    weight, rest = (x.to(device) for x in split_master(value))
    zeros = [torch.zeros(len(value), device=device) for _ in range(3)]
    step = torch.zeros((), device=device)
    tensors = Tensors([weight], [zeros[0]], [zeros[1]], [zeros[2]], [rest], [step])
    fused_adamw_(tensors, 0.0, (0.9, 0.99), 1e-8, 0.0)
    assert torch.equal(join_master(weight, rest).cpu(), value)


def test_a_master_that_is_not_a_number_stays_none(device):
    weight, rest = (x.to(device) for x in split_master(torch.tensor([float("nan"), 1.0])))
    state = [torch.zeros(2, device=device) for _ in range(3)]
    tensors = Tensors(
        [weight], [state[0]], [state[1]], [state[2]], [rest], [torch.zeros((), device=device)]
    )
    fused_adamw_(tensors, **OPTIONS)
    assert join_master(weight, rest).isnan().tolist() == [True, False]


@pytest.mark.parametrize("layout", ["not aligned", "not dense"])
def test_tensors_that_lie_otherwise(layout, device):
    tensors = drawn(torch.float32, torch.float32, device, shapes=[(9, 4), (33,)])
    for row in (tensors.weights, tensors.means):
        if layout == "not aligned":
            row[1] = torch.cat((row[1], row[1]))[33 - 1 : 2 * 33 - 1]
        else:
            row[0] = row[0].t().contiguous().t()
    compare(tensors)


def test_nothing_at_all_and_mixed_types(device):
    fused_adamw_(Tensors(), **OPTIONS)
    tensors = drawn(torch.float32, torch.float32, device)
    tensors.gradients[1] = tensors.gradients[1].bfloat16()
    with pytest.raises(ValueError, match="one set of dtypes"):
        fused_adamw_(tensors, **OPTIONS)


@pytest.mark.parametrize(
    "what, kind", [("squares", torch.bfloat16), ("squares", torch.float64), ("lows", torch.int32)]
)
def test_states_of_other_types_are_refused(what, kind, device):
    """The kernel takes them for what the means are, and would write beyond them."""
    tensors = drawn(torch.bfloat16, torch.float32, device)
    setattr(tensors, what, [x.to(kind) for x in getattr(tensors, what)])
    with pytest.raises(ValueError, match="squares like means, lows in int16"):
        fused_adamw_(tensors, **OPTIONS)


def test_a_gradient_of_another_size_is_refused(device):
    tensors = drawn(torch.float32, torch.float32, device)
    tensors.gradients[0] = tensors.gradients[0].flatten()[:1].clone()
    with pytest.raises(ValueError, match="row 1 of the tensors has"):
        fused_adamw_(tensors, **OPTIONS)


def test_who_saved_a_weight_notices(device):
    tensors = drawn(torch.float32, torch.float32, device, shapes=[(5,)])
    weight = tensors.weights[0].requires_grad_()
    loss = weight.square().sum()
    with torch.no_grad():
        fused_adamw_(tensors, **OPTIONS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


MUTATIONS = {
    "no decay": (
        "tl.fma(w.to(tl.float32), decay, -rate * m / (tl.sqrt(v * of_square) + eps))",
        "tl.fma(w.to(tl.float32), 1.0, -rate * m / (tl.sqrt(v * of_square) + eps))",
    ),
    "no correction of the mean": ("lr / tl.load(corrections_ptr + tensor)", "lr"),
    "correction of another tensor": (
        "tl.load(corrections_ptr + count + tensor)",
        "tl.load(corrections_ptr + count)",
    ),
    "no factor": (
        "tl.load(g_at, mask=inside, other=0.0).to(tl.float32) * factor",
        "tl.load(g_at, mask=inside, other=0.0).to(tl.float32)",
    ),
    "eps within the root": ("tl.sqrt(v * of_square) + eps", "tl.sqrt(v * of_square + 0.1)"),
    "not rounded to the nearest": (
        "tl.where(finite, (magnitude + 0x8000) >> 16, special)",
        "tl.where(finite, (magnitude + 0x4000) >> 16, special)",
    ),
    "the upper half alone": (
        "magnitude = ((pattern & 0x7FFF) << 16) + low.to(tl.int32)",
        "magnitude = ((pattern & 0x7FFF) << 16)",
    ),
    "the first chunk only": ("start + offset", "offset"),
    "steps not counted": (
        "torch._foreach_add_(tensors.steps, 1.0)",
        "torch._foreach_add_(tensors.steps, 0.0)",
    ),
}


@pytest.mark.parametrize("fault", MUTATIONS)
def test_planted_faults_are_found(fault, device):
    broken = mutant(module, *MUTATIONS[fault])
    with pytest.raises(AssertionError, match="error"):
        compare(
            drawn(torch.bfloat16, torch.bfloat16, device),
            broken.fused_adamw_,
            torch.tensor(0.37, device=device),
        )


def test_dice_are_thrown_anew_while_the_first_weight_stays(device):
    """As where no rank uses it: the others are not rounded alike in every step."""
    size = LIST_CHUNK
    third = 1 + 2**-9 + 2**-10
    states = [[torch.ones(size, device=device).bfloat16() for _ in range(2)] for _ in range(2)]
    ones, steps = ([torch.ones(shape, device=device) for _ in range(2)] for shape in (size, ()))
    tensors = Tensors(ones, [torch.full_like(x, third) for x in ones], *states, [], steps)
    ups = []
    for _ in range(2):
        fused_adamw_(
            tensors, 0.0, (0.0, 0.0), 1e-8, 0.0, apply=torch.tensor([False, True], device=device)
        )
        ups.append((tensors.means[1] > 1).cpu())
    assert (ups[0] != ups[1]).double().mean().item() > 0.1


LOWS = torch.arange(1 << 16, dtype=torch.int64)

HIGHS = {
    "zero": 0x0000,
    "smallest subnormals": 0x0001,
    "largest subnormals": 0x007F,
    "smallest normals": 0x0080,
    "one": 0x3F80,
    "just below two": 0x3FFF,
    "odd": 0x4123,
    "largest": 0x7F7F,
}


def from_bits(bits: Tensor) -> Tensor:
    """fp32 from unsigned 32-bit patterns in int64."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def bits_of(x: Tensor) -> Tensor:
    """Unsigned patterns in int64, of fp32 or bf16."""
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    return x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


@pytest.mark.parametrize("negative", [False, True], ids=["positive", "negative"])
@pytest.mark.parametrize("high", HIGHS)
def test_every_low_half(high, negative):
    """Joined, every bit is there again; hi is ``(bits + 0x8000) >> 16``, and lo what that
    leaves, in 16 signed bits.
    """
    bits = ((HIGHS[high] | 0x8000 * negative) << 16) + LOWS
    value = from_bits(bits)
    hi, lo = split_master(value)
    assert (hi.dtype, lo.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(bits_of(join_master(hi, lo)), bits)
    assert torch.equal(bits_of(hi), (bits + 0x8000) >> 16)
    magnitude = bits & 0x7FFFFFFF
    of_hi = ((bits + 0x8000) >> 16) & 0x7FFF
    assert torch.equal(lo.to(torch.int64), magnitude - (of_hi << 16))


@pytest.mark.parametrize("negative", [False, True], ids=["positive", "negative"])
def test_every_low_half_of_what_is_not_finite(negative):
    """Infinity stays infinity of its sign, NaN stays NaN also when all its mantissa lies in the
    lower half.
    """
    bits = ((0x7F80 | 0x8000 * negative) << 16) + LOWS
    hi, lo = split_master(from_bits(bits))
    joined = join_master(hi, lo)
    assert not lo.any()
    assert joined[0].item() == hi[0].item() == (float("-inf") if negative else float("inf"))
    assert torch.isnan(joined[1:]).all() and torch.isnan(hi[1:]).all()
    again = split_master(joined)
    assert torch.equal(bits_of(again[0]), bits_of(hi)) and torch.equal(again[1], lo)


@pytest.mark.parametrize(
    "pattern", [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F80FFFF, 0x7FFF8000]
)
def test_nan(pattern):
    hi, lo = split_master(from_bits(torch.tensor([pattern])))
    assert torch.isnan(hi).all() and torch.isnan(join_master(hi, lo)).all() and lo.item() == 0
    assert bits_of(hi).item() >> 15 == pattern >> 31  # the sign too


def test_random_patterns():
    bits = torch.randint(0, 1 << 32, (200_000,))
    bits = bits[(bits & 0x7F800000) != 0x7F800000]
    assert torch.equal(bits_of(join_master(*split_master(from_bits(bits)))), bits)


def test_ties_go_away_from_zero():
    """``.bfloat16()`` goes to the even neighbour: for 1 + 2⁻⁸ that is 1."""
    value = torch.tensor([1 + 2.0**-8, -1 - 2.0**-8, 1 + 3 * 2.0**-8])
    assert torch.equal(
        split_master(value)[0].float(), torch.tensor([1 + 2.0**-7, -1 - 2.0**-7, 1 + 2 * 2.0**-7])
    )
    assert value.bfloat16()[0].item() == 1


def test_hi_is_the_nearest_bf16():
    value = torch.randn(10_000) * torch.exp(torch.randn(10_000) * 5)
    hi, _ = split_master(value)
    assert (
        (hi.double() - value.double()).abs() <= (value.bfloat16().double() - value.double()).abs()
    ).all()


def test_bf16_values_need_no_low_half():
    value = torch.randn(1000).bfloat16()
    hi, lo = split_master(value.float())
    assert torch.equal(hi, value) and not lo.any()


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 1, 4)], ids=str)
def test_shapes(shape):
    value = torch.randn(shape)
    hi, lo = split_master(value)
    assert hi.shape == lo.shape == value.shape
    assert torch.equal(join_master(hi, lo), value)


def test_non_contiguous():
    value = torch.randn(8, 6).t()[::2]
    assert torch.equal(join_master(*split_master(value)), value)
    hi, lo = split_master(value.contiguous())
    spread = (
        torch.zeros(3, 16, dtype=torch.bfloat16)[:, ::2],
        torch.zeros(3, 16, dtype=torch.int16)[:, ::2],
    )
    for there, x in zip(spread, (hi, lo), strict=True):
        there.copy_(x)
    assert torch.equal(join_master(*spread), value)
