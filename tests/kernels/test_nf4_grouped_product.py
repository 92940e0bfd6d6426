"""Grouped products of few tokens with experts in 4 bits: as exact as those over dense weights, and
experts that nobody chose are not read.
"""

import sys
from dataclasses import replace

import pytest
import torch
from test_expert_dispatch import drawn
from test_nf4_product import weight

from chronicals.kernels.expert_dispatch import Dispatch, dispatch_reference, dispatch_to_experts
from chronicals.kernels.nf4_grouped_product import (
    multiplies_few_tokens,
    nf4_grouped_product,
    nf4_grouped_product_reference,
)
from mutants import mutant

module = sys.modules["chronicals.kernels.nf4_grouped_product"]

CASES = [
    (1, 1, 1, 64, 16),
    (1, 3, 5, 192, 70),
    (37, 2, 4, 128, 24),
    (64, 3, 8, 320, 67),
    (20, 4, 16, 64, 128),
]
"""Tokens, experts of a token, experts, columns, outputs."""


def check(
    case, dtype, device, of=module, of_tokens=True, bias=False, tall=None, one_sided=False, **form
):
    """Against fp64 of the values that the codes stand for, beside the plain product's own error.

    Args:
        tall: rows of a tile of the dispatch.
        one_sided: all tokens but the last choose the first expert.
    """
    tokens, each, experts, columns, outputs = case
    chosen = drawn(tokens, each, experts, device)
    if one_sided:
        chosen = torch.zeros_like(chosen)
        chosen[-1] = experts - 1
    to = dispatch_to_experts(chosen, experts)
    if tall is not None:
        to = Dispatch(*dispatch_reference(chosen.reshape(-1), experts, tall), to.each, tall)
    packed, scales = weight(experts * outputs, columns, device, **form)
    x = torch.randn(tokens if of_tokens else len(to.order_S), columns, device=device).to(dtype)
    given = torch.randn(experts, outputs, device=device).to(dtype) if bias else None
    options = {name: value for name, value in form.items() if name != "nested"}
    arguments = packed, scales, to, outputs, of_tokens, given
    got = of.nf4_grouped_product(x, *arguments, **options)
    plain = nf4_grouped_product_reference(x, *arguments, **options)
    one = dispatch_to_experts(torch.zeros(columns, 1, dtype=torch.int64, device=device), 1)
    dense = nf4_grouped_product_reference(
        torch.eye(columns, device=device).to(dtype),
        packed,
        scales,
        one,
        experts * outputs,
        **options,
    )
    dense = dense.t().view(experts, outputs, columns).double()
    rows = x.double()[to.order_S.long() // to.each] if of_tokens else x.double()
    of_row = chosen.reshape(-1)[to.order_S.long()]
    exact = torch.einsum("sk,snk->sn", rows, dense[of_row])
    if given is not None:
        exact += given.double()[of_row]
    assert got.shape == exact.shape and got.dtype == dtype
    ours, theirs = (float((y.double() - exact).norm() / exact.norm()) for y in (got, plain))
    assert ours <= 1.5 * theirs < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("of_tokens", [True, False], ids=["tokens", "sorted"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_over_shapes(case, of_tokens, nested, dtype, device):
    check(case, dtype, device, of_tokens=of_tokens, nested=nested)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["nf4", "fp4"])
@pytest.mark.parametrize(("block", "columns"), [(32, 96), (256, 512)])
def test_over_blocks_with_a_bias(block, columns, code, device):
    check((9, 2, 3, columns, 37), torch.bfloat16, device, bias=True, block=block, code=code)


@pytest.mark.slow
@pytest.mark.parametrize("tall", [16, 64])
def test_an_expert_with_more_rows_than_are_multiplied_at_once(tall, device):
    """39 of 40 tokens chose the same of four experts: four times the mean."""
    assert module._rows_at_once(40, 4, tall) == min(tall, 32)
    check((40, 1, 4, 64, 24), torch.bfloat16, device, tall=tall, one_sided=True)


def test_experts_that_no_token_chose_are_not_read(device):
    packed, scales = weight(4 * 16, 64, device, nested=False)
    to = dispatch_to_experts(torch.tensor([[2, 0], [0, 2]], device=device), 4)
    x = torch.randn(2, 64, device=device).bfloat16()
    expected = nf4_grouped_product(x, packed, scales, to, 16, True)
    absmax = scales.absmax.clone().view(4, -1)
    absmax[[1, 3]] = float("nan")
    poisoned = replace(scales, absmax=absmax.view(-1))
    got = nf4_grouped_product(x, packed, poisoned, to, 16, True)
    assert torch.equal(got, expected) and got.isfinite().all()


def test_rows_at_once_are_twice_the_mean():
    assert module._rows_at_once(8, 128, 64) == 16
    assert module._rows_at_once(128, 8, 64) == 32
    assert module._rows_at_once(128, 2, 64) == 64


def test_what_the_kernel_takes(device):
    def takes(tokens, columns=64, dtype=torch.bfloat16, block=64):
        to = dispatch_to_experts(torch.zeros(tokens, 2, dtype=torch.int64, device=device), 3)
        x = torch.zeros(2 * tokens, columns, dtype=dtype, device=device)
        return multiplies_few_tokens(x, to, block)

    assert takes(1) and takes(64) and takes(1, dtype=torch.float16) and takes(1, 96, block=32)
    assert not takes(65) and not takes(0) and not takes(1, dtype=torch.float32)
    assert not takes(1, 96)


def test_sizes_that_do_not_fit(device):
    packed, scales = weight(2 * 8, 64, device)
    to = dispatch_to_experts(torch.zeros(3, 1, dtype=torch.int64, device=device), 2)
    x = torch.zeros(3, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="are not those of 18 x 64"):
        nf4_grouped_product(x, packed, scales, to, 9)
    with pytest.raises(ValueError, match=r"x is \(2, 64\): expected \[3, K\]"):
        nf4_grouped_product(x[:2], packed, scales, to, 8)


def test_it_is_an_operator_of_torch(device):
    packed, scales = weight(2 * 8, 64, device)
    to = dispatch_to_experts(torch.tensor([[1], [0]], device=device), 2)
    x = torch.randn(2, 64, device=device).bfloat16()
    nested = [scales.absmax2, scales.code2, scales.offset]
    codes = x, packed, scales.absmax, nested, scales.block2
    dispatch = to.order_S, to.bounds, to.tiles, to.each, to.rows
    torch.library.opcheck(module._product, (*codes, *dispatch, True, 8, None, 64, "nf4"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(expert.to(tl.int64) * outputs + output) * pairs", "output.to(tl.int64) * pairs"),
        ("tl.load(order_ptr + taken) // each", "tl.load(order_ptr + taken)"),
        ("first + TALL", "first + TALL - 1"),
        ("bias_ptr + expert.to(tl.int64) * bias_row + output", "bias_ptr + output"),
        ("range(first, end, ROWS)", "range(first, first + 1, ROWS)"),
    ],
)
def test_a_wrong_kernel_is_found(old, new, device):
    wrong = mutant(module, old, new)
    with pytest.raises((AssertionError, IndexError)):
        check((37, 2, 4, 128, 24), torch.bfloat16, device, of=wrong, bias=True, tall=16)
        check((40, 1, 4, 64, 24), torch.bfloat16, device, of=wrong, tall=64, one_sided=True)
