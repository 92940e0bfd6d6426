"""What attention gave, kept: the gradients of attention that is computed again."""

import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import families
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import ActivationOffload, attention_results, recompute
from chronicals.memory.attention_results import (
    RESULTS,
    AttentionResults,
    ResultsOnDevice,
    SavedTensors,
)
from chronicals.models import PresentedModel
from chronicals.patching import attention_groups, patch_parts, tile_layers, tiled_layer

LAYERS = 3
LENGTHS = (7, 1, 12, 5, 7)


@pytest.fixture(autouse=True)
def one_key_head_at_a_time(set_constants):
    set_constants(recompute, TILE=7, GROUP_ROWS=1)


def tiled(family="llama", dropout=0.2):
    model = families.build(family, num_hidden_layers=LAYERS)
    apply_lora(model, LoRAConfig(rank=4, dropout=dropout))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    patch_parts(model, whole_layers=True)
    tile_layers(model)
    return model


def layers_of(model):
    return list(model.get_decoder().layers)


def loss_of(model):
    torch.manual_seed(11)
    batch = families.documents_batch(LENGTHS).to(model.device)
    with PresentedModel(model, packed=True, head_is_read=False).attending_documents() as presented:
        torch.manual_seed(1)  # of dropout
        return presented.hidden_states(batch).square().sum()


def gradients(model):
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def kept(model, layers=None, smallest=1):
    chosen = layers_of(model) if layers is None else layers
    return AttentionResults(model.get_decoder(), chosen, smallest)


def on_device(model):
    return ResultsOnDevice(layers_of(model))


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "mistral"])
def test_the_gradients_are_the_same_bits(family):
    """Also where scores are bounded, and where tokens attend to a window."""
    model = tiled(family)
    expected = gradients(model)
    with kept(model) as results:
        for _ in range(2):
            assert_equal(gradients(model), expected)
        assert results.stored > 0
    assert_equal(gradients(model), expected)


@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma3"])
def test_results_on_the_device_give_the_same_bits(family):
    model = tiled(family)
    expected = gradients(model)
    with on_device(model):
        for _ in range(2):
            assert_equal(gradients(model), expected)
    assert not any(hasattr(layer, RESULTS) for layer in layers_of(model))


def test_results_on_the_device_may_be_offloaded_by_others():
    """As in a run that offloads what autograd saves after it ran out of memory."""
    model = tiled()
    expected = gradients(model)
    with on_device(model), ActivationOffload(model.get_decoder(), smallest=1) as offload:
        assert_equal(gradients(model), expected)
        assert offload.moved > 0


def test_results_on_the_device_are_freed_with_their_layers(monkeypatch):
    """While the loss, and with it the graph, is still there: those of the last layer first."""
    model = tiled()
    alive = []
    usual = SavedTensors.to_save

    def watched(self):
        tensors = usual(self)
        alive.append([StorageWeakRef(tensor.untyped_storage()) for tensor in tensors])
        return tensors

    monkeypatch.setattr(SavedTensors, "to_save", watched)

    def left():
        gc.collect()
        return [sum(not memory.expired() for memory in memories) for memories in alive]

    found = []
    for layer in layers_of(model)[1:]:
        layer.register_full_backward_pre_hook(lambda *_: found.append(left()))
    with on_device(model):
        loss = loss_of(model)
        each = len(alive[0])
        assert each >= model.config.num_key_value_heads and left() == [each] * LAYERS
        loss.backward()
    assert found == [[each] * LAYERS, [each, each, 0]]
    assert left() == [0] * LAYERS


def test_attention_runs_once_a_step_in_the_layers_that_were_chosen(monkeypatch):
    model = tiled()
    counted = []
    usual = tiled_layer.TiledLayer._attend
    monkeypatch.setattr(
        tiled_layer.TiledLayer,
        "_attend",
        lambda self, group: counted.append(self.results is not None) or usual(self, group),
    )
    with kept(model, layers_of(model)[1:2]):
        gradients(model)
    groups = model.config.num_key_value_heads
    assert counted.count(True) == groups
    assert counted.count(False) == 2 * (LAYERS - 1) * groups
    assert not any(hasattr(layer, RESULTS) for layer in layers_of(model))


def test_nothing_of_a_pass_stays_on_the_device_between_its_passes(monkeypatch):
    """Queries, keys, values and results are gone; the last result, too, when the decoder ends."""
    model = tiled()
    alive = []
    usual = attention_groups.AttentionGraph.of.__func__

    def watched(cls, group, attend):
        graph, value, others = usual(cls, group, attend)
        tensors = (*group.tensors, value)
        alive.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        return graph, value, others

    monkeypatch.setattr(attention_groups.AttentionGraph, "of", classmethod(watched))
    with kept(model):
        loss = loss_of(model)
        gc.collect()
        assert len(alive) == 4 * LAYERS * model.config.num_key_value_heads
        assert all(memory.expired() for memory in alive)
        loss.backward()


def test_buffers_are_used_again_and_go_with_their_owner():
    model = tiled()
    with kept(model) as results:
        sizes = []
        for _ in range(3):
            gradients(model)
            gc.collect()
            free = [buffer for buffers in results._free.values() for buffer in buffers]
            sizes.append((len(free), sorted(buffer.data_ptr() for buffer in free)))
        assert sizes[0][0] and sizes[0] == sizes[1] == sizes[2]
        buffer = weakref.ref(free[0])
        del free
    gc.collect()
    assert buffer() is None


def test_small_tensors_stay_where_they_are():
    model = tiled()
    expected = gradients(model)
    with kept(model, smallest=attention_results.SMALLEST) as results:
        assert_equal(gradients(model), expected)
        assert results.stored == 0


def test_without_gradients_nothing_is_stored():
    model = tiled()
    with kept(model) as results, torch.no_grad():
        loss_of(model)
        assert results.stored == 0


@pytest.mark.parametrize("keep", [kept, on_device])
def test_a_graph_can_be_differentiated_again(keep):
    model = tiled()
    expected = gradients(model)
    with keep(model):
        model.zero_grad()
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_equal(found, {name: value for name, value in expected.items() if name != "loss"})


@pytest.mark.parametrize("keep", [kept, on_device])
def test_passes_that_overlap_have_results_of_their_own(keep):
    model = tiled()
    expected = gradients(model)
    with keep(model):
        losses = [loss_of(model) for _ in range(2)]
        for loss in losses:
            model.zero_grad()
            loss.backward()
            for name, p in model.named_parameters():
                assert p.grad is None or torch.equal(p.grad, expected[name])


def test_no_graph_outlives_its_pass():
    """Hooks on saved tensors that held the graph would keep it, and all that it saved, for ever."""
    model = tiled()
    with kept(model):
        made = []
        usual = attention_groups._SavedElsewhere.settle
        attention_groups._SavedElsewhere.settle = lambda self, known: (
            made.append(weakref.ref(self)) or usual(self, known)
        )
        try:
            gradients(model)
        finally:
            attention_groups._SavedElsewhere.settle = usual
        gc.collect()
        assert made and not any(ref() is not None for ref in made)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_in_16_bits_flash_attention_gives_the_same_bits(family):
    torch.use_deterministic_algorithms(True)  # the order of a gradient's sums is not, else
    try:
        model = tiled(family).to(torch.bfloat16)
        expected = gradients(model)
        with kept(model) as results:
            assert_equal(gradients(model), expected)
            tokens = sum(LENGTHS)
            heads = model.config.num_attention_heads
            width = model.config.head_dim
            assert results.stored == LAYERS * tokens * heads * (2 * width + 4)
        with on_device(model):
            assert_equal(gradients(model), expected)
    finally:
        torch.use_deterministic_algorithms(False)
