"""Recomputation of decoder layers, and of a function of rows by tiles."""

import traceback

import pytest
import torch
import torch.utils.checkpoint
import transformers
from torch import nn

import families
import tiny
from chronicals.memory import (
    checkpoints_end_with_errors,
    decoder_layers,
    draws_numbers,
    enable_gradient_checkpointing,
    makes_tiles,
    recompute,
    rows_of_tile,
    tiled,
    tiles_of,
)


def test_the_first_layers_alone():
    model = tiny.llama()
    enable_gradient_checkpointing(model, first=1)
    assert [layer.gradient_checkpointing for layer in model.get_decoder().layers] == [True, False]


CHANCES = {
    "Starcoder2": {"residual_dropout": 0.2, "attention_dropout": 0.0, "embedding_dropout": 0.0},
    "Mixtral": {"router_jitter_noise": 0.2, "num_local_experts": 4},
    "Phimoe": {"input_jitter_noise": 0.2, "num_local_experts": 4},
    "GPT2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.2,
    },
}


@pytest.mark.parametrize("family", CHANCES)
def test_what_is_left_to_chance_is_drawn_again_as_it_was(family):
    sizes = {**families.SIZES, "num_hidden_layers": 2, **CHANCES[family]}
    sizes = (
        sizes
        if family != "GPT2"
        else {**CHANCES[family], **families.IDS, "vocab_size": families.VOCABULARY}
    )
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**sizes)
    kind = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family}{kind}")(config).train()
    ids = torch.randint(1, families.VOCABULARY, (2, 9))
    found = []
    for recomputed in (False, False, True):
        if recomputed:
            enable_gradient_checkpointing(model)
        model.zero_grad()
        torch.manual_seed(2 if found else 3)
        model(input_ids=ids, labels=ids).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert not torch.equal(found[0], found[1]), "nothing is left to chance"
    assert torch.equal(found[1], found[2])


def test_what_is_left_to_no_chance():
    for family in ("llama", "qwen3", "gemma3", "gpt_oss"):
        assert not draws_numbers(families.build(family))


def test_layers_have_other_names_too():
    assert [
        len(decoder_layers(families.build(family))) for family in ("llama", "gpt2", "bloom")
    ] == [2, 2, 2]


def test_layers_of_the_decoder_are_counted_not_those_of_a_tower():
    """The tower's come first among the modules; a layer's own inner layer goes with it."""
    model = families.build("gemma3")
    layers = model.get_decoder().layers
    model.tower = torch.nn.ModuleList(
        [type(layers[0])(model.config.get_text_config(), 0) for _ in range(3)]
    )
    layers[1].inner = type(layers[0])(model.config.get_text_config(), 0)
    model._modules = {"tower": model.tower, **model._modules}
    enable_gradient_checkpointing(model, first=1)
    assert [layer.gradient_checkpointing for layer in layers] == [True] + [False] * (
        len(layers) - 1
    )
    assert not layers[1].inner.gradient_checkpointing and all(
        layer.gradient_checkpointing for layer in model.tower
    )


def test_nothing_is_left_at_the_embedding():
    """No gradient is asked of a frozen one, which re-entrance would need."""
    model = tiny.llama()
    enable_gradient_checkpointing(model)
    assert not model.get_input_embeddings()._forward_hooks


def test_a_class_that_cannot_is_named():
    model = tiny.llama()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot recompute"):
        enable_gradient_checkpointing(model)


def test_a_failed_forward_leaves_no_hooks_behind():
    """As a notebook does, the test keeps the error; the graph made afterwards is as any other."""
    weight = torch.randn(3, requires_grad=True)

    def fails(x):
        raise RuntimeError("in the layer")

    with pytest.raises(RuntimeError, match="in the layer") as kept, checkpoints_end_with_errors():
        torch.utils.checkpoint.checkpoint(fails, weight, use_reentrant=False)
    (weight * weight).sum().backward()
    assert torch.equal(weight.grad, 2 * weight.detach())
    frames = [frame for frame, _ in traceback.walk_tb(kept.tb)]
    ended = [f for f in frames if f.f_code.co_filename == torch.utils.checkpoint.__file__]
    assert ended and not any(frame.f_locals for frame in ended)


def parts():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 8)).double()
    return (
        mlp,
        torch.randn(23, 8, dtype=torch.float64, requires_grad=True),
        torch.randn(23, 8, dtype=torch.float64),
    )


@pytest.mark.parametrize("tile", [1, 5, 22, 23, 100])
def test_equals_the_whole(tile):
    mlp, x, upstream = parts()
    found = []
    for run in (mlp, lambda x: tiled(mlp, x, tile=tile)):
        y = run(x)
        found.append([y, *torch.autograd.grad(y, [x, *mlp.parameters()], upstream)])
    for whole, own in zip(*found):
        torch.testing.assert_close(own, whole, rtol=1e-12, atol=1e-12)


def test_without_gradients():
    mlp, x, _ = parts()
    with torch.no_grad():
        torch.testing.assert_close(tiled(mlp, x, tile=4), mlp(x), rtol=1e-12, atol=1e-12)


def test_random_numbers_are_drawn_again():
    """A planted fault: were they not kept, the mask of the backward pass would be another."""
    mlp, x, _ = parts()
    mlp[2].p = 0.5
    for draws in (True, False):
        torch.manual_seed(3)
        y = tiled(mlp, x, draws=draws, tile=5)
        (dx,) = torch.autograd.grad(y.sum(), x)
        torch.manual_seed(3)
        masked = torch.cat([mlp(part) for part in x.split(5)])
        (expected,) = torch.autograd.grad(masked.sum(), x)
        assert torch.allclose(dx, expected) == draws


def test_what_is_wide_exists_for_a_tile_alone(set_constants):
    """Tensors that autograd keeps over the forward pass are no wider than x; in the backward
    pass as wide as one tile.
    """
    set_constants(recompute, TILE=5)
    mlp, x, _ = parts()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        tiled(mlp, x)
    assert seen and all(shape[-1] <= 8 for shape in seen)
    rows = []
    mlp[1].register_forward_hook(lambda _, args, out: rows.append(len(out)))
    tiled(mlp, x).sum().backward()
    assert max(rows) == 5


@pytest.mark.parametrize(
    ("inner", "rows"), [(96, 4096), (14336, 4096), (20480, 4096), (20481, 2048), (28672, 2048)]
)
def test_tiles_of_wide_layers_have_fewer_rows(inner, rows):
    assert rows_of_tile(inner) == rows
    assert rows_of_tile(2**30) == 1024
    assert [part.stop for part in tiles_of(2 * rows + 1, rows)] == [rows, 2 * rows, 2 * rows + 1]
    assert makes_tiles(rows + 1, rows) and not makes_tiles(rows, rows)
