"""Packed rows hold every document once, and a position attends to its own document."""

import random

import pytest
import torch

from chronicals.data import SequencePacker, plan_packs


def token_rows(count, longest):
    """Documents that no token is shared between, with a random part masked."""
    rows = []
    start = 1000
    for _ in range(count):
        ids = list(range(start, start + random.randint(1, longest)))
        start = ids[-1] + 1
        rows.append({"input_ids": ids, "labels": [random.choice([token, -100]) for token in ids]})
    return rows


@pytest.mark.parametrize("width", [1, 7, 32])
def test_packed_rows_hold_every_document_once_and_apart(width):
    rows = token_rows(40, width)
    packer = SequencePacker(width, padding_token_id=7)
    packed = packer.pack(rows)
    by_first = {row["input_ids"][0]: row for row in rows}
    for row in packed:
        assert set(row) == {"input_ids", "labels", "position_ids", "sequence_ids"}
        assert {len(column) for column in row.values()} == {width}
        ids = row["sequence_ids"]
        at = 0
        number = 0
        while at < width and ids[at] != SequencePacker.PADDING:
            document = by_first.pop(row["input_ids"][at])
            span = slice(at, at + len(document["input_ids"]))
            assert row["input_ids"][span] == document["input_ids"]
            assert row["labels"][span] == [-100, *document["labels"][1:]]
            assert row["position_ids"][span] == list(range(len(document["input_ids"])))
            assert ids[span] == [number] * len(document["input_ids"])
            at = span.stop
            number = number + 1
        tail = width - at
        assert row["input_ids"][at:] == [7] * tail
        assert row["labels"][at:] == [-100] * tail
        assert ids[at:] == [SequencePacker.PADDING] * tail
    assert not by_first
    assert packer.original_tokens == sum(len(row["input_ids"]) for row in rows)
    assert packer.packed_tokens == len(packed) * width
    assert packer.efficiency == packer.original_tokens / packer.packed_tokens
    assert len(packed) == len(plan_packs([len(row["input_ids"]) for row in rows], width))


def test_rows_without_labels_are_trained_but_for_their_first_token():
    (row,) = SequencePacker(8).pack([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    assert row["input_ids"] == [5, 6, 7, 8, 9, 0, 0, 0]
    assert row["labels"] == [-100, 6, 7, -100, 9, -100, -100, -100]
    assert row["sequence_ids"] == [0, 0, 0, 1, 1, -1, -1, -1]


def test_longer_documents_are_cut_counted_and_warned_about(caplog):
    packer = SequencePacker(4)
    (row,) = packer.pack([{"input_ids": [1, 2, 3, 4, 5, 6]}])
    assert row["input_ids"] == [1, 2, 3, 4]
    assert row["labels"] == [-100, 2, 3, 4]
    assert packer.truncated_documents == 1
    assert "1 documents were cut at max_seq_length=4" in caplog.text


def test_counts_describe_the_last_packing_only(caplog):
    packer = SequencePacker(4)
    packer.pack([{"input_ids": [1, 2, 3, 4, 5, 6]}] * 3)
    caplog.clear()
    packer.pack([{"input_ids": [1, 2]}])
    assert (packer.original_tokens, packer.packed_tokens, packer.efficiency) == (2, 4, 0.5)
    assert packer.truncated_documents == 0
    assert not caplog.records


def test_nothing_packed_is_nothing():
    packer = SequencePacker(4)
    assert packer.pack([]) == []
    assert (packer.original_tokens, packer.packed_tokens, packer.efficiency) == (0, 0, 0.0)


@pytest.mark.parametrize("row", [{"input_ids": []}, {"input_ids": [1, 2], "labels": [1]}])
def test_rows_that_cannot_be_packed_are_named(row):
    with pytest.raises(ValueError, match="row 1: "):
        SequencePacker(4).pack([{"input_ids": [1]}, row])


def test_a_width_below_one_is_refused():
    with pytest.raises(ValueError, match="max_seq_length=0"):
        SequencePacker(0)


@pytest.mark.parametrize("causal", [True, False])
def test_the_mask_lets_a_position_see_its_own_document_alone(causal):
    packer = SequencePacker(17)
    packed = packer.pack(token_rows(12, 15))
    ids = [
        *(row["sequence_ids"] for row in packed),
        [0] * 6 + [1] * 3 + [SequencePacker.PADDING] * 8,
    ]
    mask = packer.create_attention_mask(torch.tensor(ids), causal=causal)
    assert mask.dtype == torch.bool
    assert mask.shape == (len(ids), 1, 17, 17)
    for row, allowed in zip(ids, mask[:, 0].tolist()):
        for query in range(17):
            for key in range(17):
                together = row[query] == row[key] != SequencePacker.PADDING and (
                    key <= query or not causal
                )
                assert allowed[query][key] == (together or query == key)
    assert mask.any(-1).all()
    assert torch.equal(mask, packer.create_attention_mask(ids, causal=causal))


def test_the_mask_is_causal_unless_asked_otherwise():
    packer = SequencePacker(5)
    assert torch.equal(
        packer.create_attention_mask([0, 0, 0, 1, -1]),
        packer.create_attention_mask([[0, 0, 0, 1, -1]]),
    )
    assert torch.equal(
        packer.create_attention_mask([0] * 5)[0, 0], torch.ones(5, 5, dtype=torch.bool).tril()
    )
