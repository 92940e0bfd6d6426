"""Dense values of some slots: those of the format's own dequantisation, bit by bit."""

import pytest
import torch
from test_few_tokens_product import FORMATS, in_records

from chronicals.kernels.dense_slots import dense_slots

PACKED = [name for name in FORMATS if name not in ("16 bit", "transposed") and "fp8" not in name]
SHAPES = [(1, 16, 64), (5, 67, 192), (4, 128, 320)]
"""Slots, outputs, columns."""


def check(format, shape, dtype, device, records=None):
    slots, outputs, columns = shape
    stack = in_records(FORMATS[format](slots, outputs, columns, dtype, device))
    columns = stack.layout.columns
    records = torch.randperm(slots)[: max(1, slots - 1)].tolist() if records is None else records
    out = torch.full((len(records), outputs, columns), float("nan"), dtype=dtype, device=device)
    places = torch.tensor(records, dtype=torch.int32, device=device)
    assert dense_slots(stack, places, out) is out
    for matrix, slot in zip(out, records):
        assert torch.equal(matrix, stack.dense(slot, dtype).to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_values_of_the_format(format, shape, dtype, device):
    check(format, shape, dtype, device)


@pytest.mark.parametrize("records", [[], [2, 2, 0]], ids=str)
def test_any_records(records, device):
    check("nf4", (3, 24, 64), torch.bfloat16, device, records)


def first(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("format", ["16 bit", "fp8 in blocks"])
def test_formats_that_are_not_packed_are_refused(format, device):
    stack = FORMATS[format](2, 16, 64, torch.bfloat16, device)
    with pytest.raises(ValueError, match="in 16 bits or FP8: give one in a packed format"):
        dense_slots(stack, first(device), torch.empty(1, 16, 64, device=device))


def test_memory_of_another_shape_is_refused(device):
    stack = FORMATS["nf4"](2, 16, 64, torch.bfloat16, device)
    with pytest.raises(ValueError, match=r"expected contiguous \(1, 16, 64\)"):
        dense_slots(stack, first(device), torch.empty(2, 16, 64, device=device))
