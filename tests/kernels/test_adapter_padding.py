"""write_adapters: A and s·B where the reference puts them, and nothing anywhere else."""

import sys

import pytest
import torch

from chronicals.kernels.adapter_padding import write_adapters, write_adapters_reference
from mutants import mutant

MODULE = sys.modules["chronicals.kernels.adapter_padding"]
SIZES = (24, 7, 13)
WIDTH = 20
ROOM = 16


def check(write, ranks, dtype, device):
    count = len(ranks)
    sizes = SIZES[:count]
    scales = [0.5, 1.5, 3.0][:count]
    downs = [torch.randn(rank, WIDTH, device=device) if rank else None for rank in ranks]
    ups = [
        torch.randn(size, rank, device=device) if rank else None for size, rank in zip(sizes, ranks)
    ]
    buffers = [
        torch.zeros(sum(sizes) + ROOM, WIDTH + ROOM, device=device, dtype=dtype) for _ in range(2)
    ]
    for write_into, buffer in zip((write, write_adapters_reference), buffers):
        down = buffer[sum(sizes) :, :WIDTH]
        up = buffer[: sum(sizes), WIDTH:]
        write_into(down, up, sizes, ranks, downs, ups, scales)
    assert ((buffers[0] - buffers[1]).abs() <= torch.finfo(dtype).eps * buffers[1].abs()).all()
    row = 0
    column = 0
    for size, rank, a, b, scale in zip(sizes, ranks, downs, ups, scales):
        if rank:
            assert torch.equal(down[column : column + rank], a.to(dtype))
            assert torch.equal(up[row : row + size, column : column + rank], (scale * b).to(dtype))
        row = row + size
        column = column + rank
    assert buffers[1].count_nonzero() == sum(
        rank * (WIDTH + size) for rank, size in zip(ranks, sizes)
    )


@pytest.mark.parametrize("ranks", [(4,), (3, 0, 5), (3, 5), (0, 2, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_the_reference(dtype, ranks, device):
    check(write_adapters, ranks, dtype, device)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "tl.load(b_ptr + at, mask=at < b_elements).to(tl.float32) * scale",
            "tl.load(b_ptr + at, mask=at < b_elements).to(tl.float32)",
        ),
        ("column = rank0 + rank1", "column = rank0"),
        (
            "(row + at // rank).to(tl.int64) * up_stride + column",
            "(row + at // rank).to(tl.int64) * up_stride",
        ),
    ],
)
def test_planted_faults_are_found(old, new, device):
    wrong = mutant(MODULE, old, new)
    with pytest.raises(AssertionError):
        check(wrong.write_adapters, (3, 2, 5), torch.float32, device)
