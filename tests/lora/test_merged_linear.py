"""merged_linear against linear layers and adapters one by one, in all mixtures, with padding
columns and without.
"""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from chronicals.kernels.dropped_products import dropped_reference
from chronicals.kernels.launch import with_padding
from chronicals.kernels.linear_head import Adapter
from chronicals.lora import merged_linear as module
from chronicals.lora.merged_linear import (
    MergedWeights,
    Remake,
    merged_linear,
    merged_linear_reference,
)
from chronicals.quantization import FP8Base, Linear4bit, packed_weight
from chronicals.quantization.dense import columns_for
from comparison import assert_as_exact_as_plain, equal
from mutants import mutant

pytestmark = pytest.mark.usefixtures("kernels")

FULL = torch.float32
TYPES = [FULL, torch.bfloat16]
RANKS = [(0,), (0, 0, 0), (4,), (3, 3, 3), (0, 5, 0), (8, 0)]
SIZES = (24, 7, 13)


def padded(x, padding):
    made = with_padding(x, x.shape, padding)
    made.copy_(x)
    return made


def functions(ranks, biased, made_with_padding, dropout=0.0, of=module, scales=(0.5, 1.5, 2.5)):
    """Ours and the plain one, of x, the weights, the biases, and the A and B of the layers that
    have them.
    """
    count = len(ranks)
    adapted = [n for n, rank in enumerate(ranks) if rank]

    def parts(tensors):
        weights = tensors[:count]
        rest = tensors[count:]
        biases, rest = (rest[:count], rest[count:]) if biased else ([None] * count, rest)
        adapters = [None] * count
        for place, n in enumerate(adapted):
            a = rest[place]
            b = rest[len(adapted) + place]
            adapters[n] = Adapter(a, b, scales[n], dropout)
        return weights, biases, adapters

    def ours(x, *tensors):
        weights, biases, adapters = parts(tensors)
        merged = of.MergedWeights.fused(weights, biases, ranks)
        columns = merged.padding.columns
        x = _Padded.apply(x, columns) if made_with_padding else x * 1
        y = of.merged_linear(x, merged, adapters, made_with_padding, made_with_padding)
        return _GradientPadded.apply(y, columns) if made_with_padding else y * 1

    def plain(x, *tensors):
        return merged_linear_reference(x, *parts(tensors))

    return ours, plain


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, padding):
        return padded(x, padding)

    @staticmethod
    def backward(ctx, g):
        return g, None


class _GradientPadded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, padding):
        ctx.padding = padding
        return y * 1

    @staticmethod
    def backward(ctx, g):
        return padded(g, ctx.padding), None


def draw(ranks, biased, dtype, device, rows=13, width=20):
    def drawn():
        def random(*shape, scale=1.0, kind=dtype):
            return (torch.randn(*shape, device=device) * scale).to(kind)

        sizes = SIZES[: len(ranks)]
        weights = [random(size, width, scale=width**-0.5) for size in sizes]
        biases = [random(size) for size in sizes] if biased else []
        downs = [
            random(rank, width, scale=width**-0.5, kind=torch.float32) for rank in ranks if rank
        ]
        ups = [random(size, rank, kind=torch.float32) for size, rank in zip(sizes, ranks) if rank]
        return [random(rows, width), *weights, *biases, *downs, *ups]

    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("made_with_padding", [True, False], ids=["padding", "dense"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_equals_the_layers_one_by_one(dtype, ranks, biased, made_with_padding, device):
    ours, plain = functions(ranks, biased, made_with_padding)
    assert_as_exact_as_plain(ours, plain, draw(ranks, biased, dtype, device))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_layers_of_one_scale(dtype, device):
    ours, plain = functions((3, 5), False, True, scales=(3.0, 3.0))
    assert_as_exact_as_plain(ours, plain, draw((3, 5), False, dtype, device))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 131])
def test_rows(rows, device):
    ours, plain = functions((3, 3, 3), True, True)
    assert_as_exact_as_plain(
        ours, plain, draw((3, 3, 3), True, torch.bfloat16, device, rows=rows, width=33)
    )


def test_what_is_frozen_gets_no_gradient(device):
    ours, _ = functions((3, 3), False, True)
    x, w1, w2, a1, a2, b1, b2 = draw((3, 3), False, torch.float32, device)()
    leaves = [tensor.requires_grad_() for tensor in (a1, a2, b1, b2)]
    y = ours(x, w1, w2, *leaves)
    y.sum().backward()
    assert x.grad is None and w1.grad is None and all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("ranks", [(3, 5, 2), (40, 5, 2)], ids=str)
def test_gradients_of_adapters_are_dense(ranks, dropout, device):
    """Else autograd would copy each of them by itself; and they hold nothing of the margins."""
    ours, _ = functions(ranks, False, True, dropout)
    leaves = [tensor.requires_grad_() for tensor in draw(ranks, False, torch.bfloat16, device)()]
    for gradient in torch.autograd.grad(ours(*leaves).sum(), leaves)[4:]:
        assert gradient.is_contiguous()
        width = sum(ranks) if gradient.shape[1] == 20 else max(ranks)
        assert gradient.untyped_storage().nbytes() <= max(width * 20, sum(SIZES) * width) * 4


@pytest.mark.slow
def test_dropout_is_that_of_the_mean(device):
    """The mean over draws is what is computed without dropout, of outputs and of gradients; a
    draw is something else.
    """
    ranks = (4, 4)
    inputs = [tensor.double() for tensor in draw(ranks, False, torch.float32, device, rows=3)()]
    upstream = torch.randn(3, sum(SIZES[:2]), device=device, dtype=torch.float64)

    def run(function):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    exact = run(functions(ranks, False, False)[1])
    draws = [run(functions(ranks, False, False, dropout=0.5)[0]) for _ in range(800)]
    for e, *drawn in zip(exact, *draws):
        mean = torch.stack(drawn).mean(0)
        spread = torch.stack(drawn).std(0)
        assert ((mean - e).abs() <= 6 * spread / 800**0.5 + 1e-9).all()
    assert not equal(draws[0][0], draws[1][0])


@pytest.mark.slow
def test_dropout_in_forward_and_backward_is_the_same(device):
    """Gradients are those of the very function that was drawn: a step along dx changes y as it
    says.
    """
    ours, _ = functions((4,), False, True, dropout=0.5)
    tensors = [x.double() for x in draw((4,), False, torch.float32, device)()]

    def value(x):
        torch.manual_seed(5)
        return ours(x, *tensors[1:])

    torch.autograd.gradcheck(value, (tensors[0].requires_grad_(),))


SEED = 1234567
"""Of a mask."""


def with_its_mask(ranks, biased, made_with_padding, of=module):
    """Ours under dropout, and the plain formula, in torch, with the mask that ours draws."""
    ours, _ = functions(ranks, biased, made_with_padding, dropout=0.5, of=of)
    count = len(ranks)
    adapted = [n for n, rank in enumerate(ranks) if rank]

    def seed(like):
        return torch.tensor([SEED], device=like.device)

    def seeded(x, *tensors):
        with mock.patch.object(
            of, "draw_seed", seed
        ):  # the exact result is computed on the CPU, under the same mask
            return ours(x, *tensors)

    def plain(x, *tensors):
        dropped = dropped_reference(x, seed(x), 0.5)
        weights = tensors[:count]
        rest = tensors[count:]
        biases, rest = (rest[:count], rest[count:]) if biased else ([None] * count, rest)
        parts = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases)]
        for n, a, b in zip(adapted, rest, rest[len(adapted) :]):
            parts[n] = (
                parts[n] + (0.5, 1.5, 2.5)[n] * (dropped @ a.to(x.dtype).t()) @ b.to(x.dtype).t()
            )
        return torch.cat(parts, 1)

    return seeded, plain


@pytest.mark.slow
@pytest.mark.parametrize("made_with_padding", [True, False], ids=["padding", "dense"])
@pytest.mark.parametrize(("ranks", "biased"), [((3, 3, 3), False), ((0, 5, 0), True)], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_under_dropout_equals_the_formula_with_its_mask(
    dtype, ranks, biased, made_with_padding, device
):
    """Of every output and gradient: a mean over draws does not see which mask a gradient was
    made with.
    """
    assert_as_exact_as_plain(
        *with_its_mask(ranks, biased, made_with_padding), draw(ranks, biased, dtype, device)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dropped_gradient_of_down(g, x, seed, options.dropout)", "g.t() @ x"),
        ("add_dropped_product_(dx, g, down, seed, options.dropout)", "dx + g @ down"),
    ],
    ids=["dA of all of x", "dx of all of g A"],
)
def test_a_gradient_without_the_mask_is_found(old, new, device):
    with pytest.raises(AssertionError):
        ours, plain = with_its_mask((3, 3), False, True, of=mutant(module, old, new))
        assert_as_exact_as_plain(ours, plain, draw((3, 3), False, torch.float32, device))


def of_format(name, weights, ranks):
    """Weights ``[n, K]`` in a format, and the values that it multiplies by."""
    if name == "nf4":
        packed = [packed_weight(Linear4bit.of(linear_of(weight))) for weight in weights]
        values = torch.cat([one.dense() for one in packed])
        return MergedWeights.packed(packed, [None] * len(packed), ranks), values
    merged = MergedWeights.fused(weights, [None] * len(weights), ranks)
    if name == "fp8":
        merged = merged.in_format(FP8Base)
    return merged, torch.cat(list(weights))


def linear_of(weight):
    linear = torch.nn.Linear(*weight.shape[::-1], bias=False, device=weight.device)
    linear.weight.data = weight
    return linear


@pytest.mark.parametrize("ranks", [(0, 0), (4, 0)], ids=["plain", "adapter"])
@pytest.mark.parametrize("name", ["dense", "nf4", "fp8"])
def test_outputs_may_stay_in_fp32(name, ranks, device):
    """As generation has the branches of a layer; rounded they are those in 16 bits."""
    x = torch.randn(16, 128, device=device).bfloat16()
    weights = [(torch.randn(size, 128, device=device) / 8).bfloat16() for size in (32, 48)]
    merged, values = of_format(name, weights, ranks)
    a, b = torch.randn(4, 128, device=device) / 8, torch.randn(32, 4, device=device)
    adapters = [Adapter(a, b, 0.5) if ranks[0] else None, None]
    with torch.no_grad():
        wide, narrow = (merged_linear(x, merged, adapters, dtype=kind) for kind in (FULL, None))
    assert wide.dtype == FULL and narrow.dtype == torch.bfloat16
    assert not torch.equal(wide.bfloat16().float(), wide)
    torch.testing.assert_close(wide, narrow.float(), rtol=2e-2, atol=2e-2)
    exact = x.double() @ values.double().t()
    if ranks[0]:  # u is in 16 bits
        u = (x.float() @ a.bfloat16().float().t()).bfloat16().double()
        exact[:, :32] += u @ (0.5 * b).bfloat16().double().t()
    assert (wide - exact).norm() < (5e-2 if name == "fp8" else 1e-5) * exact.norm()


def test_outputs_in_fp32_with_biases_and_without_gradients(device):
    x = torch.randn(3, 20, device=device).bfloat16()
    weight, bias = torch.randn(7, 20, device=device).bfloat16(), torch.ones(7, device=device)
    merged = MergedWeights.fused([weight], [bias.bfloat16()], (0,))
    with torch.no_grad():
        wide = merged_linear(x, merged, [None], dtype=FULL)
    torch.testing.assert_close(wide, x.float() @ weight.float().t() + 1, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="float32 of x in torch.bfloat16 have no gradient"):
        merged_linear(x, merged, [None], dtype=FULL)


def test_padding_columns_are_a_multiple_of_64():
    assert [columns_for(ranks) for ranks in ((), (0, 0), (1,), (64,), (22, 22, 22))] == [
        0,
        0,
        64,
        64,
        128,
    ]


def test_layers_must_fit_each_other():
    x = torch.randn(3, 4)
    w = torch.randn(5, 4)
    with pytest.raises(ValueError, match="some of the layers have a bias"):
        MergedWeights.fused([w, w], [torch.zeros(5), None], (0, 0))
    a = torch.randn(2, 4)
    b = torch.randn(5, 2)
    merged = MergedWeights.fused([w, w], [None, None], (2, 2))
    with pytest.raises(ValueError, match="dropouts"):
        merged_linear(x, merged, [Adapter(a, b, 1.0, 0.1), Adapter(a, b, 1.0, 0.2)])
    with pytest.raises(
        ValueError, match=r"adapters have ranks \(2, 0\), the padding is for \(2, 2\)"
    ):
        merged_linear(x, merged, [Adapter(a, b, 1.0), None])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            (
                "adapter_gradients(dy, padding.up, rows[:, base.width :], g, merged.sizes, "
                "padding.ranks, options.scales, ctx.adapter_dtype)"
            ),
            (
                "adapter_gradients(-dy, padding.up, rows[:, base.width :], g, merged.sizes, "
                "padding.ranks, options.scales, ctx.adapter_dtype)"
            ),
        ),
        (
            "base.weight_gradient(operand, x)",
            "base.weight_gradient(operand, Operand(1.1 * x.dense))",
        ),
    ],
)
def test_a_wrong_backward_is_found(old, new, device):
    ours, plain = functions((3, 3), False, True, of=mutant(module, old, new))
    with pytest.raises(AssertionError):
        assert_as_exact_as_plain(ours, plain, draw((3, 3), False, torch.float32, device))


@pytest.mark.parametrize(
    ("old", "new"),
    [("", ""), ("product_into(g, dy, padding.up)", "product_into(g, -dy, padding.up)")],
)
def test_frozen_adapters_pass_gradients_on(old, new, device):
    x, *tensors = draw((3, 5), False, torch.float32, device)()
    found = []
    for function in functions((3, 5), False, True, of=mutant(module, old, new) if old else module):
        leaf = x.clone().requires_grad_()
        found += torch.autograd.grad(function(leaf, *tensors).square().sum(), leaf)
    assert torch.allclose(*found, rtol=1e-4, atol=1e-4) != bool(old)


def test_is_what_linear_computes(device):
    x = torch.randn(5, 4, device=device)
    w = torch.randn(6, 4, device=device)
    torch.testing.assert_close(
        merged_linear(x, MergedWeights.fused([w], [None], (0,)), [None]), F.linear(x, w)
    )


def test_other_adapters_between_forward_and_backward_change_nothing(device):
    """As a reference adapter does, whose pass stands between the two of the one that is trained."""
    ranks = (3, 5)
    x, w1, w2, *matrices = draw(ranks, False, torch.float32, device)()
    others = [torch.randn_like(matrix) for matrix in matrices]
    merged = MergedWeights.fused([w1, w2], [None, None], ranks)

    def run(given, scale):
        adapters = [Adapter(given[n], given[2 + n], scale) for n in range(2)]
        return merged_linear(leaf, merged, adapters)

    found = []
    for disturbed in (False, True):
        leaf = x.clone().requires_grad_()
        leaves = [m.clone().requires_grad_() for m in matrices]
        y = run(leaves, 0.5)
        if disturbed:
            with torch.no_grad():
                run(others, 2.0)
        found.append(torch.autograd.grad(y.square().sum(), [leaf, *leaves]))
    assert all(equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_x_with_what_lies_behind_its_rows_is_of_another_version(dropout, device):
    """Who has moved x elsewhere must not take that for what is saved here."""
    x, w, a, b = (t.requires_grad_() for t in draw((3,), False, torch.float32, device)())
    merged = MergedWeights.fused([w], [None], (3,))
    saved = []
    padded = (
        with_padding(x, x.shape, merged.padding.columns).copy_(x.detach()).data.requires_grad_()
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        merged_linear(padded, merged, [Adapter(a, b, 0.5, dropout)], padded=True)
    (own,) = [
        t for t in saved if t.untyped_storage().data_ptr() == padded.untyped_storage().data_ptr()
    ]
    assert own._version != padded._version


def test_an_adapter_changed_before_the_backward_is_refused(device):
    ours, _ = functions((3,), False, False)
    x, w, a, b = (t.requires_grad_() for t in draw((3,), False, torch.float32, device)())
    y = ours(x, w, a, b)
    with torch.no_grad():
        a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_second_backward_is_the_first_and_a_double_one_is_refused(device):
    x, w, a, b = (t.requires_grad_() for t in draw((3,), False, torch.float32, device)())
    merged = MergedWeights.fused([w], [None], (3,))
    y = merged_linear(x, merged, [Adapter(a, b, 0.5)], remake=Remake(torch.clone, x.detach()))
    first, second = (
        torch.autograd.grad(y.sum(), (x, w, a, b), retain_graph=True) for _ in range(2)
    )
    assert all(equal(one, other) for one, other in zip(first, second))
    with pytest.raises(RuntimeError, match="create_graph=True: _MergedLinear"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_biases_alone_keep_nothing_of_x(device):
    ours, plain = functions((0, 0, 0), True, False)
    tensors = [
        tensor.requires_grad_(n == 0 or n > 3)
        for n, tensor in enumerate(draw((0, 0, 0), True, torch.float32, device)())
    ]
    kept = []
    trained = [tensors[0], *tensors[4:]]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        y = ours(*tensors)
    found, expected = (torch.autograd.grad(out.sum(), trained) for out in (y, plain(*tensors)))
    assert tensors[0].shape not in kept
    assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_biases_over_many_rows(dtype, device):
    dy = torch.randn(20_000, 512, device=device).to(dtype)
    exact = dy.cpu().double().sum(0)
    ours, plain = (
        float((found.cpu().double() - exact).norm())
        for found in (module._bias_gradient(dy), dy.sum(0))
    )
    assert ours <= 1.25 * plain
