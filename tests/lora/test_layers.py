"""A linear layer with its adapter in the products, against the formula in fp64 and against the
way through the layer.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chronicals.lora.layers as module
from chronicals.lora import LoRAConfig, LoRALinear
from chronicals.lora.layers import LoRAEmbedding
from comparison import assert_as_exact_as_plain, equal
from mutants import mutant

IN = 19
OUT = 23
RANK = 3
SCALE = 1.5


def drawn(shape, dtype, device, bias):
    def draw():
        drawn = [
            torch.randn(*shape, IN, device=device).to(dtype),
            torch.randn(RANK, IN, device=device) * 0.3,
            torch.randn(OUT, RANK, device=device) * 0.3,
        ]
        return drawn if dtype != torch.float64 else [x.double() for x in drawn]

    return draw


def layer_of(weight, bias, a, b, of=module):
    """The layer with its adapter's matrices as given, differentiable."""
    base = nn.Linear(IN, OUT, bias=bias is not None, dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        base.weight.copy_(weight)
        if bias is not None:
            base.bias.copy_(bias)
    layer = of.LoRALinear(base, LoRAConfig(rank=RANK, alpha=SCALE * RANK, dropout=0.0), IN, OUT)
    del layer.lora_A, layer.lora_B
    layer.lora_A = a
    layer.lora_B = b
    return layer


def compare(shape, dtype, device, bias=True, of=module):
    weight = torch.randn(OUT, IN, device=device).to(dtype)
    offset = torch.randn(OUT, device=device).to(dtype) if bias else None

    def plain(x, a, b):
        kind = x.dtype
        w, c = (None if t is None else t.to(x.device, kind) for t in (weight, offset))
        return F.linear(x, w, c) + SCALE * F.linear(F.linear(x, a.to(kind)), b.to(kind))

    def ours(x, a, b):
        layer = layer_of(weight, offset, a, b, of)
        assert module._is_plain(layer.base_layer, x)
        return layer(x)

    assert_as_exact_as_plain(ours, plain, drawn(shape, dtype, device, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(1,), (13,), (2, 7), (0,)], ids=str)
def test_equals_the_formula(shape, bias, dtype, device):
    compare(shape, dtype, device, bias)


MUTATIONS = {
    "no scale forward": (
        "y.addmm_(down, b.t().to(kind), alpha=scale)",
        "y.addmm_(down, b.t().to(kind), alpha=1.0)",
    ),
    "no scale backward": ("(dy @ b.to(kind)) * ctx.scale", "(dy @ b.to(kind))"),
    "no scale of dB": (
        "product(dy.t(), down, b.dtype, ctx.scale)",
        "product(dy.t(), down, b.dtype)",
    ),
    "no adapter in dx": ("(dy @ weight).addmm_(g, a.to(kind))", "(dy @ weight)"),
    "no base in dx": ("(dy @ weight).addmm_", "torch.zeros_like(rows).addmm_"),
    "dA of the output's gradient": (
        "product(g.t(), rows, a.dtype)",
        "product(down.t(), rows, a.dtype)",
    ),
}


@pytest.mark.parametrize("fault", MUTATIONS)
def test_planted_faults_are_found(fault, device):
    broken = mutant(module, *MUTATIONS[fault])
    with pytest.raises(AssertionError, match="error"):
        compare((2, 7), torch.float32, device, of=broken)


WAYS = {
    "dropout": lambda layer: setattr(layer, "dropout", 0.3),
    "a hook": lambda layer: layer.base_layer.register_forward_hook(lambda *_: None),
    "a forward of somebody else's": lambda layer: setattr(
        layer.base_layer, "forward", layer.base_layer.forward
    ),
    "a trained base": lambda layer: layer.base_layer.requires_grad_(True),
}


@pytest.mark.parametrize("way", WAYS)
def test_otherwise_the_layer_itself_runs(way, monkeypatch):
    layer = LoRALinear(nn.Linear(IN, OUT), LoRAConfig(rank=RANK, dropout=0.0), IN, OUT)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(5, IN, requires_grad=True)
    calls = []
    monkeypatch.setattr(module._WithAdapter, "apply", lambda *given: calls.append(given))
    WAYS[way](layer)
    layer(x).sum().backward()
    assert not calls
    assert layer.lora_A.grad.any() and (layer.base_layer.weight.grad is not None) == (
        way == "a trained base"
    )


def test_both_ways_agree(monkeypatch):
    layer = LoRALinear(nn.Linear(IN, OUT), LoRAConfig(rank=RANK, dropout=0.0), IN, OUT).double()
    nn.init.normal_(layer.lora_B)
    x = torch.randn(2, 5, IN, dtype=torch.float64)
    upstream = torch.randn(2, 5, OUT, dtype=torch.float64)
    found = []
    for plain in (True, False):
        monkeypatch.setattr(module, "_is_plain", lambda *_, plain=plain: plain)
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        found.append([y, *torch.autograd.grad(y, (leaf, layer.lora_A, layer.lora_B), upstream)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_second_backward_through_the_first_is_refused():
    """The first is made of products over saved tensors, of which a second would know nothing."""
    layer = LoRALinear(nn.Linear(IN, OUT), LoRAConfig(rank=RANK, dropout=0.0), IN, OUT)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(5, IN, requires_grad=True)
    with pytest.raises(
        RuntimeError, match="create_graph=True: _WithAdapterBackward has no second derivative"
    ):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("shape", [(), (5,), (2, 5)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_output_may_be_written_into(dropout, shape):
    """As OLMo clamps its queries in place."""
    layer = LoRALinear(nn.Linear(IN, OUT), LoRAConfig(rank=RANK, dropout=dropout), IN, OUT)
    nn.init.normal_(layer.lora_B, std=0.1)
    x = torch.randn(*shape, IN)
    leaves = (layer.lora_A, layer.lora_B)

    def gradients(clamp):
        torch.manual_seed(3)
        return torch.autograd.grad(clamp(layer(x), min=-0.3, max=0.3).square().sum(), leaves)

    for got, expected in zip(gradients(torch.clamp_), gradients(torch.clamp), strict=True):
        assert expected.any() and equal(got, expected)


def test_no_gradient_below_the_first_adapter():
    """An input that needs none costs no product, and under autocast the products are those of
    autocast.
    """
    layer = LoRALinear(nn.Linear(IN, OUT), LoRAConfig(rank=RANK, dropout=0.0), IN, OUT)
    x = torch.randn(5, IN)
    layer(x).sum().backward()
    assert layer.lora_B.grad.any() and x.grad is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_compiled():
    layer = LoRALinear(nn.Linear(IN, OUT), LoRAConfig(rank=RANK, dropout=0.0), IN, OUT)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(5, IN, requires_grad=True)
    leaves = x, layer.lora_A, layer.lora_B
    expected = torch.autograd.grad(layer(x).square().sum(), leaves)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(x).square().sum(), leaves), expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


class OnAnotherDevice(nn.Module):
    """Linear layers and an embedding whose weights are not in the host's memory."""

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.first = nn.Linear(IN, OUT)
            self.table = nn.Embedding(OUT, IN)


def state_after(base, made):
    """Of the host's random numbers, when an adapter is made for it."""
    torch.manual_seed(3)
    made(base)
    return torch.get_rng_state()


@pytest.mark.parametrize("init", ["default", "gaussian"])
def test_a_seed_gives_the_same_adapters_on_every_device(init):
    config = LoRAConfig(rank=RANK, init=init)
    elsewhere = OnAnotherDevice()

    def linear(base):
        return LoRALinear(base, config, IN, OUT)

    def embedding(base):
        return LoRAEmbedding(base, config)

    assert equal(state_after(elsewhere.first, linear), state_after(nn.Linear(IN, OUT), linear))
    assert equal(
        state_after(elsewhere.table, embedding), state_after(nn.Embedding(OUT, IN), embedding)
    )
    torch.manual_seed(3)
    first = LoRALinear(nn.Linear(IN, OUT), config, IN, OUT).lora_A
    torch.manual_seed(3)
    nn.Linear(IN, OUT)
    assert first.std() > 0 and equal(
        first, LoRALinear(elsewhere.first.to_empty(device="cpu"), config, IN, OUT).lora_A
    )
