"""A function of rows by tiles: the same values and gradients, and only a tile's intermediates at
a time.
"""

import pytest
import torch
from torch import nn

from chronicals.memory import recompute, tiled


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


def test_what_is_wide_exists_for_a_tile_alone(monkeypatch):
    """Tensors that autograd keeps over the forward pass are no wider than x; in the backward
    pass as wide as one tile.
    """
    monkeypatch.setattr(recompute, "TILE", 5)
    mlp, x, _ = parts()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        tiled(mlp, x)
    assert seen and all(shape[-1] <= 8 for shape in seen)
    rows = []
    mlp[1].register_forward_hook(lambda _, args, out: rows.append(len(out)))
    tiled(mlp, x).sum().backward()
    assert max(rows) == 5
