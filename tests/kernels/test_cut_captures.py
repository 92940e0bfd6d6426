"""Tensors over the memory of others, and what the host runs between graphs."""

import gc
import weakref
from typing import NamedTuple

import pytest
import torch

from chronicals.kernels.cuda_graphs import Borrowed, capture_under_way, run_on_host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(7, 5), (), (3, 0)], ids=str)
def test_it_reads_and_writes_the_memory(dtype, shape, device):
    tensor = torch.arange(35, device=device)[: max(1, torch.Size(shape).numel())].to(dtype)
    tensor = tensor[: torch.Size(shape).numel()].reshape(shape)
    view = Borrowed(tensor).tensor
    assert view.dtype == dtype and view.shape == tensor.shape and torch.equal(view, tensor)
    view.fill_(3)
    assert (tensor == 3).all()


def test_strides_and_offsets_are_kept(device):
    tensor = torch.arange(70, device=device).view(7, 10)[1::2, 1:8:3].t()
    view = Borrowed(tensor).tensor
    assert view.stride() == tensor.stride() and torch.equal(view, tensor)
    view += 1
    assert torch.equal(view, tensor)


def test_it_does_not_keep_the_tensor(device):
    tensor = torch.ones(5, device=device)
    there = weakref.ref(tensor)
    borrowed = Borrowed(tensor)
    del tensor
    gc.collect()
    assert there() is None and borrowed is not None


class Pair(NamedTuple):
    one: torch.Tensor | None
    number: int


def test_the_host_runs_with_the_captured_memory(device):
    """At each replay and not before, without gradients."""
    seen = []

    def run(pair, tensors, other):
        seen.append((pair.number, other, torch.is_grad_enabled()))
        pair.one.add_(tensors[0])
        assert tensors[1] is None

    decisions = []

    class Capture:
        def cut(self, decide, behind):
            assert behind is None
            decisions.append(decide)

    weight = torch.ones(3, device=device, requires_grad=True)
    total = torch.zeros(3, device=device)
    with capture_under_way(Capture()):
        run_on_host(run, Pair(total, 4), (weight, None), "as it is")
    assert not seen
    [decide] = decisions
    decide()
    with torch.no_grad():
        weight.fill_(5)
    decide()
    assert seen == [(4, "as it is", False)] * 2 and total.tolist() == [6, 6, 6]
    run_on_host(run, Pair(total, 7), (weight, None), None)
    assert seen[-1] == (7, None, False) and total.tolist() == [11, 11, 11]
