"""merged_linear with its weights in FP8: each product is that of the operands in FP8, and
adapters stay as they are.
"""

import sys

import pytest
import torch

from chronicals.kernels.fp8 import Amax, dequantize, fp8_quantize, with_amax
from chronicals.kernels.linear_head import Adapter
from chronicals.lora import merged_linear as module
from chronicals.lora.merged_linear import MergedWeights, Remake, merged_linear
from chronicals.quantization import FP8Base
from comparison import equal
from mutants import mutant

pytestmark = pytest.mark.usefixtures("kernels")

FORMAT = sys.modules["chronicals.quantization.fp8"]
SIZES = (32, 16)
WIDTH = 48
TOKENS = 64


class Given:
    """Two layers of one input, x, and the gradient of what they give; sizes of x and dy differ
    by row.
    """

    def __init__(self, device, ranks, biased=False, frozen=False, dtype=torch.float32, dropout=0.0):
        def random(*shape):
            return torch.randn(*shape, device=device)

        slope = torch.logspace(-1, 1, TOKENS, device=device)[:, None]
        self.x = (random(TOKENS, WIDTH) * slope).to(dtype).requires_grad_()
        self.dy = (random(TOKENS, sum(SIZES)) / slope).to(dtype)
        self.weights = [
            (random(size, WIDTH) * WIDTH**-0.5).to(dtype).requires_grad_(not frozen)
            for size in SIZES
        ]
        self.biases = (
            [random(size).to(dtype).requires_grad_() for size in SIZES] if biased else [None] * 2
        )
        self.merged = MergedWeights.fused(self.weights, self.biases, ranks, FP8Base)
        self.adapters = [
            Adapter(
                (random(rank, WIDTH) * 0.1).requires_grad_(),
                random(size, rank).requires_grad_(),
                0.5 + n,
                dropout,
            )
            if rank
            else None
            for n, (rank, size) in enumerate(zip(ranks, SIZES))
        ]
        self.place = self.merged.storage.matrix

    def run(self, of=module, **options):
        """y, dx, then the gradients of weights, biases and adapters that want one."""
        y = of.merged_linear(self.x, self.merged, self.adapters, **options)
        return [y.detach(), *torch.autograd.grad(y, [self.x, *self.leaves()], self.dy)]

    def leaves(self):
        matrices = [
            m
            for name in ("a", "b")
            for adapter in self.adapters
            if adapter
            for m in [getattr(adapter, name)]
        ]
        return [
            leaf
            for leaf in (*self.weights, *self.biases, *matrices)
            if leaf is not None and leaf.requires_grad
        ]

    def meant(self):
        """The same in fp64, of what FP8 makes of x, of the weights and of dy."""

        def in_fp8(x):
            return dequantize(fp8_quantize(x.detach().contiguous())[0]).double()

        wide = self.x.detach().double()
        x = in_fp8(self.x)
        w = in_fp8(self.place)
        g = in_fp8(self.dy)
        y = x @ w.t()
        dx = g @ w
        dy = self.dy.double()
        if self.merged.bias is not None:
            y = y + self.merged.bias.double()
        downs = []
        ups = []
        row = 0
        for adapter, size in zip(self.adapters, SIZES):
            part = slice(row, row + size)
            row = row + size
            if adapter is None:
                continue
            a, b = (m.detach().double() for m in (adapter.a, adapter.b))
            y[:, part] += adapter.scale * wide @ a.t() @ b.t()
            back = adapter.scale * dy[:, part] @ b
            dx += back @ a
            downs.append(back.t() @ wide)
            ups.append(adapter.scale * dy[:, part].t() @ wide @ a.t())
        of_weights = [
            part for part, w in zip((g.t() @ x).split(SIZES), self.weights) if w.requires_grad
        ]
        of_biases = [] if self.merged.bias is None else list(dy.sum(0).split(SIZES))
        return [y, dx, *of_weights, *of_biases, *downs, *ups]


def assert_close(found, expected, steps):
    assert len(found) == len(expected)
    for ours, exact in zip(found, expected):
        assert (ours.double() - exact).norm() <= steps * exact.norm()


def on(device):
    """What sums in fewer bits may lose on a card; elsewhere products are exact to fp32."""
    return 2e-3 if device.type == "cuda" else 1e-5


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("ranks", [(0, 0), (3, 5), (0, 4)], ids=str)
def test_products_are_those_of_the_operands(ranks, biased, frozen, device):
    given = Given(device, ranks, biased, frozen)
    assert_close(given.run(), given.meant(), on(device))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 0), (8, 8)], ids=str)
def test_in_bf16(ranks, device):
    given = Given(device, ranks, biased=True, dtype=torch.bfloat16)
    assert_close(given.run(), given.meant(), 2**-7)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 0), (3, 3)], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_made_again_and_unread_are_the_same(frozen, ranks, device):
    """Whether x is kept, in 8 bits or in its own, is made again, or nothing but the backward
    pass is wanted.
    """
    given = Given(device, ranks, frozen=frozen)
    kept = given.run()
    for options in (
        {"x_is_saved": True},
        {"remake": Remake(torch.clone, given.x.detach())},
        {"skip_output": True},
    ):
        found = given.run(**options)
        assert all(equal(a, b) for a, b in zip(kept[1:], found[1:]))


@pytest.mark.slow
def test_a_frozen_weight_is_quantised_once_and_when_it_was_written_to(device, record_calls):
    given = Given(device, (4, 4), frozen=True)
    made = record_calls(given.merged.base, "dense")  # what is quantised
    first = given.run()
    assert all(equal(a, b) for a, b in zip(first, given.run())) and len(made) == 1
    with torch.no_grad():
        given.place.mul_(2)
        given.weights[0].mul_(2)  # in the package, both are one memory
    assert not equal(given.run()[0], first[0]) and len(made) == 2


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_dropout_is_that_of_the_adapter_alone(frozen, device):
    """What adapters add to y and dx, and their own gradients, are those of the same draw in 16
    bit.
    """
    given = Given(device, (4, 4), frozen=frozen, dropout=0.5)
    bare = Given(device, (0, 0), frozen=frozen)
    bare.__dict__ |= {name: getattr(given, name) for name in ("x", "dy", "weights")}
    bare.merged = MergedWeights.fused(given.weights, [None] * 2, (0, 0), FP8Base)
    added = []
    for in_fp8 in (True, False):
        if not in_fp8:
            given.merged, bare.merged = given.merged.in_16_bit(), bare.merged.in_16_bit()
        torch.manual_seed(5)
        whole = given.run()
        without = bare.run()
        added.append([whole[0] - without[0], whole[1] - without[1], *whole[len(without) :]])
    assert_close(added[0], [x.double() for x in added[1]], 1e-3 if device.type == "cuda" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_peaks_that_others_found_are_taken(frozen, device):
    """Such as are 4 times too large show it: 8 bits have fewer then for what is there."""
    given = Given(device, (3, 5), frozen=frozen)
    usual = given.run()
    for factor in (1.0, 4.0):
        amaxes = [Amax(), Amax()]
        for amax, x in zip(amaxes, (given.x, given.dy)):
            with_amax(amax, x, (factor * x.detach().abs().max()).float().view(torch.int32)[None])
        found = given.run(amaxes=tuple(amaxes))
        assert all(equal(a, b) for a, b in zip(usual, found)) == (factor == 1.0)
        assert amaxes[0].take(given.x) is None and amaxes[1].take(given.dy) is None


def test_rows_that_are_no_multiple_are_refused(device):
    given = Given(device, (0, 0))
    with pytest.raises(ValueError, match="x has 7 rows: FP8 products need multiples of 16"):
        merged_linear(given.x[:7], given.merged, given.adapters)


FAULTS = {
    "the adapter is forgotten in y": (
        module,
        "add_product_(y, rows[:, base.width :], padding.up.t())",
        "pass",
    ),
    "the adapter is forgotten in dx": (module, "dx.addmm_(g, down)", "dx"),
    "operands in another type": (
        FORMAT,
        "fp8_quantize(x, layout=layout, amax=amax)",
        "fp8_quantize(x, dtype=torch.float8_e5m2, layout=layout, amax=amax)",
    ),
    "the scale of dy for x": (
        FORMAT,
        'fp8_quantize(x.dense, layout="columns", scale=x.scale)',
        'fp8_quantize(x.dense, layout="columns", scale=dy.scale)',
    ),
    "the scale of dy for x in 8 bits": (
        FORMAT,
        "scaled_product(dy.columns, columns, self.dtype)",
        "scaled_product(dy.columns, Scaled(columns[0], dy.scale), self.dtype)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, device):
    of, old, new = FAULTS[fault]
    wrong = mutant(of, old, new)
    with pytest.raises(AssertionError):
        for ranks in ((3, 5), (0, 0)):
            given = Given(device, ranks)
            if of is FORMAT:
                given.merged = given.merged.in_format(wrong.FP8Base)
                assert_close(given.run(), given.meant(), on(device))
            else:
                assert_close(given.run(of=wrong), given.meant(), on(device))
