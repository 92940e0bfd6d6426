"""Products of two TF32 parts with weights that are bf16 numbers: as near to fp64 as fp32's, where tensor cores read TF32."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chronicals.benchmark.arms import split_products
from chronicals.benchmark.arms.pair_reference import in_bf16


def as_tf32(x):
    """Rounded to 11 bits of significand, to the nearest, as a tensor core may read an operand."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & split_products.FIRST_BITS).view(torch.float32)


@pytest.fixture
def tensor_core(monkeypatch):
    """Products whose operands are TF32 numbers, summed in fp32."""
    monkeypatch.setattr(
        split_products, "_sum_of_products",
        lambda first, rest, weight: as_tf32(first) @ as_tf32(weight) + as_tf32(rest) @ as_tf32(weight),
    )  # fmt: skip


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
    exact = F.linear(x.double(), module.weight.double(), None if module.bias is None else module.bias.double())
    of_input = gradient.double() @ module.weight.double()
    return [[float((value.double() - right).abs().max()) for value, right in zip(pair, (exact, of_input))] for pair in found]


@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradient_are_as_exact_as_in_fp32(bias, tensor_core):
    module = layer(bias=bias)
    assert split_products.split_frozen(nn.Sequential(module))
    x, gradient = torch.randn(3, 7, 333) * 5, torch.randn(3, 7, 48)
    split, plain = errors(module, x, gradient)
    assert all(mine <= 2 * theirs for mine, theirs in zip(split, plain)), (split, plain)


def test_one_part_alone_is_refused(monkeypatch):
    """That is TF32, a thousand times less exact: the layers stay plain."""
    monkeypatch.setattr(split_products, "_sum_of_products", lambda first, rest, weight: first @ weight)
    module = layer()
    assert not split_products.split_frozen(nn.Sequential(module)) and "forward" not in vars(module)


def test_the_first_part_and_the_rest_are_the_number():
    x = torch.randn(1000) * torch.logspace(-20, 20, 1000)
    first = (x.view(torch.int32) & split_products.FIRST_BITS).view(torch.float32)
    assert torch.equal(as_tf32(first), first) and torch.equal(first + (x - first), x)
    assert ((x - first - as_tf32(x - first)).abs() <= 2.0**-22 * x.abs()).all()


def test_trained_weights_and_those_of_more_bits_stay_as_they_are():
    frozen, trained, finer = layer(), layer().requires_grad_(True), layer()
    finer.weight.data += 1e-4
    assert split_products.split_frozen(nn.ModuleList([finer, trained, frozen]))
    assert "forward" in vars(frozen) and not any("forward" in vars(module) for module in (trained, finer))
    assert not split_products.split_frozen(nn.ModuleList([finer, trained]))


def test_while_the_model_is_in_bf16_its_products_are():
    module = nn.Sequential(layer())
    split_products.split_frozen(module)
    x = torch.randn(4, 333)
    with in_bf16(module):
        found = module(x.bfloat16())
    assert found.dtype == torch.bfloat16 and torch.equal(found, F.linear(x.bfloat16(), module[0].weight.bfloat16()))
    assert module(x).dtype == torch.float32
