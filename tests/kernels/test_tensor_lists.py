"""Tables of many tensors: what they say of where things lie, and when they are made anew."""

import threading

import pytest
import torch

from chronicals.kernels import tensor_lists
from chronicals.kernels.tensor_lists import (
    LIST_CHUNK,
    MAX_CACHED_TABLES,
    table_of,
    tables_looked_up,
)


def test_a_table_leads_to_the_tensors(device):
    rows = [
        [torch.randn(n, device=device) for n in (5, 0, LIST_CHUNK + 1, 2 * LIST_CHUNK)]
        for _ in range(2)
    ]
    table = table_of(rows)
    assert table.addresses.tolist() == [[x.data_ptr() for x in row] for row in rows]
    assert table.sizes.tolist() == [5, 0, LIST_CHUNK + 1, 2 * LIST_CHUNK]
    assert table.tensors.tolist() == [0, 2, 2, 3, 3] and table.firsts.tolist() == [0, 1, 1, 3]
    assert (
        table_of(rows) is table and [x.device for x in table.on_device] == [rows[0][0].device] * 4
    )


def test_a_table_is_of_addresses_and_sizes(device):
    """Memory that was given to a tensor of another size."""
    block = torch.zeros(64, device=device)
    assert [table_of([[block[:size]]]).aligned for size in (16, 17)] == [True, False]
    assert not table_of([[block[1:17]]]).aligned


def test_few_tables_are_kept_and_the_last_ones(device):
    block = torch.zeros(4 * MAX_CACHED_TABLES, device=device)
    tables = [table_of([[block[n : n + 1]]]) for n in range(2 * MAX_CACHED_TABLES)]
    assert len(tensor_lists._tables) <= MAX_CACHED_TABLES
    assert (
        table_of([[block[2 * MAX_CACHED_TABLES - 1 : 2 * MAX_CACHED_TABLES]]]) is tables[-1]
        and table_of([[block[:1]]]) is not tables[0]
    )


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_types_have_their_names(kind):
    assert str(tensor_lists.of_triton(kind)) == {4: "fp32"}.get(
        kind.itemsize, "bf16" if kind == torch.bfloat16 else "fp16"
    )


def test_what_is_looked_up_is_told_whether_it_was_there_or_not(device):
    """In full, also what is no longer kept at the end; by whatever thread."""
    block = torch.zeros(3 * MAX_CACHED_TABLES, device=device)
    there = table_of([[block[:3]]])
    with tables_looked_up() as found, tables_looked_up() as as_well:
        with tables_looked_up() as ended:
            pass
        again = table_of([[block[:3]]])
        others = [table_of([[block[n : n + 1]]]) for n in range(2 * MAX_CACHED_TABLES)]
        thread = threading.Thread(target=table_of, args=([[block[5:9]]],))
        thread.start()
        thread.join()
    assert again is there and table_of([[block[:3]]]) is not there
    expected = [x for table in (there, *others, table_of([[block[5:9]]])) for x in table.on_device]
    assert [id(x) for x in found] == [id(x) for x in as_well] == [
        id(x) for x in expected
    ] and not ended
