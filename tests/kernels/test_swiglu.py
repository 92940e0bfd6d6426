"""fused_swiglu against equation 6 of Shazeer and against transformers' LlamaMLP."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels import fused_swiglu
from chronicals.kernels.swiglu import swiglu_reference
from comparison import assert_as_exact_as_plain

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def compare(inputs):
    assert_as_exact_as_plain(fused_swiglu, plain, inputs, exact=exact)


def inputs(shape, dtype, device, scale=2.0):
    return lambda: tuple((torch.randn(*shape, device=device) * scale).to(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (13, 64), (1, 1), (13, 37), (2, 5, 101), (3, 257)], ids=str)
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

    module = LlamaMLP(LlamaConfig(hidden_size=20, intermediate_size=37, num_attention_heads=1)).to(device)
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")

    def llama(x, *weights):
        return torch.func.functional_call(module, dict(zip(names, weights)), x)

    def ours(x, gate, up, down):
        return F.linear(fused_swiglu(F.linear(x, gate), F.linear(x, up)), down)

    def draw():
        shapes = (23, 20), (37, 20), (37, 20), (20, 37)
        return [(torch.randn(*s, device=device) * (1.0 if s[0] == 23 else 0.3)).to(dtype) for s in shapes]

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
    """Where e^-gate overflows, silu is 0 and so is its slope; at the other end silu is the gate itself."""
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
    with pytest.raises(ValueError, match="must be alike"):
        fused_swiglu(torch.randn(4, 8), up)


def test_compiled(device):
    """In one graph, and as exact."""
    compiled = torch.compile(fused_swiglu, backend="aot_eager", fullgraph=True)
    assert_as_exact_as_plain(compiled, plain, inputs((13, 37), torch.float32, device), exact=exact)
