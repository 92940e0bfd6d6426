"""host_rows: rows of a table in host memory, bit-equal to torch's embedding."""

import pytest
import torch
import torch.nn.functional as F

from chronicals.kernels import host_rows as kernel
from chronicals.kernels.host_memory import PinnedTensors
from chronicals.kernels.host_rows import host_rows, host_rows_reference
from mutants import mutant

PINNED = PinnedTensors()


def table_of(rows, width, dtype, device):
    """A table in host memory, pinned for a card."""
    values = torch.randn(rows, width).to(dtype)
    if device.type == "cpu":
        return values
    return PINNED.empty(values.shape, dtype, device).copy_(values)


def compare(ours, shape, width, dtype, device, ids_type=torch.int64):
    table = table_of(29, width, dtype, device)
    ids = torch.randint(29, shape, dtype=ids_type, device=device)
    found = ours(ids, table)
    assert found.device == ids.device and found.dtype == dtype
    assert torch.equal(found.cpu(), F.embedding(ids.cpu(), table.cpu().clone()))


@pytest.mark.parametrize("ours", [host_rows, host_rows_reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "width"), [((1, 13), 64), ((7,), 37), ((1,), 1), ((2, 3), 4099)])
def test_equals_the_embedding(ours, shape, width, dtype, device):
    compare(ours, shape, width, dtype, device)


def test_ids_may_be_narrow_or_strided(device):
    compare(host_rows, (11,), 37, torch.bfloat16, device, torch.int32)
    table = table_of(29, 37, torch.float32, device)
    ids = torch.randint(29, (14,), device=device)
    assert torch.equal(host_rows(ids[::2], table), host_rows(ids, table)[::2])


def test_no_ids(device):
    ids = torch.zeros((1, 0), dtype=torch.int64, device=device)
    assert host_rows(ids, table_of(3, 8, torch.float32, device)).shape == (1, 0, 8)


def test_a_row_that_is_not_there_is_no_number(device):
    ids = torch.tensor([0, 3, -1], device=device)
    found = host_rows(ids, table_of(3, 8, torch.float32, device))
    assert found.isnan().all(1).tolist() == [False, True, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card, where memory is pinned")
def test_a_table_that_is_not_pinned_is_refused(device):
    with pytest.raises(ValueError, match="not in pinned memory"):
        host_rows(torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("old", "new"),
    [("row * width", "t * width"), ("columns < there", "columns < there - 1")],
)
def test_planted_faults_are_found(old, new, device):
    broken = mutant(kernel, old, new)
    with pytest.raises(AssertionError):
        compare(broken.host_rows, (13,), 37, torch.float32, device)
