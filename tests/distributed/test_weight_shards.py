"""Rows that a rank has of a weight."""

import random

import pytest
import torch

import tiny
from chronicals import ChronicalsConfig
from chronicals.config import ConfigurationError
from chronicals.distributed.weight_shards import rows_of_rank
from chronicals.policies import Facts
from chronicals.policies.sharding import ranks_per_copy


def test_rows_are_cut_as_torch_cuts_chunks():
    for _ in range(50):
        rows = random.randrange(1, 40)
        count = random.randrange(1, 9)
        chunks = [list(chunk) for chunk in torch.arange(rows).chunk(count)]
        chunks += [[]] * (count - len(chunks))
        assert [list(rows_of_rank(rows, rank, count)) for rank in range(count)] == [
            [int(x) for x in chunk] for chunk in chunks
        ]


def asked(number):
    return ChronicalsConfig(
        sharding="weights", sharding_ranks=number, batch_size=1, max_seq_length=64
    )


def test_neighbours_that_share_a_copy(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    model = tiny.llama()
    assert (
        ranks_per_copy(Facts(asked(None), model, 8)) == 8
        and ranks_per_copy(Facts(asked(4), model, 8)) == 4
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [ranks_per_copy(Facts(asked(None), model, ranks)) for ranks in (8, 4, 6)] == [4, 4, 6]
    assert ranks_per_copy(Facts(asked(8), model, 8)) == 8
    for wrong in (1, 3):
        with pytest.raises(
            ConfigurationError, match=rf"sharding_ranks={wrong}: 8 processes cannot share"
        ):
            ranks_per_copy(Facts(asked(wrong), model, 8))


def test_all_share_one_copy_where_that_of_a_machine_would_not_fit():
    model = tiny.llama(num_hidden_layers=16, hidden_size=256, intermediate_size=1024)
    held = sum(p.numel() for p in model.parameters())
    assert ranks_per_copy(Facts(asked(None), model, 64, total=12 * held, here=2)) == 2
    assert ranks_per_copy(Facts(asked(None), model, 64, total=6 * held, here=2)) == 64
