"""Attention over pages against attention over documents."""

import pytest
import torch

from chronicals.attention import (
    attention_reference,
    gather_pages,
    paged_attention_reference,
)
from families import distance

PAGE = 4
LENGTHS = (1, 4, 7, 13)

MASKS = {
    "plain": {},
    "window": {"window": 3},
    "wide window": {"window": 12},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -0.5])},
    "all": {"window": 5, "softcap": 1.5, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -0.5])},
}


def pages(dtype=torch.float64, heads=2, width=8, value=5):
    """Random pages, among them those of sequences of ``LENGTHS`` tokens, in no order."""
    count = 16
    keys, values = (torch.randn(count, PAGE, heads, n, dtype=dtype) for n in (width, value))
    order = torch.randperm(count)
    table = torch.zeros(len(LENGTHS), 4, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        needed = -(-length // PAGE)
        table[row, :needed], order = order[:needed], order[needed:]
    return keys, values, table


@pytest.mark.parametrize("mask", MASKS)
def test_a_query_attends_to_its_own_pages(mask):
    keys, values, table = pages()
    q = torch.randn(len(LENGTHS), 6, 8, dtype=torch.float64)
    lengths = torch.tensor(LENGTHS)
    got = paged_attention_reference(q, keys, values, table, lengths, scale=0.4, **MASKS[mask])
    for row, length in enumerate(LENGTHS):
        places = (table[row][:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        k, v = (gather_pages(x, places).transpose(0, 1) for x in (keys, values))
        window = MASKS[mask].get("window", length)
        seen = (torch.arange(length) >= length - window)[None]
        of_scores = MASKS[mask].get("softcap"), MASKS[mask].get("sinks")
        expected = attention_reference(q[row][:, None], k, v, seen, 0.4, *of_scores)[:, 0]
        assert distance(got[row], expected) < 1e-12, length


def test_what_lies_behind_the_end_of_a_sequence_does_not_matter():
    keys, values, table = pages()
    q = torch.randn(len(LENGTHS), 2, 8, dtype=torch.float64)
    lengths = torch.tensor(LENGTHS)
    before = paged_attention_reference(q, keys, values, table, lengths, scale=1.0)
    for row, length in enumerate(LENGTHS):
        if length % PAGE:
            page = table[row, length // PAGE]
            keys[page, length % PAGE :] = values[page, length % PAGE :] = float("nan")
    after = paged_attention_reference(q, keys, values, table, lengths, scale=1.0)
    assert torch.equal(before, after)
