"""Products of few rows with weights in 4 bits: as exact as those over the dequantised weight."""

import pytest
import torch

from chronicals.kernels import nf4_product as module
from chronicals.kernels.nf4 import (
    Scales,
    dynamic_code,
    quantize_fp4,
    quantize_nf4,
    quantize_scales,
)
from chronicals.kernels.nf4_product import (
    MOST_ROWS,
    multiplies_few_rows,
    nf4_product,
    nf4_product_reference,
    nf4_products,
    nf4_products_reference,
)
from comparison import assert_as_exact_as_plain
from mutants import mutant

TYPES = [torch.bfloat16, torch.float16]
ROWS = [1, 2, 7, 16, 17, 64]
SIZES = {
    "one output": (1, 64),
    "a prime number of outputs": (67, 192),
    "a step and a block": (130, 320),
    "splits": (64, 2048),
    "several blocks of scales": (33, 1024),
}
"""Outputs and columns."""


def weight(outputs, columns, device, block=64, nested=True, code="nf4"):
    """Codes and scales of rows that differ much in size."""
    sizes = 10.0 ** torch.empty(outputs, 1, device=device).uniform_(-1, 1)
    values = torch.randn(outputs, columns, device=device) * sizes
    packed, absmax = (quantize_nf4 if code == "nf4" else quantize_fp4)(values, block)
    return packed, quantize_scales(absmax) if nested else Scales(absmax)


def compare(rows, outputs, columns, dtype, device, of=module, stride=0, **format):
    """Ours against the plain product in fp64, over the values that the codes stand for."""
    packed, scales = weight(outputs, columns, device, **format)
    options = {name: x for name, x in format.items() if name != "nested"}

    def draw():
        return [torch.randn(rows, columns + stride, device=device).to(dtype)]

    def without_gradient(function, rounded=True):
        def run(x):
            given = packed.to(x.device), on(scales, x.device), outputs
            kind = dtype if rounded else x.dtype
            with torch.no_grad():
                out = function(x[:, :columns].to(kind), *given, **options)
            return out.to(x.dtype) + 0 * x.sum().to(x.dtype)

        return run

    def exact(x, packed, scales, outputs, **options):
        one = torch.eye(columns, dtype=dtype)  # the weight itself, rounded as x is
        dense = nf4_product_reference(one, packed, scales, outputs, **options)
        return x @ dense.double()

    ours, plain = (without_gradient(f) for f in (of.nf4_product, nf4_product_reference))
    assert_as_exact_as_plain(ours, plain, draw, exact=without_gradient(exact, rounded=False))


def on(scales, device):
    """The same scales on another device."""
    tensors = scales.absmax, scales.absmax2, scales.code2, scales.offset
    return Scales(*(None if x is None else x.to(device) for x in tensors), scales.block2)


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_over_shapes(size, rows, nested, dtype, device):
    compare(rows, *SIZES[size], dtype, device, nested=nested)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["nf4", "fp4"])
@pytest.mark.parametrize(("block", "columns"), [(32, 96), (128, 384), (256, 512), (512, 1536)])
def test_over_blocks(block, columns, code, device):
    compare(5, 37, columns, torch.bfloat16, device, block=block, code=code)


@pytest.mark.slow
def test_rows_that_lie_apart(device):
    compare(5, 37, 192, torch.bfloat16, device, stride=24)


def test_scales_in_blocks_of_another_size(device):
    packed, scales = weight(16, 640, device, nested=False)
    count = scales.absmax.numel()
    codes = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
    largest = torch.rand(2, device=device)
    scales = Scales(codes, largest, dynamic_code(device), scales.absmax.mean(), block2=128)
    one = torch.eye(64, 640, device=device, dtype=torch.bfloat16)
    expected = nf4_product_reference(one, packed, scales, 16)
    assert torch.equal(nf4_product(one, packed, scales, 16), expected)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_the_weight_is_the_dequantised_one_bit_by_bit(nested, device):
    packed, scales = weight(70, 128, device, nested=nested)
    one = torch.eye(128, device=device, dtype=torch.bfloat16)
    for rows in one.split(MOST_ROWS):
        expected = nf4_product_reference(rows, packed, scales, 70)
        assert torch.equal(nf4_product(rows, packed, scales, 70), expected)


def test_rows_of_any_shape(device):
    packed, scales = weight(5, 64, device)
    x = torch.randn(3, 2, 64, device=device).bfloat16()
    flat = nf4_product(x.flatten(0, 1), packed, scales, 5)
    assert torch.equal(nf4_product(x, packed, scales, 5), flat.view(3, 2, 5))
    transposed = torch.randn(64, 3, device=device).bfloat16().t()
    expected = nf4_product(transposed.contiguous(), packed, scales, 5)
    assert torch.equal(nf4_product(transposed, packed, scales, 5), expected)


def test_splits_give_the_same_bits_each_time(device):
    packed, scales = weight(64, 2048, device)
    x = torch.randn(4, 2048, device=device).bfloat16()
    assert module.few_rows_launch(x, 64).splits > 1
    first = nf4_product(x, packed, scales, 64)
    assert all(torch.equal(nf4_product(x, packed, scales, 64), first) for _ in range(3))


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("sizes", [(67,), (67, 130), (64, 1, 67), (130, 64, 64)], ids=str)
def test_weights_of_one_input_are_side_by_side(sizes, nested, device):
    """Bit by bit as each alone, where the columns are not split."""
    packed, scales = zip(*(weight(size, 320, device, nested=nested) for size in sizes))
    x = torch.randn(5, 320, device=device).bfloat16()
    assert module.few_rows_launch(x, min(sizes)).splits == 1
    alone = [nf4_product(x, *one) for one in zip(packed, scales, sizes)]
    assert torch.equal(nf4_products(x, packed, scales, sizes), torch.cat(alone, 1))


@pytest.mark.slow
def test_weights_of_one_input_are_as_exact_as_the_plain_product(device):
    """With splits, of which the sums are side by side, too."""
    sizes = (128, 67, 64)
    packed, scales = zip(*(weight(size, 2048, device) for size in sizes))
    x = torch.randn(3, 2048, device=device).bfloat16()
    one = torch.eye(2048, device=device).bfloat16()
    dense = nf4_products_reference(one, packed, scales, sizes).double()
    exact = x.double() @ dense
    errors = [
        float((product(x, packed, scales, sizes) - exact).norm() / exact.norm())
        for product in (nf4_products, nf4_products_reference)
    ]
    assert errors[0] <= 1.5 * errors[1] < 1e-2


def test_weights_whose_scales_differ_in_form_are_multiplied_by_the_reference(device):
    packed, scales = zip(*(weight(8, 64, device, nested=nested) for nested in (False, True)))
    x = torch.randn(2, 64, device=device).bfloat16()
    assert not module.are_one_launch(scales) and not module.are_one_launch([scales[0]] * 4)
    expected = nf4_products_reference(x, packed, scales, (8, 8))
    assert torch.equal(nf4_products(x, packed, scales, (8, 8)), expected)


def test_what_the_kernel_takes(device):
    def takes(*shape, dtype=torch.bfloat16, block=64):
        return multiplies_few_rows(torch.zeros(shape, dtype=dtype, device=device), block)

    assert takes(64, 128) and takes(1, 64, 128) and takes(1, 128, dtype=torch.float16)
    assert not takes(65, 128) and not takes(0, 128) and not takes(2, 128, dtype=torch.float32)
    assert not takes(2, 96) and takes(2, 96, block=32)


def test_a_launch_fits_the_shape():
    one = module.few_rows_launch(torch.zeros(1, 4096), 64)
    assert (one.rows, one.splits) == (16, 8)
    # the sums of many rows would move more bytes than the codes
    assert module.few_rows_launch(torch.zeros(64, 4096), 64) == module.FewRowsLaunch(64, 4)
    assert module.few_rows_launch(torch.zeros(64, 4096), 4096).splits == 1
    assert module.few_rows_launch(torch.zeros(17, 64), 64) == module.FewRowsLaunch(32, 1)


@pytest.mark.parametrize("columns", [64, 2048], ids=["one step", "splits"])
def test_sums_may_stay_in_fp32(columns, device):
    packed, scales = weight(67, columns, device)
    given = [packed], [scales], [67]
    x = torch.randn(7, columns, device=device).bfloat16()
    sums = nf4_products(x, *given, dtype=torch.float32)
    assert sums.dtype == torch.float32 and torch.equal(sums.bfloat16(), nf4_products(x, *given))
    one = torch.eye(columns, device=device).bfloat16()
    exact = x.double() @ nf4_product_reference(one, packed, scales, 67).double()
    assert float((sums - exact).norm()) < 1e-5 * float(exact.norm())


def test_sizes_that_do_not_fit(device):
    packed, scales = weight(8, 64, device)
    x = torch.zeros(2, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="256 bytes and 8 scales are not those of 9 x 64"):
        nf4_product(x, packed, scales, 9)
    with pytest.raises(ValueError, match="code='int4'"):
        nf4_product(x, packed, scales, 8, code="int4")


def test_a_launch_that_splits_leaves_none_as_done(device):
    """The next launch of the stream counts from zero again, and gives the same bits."""
    packed, scales = weight(64, 2048, device)
    x = torch.randn(3, 2048, device=device).bfloat16()
    assert module.few_rows_launch(x, 64).splits > 1
    first, second = (nf4_product(x, packed, scales, 64) for _ in range(2))
    assert torch.equal(first, second)
    assert not module.arrivals(x.device).any()


def test_it_is_an_operator_of_torch(device):
    packed, scales = weight(8, 64, device)
    x = torch.randn(2, 64, device=device).bfloat16()
    absmax = [scales.absmax], [scales.absmax2, scales.code2, scales.offset], scales.block2
    torch.library.opcheck(module._nf4_product, (x, [packed], *absmax, [8], 64, "nf4"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("absmax = absmax + tl.load(offset_ptr)", "absmax = absmax"),
        ("block // BLOCK2", "block // (2 * BLOCK2)"),
        ("tl.join(upper, lower)", "tl.join(lower, upper)"),
        ("pair + byte < end", "pair + byte < end - 1"),
        ("tl.minimum(begin + each, pairs)", "tl.minimum(begin + each - HALF, pairs)"),
        ("parts_ptr + each * count + place", "parts_ptr + place"),
        (
            "(at[:, None] + (pair + group)[None, :]) // (BLOCK // 2)",
            "(at[:, None] + (pair + group)[None, :]) // BLOCK",
        ),
    ],
)
def test_a_wrong_kernel_is_found(old, new, device):
    """Scales of several blocks of scales, splits of several steps."""
    wrong = mutant(module, old, new)
    with pytest.raises((AssertionError, IndexError)):
        compare(3, 64, 2048, torch.bfloat16, device, of=wrong)
