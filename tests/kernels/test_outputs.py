"""Outputs of the public operators: whoever calls one may write into them in place, as into those
of plain torch.
"""

import re

import pytest
import torch
from torch import Tensor, nn

import chronicals.kernels
from chronicals.attention import document_attention, gather_keys
from chronicals.batch import SharedKeys
from chronicals.kernels import (
    fp8_linear,
    fused_add_rmsnorm,
    fused_cross_entropy,
    fused_experts,
    fused_geglu,
    fused_layernorm,
    fused_qk_norm_rope,
    fused_qk_rope,
    fused_rmsnorm,
    fused_softmax,
    fused_swiglu,
    linear_cross_entropy,
    token_log_probability,
)
from chronicals.kernels.fused_experts import ExpertWeights
from chronicals.kernels.glu import glu_of_both
from chronicals.kernels.qk_norm_rope import fused_qkv_norm_rope
from chronicals.lora import LoRAConfig, LoRALinear
from interpreted import kernels_run

WIDTH = 16
ROWS = (2, 3)
"""Rows in two dimensions, as a model has them: an operator that works on one flattens them."""


def angles(*shape: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(*shape)
    return angle.cos(), angle.sin()


def experts(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0]])
    shares = torch.rand(3, 2)
    return fused_experts(x, chosen, shares, ExpertWeights(first), ExpertWeights(second))


def shared() -> SharedKeys:
    index = torch.tensor([0, 1, 0, 2])
    places = torch.tensor([[0, 1, 3], [2, -1, -1]])
    return SharedKeys(index, torch.tensor([0, 2, 4], dtype=torch.int32), places, 2)


def adapted(x: Tensor) -> Tensor:
    layer = LoRALinear(
        nn.Linear(WIDTH, WIDTH).requires_grad_(False), LoRAConfig(rank=2, dropout=0.0), WIDTH, WIDTH
    )
    nn.init.normal_(layer.lora_B)
    return layer(x)


BOUNDS = torch.tensor([0, 2, 6], dtype=torch.int32)

OPERATORS = {
    "fp8_linear": (fp8_linear, [(*ROWS, WIDTH), (WIDTH, WIDTH)]),
    "fused_add_rmsnorm": (fused_add_rmsnorm, [(*ROWS, WIDTH), (*ROWS, WIDTH), (WIDTH,)]),
    "fused_cross_entropy": (
        lambda x, w: fused_cross_entropy(x, w, torch.arange(6).view(ROWS)),
        [(*ROWS, WIDTH), (9, WIDTH)],
    ),
    "fused_experts": (experts, [(3, WIDTH), (3, 2 * WIDTH, WIDTH), (3, WIDTH, WIDTH)]),
    "fused_geglu": (fused_geglu, [(*ROWS, WIDTH)] * 2),
    "fused_layernorm": (fused_layernorm, [(*ROWS, WIDTH), (WIDTH,), (WIDTH,)]),
    "fused_qk_norm_rope": (
        lambda q, k, a, b: fused_qk_norm_rope(q, k, a, b, *angles(6, WIDTH)),
        [(6, 2, WIDTH), (6, 1, WIDTH), (WIDTH,), (WIDTH,)],
    ),
    "fused_qk_rope": (
        lambda q, k: fused_qk_rope(q, k, *angles(1, 3, WIDTH)),
        [(2, 2, 3, WIDTH), (2, 1, 3, WIDTH)],
    ),
    "fused_rmsnorm": (fused_rmsnorm, [(*ROWS, WIDTH), (WIDTH,)]),
    "fused_softmax": (fused_softmax, [(*ROWS, WIDTH)]),
    "fused_swiglu": (fused_swiglu, [(*ROWS, WIDTH)] * 2),
    "linear_cross_entropy": (
        lambda x, w: linear_cross_entropy(x, w, torch.arange(6)),
        [(6, WIDTH), (9, WIDTH)],
    ),
    "token_log_probability": (
        lambda x, w: token_log_probability(x, w, torch.arange(6), entropy=True),
        [(6, WIDTH), (9, WIDTH)],
    ),
    "document_attention": (
        lambda q, k, v: document_attention(q, k, v, BOUNDS, 4),
        [(6, 2, WIDTH), (6, 1, WIDTH), (6, 1, WIDTH)],
    ),
    "gather_keys": (lambda x: gather_keys(x, shared()), [(3, 1, WIDTH)]),
    "fused_qkv_norm_rope": (
        lambda qkv, a, b: fused_qkv_norm_rope(qkv, a, b, *angles(6, WIDTH), (2, 1)),
        [(6, 4 * WIDTH), (WIDTH,), (WIDTH,)],
    ),
    "glu_of_both": (lambda both: glu_of_both(both, "silu"), [(6, 2 * WIDTH)]),
    "LoRALinear": (adapted, [(*ROWS, WIDTH)]),
}
"""By name, an operator and the shapes of its inputs."""

NOT_DIFFERENTIABLE = {
    "fp8_grouped_product",
    "fp8_quantize",
    "fp8_quantize_experts",
    "fused_adamw_",
    "grouped_product",
    "grouped_weight_gradient",
}

SUMMED = {"linear_distillation"}
"""What returns the sums of a loss, as ``linear_cross_entropy`` does, in a structure."""

SHARED = {("fused_qkv_norm_rope", 2)}
"""Outputs, by their place, that stand where the input stood, which their documentation says."""


@pytest.fixture(autouse=True)
def kernels():
    with kernels_run():
        yield


def outputs(name: str, neighbours: list[Tensor] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs of an operator, and its outputs that have a gradient; the same each time.
    ``neighbours`` is told what lies in one storage with the inputs, as keys lie beside queries."""
    operator, shapes = OPERATORS[name]
    torch.manual_seed(0)
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    wide = [torch.cat((leaf, leaf), -1) for leaf in leaves]
    if neighbours is not None:
        neighbours += [pair[..., pair.shape[-1] // 2 :] for pair in wide]
    out = operator(*(pair[..., : pair.shape[-1] // 2] for pair in wide))
    found = out if isinstance(out, tuple) else (out,)
    return leaves, [x for x in found if isinstance(x, Tensor) and x.requires_grad]


def gradients(leaves: list[Tensor], out: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    value = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in out)
    return torch.autograd.grad(value, leaves)


def test_every_differentiable_operator_is_tried():
    tried = {*OPERATORS, *NOT_DIFFERENTIABLE, *SUMMED}
    assert {*chronicals.kernels.__all__} - tried == set(), "no entry in OPERATORS"


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_returned_is_no_view_and_stands_beside_the_inputs(name):
    operator, shapes = OPERATORS[name]
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    out = operator(*leaves)
    there = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    for place, x in enumerate(out if isinstance(out, tuple) else (out,)):
        assert (name, place) in SHARED or x.untyped_storage().data_ptr() not in there
        within_a_function = isinstance(x.grad_fn, torch.autograd.function.BackwardCFunction)
        assert not (within_a_function and x._is_view())


def assert_right_or_refused(
    leaves: list[Tensor], out: list[Tensor], expected: list[Tensor]
) -> None:
    """The gradient is right, or torch says that what the operator needs for it was overwritten."""
    try:
        found = gradients(leaves, out)
    except RuntimeError as error:
        assert re.search("modified (by an )?inplace", str(error))
        return
    for ours, plain in zip(found, expected):
        assert torch.allclose(ours, plain, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_writing_into_what_is_returned_is_as_with_plain_torch(name):
    for place in range(len(outputs(name)[1])):
        leaves, out = outputs(name)
        out[place] = out[place] * 2
        expected = gradients(leaves, out)
        leaves, out = outputs(name)
        out[place].mul_(2)
        assert_right_or_refused(leaves, out, expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_writing_beside_what_was_given_is_as_with_plain_torch(name):
    """Into the other part of a product, of which the operator has one, as a rotation in place
    does.
    """
    expected = gradients(*outputs(name))
    for place in range(len(OPERATORS[name][1])):
        neighbours: list[Tensor] = []
        leaves, out = outputs(name, neighbours)
        neighbours[place].mul_(2)
        assert_right_or_refused(leaves, out, expected)
