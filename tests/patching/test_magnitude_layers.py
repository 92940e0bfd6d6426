"""Fused decoder layers whose adapters have magnitudes (DoRA): what the class computes with its
layers one by one.
"""

import copy
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import families
from chronicals.lora import LoRAConfig, LoRALinear, apply_lora, without_adapters
from chronicals.lora.magnitude import RowNorms
from chronicals.memory import enable_gradient_checkpointing
from chronicals.models import PresentedModel
from chronicals.patching import (
    decoder_layer,
    forget_row_norms,
    patch_parts,
    recompute_norms_and_units,
    tile_mlps,
    unfuse_weights,
)
from chronicals.patching.decoder_layer import FUSED_LAYER
from chronicals.quantization import Linear4bit, dense, nf4
from chronicals.training.step import compilation


def adapted(family="llama", **options):
    """A model in fp64 with adapters as if they had been trained."""
    model = families.build(family)
    if options.pop("four_bits", False):
        for path, layer in list(model.get_decoder().layers.named_modules()):
            if isinstance(layer, nn.Linear):
                parent, _, name = path.rpartition(".")
                setattr(
                    model.get_decoder().layers.get_submodule(parent), name, Linear4bit.of(layer)
                )
    apply_lora(
        model.double(),
        LoRAConfig(**{"rank": 3, "alpha": 5, "dropout": 0.0, "use_dora": True} | options),
    ).double()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, LoRALinear):
                nn.init.normal_(layer.lora_B, std=0.3)
                layer.lora_magnitude_vector.copy_(
                    layer.norms() * (0.8 + 0.4 * torch.rand(layer.out_features))
                )
    return model


def fused(model):
    patch_parts(model, whole_layers=True)
    return model


def both(model, batch):
    plain = families.states_and_gradients(copy.deepcopy(model), batch)
    model = fused(model)
    before = decoder_layer.runs[FUSED_LAYER]
    ours = families.states_and_gradients(model, batch)
    assert decoder_layer.runs[FUSED_LAYER] == before + len(model.get_decoder().layers)
    assert any("lora_magnitude_vector" in name for name in plain)
    return plain, ours


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj", "down_proj"]], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_equals_the_class(family, targets):
    families.assert_same(*both(adapted(family, target_modules=targets), families.documents_batch()))


def test_over_weights_in_4_bits():
    families.assert_same(*both(adapted(four_bits=True), families.documents_batch()))


def test_nothing_is_kept_of_a_pass_whose_kernels_did_not_run(monkeypatch, let_return):
    """Norms of rows of weights that were not dequantised, and of adapters that were not written."""
    model = fused(adapted(four_bits=True))
    batch = families.documents_batch()

    @contextmanager
    def not_running():
        with monkeypatch.context() as patch:
            patch.setattr(
                nf4, "dequantize_4bit", lambda packed, scales, out, *_: out.fill_(float("nan"))
            )
            patch.setattr(dense, "write_adapters", lambda *_: None)
            yield

    monkeypatch.setattr(compilation, "compiling_only", not_running)
    monkeypatch.setattr(
        compilation,
        "micro_step",
        lambda model, *_: families.states_and_gradients(model.model, batch),
    )
    let_return(torch.random, fork_rng=nullcontext())
    expected = families.states_and_gradients(copy.deepcopy(model), batch)
    compilation.compile_micro_step(
        SimpleNamespace(model=model), None, batch, {}, SimpleNamespace(device=torch.device("cpu"))
    )
    families.assert_same(expected, families.states_and_gradients(model, batch))


MEMORY = {
    "layers recomputed": lambda model: enable_gradient_checkpointing(model, True),
    "norms and units recomputed": recompute_norms_and_units,
    "in tiles": tile_mlps,
}


@pytest.mark.parametrize("way", MEMORY)
def test_in_less_memory_it_is_the_same(way):
    model = adapted().train()
    batch = families.documents_batch()
    plain = families.states_and_gradients(copy.deepcopy(model), batch)
    MEMORY[way](model)
    families.assert_same(plain, families.states_and_gradients(fused(model), batch))


def states_of(model, batch):
    with PresentedModel(model, packed=True, head_is_read=False).attending_documents() as presented:
        return presented.hidden_states(batch)


def losses(model, batch, steps=4, rate=0.05):
    """Of steps of plain gradient descent over what is trained."""
    found = []
    for _ in range(steps):
        loss = states_of(model, batch).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= rate * p.grad
                    p.grad = None
        found.append(float(loss.detach()))
    return found


def test_losses_of_some_steps_are_those_of_the_layers_one_by_one():
    """Norms follow the adapters from step to step."""
    model = adapted()
    batch = families.documents_batch()
    expected = losses(copy.deepcopy(model), batch)
    assert expected[0] != pytest.approx(expected[-1], rel=1e-3)
    assert losses(fused(model), batch) == pytest.approx(expected, rel=1e-6)


def test_norms_of_the_first_step_give_other_losses(monkeypatch):
    model = adapted()
    batch = families.documents_batch()
    expected = losses(copy.deepcopy(model), batch)
    right = RowNorms.of
    monkeypatch.setattr(
        RowNorms, "of", lambda own, *given: own._norms[1] if own._norms else right(own, *given)
    )
    assert losses(fused(model), batch) != pytest.approx(expected, rel=1e-6)


def test_norms_that_are_forgotten_are_computed_anew():
    """An adapter that was written unseen, as by a graph."""
    model = fused(adapted())
    batch = families.documents_batch()
    families.states_and_gradients(model, batch)
    for layer in model.modules():
        if isinstance(layer, LoRALinear):
            layer.lora_B.data.mul_(2)
    forget_row_norms(model)
    ours = families.states_and_gradients(model, batch)
    unfuse_weights(model)
    families.assert_same(families.states_and_gradients(model, batch), ours)


def test_switched_off_they_are_the_base():
    model = fused(adapted())
    batch = families.documents_batch()
    with without_adapters(model), torch.no_grad():
        found = states_of(model, batch)
        bare = families.build("llama").double()
        weights = {
            name.replace("base_layer.", ""): x
            for name, x in model.state_dict().items()
            if "lora_" not in name
        }
        bare.load_state_dict(weights)
        expected = states_of(bare, batch)
    assert families.distance(found, expected) <= 1e-6
