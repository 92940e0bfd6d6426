"""MLPs by tiles, as modules and in fused layers: the hidden states and gradients of the class."""

import copy

import pytest
import torch
from torch import nn

import families
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import enable_gradient_checkpointing, recompute
from chronicals.patching import (
    patch_parts,
    recompute_norms_and_units,
    tile_mlps,
    unpatch_model,
    untile_mlps,
)

TILES = [1, 7, 24, 25]
"""Of 25 rows."""


def adapted(model):
    apply_lora(model, LoRAConfig(rank=3, alpha=5, dropout=0.0))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    return model


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize(
    "runs", ["as it was", "parts", "layers", "layers, in part again", "layers, again"]
)
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "phi3"])
def test_equals_the_class(family, runs, lora, tile, monkeypatch):
    monkeypatch.setattr(recompute, "TILE", tile)
    model = families.build(family).double()
    model = adapted(model).double() if lora else model
    batch = families.documents_batch()
    plain = families.states_and_gradients(copy.deepcopy(model), batch)
    if runs != "as it was":
        patch_parts(model, whole_layers=runs != "parts")
    if runs == "layers, in part again":
        recompute_norms_and_units(model)
    if runs == "layers, again":
        enable_gradient_checkpointing(model, whole_layers=True)
    assert tile_mlps(model) == len(model.get_decoder().layers)
    families.assert_same(plain, families.states_and_gradients(model, batch))


def test_rows_of_a_batch_are_rows(monkeypatch):
    monkeypatch.setattr(recompute, "TILE", 7)
    model = families.build("llama")
    ids = torch.randint(0, families.VOCABULARY, (3, 11))
    expected = model(input_ids=ids).logits
    tile_mlps(model)
    torch.testing.assert_close(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize("whole_layers", [False, True])
def test_only_a_tile_is_wide(whole_layers, monkeypatch):
    """Of what autograd keeps over the forward pass; the inner width is that of nothing else."""
    monkeypatch.setattr(recompute, "TILE", 7)
    model = families.build("llama", intermediate_size=104)
    seen = []
    patch_parts(model, whole_layers=whole_layers)
    for tiles in (False, True):
        if tiles:
            tile_mlps(model)
        seen.clear()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def see(x, weights=weights):
            if x.untyped_storage().data_ptr() not in weights:
                seen.append(x.shape)
            return x

        with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
            families.states_and_gradients(model, families.documents_batch())
        assert any(104 in shape or 208 in shape for shape in seen) != tiles


def test_a_forward_of_somebody_elses_is_left_alone(monkeypatch):
    monkeypatch.setattr(recompute, "TILE", 7)
    model = families.build("llama")
    calls = []
    mlp = model.get_decoder().layers[0].mlp
    usual = mlp.forward
    mlp.forward = lambda x: calls.append(len(x)) or usual(x)
    assert tile_mlps(model) == len(model.get_decoder().layers) - 1
    families.states_and_gradients(model, families.documents_batch())
    assert calls


def test_copied_and_undone(monkeypatch):
    monkeypatch.setattr(recompute, "TILE", 7)
    model = families.build("llama")
    batch = families.documents_batch()
    before = families.states_and_gradients(model, batch)
    tile_mlps(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    families.assert_same(before, families.states_and_gradients(other, batch))
    parts = families.build("llama")
    patch_parts(parts)
    tile_mlps(parts)
    untile_mlps(parts)
    assert parts.get_decoder().layers[0].mlp.forward.__func__.chronicals_form == "fused_swiglu"
    unpatch_model(other)
    assert not any("forward" in vars(module) for module in other.modules())
    rows = []
    other.get_decoder().layers[0].mlp.register_forward_hook(
        lambda _, args, out: rows.append(out.shape[-2])
    )
    families.states_and_gradients(other, batch)
    assert rows == [25]
