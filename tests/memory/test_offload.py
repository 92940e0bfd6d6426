"""Activations that go to host memory and come back: the same gradients, bit by bit, and less on
the card.
"""

import gc

import pytest
import torch

import tiny
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import ActivationOffload, enable_gradient_checkpointing

WINDOWS = {"nothing": 0, "a little": 50_000, "everything": 1 << 40, "its own": None}


def model_of(kind):
    model = tiny.llama(num_hidden_layers=3).to("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "adapters":
        torch.manual_seed(0)
        apply_lora(model, LoRAConfig(rank=4, alpha=8, dropout=0.2, target_modules="all-linear"))
    if kind == "recomputed":
        enable_gradient_checkpointing(model)
    return model.train()


def ids_of(model, rows=3):
    return torch.randint(0, 300, (rows, 40), generator=torch.Generator().manual_seed(rows)).to(
        model.device
    )


def gradients(model, ids):
    torch.manual_seed(1)  # of dropout
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(left, right):
    assert left.keys() == right.keys() and left
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", ["full", "adapters", "recomputed"])
def test_gradients_are_the_same_bits(kind, window):
    model = model_of(kind)
    expected = gradients(model, ids_of(model))
    offload = ActivationOffload(model.get_decoder(), smallest=1, window=WINDOWS[window])
    for _ in range(3):
        assert_same(gradients(model, ids_of(model)), expected)
    assert offload.moved > 0


def test_by_default_a_few_tensors_are_on_their_way():
    """Three as large as the largest, which is an input where layers are recomputed, and else
    what they keep.
    """
    offloads = []
    for kind in ("recomputed", "full"):
        model = model_of(kind)
        offloads.append(ActivationOffload(model.get_decoder(), smallest=1))
        gradients(model, ids_of(model))
    assert offloads[0].window == 3 * offloads[0].largest == 3 * 3 * 40 * 64 * 4
    assert offloads[1].window == 3 * offloads[1].largest > offloads[0].window


def test_inputs_of_recomputed_layers_move_and_little_else():
    """A layer keeps its input alone, ``[3, 40, 64]`` in fp32; beside it the final norm keeps
    what it reads.
    """
    model = model_of("recomputed")
    layer = 3 * 40 * 64 * 4
    offload = ActivationOffload(model.get_decoder(), smallest=layer)
    gradients(model, ids_of(model))
    assert 3 * layer <= offload.moved <= 6 * layer


def test_passes_of_other_sizes_between_forward_and_backward():
    """Two graphs at a time, each with its own order, and one that never runs backward."""
    model = model_of("full")
    parts = [ids_of(model, rows) for rows in (1, 3)]
    expected = [gradients(model, ids) for ids in parts]
    ActivationOffload(model.get_decoder(), smallest=1, window=50_000)
    losses = [model(input_ids=ids, labels=ids).loss for ids in (*parts, parts[0])]
    del losses[2]
    for loss, own in zip(losses, expected):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert_same({name: p.grad for name, p in model.named_parameters()}, own)
        model.zero_grad()
        loss.backward()
        assert_same({name: p.grad for name, p in model.named_parameters()}, own)


@pytest.mark.slow
def test_host_memory_is_kept_and_not_more_of_it():
    model = model_of("full")
    offload = ActivationOffload(model.get_decoder(), smallest=1)

    def held():
        gc.collect()
        return sorted(memory.data_ptr() for free in offload.free.values() for memory in free)

    gradients(model, ids_of(model))
    first = held()
    bytes_held = sum(len(memory) for free in offload.free.values() for memory in free)
    assert offload.moved <= bytes_held < 2 * offload.moved
    for _ in range(3):
        gradients(model, ids_of(model))
    assert held() == first


@pytest.mark.slow
def test_host_memory_does_not_grow_with_every_new_length():
    model = model_of("full")
    offload = ActivationOffload(model.get_decoder(), smallest=1)
    most = 0
    for rows in (4, 7, 5, 6, 3):
        gradients(model, ids_of(model, rows))
        most = max(most, offload.moved)
    gc.collect()
    assert sum(len(memory) for free in offload.free.values() for memory in free) < 3 * most


def test_what_stays():
    """Weights, what is small, integers, evaluation, and all of it once removed."""
    model = model_of("full")
    offload = ActivationOffload(model.get_decoder(), smallest=1 << 30)
    gradients(model, ids_of(model))
    assert offload.moved == 0
    offload.smallest = 1
    with torch.no_grad():
        model(input_ids=ids_of(model))
    assert offload.moved == 0
    weights = {p.numel() * 4 for p in model.parameters()}
    sizes = set()
    take = offload.take
    offload.take = lambda size: (sizes.add(size), take(size))[1]
    gradients(model, ids_of(model, 7))
    moved = offload.moved
    assert moved and sizes and not weights & sizes
    offload.remove()
    gradients(model, ids_of(model))
    assert offload.moved == moved


def test_a_pass_that_fails_leaves_nothing_behind():
    model = model_of("full")
    expected = gradients(model, ids_of(model))
    offload = ActivationOffload(model.get_decoder(), smallest=1)

    def fail(*_):
        raise RuntimeError("planted")

    hook = model.get_decoder().layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        gradients(model, ids_of(model))
    hook.remove()
    moved = offload.moved
    x = torch.randn(64, 64, requires_grad=True)
    (x * x).sum().backward()
    assert offload.moved == moved  # outside the module nothing is moved
    assert_same(gradients(model, ids_of(model)), expected)


def test_a_pass_broken_off_from_the_keyboard_leaves_nothing_behind():
    def interrupt(*_):
        raise KeyboardInterrupt

    module = torch.nn.Linear(8, 8)
    x = torch.randn(16, 8, requires_grad=True)
    with pytest.raises(KeyboardInterrupt), ActivationOffload(module, smallest=1) as offload:
        module.register_forward_pre_hook(interrupt)
        module(x)
    (x * x).sum().backward()
    assert offload.moved == 0


def test_one_tensor_saved_twice_moves_once():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8))

        def forward(self, x):
            y = x * self.weight  # saves x
            return torch.sin(y) + torch.cos(y)  # both save y

    module = Twice()
    x = torch.randn(16, 8, requires_grad=True)
    offload = ActivationOffload(module, smallest=1)
    module(x).sum().backward()
    assert offload.moved == 2 * x.nbytes


def test_narrow_views_go_with_their_memory():
    """Queries, keys and values of one product: keys are a sixth of it."""

    class Attends(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 96))

        def forward(self, x):
            q, k, v = (x @ self.weight).split((64, 16, 16), 1)
            return q.sin().sum() + k.sin().sum() + v.sin().sum()

    module = Attends()
    x = torch.randn(16, 8)
    offload = ActivationOffload(module, smallest=1)
    module(x).backward()
    assert offload.moved == x.nbytes + 16 * 96 * 4


def test_memory_that_is_written_while_it_is_copied():
    """Plain autograd refuses to go on; so do we, unless the copy was over."""

    class Reuses(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x):
            buffer = x.detach() + 1
            first = self.weight * buffer
            buffer.add_(1)
            return first + self.weight * buffer

    for window in (None, 1 << 30, 0):
        module = Reuses()
        x = torch.randn(16, 8)
        if window is not None:
            ActivationOffload(module, smallest=1, window=window)
        if window == 0:
            module(x).sum().backward()
            assert torch.allclose(module.weight.grad, (x + 1).sum(0) + (x + 2).sum(0), atol=1e-5)
        else:
            with pytest.raises(RuntimeError, match="in ?place"):
                module(x).sum().backward()
