"""Experts with adapters beside what transformers computes from the adapted weights, in fp64."""

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import use_experts_implementation

from chronicals.lora import LoRAConfig, stacked_experts
from chronicals.lora.parameter_layer import LoRAParameter
from chronicals.lora.stacked_experts import expert_inputs, product_by_groups

EXPERTS = 5
WIDE = 12
INNER = 10
HAS_POST_EXPERT_NORMS = (
    "has_post_expert_norm" in inspect.signature(use_experts_implementation).parameters
)
"""transformers below 5.20 knows no norm after each expert."""
KINDS = [
    kind
    for kind in itertools.product([True, False], repeat=4)
    if HAS_POST_EXPERT_NORMS or not kind[3]
]


def experts(has_gate, has_bias, is_transposed, has_post_expert_norm, implementation="eager"):
    """A class as transformers' own, of random weights in fp64; its own forward is never called."""
    flags = {"has_gate": has_gate, "has_bias": has_bias, "is_transposed": is_transposed}
    if HAS_POST_EXPERT_NORMS:
        flags["has_post_expert_norm"] = has_post_expert_norm

    @use_experts_implementation(**flags)
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = EXPERTS
            self.act_fn = F.silu
            first, out = ("gate_up_proj", 2 * INNER) if has_gate else ("up_proj", INNER)
            for name, wide, narrow in ((first, WIDE, out), ("down_proj", INNER, WIDE)):
                shape = (EXPERTS, wide, narrow) if is_transposed else (EXPERTS, narrow, wide)
                self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
                if has_bias:
                    self.register_parameter(
                        f"{name}_bias",
                        nn.Parameter(torch.randn(EXPERTS, narrow, dtype=torch.float64)),
                    )
            self.post_expert_norm = nn.RMSNorm(WIDE, dtype=torch.float64)

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("experts are computed from their flags")

    config = type("Config", (), {"_experts_implementation": implementation})()
    return Experts(config)


def adapted(layer, names):
    for name in names:
        layer = LoRAParameter(
            layer, name, LoRAConfig(3, 5, 0.0, [], target_parameters=[name])
        ).double()
        nn.init.normal_(layer.lora_B)
    return layer


def inputs(tokens=7, each=2):
    chosen = torch.stack(
        [torch.randperm(EXPERTS - 1)[:each] for _ in range(tokens)]
    )  # the last expert gets no token
    return (
        torch.randn(tokens, WIDE, dtype=torch.float64),
        chosen,
        torch.rand(tokens, each, dtype=torch.float64),
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("which", ["both", "first", "down"])
def test_outputs_and_gradients(kind, which):
    layer = experts(*kind, implementation="batched_mm")
    first = "gate_up_proj" if kind[0] else "up_proj"
    outer = adapted(
        layer, {"both": [first, "down_proj"], "first": [first], "down": ["down_proj"]}[which]
    )
    hidden, chosen, shares = inputs()
    hidden.requires_grad_()
    shares.requires_grad_()
    matrices = [p for p in outer.parameters() if p.requires_grad and p.ndim == 2]
    assert (
        expert_inputs(layer, {first: 0, "down_proj": 0}, (hidden, chosen, shares), {}) is not None
    )
    upstream = torch.randn(7, WIDE, dtype=torch.float64)
    got = outer(hidden, chosen, top_k_weights=shares)
    gradients = torch.autograd.grad((got * upstream).sum(), [hidden, shares, *matrices])
    whole = {}
    layers = outer
    while isinstance(layers, LoRAParameter):
        whole[layers.parameter_name] = layers.adapted()
        layers = layers.base_layer
    expected = torch.func.functional_call(layer, whole, (hidden, chosen, shares))
    assert torch.allclose(got, expected, rtol=1e-10)
    for mine, theirs in zip(
        gradients,
        torch.autograd.grad((expected * upstream).sum(), [hidden, shares, *matrices]),
        strict=True,
    ):
        assert theirs.any() and torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)


def test_permuting_tokens_permutes_outputs():
    outer = adapted(experts(True, True, False, False), ["gate_up_proj", "down_proj"])
    hidden, chosen, shares = inputs(tokens=11)
    order = torch.randperm(11)
    expected = outer(hidden, chosen, shares)[order]
    assert torch.allclose(outer(hidden[order], chosen[order], shares[order]), expected, rtol=1e-12)


def test_no_token():
    outer = adapted(experts(True, False, False, False), ["down_proj"])
    hidden, chosen, shares = inputs(tokens=1)
    assert outer(hidden[:0], chosen[:0], shares[:0]).shape == (0, WIDE)


def left_to_its_class(layer, change):
    hidden, chosen, shares = inputs()
    return expert_inputs(change(layer), {"down_proj": 0}, (hidden, chosen, shares), {}) is None


def test_what_is_more_than_its_flags_is_left_to_its_class(let_return):
    let_return(stacked_experts, transformers_before=False)

    def several_ranks(layer):
        layer._is_expert_parallel = True
        return layer

    def hooked(layer):
        layer.register_forward_pre_hook(lambda *_: None)
        return layer

    def replaced(layer):
        layer.forward = lambda *_: None
        return layer

    kind = (True, False, False, False)
    assert not left_to_its_class(experts(*kind), lambda layer: layer)
    assert all(
        left_to_its_class(experts(*kind), change) for change in (several_ranks, hooked, replaced)
    )
    assert left_to_its_class(nn.Linear(2, 2), lambda layer: layer)
    hidden, chosen, shares = inputs()
    biased = experts(True, True, False, False)
    assert expert_inputs(biased, {"down_proj_bias": 0}, (hidden, chosen, shares), {}) is None
    assert expert_inputs(biased, {"down_proj": 0}, (hidden[None], chosen, shares), {}) is None
    assert expert_inputs(biased, {"down_proj": 0}, (hidden, chosen), {}) is None


@pytest.mark.parametrize(
    "counts", [[3, 0, 4, 1], [0, 0, 0, 7], [1, 1, 1, 1], [0, 0, 0, 0]], ids=str
)
def test_grouped_products(counts):
    ends = torch.tensor(counts).cumsum(0)
    x = torch.randn(sum(counts), 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    rows = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    got = product_by_groups(x, w, ends)
    expected = torch.einsum("sk,skn->sn", x, w[rows])
    assert torch.allclose(got, expected)
    upstream = torch.randn_like(expected)
    if not len(rows):
        return
    mine = torch.autograd.grad((got * upstream).sum(), [x, w])
    for a, b in zip(mine, torch.autograd.grad((expected * upstream).sum(), [x, w]), strict=True):
        assert torch.allclose(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_kernel_for_all_groups(rank, transposed):
    """bf16 on a card, ranks that are no multiple of 8 too, without the host waiting."""
    counts = torch.tensor([3, 0, 40, 21], device="cuda")
    ends = counts.cumsum(0)
    rows = torch.repeat_interleave(torch.arange(4, device="cuda"), counts)
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, 32, rank, device="cuda", dtype=torch.bfloat16)
    w = (w.transpose(1, 2).contiguous().transpose(1, 2) if transposed else w).requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = product_by_groups(x, w, ends)
        mine = torch.autograd.grad(got.float().square().sum(), [x, w])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    xd, wd = (tensor.detach().double().requires_grad_() for tensor in (x, w))
    expected = torch.einsum("sk,skn->sn", xd, wd[rows])
    theirs = torch.autograd.grad(expected.square().sum(), [xd, wd])
    for a, b in ((got, expected), *zip(mine, theirs, strict=True)):
        assert (a.double() - b).norm() <= 2e-2 * b.norm()


@pytest.mark.gpu
def test_experts_may_lie_innermost():
    """As in PEFT's B, ``[out, rank · experts]``, of which the product reads a view."""
    ends = torch.tensor([3, 3, 43, 64], device="cuda")
    groups = torch.repeat_interleave(
        torch.arange(4, device="cuda"), torch.tensor([3, 0, 40, 21], device="cuda")
    )
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    stored = torch.randn(16, 32 * 4, device="cuda", dtype=torch.bfloat16)
    up = stored.view(16, 32, 4).permute(2, 1, 0)  # [experts, rank, out]
    assert up.stride(0) == 1
    got = product_by_groups(x, up, ends)
    expected = torch.einsum("sk,skn->sn", x.double(), up.double()[groups])
    assert (got.double() - expected).norm() <= 2e-2 * expected.norm()
