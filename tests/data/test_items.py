"""An item's documents share a pack and a side of a split; Batches carry its columns, and its
counts come from the plan.
"""

import random

import numpy as np
import pytest
import torch

import tiny
from chronicals.batch import IGNORED
from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, Tokenizer, build_store, plan_packs

FILLER = 1_000_000


def make_store(folder, items, longest=20):
    """A document n begins with token n; ``items`` documents an item, by turns."""
    sizes = []
    while sum(sizes) < 60:
        sizes.append(items[len(sizes) % len(items)])
    count = sum(sizes)
    rows = [
        {
            "input_ids": [
                n,
                *(random.randrange(500, FILLER) for _ in range(random.randint(1, longest - 1))),
            ]
        }
        for n in range(count)
    ]
    store = build_store(rows, Tokenizer(tiny.tokenizer()), longest, folder)
    return store.with_column("side", np.concatenate([np.arange(size) for size in sizes])), sizes


def config(width=64, batch=2, accumulation=2, **changes):
    return ChronicalsConfig(
        max_seq_length=width,
        batch_size=batch,
        gradient_accumulation_steps=accumulation,
        seed=3,
        **changes,
    )


def item_of(sizes):
    return np.repeat(np.arange(len(sizes)), sizes)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["best-fit", "first-fit", "in-order"])
@pytest.mark.parametrize("items", [(2,), (4,), (1, 3, 2)])
@pytest.mark.parametrize("limit", [None, 5])
def test_an_item_never_splits_over_packs(tmp_path, strategy, items, limit):
    store, sizes = make_store(tmp_path, items)
    plan = plan_packs(store.lengths, 80, limit, strategy, store.items)
    assert sorted(plan.documents) == list(range(len(store)))
    of = item_of(sizes)
    for pack in plan:
        assert store.lengths[pack].sum() <= 80 and (limit is None or len(pack) <= limit)
        for item in set(of[pack].tolist()):
            assert np.flatnonzero(of == item).tolist() == [
                n for n in pack.tolist() if of[n] == item
            ], "whole, and in order"


def test_items_that_no_pack_holds_are_refused():
    lengths = [5, 6, 5, 5]
    items = np.array([0, 2, 4])
    with pytest.raises(ValueError, match="item 0 has 11 tokens: must be at most max_seq_length=10"):
        plan_packs(lengths, 10, items=items)
    with pytest.raises(ValueError, match="max_documents=1: an item has 2 documents"):
        plan_packs(lengths, 20, 1, items=items)


def test_without_packing_a_pack_holds_one_item(tmp_path):
    store, _ = make_store(tmp_path, (2,))
    stream = BatchStream(store, config(use_sequence_packing=False), FILLER)
    assert sorted(pack.tolist() for pack in stream.plan) == [
        [n, n + 1] for n in range(0, len(store), 2)
    ]


def test_items_of_one_document_are_planned_as_documents_are(tmp_path):
    store, _ = make_store(tmp_path, (1,))
    plain = plan_packs(store.lengths, 64, 3)
    items = plan_packs(store.lengths, 64, 3, items=store.items)
    assert (
        plain.documents.tolist() == items.documents.tolist()
        and plain.offsets.tolist() == items.offsets.tolist()
    )


@pytest.mark.parametrize("items", [(2,), (1, 3)])
def test_batches_carry_columns_of_their_documents(tmp_path, items):
    store, sizes = make_store(tmp_path, items)
    store = store.with_column("reference", np.arange(len(store), dtype=np.float32))
    seen = []
    for step in BatchStream(store, config(), FILLER, epochs=1).steps(count=6):
        for batch in step.batches:
            assert batch.weights is None and batch.segments.keys() == {"side", "group", "reference"}
            starts = batch.cu_seqlens[:-1]
            lengths = batch.cu_seqlens.diff()
            assert {tensor.shape for tensor in batch.segments.values()} == {starts.shape}
            assert batch.segments["reference"].dtype == torch.float32
            first = torch.where(
                lengths > 0, batch.input_ids[starts.clamp(max=len(batch) - 1)], FILLER
            )
            there = first != FILLER
            for name in ("side", "group", "reference"):
                assert (batch.segments[name][~there] == -1).all()
            assert (
                batch.segments["side"][there].tolist()
                == store.columns["side"][first[there]].tolist()
            )
            assert batch.segments["reference"][there].tolist() == first[there].tolist()
            groups = item_of(sizes)[first[there]]
            _, expected = np.unique(groups, return_inverse=True)
            found = batch.segments["group"][there].numpy()
            assert sorted(set(found)) == list(range(len(set(groups))))
            assert len(set(zip(found, expected))) == len(set(groups)), "one number an item"
            seen += first[there].tolist()
    assert sorted(seen) == list(range(len(store)))


@pytest.mark.slow
def test_weights_of_documents_are_those_of_their_targets_and_are_counted(tmp_path):
    store, sizes = make_store(tmp_path, (2,))
    weight = np.random.default_rng(0).random(len(store)).astype(np.float32)
    (rank, other) = (
        BatchStream(
            store.with_column("weight", weight), config(), FILLER, epochs=1, rank=n, ranks=2
        )
        for n in range(2)
    )
    items = 0
    for one, two in zip(rank.steps(count=4), other.steps(count=4)):
        assert one.counts == two.counts
        batches = [*one.batches, *two.batches]
        total = sum(float(b.weights[b.targets != IGNORED].double().sum()) for b in batches)
        assert one.counts["weight"] == pytest.approx(total)
        for batch in batches:
            starts = batch.cu_seqlens[:-1]
            lengths = batch.cu_seqlens.diff()
            first = batch.input_ids[starts[lengths > 0]]
            of_documents = torch.from_numpy(np.append(weight, -1.0)).float()[
                torch.where(first == FILLER, len(weight), first)
            ]
            assert torch.equal(
                batch.weights, torch.repeat_interleave(of_documents, lengths[lengths > 0])
            )
        items += one.counts["items"]
    assert items == len(sizes)


def test_a_split_leaves_items_whole(tmp_path):
    store, sizes = make_store(tmp_path, (2, 3))
    parts = store.split(0.3, seed=1)
    of = item_of(sizes)
    found = [{of[part.document(n)[0][0]] for n in range(len(part))} for part in parts]
    assert not found[0] & found[1] and found[0] | found[1] == set(range(len(sizes)))
    for part in parts:
        assert np.diff(part.items).sum() == len(part)
        assert [sizes[of[part.document(first)[0][0]]] for first in part.items[:-1]] == np.diff(
            part.items
        ).tolist()


def test_a_column_has_a_value_for_each_document(tmp_path):
    store, _ = make_store(tmp_path, (2,))
    with pytest.raises(ValueError, match="reference: 3 values for 60 documents"):
        store.with_column("reference", np.zeros(3))
