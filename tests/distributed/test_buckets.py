"""Gradients in buckets: each in one, in order, no bucket too large; and their sums are those of
each by itself.
"""

import pytest
import torch
import torch.distributed as dist

from chronicals.distributed import mesh
from chronicals.distributed.mesh import IN_FLIGHT, buckets, sum_over_ranks
from mutants import mutant

SHAPES = [(3, 5), (7,), (100, 30), (1,), (), (0, 4), (60,), (50, 50), (2, 2)]


def drawn():
    kinds = [
        torch.float32,
        torch.float32,
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    kinds += [torch.bfloat16, torch.float32]
    found = [torch.randn(shape).to(kind) for shape, kind in zip(SHAPES, kinds, strict=True)]
    return [*found, torch.randn(8, 6).t()]


class Doubling:
    """Two ranks with the same gradients; what they have is doubled when it is waited for."""

    def __init__(self):
        self.flying = 0
        self.most = 0
        self.calls = []

    def all_reduce(self, tensor, async_op):
        assert async_op and tensor.is_contiguous()
        self.flying += 1
        self.most = max(self.most, self.flying)
        self.calls.append(tensor.nbytes)
        outer = self

        class Work:
            def wait(self):
                tensor.mul_(2)
                outer.flying -= 1

        return Work()


@pytest.fixture
def ranks(monkeypatch):
    found = Doubling()
    monkeypatch.setattr(dist, "all_reduce", found.all_reduce)
    return found


@pytest.mark.parametrize("size", [1, 60, 300, 1 << 20])
def test_sums_are_those_of_each_by_itself(size, ranks):
    gradients = drawn()
    expected = [2 * gradient for gradient in gradients]
    places = [gradient.data_ptr() for gradient in gradients]
    sum_over_ranks(gradients, size)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True))
    assert (
        [gradient.data_ptr() for gradient in gradients] == places
        and not ranks.flying
        and ranks.most <= IN_FLIGHT
    )
    largest = max(gradient.nbytes for gradient in gradients)
    assert all(size_of <= max(size, largest) for size_of in ranks.calls) and (
        size < 1000 or len(ranks.calls) < len(gradients)
    )


def is_right(found, gradients, size):
    in_order = [id(gradient) for bucket in found for gradient in bucket] == [
        id(gradient) for gradient in gradients
    ]
    alike = all(len({gradient.dtype for gradient in bucket}) == 1 for bucket in found)
    return (
        in_order
        and alike
        and all(len(bucket) == 1 or sum(g.nbytes for g in bucket) <= size for bucket in found)
    )


@pytest.mark.parametrize("size", [1, 60, 300, 1 << 20])
def test_each_is_in_one_bucket_in_order(size):
    gradients = drawn()
    assert is_right(buckets(gradients, size), gradients, size) and buckets([]) == []


def test_a_large_one_is_summed_where_it_is(ranks):
    large = torch.randn(1000)
    sum_over_ranks([torch.randn(4), large, torch.randn(4)], 64)
    assert ranks.calls == [16, 4000, 16]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("room -= gradient.nbytes", "room -= 0"),
        (
            "not found or gradient.nbytes > room or gradient.dtype != found[-1][0].dtype",
            "not found or gradient.nbytes > room",
        ),
        ("work.wait()", "pass"),
        ("while waiting or flying:\n    ...", "while waiting:\n    ..."),
        ("[] if alone else bucket", "[]"),
    ],
)
def test_a_planted_fault_is_found(old, new, ranks):
    wrong = mutant(mesh, old, new)
    gradients = drawn()
    expected = [2 * gradient for gradient in gradients]
    wrong.sum_over_ranks(gradients, 80)
    summed = all(
        torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True)
    )
    assert not summed or ranks.flying or not is_right(wrong.buckets(gradients, 80), gradients, 80)
