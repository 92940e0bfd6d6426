"""Recognising a part by its structure: what computes something else is not taken for it. Parts
proved by themselves where the model has no twin; and models that are more than text.
"""

import copy
import functools
import inspect

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import families
from chronicals import patch_model, unpatch_model
from chronicals.models.twin import randomise
from chronicals.patching import attention, plan
from chronicals.patching.forms import NoShell, shell_of
from chronicals.patching.gated_mlps import recognise_gated_mlp
from chronicals.patching.norms import recognise_gated_norm, recognise_norm
from chronicals.patching.rotary import recognise_rotary
from patching.test_patch import assert_same, batch, loss_and_gradients


def random(module):
    return randomise(module) or module


class Changed(LlamaRMSNorm):
    """A norm with a fault."""

    fault = ""

    def forward(self, x):
        wide = x.float()
        power = (
            wide.abs().mean(-1, keepdim=True).square()
            if self.fault == "mean"
            else wide.square().mean(-1, keepdim=True)
        )
        epsilon = 1e-6 if self.fault == "epsilon" else self.variance_epsilon
        scale = 1.01 if self.fault == "scale" else 1.0
        out = self.weight * (wide * torch.rsqrt(power + epsilon)).to(x.dtype) * scale
        return out.detach() + (self.weight * 0).sum() if self.fault == "detached" else out


@pytest.mark.parametrize(
    "module, by",
    [
        (LlamaRMSNorm(16), "fused_rmsnorm"),
        (GemmaRMSNorm(16), "fused_rmsnorm"),
        (nn.RMSNorm(16), "fused_rmsnorm"),
        (nn.RMSNorm(16, eps=1e-5), "fused_rmsnorm"),
        (nn.RMSNorm(16, elementwise_affine=False, eps=1e-5), "fused_rmsnorm"),
        (nn.LayerNorm(16), "fused_layernorm"),
        (nn.LayerNorm(16, bias=False), "fused_layernorm"),
        (nn.LayerNorm(16, elementwise_affine=False), "fused_layernorm"),
    ],
    ids=str,
)
def test_norms(module, by):
    form = recognise_norm(random(module))
    assert form is not None and form.by == by
    x = torch.randn(3, 16)
    torch.testing.assert_close(form.forward(module, x), type(module).forward(module, x))


def test_an_epsilon_is_read_from_the_instance():
    form = recognise_norm(random(LlamaRMSNorm(16, eps=1e-6)))
    other = random(LlamaRMSNorm(16, eps=0.5))
    x = torch.randn(3, 16)
    torch.testing.assert_close(form.forward(other, x), LlamaRMSNorm.forward(other, x))


@pytest.mark.parametrize("fault", ["mean", "epsilon", "scale", "detached"])
def test_a_norm_with_a_fault_is_not_taken_for_one(fault):
    module = random(Changed(16))
    assert recognise_norm(module) is not None
    module.fault = fault
    assert recognise_norm(module) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [LlamaRMSNorm, GemmaRMSNorm])
def test_the_type_of_the_result(cls, kind):
    """fp32 weights on bf16 rows: Llama's norm returns fp32, Gemma's bf16."""
    module = random(cls(16))
    form = recognise_norm(module)
    x = torch.randn(3, 16).to(kind)
    assert form.forward(module, x).dtype == cls.forward(module, x).dtype


@pytest.mark.parametrize(
    "module",
    [nn.Dropout(0.1), nn.SiLU(), nn.Linear(16, 16), nn.Embedding(4, 16), nn.Sequential()],
    ids=str,
)
def test_other_modules_are_no_norms(module):
    assert recognise_norm(module) is None


class MLP(nn.Module):
    def __init__(self, activation, swapped=False, factor=1.0):
        super().__init__()
        self.b = nn.Linear(12, 20)
        self.a = nn.Linear(12, 20)
        self.out = nn.Linear(20, 12)
        self.activation = activation
        self.swapped = swapped
        self.factor = factor

    def forward(self, x):
        gate, up = (self.b(x), self.a(x)) if self.swapped else (self.a(x), self.b(x))
        return self.out(self.activation(gate) * up) * self.factor


class Merged(nn.Module):
    def __init__(self, gate_first):
        super().__init__()
        self.both = nn.Linear(12, 40)
        self.down = nn.Linear(20, 12)
        self.act = nn.SiLU()
        self.gate_first = gate_first

    def forward(self, x):
        first, second = self.both(x).chunk(2, -1)
        return self.down(self.act(first) * second if self.gate_first else first * self.act(second))


@pytest.mark.parametrize(
    "module, by",
    [
        (MLP(nn.SiLU()), "fused_swiglu"),
        (MLP(nn.SiLU(), swapped=True), "fused_swiglu"),
        (MLP(nn.GELU()), "fused_geglu"),
        (MLP(nn.GELU(approximate="tanh")), "fused_geglu (tanh)"),
        (MLP(torch.nn.functional.silu), "fused_swiglu"),
        (Merged(True), "fused_swiglu, merged"),
        (Merged(False), "fused_swiglu, merged"),
    ],
    ids=["silu", "swapped", "gelu", "tanh", "function", "merged", "merged, up first"],
)
def test_gated_mlps(module, by):
    module.factor = 1
    form = recognise_gated_mlp(random(module))
    assert form is not None and form.by == by
    x = torch.randn(3, 12)
    torch.testing.assert_close(form.forward(module, x), module(x))


@pytest.mark.parametrize(
    "module",
    [MLP(nn.ReLU()), MLP(nn.Sigmoid()), MLP(nn.SiLU(), factor=1.5)],
    ids=["relu", "glu", "factor"],
)
def test_other_mlps_are_not_taken_for_them(module):
    assert recognise_gated_mlp(random(module)) is None


@pytest.mark.parametrize(
    "first, then",
    [
        (nn.SiLU(), nn.ReLU()),
        (nn.GELU(), nn.GELU(approximate="tanh")),
        (torch.nn.functional.silu, torch.nn.functional.relu),
    ],
    ids=["another class", "another setting", "another function"],
)
def test_an_activation_that_is_another_since_is_called(first, then):
    form = recognise_gated_mlp(random(MLP(first, factor=1)))
    x = torch.randn(3, 12)
    module = random(MLP(then, factor=1))
    assert form is not None
    torch.testing.assert_close(form.forward(module, x), module(x), rtol=0, atol=0)


class Gated(LlamaRMSNorm):
    """A norm that may be given more than its input, by a name of its own."""

    def forward(self, hidden_states, gate=None):
        out = LlamaRMSNorm.forward(self, hidden_states)
        return out if gate is None else out * torch.nn.functional.silu(gate)


def test_a_form_is_called_as_the_class_is():
    module = random(Gated(16))
    x = torch.randn(2, 3, 16)
    form = recognise_norm(module)
    for args, kwargs in (
        ((x,), {}),
        ((), {"hidden_states": x}),
        ((x, 2 * x), {}),
        ((x,), {"gate": 2 * x}),
    ):
        torch.testing.assert_close(form.forward(module, *args, **kwargs), module(*args, **kwargs))


class Bounded(nn.Module):
    """A gated MLP whose gate has a bound that small inputs never reach."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 24)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)).clamp(max=50) * self.up(x))


def test_a_bound_is_seen():
    assert recognise_gated_mlp(random(Bounded())) is None


class GatedNorm(nn.Module):
    """As linear attention has it: the norm, then the gate, or the other way round."""

    def __init__(self, gate_first=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.epsilon = 1e-6
        self.gate_first = gate_first

    def forward(self, hidden, gate):
        x = hidden * torch.nn.functional.silu(gate) if self.gate_first else hidden
        x = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)
        return x if self.gate_first else x * torch.nn.functional.silu(gate)


@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norms(gate_first):
    module = random(GatedNorm(gate_first))
    form = recognise_gated_norm(module)
    x = torch.randn(2, 3, 16)
    gate = torch.randn(2, 3, 16)
    torch.testing.assert_close(form.forward(module, x, gate=gate), module(x, gate))
    torch.testing.assert_close(form.forward(module, x, gate[:1]), module(x, gate[:1]))


def test_a_gated_norm_with_another_gate_is_not_taken_for_one():
    class Other(GatedNorm):
        def forward(self, hidden, gate):
            return GatedNorm.forward(self, hidden, gate) * 1.01

    assert recognise_gated_norm(random(Other())) is None


def halves(q, k, cos, sin, unsqueeze_dim=1):
    """As most files of transformers rotate."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)

    def turned(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return turned(q), turned(k)


def faulty(q, k, cos, sin):
    q, k = halves(q, k, cos, sin)
    return q, k * 1.01


class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return halves(q, k, cos, sin, unsqueeze_dim=2)


class FaultyAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return faulty(q, k, cos, sin)


def test_a_rotation_is_replaced_in_the_forward_only():
    form = recognise_rotary(Attention())
    q = torch.randn(2, 5, 4, 16)
    k = torch.randn(2, 5, 2, 16)
    cos = torch.randn(2, 5, 16)
    sin = torch.randn(2, 5, 16)
    for got, expected in zip(
        form.forward(Attention(), q, k, cos, sin), Attention()(q, k, cos, sin)
    ):
        torch.testing.assert_close(got, expected)
    assert Attention.forward.__globals__["halves"] is halves
    assert form.forward.__globals__["halves"] is not halves


def renaming(old, new):
    """As transformers decorates a forward one of whose arguments has a new name."""

    def decorate(forward):
        @functools.wraps(forward)
        def decorated(*args, **kwargs):
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
            return forward(*args, **kwargs)

        return decorated

    return decorate


class DecoratedAttention(nn.Module):
    forward = renaming("query", "q")(renaming("key", "k")(Attention.forward))


class HiddenAttention(nn.Module):
    """Whose decorator finds what it decorates where nobody else does."""

    @functools.wraps(Attention.forward)
    def forward(self, *args, **kwargs):
        return Attention.forward(self, *args, **kwargs)


def test_a_rotation_behind_decorators_is_replaced_behind_them():
    form = recognise_rotary(DecoratedAttention())
    q = torch.randn(2, 5, 4, 16)
    k = torch.randn(2, 5, 2, 16)
    cos = torch.randn(2, 5, 16)
    sin = torch.randn(2, 5, 16)
    got = form.forward(DecoratedAttention(), query=q, key=k, cos=cos, sin=sin)
    for x, expected in zip(got, Attention()(q, k, cos, sin)):
        torch.testing.assert_close(x, expected)
    innermost = inspect.unwrap(form.forward)
    assert innermost.__globals__["halves"] is not halves
    assert inspect.unwrap(DecoratedAttention.forward).__globals__["halves"] is halves


def test_a_rotation_behind_a_decorator_that_hides_it_is_left():
    assert recognise_rotary(HiddenAttention()) is None


def test_a_rotation_with_a_fault_is_left():
    assert recognise_rotary(FaultyAttention()) is None


class Reshaped(nn.Module):
    """Keeps a shape that is no norm's."""

    def __init__(self):
        super().__init__()
        self.shape = (2, -1)

    def forward(self, x):
        return x.view(*self.shape)


def test_a_shape_that_is_kept_need_not_be_a_width():
    assert recognise_norm(Reshaped()) is None


@pytest.fixture
def no_twins(planned_with):
    def refuse(cls, config):
        raise ValueError("no twin in this test")

    planned_with(plan, build_twin=refuse)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "cohere", "phi"])
def test_without_a_twin(family, no_twins):
    plain = families.build(family).double()
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    assert sum(report.counts().values()) >= 3
    assert {"loss", "attention"} <= {
        entry.part for entry in report.left if "no twin in this test" in entry.reason
    }
    rows = batch()
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))


def test_the_shell_of_a_part_is_small_and_shares_nothing():
    with torch.device("meta"):
        model = families.build("llama", random=False, hidden_size=4096, intermediate_size=14336)
    layer = model.model.layers[0]
    for module, recognise in (
        (layer.mlp, recognise_gated_mlp),
        (layer.input_layernorm, recognise_norm),
    ):
        shell = shell_of(module)
        assert all(p.device.type == "cpu" and p.dtype == torch.float32 for p in shell.parameters())
        assert sum(p.numel() for p in shell.parameters()) < 10_000
        assert recognise(shell) is not None
        assert all(p.device.type == "meta" for p in module.parameters())


def test_what_a_shell_cannot_stand_for():
    with pytest.raises(NoShell, match="buffers"):
        shell_of(nn.BatchNorm1d(4))
    with pytest.raises(NoShell, match="no linear layers"):
        shell_of(nn.Sequential(nn.Conv1d(3, 3, 3)))


def llava():
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
    )
    config = LlavaConfig(
        text_config=families.configuration("llama"), vision_config=vision, image_token_index=3
    )
    return families.randomise(LlavaForConditionalGeneration(config).double())


@pytest.mark.slow
def test_with_an_image():
    plain = llava()
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    assert {
        "fused_rmsnorm",
        "fused_swiglu",
        "fused_layernorm",
        "linear_cross_entropy",
    } <= report.counts().keys()
    ids = torch.randint(4, families.VOCABULARY, (2, 11))
    ids[:, 1:5] = 3
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    rows = {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(2, 3, 8, 8).double(),
        "labels": ids.masked_fill((mask == 0) | (ids == 3), -100),
    }
    before = attention.runs[0]
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))
    assert attention.runs[0] > before
    assert not patched.config.vision_config._attn_implementation.startswith(attention.MASK_PREFIX)
    unpatch_model(patched)
    assert (
        patched.config.text_config._attn_implementation
        == plain.config.text_config._attn_implementation
    )
