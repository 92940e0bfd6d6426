"""A plan of packs is a partition, is best-fit decreasing to the document, and leaves Python free while it is made."""

import collections
import random
import threading
import time

import numpy as np
import pytest
import torch

from chronicals.data import SequencePacker, plan_packs

CASES = [  # documents, width, distribution
    (1, 1, "uniform"),
    (1, 64, "uniform"),
    (97, 64, "uniform"),
    (311, 100, "uniform"),
    (311, 63, "short"),
    (311, 65, "long"),
    (211, 4097, "uniform"),
    (211, 8192, "short"),
    (211, 300_000, "uniform"),
    (151, 64, "equal"),
    (151, 1000, "few"),
]


def draw(count, width, distribution):
    low, high = {
        "uniform": (1, width),
        "short": (1, max(width // 10, 1)),
        "long": (max(width // 2, 1), width),
        "equal": (max(width // 3, 1),) * 2,
        "few": (1, width),
    }[distribution]
    lengths = np.random.randint(low, high + 1, count)
    return np.random.choice(lengths[:4], count) if distribution == "few" else lengths


def best_fit_decreasing(lengths, width, limit):
    """Contents of the packs, by looking at every pack for every document."""
    packs = []
    for size in sorted(lengths, reverse=True):
        fits = [pack for pack in packs if sum(pack) + size <= width and len(pack) < limit]
        if not fits:
            fits = [[]]
            packs += fits
        min(fits, key=lambda pack: width - sum(pack)).append(size)
    return packs


@pytest.mark.parametrize("limit", [None, 1, 2, 5])
@pytest.mark.parametrize(("count", "width", "distribution"), CASES)
def test_a_plan_is_a_partition_within_its_bounds(count, width, distribution, limit):
    lengths = draw(count, width, distribution)
    plan = plan_packs(lengths, width, limit)
    assert sorted(plan.documents) == list(range(count))
    assert plan.offsets[0] == 0
    assert plan.offsets[-1] == count
    packs = list(plan)
    assert len(packs) == len(plan) == len(plan.offsets) - 1
    assert np.array_equal(np.concatenate(packs), plan.documents)
    assert all(1 <= len(pack) <= (limit or count) for pack in packs)
    assert all(lengths[pack].sum() <= width for pack in packs)
    assert plan.max_documents == max(map(len, packs))
    assert plan.tokens == lengths.sum()
    assert plan.fill == lengths.sum() / (len(plan) * width)


@pytest.mark.parametrize("limit", [None, 2, 5])
@pytest.mark.parametrize(("count", "width", "distribution"), CASES)
def test_every_document_goes_where_best_fit_decreasing_puts_it(count, width, distribution, limit):
    """Replays the plan longest document first; of packs with equal room any may be taken."""
    lengths = draw(count, width, distribution)
    plan = plan_packs(lengths, width, limit)
    pack_of = {document: number for number, pack in enumerate(plan) for document in pack}
    room, held = {}, collections.Counter()
    for document in sorted(range(count), key=lambda d: (-lengths[d], d)):
        size, pack = lengths[document], pack_of[document]
        fits = [room[p] for p in room if room[p] >= size and held[p] < (limit or count)]
        if fits:
            assert room.get(pack) == min(fits), f"document {document} of {size} tokens is not in the fullest pack"
        else:
            assert pack not in room
        room[pack] = room.get(pack, width) - size
        held[pack] += 1


@pytest.mark.parametrize(("count", "width", "distribution"), CASES)
def test_packs_are_filled_as_by_the_plain_algorithm(count, width, distribution):
    lengths = draw(count, width, distribution)
    plan = plan_packs(lengths, width)
    plain = best_fit_decreasing(lengths.tolist(), width, count)
    assert len(plan) == len(plain)
    assert sorted(int(lengths[pack].sum()) for pack in plan) == sorted(map(sum, plain))


def test_a_plan_is_a_function_of_the_lengths():
    lengths = draw(500, 256, "uniform")
    first, second = plan_packs(lengths, 256), plan_packs(lengths.tolist(), 256)
    assert np.array_equal(first.documents, second.documents)
    assert np.array_equal(first.offsets, second.offsets)


def test_a_usual_mix_of_lengths_fills_the_packs():
    lengths = np.clip(np.random.lognormal(np.log(400), 0.8, 20_000), 1, 2048).astype(np.int64)
    assert plan_packs(lengths, 2048).fill >= 0.99


def test_no_documents_make_no_packs():
    plan = plan_packs([], 64)
    assert (len(plan), plan.tokens, plan.max_documents, plan.fill, list(plan)) == (0, 0, 0, 0.0, [])


@pytest.mark.parametrize("wrong", [0, -1, 65])
def test_a_length_out_of_range_is_named(wrong):
    lengths = [5] * 20
    place = random.randrange(20)
    lengths[place] = wrong
    with pytest.raises(ValueError, match=rf"lengths\[{place}\]={wrong}: must be between 1 and max_seq_length=64"):
        plan_packs(lengths, 64)


def test_a_pack_must_hold_a_document():
    with pytest.raises(ValueError, match="max_documents=0"):
        plan_packs([1], 64, max_documents=0)


def test_other_threads_run_while_a_plan_is_made():
    lengths = np.random.randint(1, 2048, 4_000_000)
    plan_packs(lengths[:10], 2048)  # compiled
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(5):  # a busy machine may starve the thread once
            start = time.perf_counter()
            plan_packs(lengths, 2048)
            took = time.perf_counter() - start
            within = sum(start + 0.3 * took < at < start + 0.7 * took for at in ticks)
            if within >= 5:
                break
    finally:
        done.set()
        thread.join()
    assert within >= 5, f"a thread ran {within} times in the middle of {took:.3f} s"


# --- SequencePacker --------------------------------------------------------------------------------------------------


def token_rows(count, longest):
    """Documents that no token is shared between, with a random part masked."""
    rows, start = [], 1000
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
        ids, at, number = row["sequence_ids"], 0, 0
        while at < width and ids[at] != SequencePacker.PADDING:
            document = by_first.pop(row["input_ids"][at])
            span = slice(at, at + len(document["input_ids"]))
            assert row["input_ids"][span] == document["input_ids"]
            assert row["labels"][span] == [-100, *document["labels"][1:]]
            assert row["position_ids"][span] == list(range(len(document["input_ids"])))
            assert ids[span] == [number] * len(document["input_ids"])
            at, number = span.stop, number + 1
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
    ids = [*(row["sequence_ids"] for row in packed), [0] * 6 + [1] * 3 + [SequencePacker.PADDING] * 8]
    mask = packer.create_attention_mask(torch.tensor(ids), causal=causal)
    assert mask.dtype == torch.bool
    assert mask.shape == (len(ids), 1, 17, 17)
    for row, allowed in zip(ids, mask[:, 0].tolist()):
        for query in range(17):
            for key in range(17):
                together = row[query] == row[key] != SequencePacker.PADDING and (key <= query or not causal)
                assert allowed[query][key] == (together or query == key)
    assert mask.any(-1).all()
    assert torch.equal(mask, packer.create_attention_mask(ids, causal=causal))


def test_the_mask_is_causal_unless_asked_otherwise():
    packer = SequencePacker(5)
    assert torch.equal(packer.create_attention_mask([0, 0, 0, 1, -1]), packer.create_attention_mask([[0, 0, 0, 1, -1]]))
    assert torch.equal(packer.create_attention_mask([0] * 5)[0, 0], torch.ones(5, 5, dtype=torch.bool).tril())
