"""A layer of experts as one function, against expert by expert: the output and the gradients of
all that is given.
"""

import itertools
import sys

import pytest
import torch
from test_expert_dispatch import drawn
from torch.utils._python_dispatch import TorchDispatchMode

from chronicals.kernels.expert_glu import Gate
from chronicals.kernels.fused_experts import ExpertWeights, fused_experts, fused_experts_reference
from mutants import mutant

module = sys.modules["chronicals.kernels.fused_experts"]  # the package has a function of that name

GPT_OSS = Gate("silu", 1.702, 50.0, 1.0, True)
"""A limit that no value reaches: what lies at it in fp64 may be beyond in 16 bit; see the unit's
own tests.
"""

CASES = [(9, 1, 1, 32, 32), (37, 2, 4, 24, 40), (67, 3, 8, 70, 33), (20, 4, 16, 64, 48)]
"""Tokens, experts of a token, experts, model width, inner width."""


def built(tensors, transposed=False, bias=False, rank=0, scale=0.5):
    """x, shares and both products of tensors in the order in which ``shapes`` gives them."""
    x, shares, *rest = tensors
    products = []
    for _ in range(2):
        weight, *rest = rest
        one, rest = (rest[0], rest[1:]) if bias else (None, rest)
        down, up, rest = (*rest[:2], rest[2:]) if rank else (None, None, rest)
        products.append(ExpertWeights(weight, transposed, one, down, up, scale))
    return x, shares, *products


def shapes(case, transposed=False, bias=False, rank=0):
    tokens, each, experts, width, inner = case
    found = [(tokens, width), (tokens, each)]
    for out, into in ((2 * inner, width), (width, inner)):
        found.append((experts, into, out) if transposed else (experts, out, into))
        found += [(experts, out)] * bias
        found += [(experts, rank, into), (experts, out, rank)] if rank else []
    return found


def compare(case, dtype, device, gate=None, of=module, compiled=False, **options):
    """In relative Frobenius norm, of one draw: a layer holds many sums of few terms, and few
    tensors of many elements.
    """
    experts = drawn(*case[:3], device)
    sizes = shapes(case, **options)
    tensors = [
        (torch.randn(*size, device=device) * (0.4 if n > 1 else 1)).to(dtype)
        for n, size in enumerate(sizes)
    ]
    dy = torch.randn(case[0], case[3], device=device).to(dtype)

    def run(function, kind):
        leaves = [x.to(kind).requires_grad_() for x in tensors]

        def call(*leaves):
            x, shares, first, second = built(leaves, **options)
            return function(x, experts, shares, first, second, gate)

        call = (
            torch.compile(call, backend="aot_eager", fullgraph=True)
            if compiled and function is of.fused_experts
            else call
        )
        out = call(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dy.to(kind))]

    exact, plain = (run(fused_experts_reference, kind) for kind in (torch.float64, dtype))
    for number, (got, own, expected) in enumerate(
        zip(run(of.fused_experts, dtype), plain, exact, strict=True)
    ):
        assert got.dtype == dtype and got.shape == expected.shape
        error, plain_error = ((found.double() - expected).norm() for found in (got, own))
        limit = max(2 * plain_error, 2 * torch.finfo(dtype).eps * expected.norm())
        assert error <= limit, f"tensor {number}: {error:.2e}, allowed {limit:.2e}"


OPTIONS = [
    {"transposed": transposed, "bias": bias, "rank": rank}
    for transposed, bias, rank in itertools.product((False, True), (False, True), (0, 4))
]


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("gate", [None, GPT_OSS], ids=["swiglu", "gpt-oss"])
def test_output_and_every_gradient(options, gate, device):
    compare(CASES[1], torch.bfloat16, device, gate, **options)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sizes(case, dtype, device):
    compare(case, dtype, device, rank=4)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck_in_fp64(options):
    """Of the references of the parts, which the kernels are compared with."""
    case = 5, 2, 3, 6, 4
    experts = drawn(*case[:3], "cpu")
    tensors = [torch.randn(*shape).double().requires_grad_() for shape in shapes(case, **options)]

    def run(*tensors):
        x, shares, first, second = built(tensors, **options)
        return fused_experts(x, experts, shares, first, second, GPT_OSS)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_the_reference_is_the_definition_of_transformers():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=12, moe_intermediate_size=10, num_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    layer = Qwen3MoeExperts(config).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(9, 12).double()
    experts = drawn(9, 2, 4, "cpu")
    shares = torch.rand(9, 2).double()
    expected = layer(x, experts, shares)
    got = fused_experts_reference(
        x, experts, shares, ExpertWeights(layer.gate_up_proj), ExpertWeights(layer.down_proj)
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.slow
def test_a_frozen_layer_still_passes_gradients(device):
    """With adapters alone, or a router alone, that learn."""
    case = CASES[1]
    tensors = [torch.randn(*shape, device=device).bfloat16() for shape in shapes(case, rank=4)]
    wanted = [0, 1, 3, 4, 6, 7]
    for n in wanted:
        tensors[n].requires_grad_()
    x, shares, first, second = built(tensors, rank=4)
    experts = drawn(*case[:3], device)
    got = torch.autograd.grad(
        fused_experts(x, experts, shares, first, second).sum(), [tensors[n] for n in wanted]
    )
    expected = torch.autograd.grad(
        fused_experts_reference(x, experts, shares, first, second).sum(),
        [tensors[n] for n in wanted],
    )
    for one, other in zip(got, expected):
        assert (one - other).norm() <= 2e-2 * other.norm()
    alone = shares.detach().requires_grad_()
    out = fused_experts(
        x.detach(), experts, alone, ExpertWeights(first.weight), ExpertWeights(second.weight)
    )
    assert torch.autograd.grad(out.sum(), alone)[0].abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("learns", [None, 2, 3, 4], ids=["nothing", "W", "A", "B"])
def test_x_is_kept_where_something_reads_it(learns, device):
    """A weight, or A of an adapter: B's gradient reads what A made of x."""
    case = CASES[1]
    kept = []
    tensors = [torch.randn(*shape, device=device).bfloat16() for shape in shapes(case, rank=4)]
    for n in [0] + [learns] * (learns is not None):
        tensors[n].requires_grad_()
    x, shares, first, second = built(tensors, rank=4)
    experts = drawn(*case[:3], device)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.data_ptr()) or t, lambda t: t
    ):
        out = fused_experts(x, experts, shares, first, second)
    assert (x.data_ptr() in kept) == (learns in (2, 3))
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    expected = torch.autograd.grad(
        fused_experts_reference(x, experts, shares, first, second).sum(), leaves
    )
    for one, other in zip(torch.autograd.grad(out.sum(), leaves), expected, strict=True):
        assert (one - other).norm() <= 2e-2 * other.norm()


@pytest.mark.slow
def test_twice_the_same_bits(device):
    case = CASES[2]
    tensors = [
        torch.randn(*shape, device=device).bfloat16().requires_grad_() for shape in shapes(case)
    ]
    x, shares, first, second = built(tensors)
    experts = drawn(*case[:3], device)

    def run():
        out = fused_experts(x, experts, shares, first, second)
        return out, *torch.autograd.grad(out.float().square().sum(), tensors)

    assert all(torch.equal(one, other) for one, other in zip(run(), run()))


def test_no_tokens(device):
    tensors = [
        torch.randn(*shape, device=device).requires_grad_() for shape in shapes((0, 2, 3, 8, 4))
    ]
    x, shares, first, second = built(tensors)
    out = fused_experts(
        x, torch.zeros(0, 2, dtype=torch.int64, device=device), shares, first, second
    )
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert out.shape == (0, 8) and not gradients[2].any() and gradients[0].shape == (0, 8)


@pytest.mark.slow
def test_compiled(device):
    """In one graph, and as exact."""
    compare(CASES[1], torch.bfloat16, device, compiled=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(x=torch.zeros(3, 7)), r"expected \[T, 8\]"),
        (lambda t: t.update(second=ExpertWeights(torch.zeros(3, 8, 5))), r"it must be \(3, 8, 4\)"),
        (lambda t: t.update(x=torch.zeros(3, 8).bfloat16()), "they must have one dtype"),
    ],
)
def test_what_does_not_belong_together_is_refused(change, message):
    given = {
        "x": torch.zeros(3, 8),
        "experts": torch.zeros(3, 2, dtype=torch.int64),
        "shares": torch.zeros(3, 2),
        "first": ExpertWeights(torch.zeros(3, 8, 8)),
        "second": ExpertWeights(torch.zeros(3, 8, 4)),
    }
    change(given)
    with pytest.raises(ValueError, match=message):
        fused_experts(**given)


MUTATIONS = {
    "the adapter of down learns twice as much": (
        "grouped_weight_gradient(thin_dy, unit, to, dtype=a2.dtype)",
        "2 * grouped_weight_gradient(thin_dy, unit, to, dtype=a2.dtype)",
    ),
    "the router does not learn of the bias": (
        "product(dy, b2.t(), d_shares.dtype).gather(1, experts)",
        "0",
    ),
    "the gradient of x without the adapter": (
        "adapted = LowRankTerm(thin, of.down.mT)",
        "adapted = None",
    ),
    "a bias that learns without shares": ("shares.to(dy.dtype)", "0.5 + shares.to(dy.dtype)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_faults_are_found(name, device):
    wrong = mutant(module, *MUTATIONS[name])
    with pytest.raises(AssertionError):
        compare(CASES[1], torch.bfloat16, device, of=wrong, bias=True, rank=4)


class Watch(TorchDispatchMode):
    """Collects operators that wait for the device, or make a tensor of numbers on the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
def test_the_host_waits_for_nothing(device):
    """So that CUDA graphs capture it, shapes and all: none depends on which experts are chosen."""
    case = CASES[1]
    options = {"bias": True, "rank": 4}
    tensors = [
        torch.randn(*shape, device=device).bfloat16().requires_grad_()
        for shape in shapes(case, **options)
    ]
    x, shares, first, second = built(tensors, **options)
    experts = drawn(*case[:3], device)
    with Watch() as watch:
        fused_experts(x, experts, shares, first, second).sum().backward()
    assert "grouped_product" in watch.found
    assert not {
        "_local_scalar_dense",
        "lift_fresh",
        "nonzero",
        "is_nonzero",
        "masked_select",
        "unique",
    } & set(watch.found)
