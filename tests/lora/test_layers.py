"""A linear layer with its adapter in the products, against the formula in fp64 and against the
way through the layer; adapters of the input embedding, beside the real PEFT, both ways.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from adapted import changed, close, gpt2, llama, logits, randomise, tokens, train_on
from safetensors.torch import load_file
from torch import nn

import chronicals.lora.layers as module
import families
from chronicals.lora import (
    LoRAConfig,
    LoRALinear,
    adapters,
    apply_lora,
    load_adapter,
    merge_and_unload,
    save_adapter,
    without_adapters,
)
from chronicals.lora.layers import LoRAEmbedding, is_embedding
from chronicals.lora.several import add_adapter, add_weighted_adapter, set_adapter
from chronicals.optimizers.learning_rates import lora_plus_groups
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
def test_otherwise_the_layer_itself_runs(way, must_not_call):
    layer = LoRALinear(nn.Linear(IN, OUT), LoRAConfig(rank=RANK, dropout=0.0), IN, OUT)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(5, IN, requires_grad=True)
    must_not_call(module._WithAdapter, "apply", "the layer itself does not run")
    WAYS[way](layer)
    layer(x).sum().backward()
    assert layer.lora_A.grad.any() and (layer.base_layer.weight.grad is not None) == (
        way == "a trained base"
    )


def test_both_ways_agree():
    layer = LoRALinear(nn.Linear(IN, OUT), LoRAConfig(rank=RANK, dropout=0.0), IN, OUT).double()
    nn.init.normal_(layer.lora_B)
    x = torch.randn(2, 5, IN, dtype=torch.float64)
    upstream = torch.randn(2, 5, OUT, dtype=torch.float64)
    found = []
    for plain in (True, False):
        if not plain:
            WAYS["a hook"](layer)
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


def gemma3():
    """Its embedding is scaled."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return families.build("gemma3", vocab_size=300, tie_word_embeddings=False).eval()


def padded():
    return llama(pad_token_id=5)


MODELS = {
    "llama": (llama, ["q_proj", "embed_tokens"]),
    "alone": (llama, ["embed_tokens"]),
    "a padding token": (padded, ["q_proj", "embed_tokens"]),
    "tied": (lambda: llama(tie_word_embeddings=True), ["q_proj", "embed_tokens"]),
    "gpt2": (gpt2, ["c_attn", "wte"]),
    "positions": (gpt2, ["c_attn", "wpe"]),
    "gemma3": (gemma3, ["q_proj", "embed_tokens"]),
}


def ours(name="llama", **fields):
    build, wanted = MODELS[name]
    model = apply_lora(
        build(),
        LoRAConfig(**{"rank": 4, "alpha": 12, "target_modules": wanted, "dropout": 0.0, **fields}),
    )
    randomise(model)
    return model.eval()


def theirs(name="llama", **fields):
    peft = pytest.importorskip("peft")
    build, wanted = MODELS[name]
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=wanted, fan_in_fan_out=build is gpt2, **fields
    )
    model = peft.get_peft_model(build(), config).eval()
    randomise(model)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path, name):
    """Logits are equal in both libraries, and still are after training on in both."""
    peft = pytest.importorskip("peft")
    build, _ = MODELS[name]
    other = theirs(name)
    ids = tokens()
    other.save_pretrained(tmp_path / "theirs")
    bare = logits(build(), ids)
    expected = logits(other, ids)
    model = load_adapter(build(), tmp_path / "theirs").eval()
    assert changed(expected, bare) and close(logits(model, ids), expected)
    save_adapter(model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(build(), tmp_path / "ours", is_trainable=True).eval()
    assert close(logits(again, ids), expected)
    first, second = (
        load_file(tmp_path / whose / "adapter_model.safetensors") for whose in ("theirs", "ours")
    )
    assert all(equal(first[key], second[key]) for key in first if ".lora_" in key)
    after = train_on(model, ids)
    assert close(after, train_on(again, ids), 1e-4) and not close(after, expected, 1e-2)


def test_what_is_written(tmp_path):
    save_adapter(ours("alone"), tmp_path)
    tensors = {
        key: list(tensor.shape)
        for key, tensor in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    path = "base_model.model.model.embed_tokens.lora_embedding_"
    assert tensors == {f"{path}A": [4, 300], f"{path}B": [64, 4]}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == [
        "model.embed_tokens"
    ]


@pytest.mark.parametrize("name", ["llama", "gemma3", "a padding token"])
def test_outputs_and_gradients(name):
    """Of the layer alone, in fp64, beside the embedding with the adapted weight."""
    layer = ours(name).double().model.embed_tokens
    ids, (a, b) = torch.randint(1, 300, (3, 17)), layer.pair  # Gemma's padding token is 0
    ids[0, :3] = 5
    scale = float(getattr(layer.base_layer, "embed_scale", 1.0))
    whole = layer.base_layer.weight + layer.scale * (b @ a).t()
    expected = torch.nn.functional.embedding(ids, whole, layer.base_layer.padding_idx) * scale
    got = layer(ids)
    upstream = torch.randn(3, 17, whole.shape[1], dtype=torch.float64)
    assert torch.allclose(got, expected, rtol=1e-6) and (scale != 1) == (name == "gemma3")
    mine, right = (torch.autograd.grad((y * upstream).sum(), [a, b]) for y in (got, expected))
    assert torch.allclose(mine[0], right[0], rtol=1e-6) and (name == "a padding token") == (
        not mine[0][:, 5].any()
    )
    if name != "a padding token":  # whose row PEFT leaves out of A alone
        assert torch.allclose(mine[1], right[1], rtol=1e-6)


def test_at_first_the_model_is_unchanged():
    ids = tokens()
    model = apply_lora(llama(), LoRAConfig(64, 16, 0.0, ["embed_tokens"]))
    assert equal(logits(model, ids), logits(llama(), ids))
    (path, layer), *others = adapters(model)
    assert path == "model.embed_tokens" and not others and isinstance(layer, LoRAEmbedding)
    a, b = layer.pair
    assert not a.any() and abs(b.std() - 1) < 0.1
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        f"{path}.lora_embedding_A",
        f"{path}.lora_embedding_B",
    ]


def test_it_is_adapted_only_where_it_is_named():
    assert not any(
        isinstance(layer, LoRAEmbedding)
        for _, layer in adapters(apply_lora(llama(), LoRAConfig(2)))
    )


def test_ids_are_not_dropped():
    model = ours("alone", dropout=0.9)
    ids = tokens()
    assert equal(model.train().model.embed_tokens(ids), model.eval().model.embed_tokens(ids))


@pytest.mark.parametrize("name", MODELS)
def test_merged_it_is_a_plain_model(tmp_path, name):
    """A head that is the embedding keeps its weight."""
    model = ours(name)
    ids = tokens()
    expected = logits(model, ids)
    merged = merge_and_unload(model)
    kind = type(MODELS[name][0]())
    assert type(merged) is kind and close(logits(merged, ids), expected)
    merged.save_pretrained(tmp_path / "whole")
    assert close(logits(kind.from_pretrained(tmp_path / "whole").eval(), ids), expected)


@pytest.mark.parametrize("name", ["tied", "gpt2", "llama"])
def test_a_tied_head_is_warned_of(caplog, name):
    ours(name)
    assert ("the embedding is adapted, and its weight is the head's too" in caplog.text) == (
        name != "llama"
    )


def test_without_adapters_it_is_the_base():
    model = ours("gemma3")
    ids = tokens()
    with without_adapters(model):
        assert equal(logits(model, ids), logits(gemma3(), ids))


def test_in_bf16_it_follows_fp32():
    model = ours()
    ids = tokens()
    expected = logits(model, ids)
    for parameter in model.parameters():
        parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
    got = logits(model, ids)
    assert got.dtype == torch.bfloat16 and (got - expected).norm() <= 0.05 * expected.norm()


def test_added_tokens(tmp_path):
    """The rows of the larger embedding are saved with the adapter, which has as many."""
    llama().save_pretrained(tmp_path / "base")
    base = type(llama()).from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(307, mean_resizing=False)
    model = apply_lora(base, LoRAConfig(4, 12, 0.0, ["embed_tokens"])).eval()
    randomise(model)
    ids = torch.tensor([[3, 306, 5, 301]])
    save_adapter(model, tmp_path / "mine")
    again = load_adapter(type(llama()).from_pretrained(tmp_path / "base"), tmp_path / "mine").eval()
    assert again.model.embed_tokens.pair[0].shape == (4, 307) and equal(
        logits(again, ids), logits(model, ids)
    )


def test_several_of_them(tmp_path):
    model = llama()
    ids = tokens()
    single = {}
    for name, seed in (("one", 1), ("two", 2)):
        torch.manual_seed(seed)
        made = ours()
        single[name] = logits(made, ids)
        save_adapter(made, tmp_path / name)
        add_adapter(model, name, tmp_path / name)
    for name in ("one", "two", "one"):
        assert equal(logits(set_adapter(model, name).eval(), ids), single[name])
    add_weighted_adapter(model, ["one", "two"], [1.0, 0.0], "first")
    assert close(logits(set_adapter(model, "first").eval(), ids), single["one"])


def test_lora_plus_leaves_them_at_the_usual_rate():
    groups = lora_plus_groups(ours(), 1.0, 8.0)
    assert [(group["lr"], len(group["params"])) for group in groups] == [(1.0, 4), (8.0, 2)]
    assert [group["lr"] for group in lora_plus_groups(ours("alone"), 1.0, 8.0)] == [1.0]


# --- what is refused
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, field",
    [({"use_dora": True}, "use_dora=True"), ({"init": "olora"}, "init='olora'")],
    ids=str,
)
def test_what_it_cannot_have_is_refused_by_name(fields, field):
    model = llama()
    with pytest.raises(
        ValueError, match=f"embed_tokens' is an embedding, whose adapter cannot have {field}"
    ):
        apply_lora(model, LoRAConfig(2, 2, 0.0, ["q_proj", "embed_tokens"], **fields))
    assert not list(adapters(model)) and all(p.requires_grad for p in model.parameters())


class Twice(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


class Shifted(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + 1


class Scaled(nn.Embedding):
    embed_scale = 3.0

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale


def test_what_is_an_embedding():
    """Whatever else its class does with the rows would be left out of the adapter's."""
    assert is_embedding(nn.Embedding(7, 4, padding_idx=6)) and is_embedding(Scaled(7, 4))
    assert is_embedding(gemma3().model.embed_tokens)
    others = [
        Twice(7, 4),
        Shifted(7, 4),
        nn.Embedding(7, 4, max_norm=1.0),
        nn.Embedding(7, 4, sparse=True),
        nn.Linear(7, 4),
    ]
    assert not any(is_embedding(layer) for layer in others)


def test_another_embedding_is_refused_by_name():
    model = llama()
    model.set_input_embeddings(Twice(300, 64))
    with pytest.raises(
        ValueError, match="embed_tokens' is Twice; only linear layers and embeddings can be adapted"
    ):
        apply_lora(model, LoRAConfig(2, 2, 0.0, ["embed_tokens"]))
