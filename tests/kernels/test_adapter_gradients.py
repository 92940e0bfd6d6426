"""adapter_gradients against the products one by one, over layers, ranks, ends of tiles and
strided rows.
"""

import pytest
import torch

from chronicals.kernels import adapter_gradients as module
from chronicals.kernels import launch
from comparison import assert_as_exact_as_plain
from mutants import mutant

TYPES = [torch.float32, torch.bfloat16]
LAYERS = [
    ((40,), (4,)),
    ((700,), (16,)),  # a strip and a part of one
    ((300, 270), (17, 32)),
    ((24, 7, 513), (3, 0, 5)),
    ((9, 20, 31), (0, 32, 1)),
    ((20, 4, 6), (33, 0, 3)),  # wider than what a launch takes
    ((8, 8, 8, 8), (2, 2, 2, 2)),
]
FACTORS = (0.5, 1.5, 2.5, 3.5)


def functions(sizes, ranks, factors=FACTORS, of=module, spare=5):
    """Ours and the plain one: g, what lies behind it in the margin, and all dB in fp32."""
    width = sum(ranks)
    starts = [sum(ranks[:i]) for i in range(len(ranks))]
    places = [
        (sum(sizes[:i]), size, start, rank)
        for i, (size, start, rank) in enumerate(zip(sizes, starts, ranks))
    ]

    def diagonal(up):
        laid = torch.zeros_like(up)
        for row, size, start, rank in places:
            laid[row : row + size, start : start + rank] = up[
                row : row + size, start : start + rank
            ]
        return laid

    def ours(dy, up, u):
        extended = torch.full(
            (len(dy), dy.shape[1] + width + spare), float("nan"), dtype=dy.dtype, device=dy.device
        )
        extended[:, : dy.shape[1]] = dy
        g = extended[:, dy.shape[1] :]
        margin = up.new_zeros(len(up), width + spare)
        wide = u.new_zeros(len(u), width + spare)
        margin[:, :width] = diagonal(up)
        wide[:, :width] = u
        of_ups = of.adapter_gradients(
            extended[:, : dy.shape[1]],
            margin,
            wide,
            g,
            sizes,
            ranks,
            factors[: len(sizes)],
            torch.float32,
        )
        return g[:, :width], g[:, width:], torch.cat([x.reshape(-1) for x in of_ups])

    def plain(dy, up, u):
        wide = torch.promote_types(dy.dtype, torch.float32)
        of_ups = [
            factor * (dy[:, row : row + size].to(wide).t() @ u[:, start : start + rank].to(wide))
            for factor, (row, size, start, rank) in zip(factors, places)
        ]
        return (
            dy @ diagonal(up),
            dy.new_zeros(len(dy), spare),
            torch.cat([x.reshape(-1) for x in of_ups]),
        )

    return _constant(ours), _constant(plain)


def _constant(function):
    """The comparison asks for gradients, which these have none of."""

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.shapes = inputs
            return function(*(x.detach() for x in inputs))

        @staticmethod
        def backward(ctx, *_):
            return tuple(torch.zeros_like(x) for x in ctx.shapes)

    return Constant.apply


def draw(rows, sizes, ranks, dtype, device):
    shapes = (rows, sum(sizes)), (sum(sizes), sum(ranks)), (rows, sum(ranks))
    return lambda: [torch.randn(*shape, device=device).to(dtype) for shape in shapes]


@pytest.fixture
def several_parts(let_return):
    """Of rows, with several tiles each, on any device."""
    for of in (launch, module):  # a mutant imports it from the first
        let_return(of, multiprocessors=12)


def compare(ours, plain, drawn, dtype, device):
    if (
        dtype == torch.float32 and device.type == "cpu"
    ):  # the interpreter's sums are numpy's, in another order than torch's
        inputs = drawn()
        for got, exact in zip(ours(*inputs), plain(*(x.double() for x in inputs))):
            assert (got - exact).norm() <= 16 * torch.finfo(dtype).eps * exact.norm()
    elif device.type == "cpu" or dtype == torch.float32:
        assert_as_exact_as_plain(ours, plain, drawn)
    else:
        assert_as_exact_as_plain(
            lambda *inputs: ours(*inputs)[:2], lambda *inputs: plain(*inputs)[:2], drawn
        )
        inputs = drawn()
        assert_a_sum_of_tensor_cores(
            ours(*inputs)[2], plain(*(x.cpu().double() for x in inputs))[2], len(inputs[0])
        )


def assert_a_sum_of_tensor_cores(found, exact, rows):
    """dB in fp32, which they cut off at each step of 16 rows; of few rows, two roundings."""
    assert (found.cpu().double() - exact).norm() <= max(rows / 16, 2) * 2**-23 * exact.norm()


@pytest.mark.usefixtures("several_parts")
@pytest.mark.parametrize(
    ("layers", "rows"),
    [*((layers, 130) for layers in LAYERS), (LAYERS[0], 1), (LAYERS[3], 320)],
    ids=str,
)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_equals_the_products(dtype, layers, rows, device):
    compare(*functions(*layers), draw(rows, *layers, dtype, device), dtype, device)


def test_a_margin_that_is_full(device):
    layers = (30, 40), (16, 16)
    compare(
        *functions(*layers, spare=0),
        draw(67, *layers, torch.float32, device),
        torch.float32,
        device,
    )


@pytest.mark.parametrize("factors", [FACTORS, (0.5, 0.5, 0.5)], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_equals_the_products_without_a_kernel(dtype, factors, device, set_constants):
    set_constants(module, MAX_FUSED_RANK=0)
    layers = (24, 7, 13), (3, 0, 5)
    ours, plain = functions(*layers, factors)
    compare(ours, plain, draw(67, *layers, dtype, device), dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layers",
    [((4864, 4864), (32, 32)), ((4096, 1024, 1024), (16, 16, 16)), ((1000, 1000), (32, 8))],
    ids=str,
)
def test_the_sizes_of_models(layers, device):
    ours, plain = functions(*layers)
    inputs = draw(3000, *layers, torch.bfloat16, device)()
    (g, empty, of_up) = ours(*inputs)
    again = ours(*inputs)
    of_plain = plain(*inputs)[0]
    exact = plain(*(x.cpu().double() for x in inputs))

    def error(found, exact):
        return (found.cpu().double() - exact).norm() / exact.norm()

    assert (
        all(torch.equal(one, other) for one, other in zip((g, empty, of_up), again))
        and not empty.any()
    )
    assert error(g, exact[0]) <= 1.5 * error(of_plain, exact[0])
    assert_a_sum_of_tensor_cores(of_up, exact[2], 3000)


@pytest.mark.slow
@pytest.mark.usefixtures("several_parts")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("part * chunk", "part * ROWS"),
        ("triton.cdiv(tiles, parts) * GRADIENT_TILE_ROWS", "tiles // parts * GRADIENT_TILE_ROWS"),
        ("(total * factor)", "total"),
        ("above = size0\nbeside = rank0", "above = 0\nbeside = rank0"),
        ("above = size0\nbeside = rank0", "above = size0\nbeside = 0"),
        ("size0 + size1", "size0"),
        ("range(parts)", "range(1)"),
        ("range(strips)", "range(1)"),
        ("before = size0 * rank0", "before = 0"),
        ("EMPTY > 0 and layer == 0", "EMPTY > 0 and layer == 5"),
        ("(row < rows) & thin", "(row < rows - 1) & thin"),
    ],
)
def test_a_wrong_kernel_is_found(old, new, device):
    layers = (513, 30, 20), (3, 5, 2)
    ours, plain = functions(*layers, of=mutant(module, old, new))
    with pytest.raises(AssertionError):
        compare(
            ours,
            plain,
            draw(320, *layers, torch.float32 if device.type == "cpu" else torch.bfloat16, device),
            torch.float32,
            device,
        )


def test_a_missing_factor_is_found(device):
    layers = (20, 30), (33, 5)
    ours, plain = functions(
        *layers,
        of=mutant(
            module, "product(of_layer.t(), part, kind, factor)", "product(of_layer.t(), part, kind)"
        ),
    )
    with pytest.raises(AssertionError):
        compare(ours, plain, draw(67, *layers, torch.float32, device), torch.float32, device)
