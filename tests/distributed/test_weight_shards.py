"""Rows that a rank has of a weight."""

import random

import pytest
import torch

from chronicals.config import ConfigurationError
from chronicals.distributed.weight_shards import rows_of
from chronicals.training.decisions import sharing_of


def test_rows_are_cut_as_torch_cuts_chunks():
    for _ in range(50):
        rows, count = random.randrange(1, 40), random.randrange(1, 9)
        chunks = [list(chunk) for chunk in torch.arange(rows).chunk(count)]
        chunks += [[]] * (count - len(chunks))
        assert [list(rows_of(rows, rank, count)) for rank in range(count)] == [[int(x) for x in chunk] for chunk in chunks]


def asked(number):
    from chronicals import ChronicalsConfig

    return ChronicalsConfig(sharding="weights", **({} if number is None else {"sharding_ranks": number}))


def test_neighbours_that_share_a_copy(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert sharing_of(asked(None), 8) == 8 and sharing_of(asked(4), 8) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert sharing_of(asked(None), 8) == 4 and sharing_of(asked(None), 4) == 4 and sharing_of(asked(None), 6) == 6
    assert sharing_of(asked(8), 8) == 8
    for wrong in (1, 3):
        with pytest.raises(ConfigurationError, match=rf"sharding_ranks={wrong}: 8 processes cannot share"):
            sharing_of(asked(wrong), 8)
