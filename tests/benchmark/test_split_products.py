"""Products of two TF32 parts with weights that are bf16 numbers: as near to fp64 as fp32's,
where tensor cores read TF32.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chronicals.benchmark.arms import split_products
from chronicals.benchmark.arms.pair_reference import in_bf16
from comparison import equal


def as_tf32(x):
    """Rounded to 11 bits of significand, to the nearest, as a tensor core may read an operand."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & split_products.FIRST_BITS).view(torch.float32)


AT_A_TIME = 8
"""Terms of a TF32 product that a tensor core adds to its sum at a time."""


def cut(x):
    """fp32 of the fp64 number, its further bits left out."""
    near = x.float()
    too_large = near.double().abs() > x.abs()
    return torch.where(too_large, torch.nextafter(near, torch.zeros_like(near)), near)


def summed_by_tensor_core(left, right):
    """As it reads operands and cuts off what its sums have beyond fp32."""
    left = as_tf32(left).double()
    right = as_tf32(right).double()
    total = torch.zeros(len(left), right.shape[1])
    for begin in range(0, len(right), AT_A_TIME):
        part = slice(begin, begin + AT_A_TIME)
        total = cut(total.double() + left[:, part] @ right[part])
    return total


@pytest.fixture
def let_add(monkeypatch):
    """Lets products be added by another function than torch's on this machine."""
    return lambda add: monkeypatch.setattr(split_products, "_add_product", add)


@pytest.fixture
def tensor_core(let_add):
    """Products whose operands are TF32 numbers, summed in fp32."""
    let_add(lambda out, left, right: out.addmm_(as_tf32(left), as_tf32(right)))


@pytest.fixture
def cutting_tensor_core(let_add):
    """The same, its sums cut."""
    let_add(lambda out, left, right: out.add_(summed_by_tensor_core(left, right)))


def layer(outputs=48, width=333, bias=False):
    made = nn.Linear(width, outputs, bias=bias)
    made.weight.data = made.weight.data.bfloat16().float()
    return made.requires_grad_(False)


def errors(module, x, gradient):
    """Largest distances of output and input gradient from fp64's, and the same of plain fp32."""
    found = []
    for forward in (module, lambda x: F.linear(x, module.weight, module.bias)):
        given = x.clone().requires_grad_()
        out = forward(given)
        out.backward(gradient)
        found.append((out.detach(), given.grad))
    exact = F.linear(
        x.double(), module.weight.double(), None if module.bias is None else module.bias.double()
    )
    of_input = gradient.double() @ module.weight.double()
    return [
        [
            float((value.double() - right).abs().max())
            for value, right in zip(pair, (exact, of_input))
        ]
        for pair in found
    ]


@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradient_are_as_exact_as_in_fp32(bias, tensor_core):
    module = layer(bias=bias)
    assert split_products.split_frozen(nn.Sequential(module))
    x = torch.randn(3, 7, 333) * 5
    gradient = torch.randn(3, 7, 48)
    split, plain = errors(module, x, gradient)
    assert all(mine <= 2 * theirs for mine, theirs in zip(split, plain)), (split, plain)


def test_products_less_exact_than_promised_are_refused(let_add):
    """Of TF32 alone, a thousand times less exact: the layers stay plain."""
    let_add(lambda out, left, right: out.copy_(as_tf32(left) @ right))
    module = layer()
    assert not split_products.split_frozen(nn.Sequential(module)) and "forward" not in vars(module)


def test_sums_are_as_short_as_the_card_needs(set_constants, cutting_tensor_core):
    """Those over a whole row of 4,096 lose more than is promised, for what is cut off has one
    sign.
    """
    set_constants(split_products, TRIAL_ROWS=64)
    wide = layer(outputs=8, width=4096)
    assert not split_products.as_exact(wide.weight, 4096)
    terms = split_products.split_frozen(nn.Sequential(layer(), wide))
    assert terms == 512
    split, plain = errors(wide, torch.randn(64, 4096), torch.randn(64, 8))
    assert all(
        mine <= split_products.ERROR_FACTOR * theirs for mine, theirs in zip(split, plain)
    ), (
        split,
        plain,
    )


def test_the_first_part_and_the_rest_are_the_number():
    x = torch.randn(1000) * torch.logspace(-20, 20, 1000)
    first = (x.view(torch.int32) & split_products.FIRST_BITS).view(torch.float32)
    assert equal(as_tf32(first), first) and equal(first + (x - first), x)
    assert ((x - first - as_tf32(x - first)).abs() <= 2.0**-22 * x.abs()).all()


def test_trained_weights_and_those_of_more_bits_stay_as_they_are():
    frozen = layer()
    trained = layer().requires_grad_(True)
    finer = layer()
    finer.weight.data += 1e-4
    assert split_products.split_frozen(nn.ModuleList([finer, trained, frozen]))
    assert "forward" in vars(frozen) and not any(
        "forward" in vars(module) for module in (trained, finer)
    )
    assert not split_products.split_frozen(nn.ModuleList([finer, trained]))


def test_while_the_model_is_in_bf16_its_products_are():
    module = nn.Sequential(layer())
    split_products.split_frozen(module)
    x = torch.randn(4, 333)
    with in_bf16(module):
        found = module(x.bfloat16())
    assert found.dtype == torch.bfloat16 and equal(
        found, F.linear(x.bfloat16(), module[0].weight.bfloat16())
    )
    assert module(x).dtype == torch.float32
