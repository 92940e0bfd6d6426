"""Adam8bit: which moments are in 8 bits, that it trains as fp32 states do, and that it goes on
bit by bit where it stopped.
"""

import copy

import pytest
import torch
from torch import nn

from chronicals.optimizers import Adam8bit, FusedAdamW


def network(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(64, 96), nn.Flatten(), nn.Linear(8 * 96, 64), nn.Tanh(), nn.Linear(64, 64)
    ).to(dtype)


def steps(model, optimizer, count, seed=7, teacher=None):
    """Losses of training on a table that a fixed network made."""
    drawn = torch.Generator().manual_seed(seed)
    teacher = teacher or network().requires_grad_(False)
    losses = []
    for _ in range(count):
        ids = torch.randint(0, 64, (32, 8), generator=drawn)
        target = teacher(ids.flip(1)).argmax(1)
        loss = nn.functional.cross_entropy(model(ids).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_large_matrices_alone_are_in_8_bits():
    model = network()
    groups = [
        {"params": list(model[0].parameters()), "full_moments": True},
        {"params": list(model[2:].parameters())},
    ]
    optimizer = Adam8bit(groups, lr=1e-3)
    steps(model, optimizer, 1)
    dtypes = [optimizer.state[p]["exp_avg"].dtype for p in model.parameters()]
    full = torch.float32
    small = torch.uint8
    assert dtypes == [full, small, full, small, full]
    state = optimizer.state[model[2].weight]
    assert sum(x.nbytes for name, x in state.items() if name.startswith("exp")) == pytest.approx(
        2.03 * 64 * 768, rel=1e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_goes_on_bit_by_bit(dtype):
    model = network(dtype)
    optimizer = Adam8bit(model.parameters(), lr=1e-3, weight_decay=0.1)
    steps(model, optimizer, 5)
    other = copy.deepcopy(model)
    loaded = Adam8bit(other.parameters(), lr=1e-3, weight_decay=0.1)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert steps(model, optimizer, 5, seed=8) == steps(other, loaded, 5, seed=8)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_states_of_another_kind_are_refused():
    model = network()
    optimizer = Adam8bit(model.parameters())
    steps(model, optimizer, 1)
    full = FusedAdamW(model.parameters())
    weight = model[2].weight
    with pytest.raises(
        ValueError, match=r"'exp_avg' of a weight \(64, 768\) is torch.float32, here torch.uint8"
    ):
        optimizer.load_state(weight, full.state_of(weight))
    with pytest.raises(
        ValueError, match=r"'exp_avg' of a weight \(64, 768\) is torch.uint8, here torch.float32"
    ):
        full.load_state(weight, optimizer.state_of(weight))


@pytest.mark.slow
def test_it_trains_as_states_in_fp32_do():
    """The curve lies among those of fp32 states with other seeds: as far from them as they are
    from each other.
    """
    teacher = network().requires_grad_(False)

    def curve(kind, seed):
        model = network()
        for layer in model:
            if hasattr(layer, "reset_parameters"):
                torch.manual_seed(seed)
                layer.reset_parameters()
        return (
            torch.tensor(steps(model, kind(model.parameters(), lr=3e-3), 100, seed, teacher))
            .view(4, 25)
            .mean(1)
        )

    full = torch.stack([curve(FusedAdamW, seed) for seed in range(2)])
    ours = torch.stack([curve(Adam8bit, seed) for seed in range(2)])
    spread = full.max(0).values - full.min(0).values + 0.02 * full.mean(0)
    assert ((ours.mean(0) - full.mean(0)).abs() <= spread).all()
    assert (ours[:, -1] < ours[:, 0] - 0.3).all()
