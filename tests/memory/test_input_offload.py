"""Inputs of layers in tiles that wait in host memory: in one memory, the next one prefetched."""

import gc
import weakref

import pytest
import torch

import families
import tiny
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import InputOffload, offload, recompute
from chronicals.memory.offload import device_of
from chronicals.models import PresentedModel
from chronicals.patching import fuse_weights, patch_parts, tile_layers
from chronicals.policies.activation_offload import spread

LAYERS = 5
INPUT = 32 * 32 * 4
"""Bytes of the input of a layer: 32 tokens of width 32 in fp32."""


@pytest.fixture
def model(set_constants):
    set_constants(recompute, TILE=7, GROUP_ROWS=1)
    made = families.build("llama", num_hidden_layers=LAYERS)
    apply_lora(made, LoRAConfig(rank=4, dropout=0.2))
    made = made.to("cuda" if torch.cuda.is_available() else "cpu")
    patch_parts(made, whole_layers=True)
    tile_layers(made)
    fuse_weights(
        made
    )  # as a run does: weights that move during a pass leave their addresses behind
    return made


def batch(model):
    torch.manual_seed(11)
    return families.documents_batch((7, 1, 12, 5, 7)).to(model.device)


def states(model, presented):
    torch.manual_seed(1)  # of dropout
    return presented.hidden_states(batch(model))


def gradients(model, times=1):
    """Gradients by name, of the last of several steps."""
    with PresentedModel(model, packed=True, head_is_read=False).attending_documents() as presented:
        for _ in range(times):
            model.zero_grad()
            states(model, presented).square().sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def layers_of(model):
    return list(model.get_decoder().layers)


@pytest.mark.parametrize("count", range(1, LAYERS + 1))
def test_gradients_are_the_same_bits(model, count):
    expected = gradients(model)
    with InputOffload(model.get_decoder(), spread(layers_of(model), count), smallest=1) as away:
        found = gradients(model, times=2)
        assert away.moved == count * INPUT
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not model.get_decoder()._forward_hooks and not layers_of(model)[-1]._forward_hooks


def test_every_kth_layer_is_chosen_and_the_last_one():
    chosen = {count: spread(list(range(12)), count) for count in (1, 3, 4, 5, 12)}
    assert chosen[1] == [11] and chosen[3] == [3, 7, 11] and chosen[4] == [2, 5, 8, 11]
    assert len(chosen[5]) == 5 and chosen[12] == list(range(12))


def test_there_is_one_memory_allocated_once(model):
    """Of as many inputs as layers are chosen, whatever the number of steps."""
    with InputOffload(model.get_decoder(), layers_of(model)[::2], smallest=1) as away:
        places = []
        for _ in range(3):
            gradients(model)
            gc.collect()
            places.append(sorted(x.data_ptr() for free in away.free.values() for x in free))
        assert places[0] == places[1] == places[2] and len(places[0]) == 3
        assert {b - a for a, b in zip(places[0], places[0][1:])} == {INPUT}


def test_a_pass_that_begins_before_another_ends_gets_memory_of_its_own(model):
    expected = gradients(model)
    shown = PresentedModel(model, packed=True, head_is_read=False)
    with (
        InputOffload(model.get_decoder(), layers_of(model), smallest=1),
        shown.attending_documents() as presented,
    ):
        passes = [states(model, presented) for _ in range(2)]
        for one in passes:
            model.zero_grad()
            one.square().sum().backward()
            for name, p in model.named_parameters():
                assert p.grad is None or torch.equal(p.grad, expected[name])


def test_at_most_the_input_in_use_and_the_next_are_there(model, monkeypatch):
    """In the backward pass, counted at each input that is asked for; and none is brought back twice."""
    there = []
    brought = []
    usual_prefetch, usual_unpack = offload._Tape._prefetch, offload._Tape.unpack

    def prefetch(tape, saved):
        if saved.here is None:
            brought.append(saved.number)
        usual_prefetch(tape, saved)

    def unpack(tape, packed):
        tensor = usual_unpack(tape, packed)
        saved = [one() for one in tape.saved]
        there.append(sum(one is not None and one.here is not None for one in saved))
        return tensor

    monkeypatch.setattr(offload._Tape, "_prefetch", prefetch)
    monkeypatch.setattr(offload._Tape, "unpack", unpack)
    with InputOffload(model.get_decoder(), layers_of(model), smallest=1):
        gradients(model)
    assert sorted(brought) == list(range(LAYERS - 1))  # the last was still there
    assert len(there) == LAYERS and max(there) <= 2 and there[:-1].count(1) >= LAYERS - 2


def test_without_gradients_nothing_moves(model):
    shown = PresentedModel(model, packed=True, head_is_read=False)
    with InputOffload(model.get_decoder(), layers_of(model), smallest=1) as away:
        with torch.no_grad(), shown.attending_documents() as presented:
            states(model, presented)
        assert away.moved == 0 and not away.free


def test_its_memory_goes_when_it_ends(model):
    with InputOffload(model.get_decoder(), layers_of(model), smallest=1) as away:
        gradients(model)
        room = weakref.ref(away._room)
    gc.collect()
    assert room() is None


def test_the_device_is_that_of_the_layers_where_the_embedding_is_in_host_memory():
    model = tiny.llama()
    assert device_of(model) == torch.device("cpu")
    model.model.layers.to("meta")
    assert device_of(model) == torch.device("meta")
