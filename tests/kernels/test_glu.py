"""fused_swiglu and fused_geglu against equation 6 of Shazeer and against transformers' MLPs."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels import fused_geglu, fused_swiglu, glu
from chronicals.kernels.glu import geglu_reference, swiglu_reference
from comparison import assert_as_exact_as_plain
from mutants import mutant

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def compare(draw):
    assert_as_exact_as_plain(fused_swiglu, plain, draw, exact=exact)


def inputs(shape, dtype, device, scale=2.0):
    return lambda: tuple((torch.randn(*shape, device=device) * scale).to(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 64), (13, 64), (1, 1), (13, 37), (2, 5, 101), (3, 257)], ids=str
)
def test_equals_the_formula(shape, dtype, device):
    compare(inputs(shape, dtype, device))


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_reference_is_the_formula(dtype):
    assert_as_exact_as_plain(swiglu_reference, plain, inputs((13, 37), dtype, "cpu"), exact=exact)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_equals_llama_mlp(dtype, device):
    """The whole MLP, its three products included, with the gradients of its weights."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    module = LlamaMLP(LlamaConfig(hidden_size=20, intermediate_size=37, num_attention_heads=1)).to(
        device
    )
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")

    def llama(x, *weights):
        return torch.func.functional_call(module, dict(zip(names, weights)), x)

    def ours(x, gate, up, down):
        return F.linear(fused_swiglu(F.linear(x, gate), F.linear(x, up)), down)

    def draw():
        shapes = (23, 20), (37, 20), (37, 20), (20, 37)
        return [
            (torch.randn(*s, device=device) * (1.0 if s[0] == 23 else 0.3)).to(dtype)
            for s in shapes
        ]

    assert_as_exact_as_plain(ours, llama, draw)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_halves_of_a_merged_product(dtype, device):
    """Two views of one tensor, as a merged gate and up product gives them."""

    def draw():
        both = torch.randn(13, 74, device=device).to(dtype).chunk(2, -1)
        assert not both[0].is_contiguous()
        return both

    compare(draw)


def test_transposed_beside_contiguous(device):
    compare(lambda: (torch.randn(37, 13, device=device).t(), torch.randn(13, 37, device=device)))


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_far_ends_of_the_gate(dtype, device):
    """Where e^-gate overflows, silu is 0 and so is its slope; at the other end silu is the gate
    itself.
    """
    gate = torch.tensor([-1e4, -200.0, 200.0, 1e4], device=device).to(dtype).requires_grad_()
    up = torch.tensor([3.0, 3.0, 3.0, 3.0], device=device).to(dtype).requires_grad_()
    out = fused_swiglu(gate, up)
    out.sum().backward()
    assert torch.equal(out.abs(), (gate.clamp(min=0) * 3).detach().abs())
    assert torch.equal(gate.grad.abs(), torch.tensor([0.0, 0.0, 3.0, 3.0], device=device).to(dtype))
    assert torch.equal(up.grad.abs(), gate.detach().clamp(min=0))


def test_no_rows(device):
    gate = torch.zeros(0, 8, device=device, requires_grad=True)
    assert fused_swiglu(gate, torch.zeros(0, 8, device=device)).shape == (0, 8)


@pytest.mark.parametrize(
    "up",
    [torch.zeros(4, 7), torch.zeros(1, 8), torch.zeros(8), torch.zeros(4, 8).bfloat16()],
    ids=["width", "rows", "ndim", "type"],
)
def test_unlike_inputs_are_refused(up):
    with pytest.raises(ValueError, match="must have one shape and dtype"):
        fused_swiglu(torch.randn(4, 8), up)


def test_compiled(device):
    """In one graph, and as exact."""
    compiled = torch.compile(fused_swiglu, backend="aot_eager", fullgraph=True)
    assert_as_exact_as_plain(compiled, plain, inputs((13, 37), torch.float32, device), exact=exact)


# --- GELU
# --------------------------------------------------------------------------------------------------------------


def exact_gelu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    if approximate == "none":
        return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up
    return gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(1, 64), (13, 37), (2, 5, 101), (3, 257)], ids=str)
@pytest.mark.parametrize("ours", [fused_geglu, geglu_reference])
def test_geglu_equals_the_formula(ours, shape, approximate, dtype, device):
    assert_as_exact_as_plain(
        lambda g, u: ours(g, u, approximate),
        lambda g, u: F.gelu(g, approximate=approximate) * u,
        inputs(shape, dtype, device),
        exact=lambda g, u: exact_gelu(g, u, approximate),
    )


def test_an_unknown_approximation_is_refused():
    with pytest.raises(ValueError, match="approximate='erf'"):
        fused_geglu(torch.randn(4, 8), torch.randn(4, 8), "erf")


@pytest.mark.parametrize("rows", [1, 7])
def test_rows_longer_than_a_program(rows, device):
    compare(lambda: torch.randn(2, rows, 5003, device=device).unbind())


def test_strided_rows_longer_than_a_program(device):
    compare(lambda: torch.randn(3, 2 * 2500, device=device).chunk(2, -1))


MUTATIONS = {
    "slope of silu": ("slope = s * (1.0 + g * (1.0 - s))", "slope = s * (1.0 + g)"),
    "no activation for up": ("(dy * activated)", "(dy * gate)"),
    "no up for gate": ("(dy * up * slope)", "(dy * slope)"),
    "one row for all": ("d_up_ptr + row * d_up_stride", "d_up_ptr"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_faults_are_found(name, device):
    broken = mutant(glu, *MUTATIONS[name])
    with pytest.raises(AssertionError):
        assert_as_exact_as_plain(
            broken.fused_swiglu,
            plain,
            lambda: torch.randn(13, 74, device=device).chunk(2, -1),
            exact=exact,
        )


GELU_MUTATIONS = {
    "none": ("slope = s + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)", "slope = s"),
    "tanh": ("(1.0 + 0.134145 * g * g)", "(1.0 + 0.044715 * g * g)"),
}


@pytest.mark.parametrize("approximate", GELU_MUTATIONS)
def test_planted_faults_of_gelu_are_found(approximate, device):
    broken = mutant(glu, *GELU_MUTATIONS[approximate])
    with pytest.raises(AssertionError):
        assert_as_exact_as_plain(
            lambda g, u: broken.fused_geglu(g, u, approximate),
            lambda g, u: F.gelu(g, approximate=approximate) * u,
            inputs((13, 37), torch.float32, device),
        )
