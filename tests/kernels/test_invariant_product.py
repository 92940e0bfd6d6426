"""Products of the same bits for a row, whatever is beside it: against plain ones, and bit for bit."""

import pytest
import torch

from chronicals.kernels import invariant_product as module
from chronicals.kernels.invariant_product import invariant_product, invariant_product_reference
from comparison import assert_as_exact_as_plain
from mutants import mutant

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = {
    "one row": (1, 96, 70),
    "a prime number of rows": (67, 130, 40),
    "one column": (5, 200, 1),
    "several tiles": (130, 64, 129),
}
"""M, K, N."""


def compare(shape, dtype, device, of=module, transposed=True):
    rows, inner, columns = shape

    def draw():
        x = torch.randn(rows, inner, device=device)
        w = torch.randn(*((columns, inner) if transposed else (inner, columns)), device=device)
        return [x.to(dtype), w.to(dtype)]

    def with_zero_gradient(function):
        def run(x, w):
            with torch.no_grad():
                out = function(x, w.mT if transposed else w)
            return out + 0 * (x.sum() + w.sum()).to(out.dtype)

        return run

    functions = with_zero_gradient(of.invariant_product), with_zero_gradient(plain)
    assert_as_exact_as_plain(*functions, draw)


def plain(x, w):
    return invariant_product_reference(x, w)


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_over_shapes(shape, dtype, device):
    compare(SHAPES[shape], dtype, device)


def test_kernel_of_a_weight_in_rows(device):
    compare((9, 70, 33), torch.bfloat16, device, transposed=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_rows_bits_do_not_depend_on_rows_beside_it(dtype, device):
    """Nor on its place in a tile, nor on how the rows lie in memory."""
    x = torch.randn(200, 300, device=device).to(dtype)
    weight = torch.randn(50, 300, device=device).to(dtype).mT
    with torch.no_grad():
        together = invariant_product(x, weight)
        for count in (1, 2, 63, 64, 65):
            for first in (0, 1, 130):
                some = invariant_product(x[first : first + count], weight)
                assert torch.equal(some, together[first : first + count]), (count, first)
        apart = x.repeat(1, 2)[:, :300]
        assert torch.equal(invariant_product(apart, weight), together)


def test_what_trains_takes_the_reference(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    weight = torch.randn(8, 5, device=device)
    invariant_product(x, weight).sum().backward()
    assert torch.allclose(x.grad, weight.sum(1).expand(3, 8))


def test_a_mutant_is_found(device):
    """The last values of k, which fill no tile, are left out."""
    old, new = "range(0, inner, INNER)", "range(0, inner // INNER * INNER, INNER)"
    wrong = mutant(module, old, new)
    with pytest.raises(AssertionError):
        compare((67, 130, 40), torch.bfloat16, device, wrong)
