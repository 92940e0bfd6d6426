"""Assembly writes, bit for bit, what a loop in plain Python over the documents writes."""

import random

import numpy as np
import pytest

import tiny
from chronicals.batch import IGNORED
from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, DataError, Tokenizer, TokenStore, build_store
from chronicals.data.making import store as stores
from chronicals.data.packs.assembly import ENTRY_SHARES, WIDTH_BUCKETS
from chronicals.data.reading import records

FILLER = 77


def reference(store, packs, width, most_documents):
    """Ids, targets, positions, bounds, ``max_seqlen`` and trained positions of packs, documents
    read one by one.
    """
    longest = max((len(store.document(n)[0]) for pack in packs for n in pack), default=1)
    bucket = min(
        bound for bound in (-(-width // share) for share in (8, 4, 2, 1)) if bound >= longest
    )
    ids = []
    targets = []
    positions = []
    bounds = [0]
    for number, pack in enumerate(packs):
        for document in pack:
            tokens, trained = (column.tolist() for column in store.document(document))
            ids += tokens
            targets += [
                token if kept else IGNORED for token, kept in zip(tokens[1:], trained[1:])
            ] + [IGNORED]
            positions += range(len(tokens))
            bounds.append(len(ids))
        while len(ids) < (number + 1) * width:
            length = min(bucket, -(-width // WIDTH_BUCKETS), (number + 1) * width - len(ids))
            ids += [FILLER] * length
            targets += [IGNORED] * length
            positions += range(length)
            bounds.append(len(ids))
    share = -(-len(packs) * (most_documents + WIDTH_BUCKETS) // ENTRY_SHARES)
    if len(bounds) > 2:  # one document that is all of a micro-batch has no more bounds
        bounds += [len(ids)] * (-(len(bounds) - 1) % share)
    return ids, targets, positions, bounds, bucket, sum(target != IGNORED for target in targets)


def written(batch):
    tensors = (batch.input_ids, batch.targets, batch.position_ids, batch.cu_seqlens)
    return *(tensor.tolist() for tensor in tensors), batch.max_seqlen, batch.trained


def make_store(folder, count, longest):
    rows = []
    for _ in range(count):
        ids = [random.randrange(2**31) for _ in range(random.randint(2, longest))]
        labels = [token if random.random() < 0.5 else IGNORED for token in ids]
        labels[-1] = ids[-1]
        rows.append({"input_ids": ids, "labels": labels})
    return build_store(rows, Tokenizer(tiny.tokenizer()), longest, folder)


def check(store, **settings):
    config = ChronicalsConfig(seed=random.randrange(1000), **settings)
    stream = BatchStream(store, config, FILLER, epochs=2)
    count = 0
    for step in stream.steps(count=stream.left(None) + 1):
        packs = stream.packs_of(step.began)
        held = {pack[0]: pack for pack in packs if len(pack)}
        for batch in step.batches:
            starts = batch.input_ids.view(-1, stream.width)[:, :2].tolist()
            mine = [
                next((p for n, p in held.items() if store.document(n)[0][:2].tolist() == ids), [])
                for ids in starts
            ]
            assert written(batch) == reference(store, mine, stream.width, stream.plan.max_documents)
            count += sum(map(len, mine))
    assert count == 2 * len(store)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["best-fit", "in-order"])
@pytest.mark.parametrize(
    ("count", "longest", "width"),
    [(1, 2, 2), (23, 3, 3), (61, 12, 13), (97, 64, 64), (50, 30, 101), (40, 9, 257)],
)
def test_batches_are_those_of_the_plain_loop(tmp_path, count, longest, width, strategy):
    store = make_store(tmp_path, count, longest)
    check(
        store,
        max_seq_length=width,
        batch_size=3,
        gradient_accumulation_steps=2,
        packing_strategy=strategy,
    )


@pytest.mark.parametrize("rows_a_batch", [1, 7, 64])
def test_batches_of_the_file_and_parts_of_a_store_make_no_difference(
    tmp_path, set_constants, rows_a_batch
):
    set_constants(records, CHUNK_ROWS=rows_a_batch)
    store = make_store(tmp_path, 64, 20)
    settings = {"max_seq_length": 40, "batch_size": 2, "gradient_accumulation_steps": 1}
    check(store, **settings)
    part, rest = store.split(0.4, seed=3)
    check(part, **settings)
    check(rest.subset(np.array([5, 0, 11])), **settings)


def test_one_document_a_pack_leaves_long_tails(tmp_path):
    check(make_store(tmp_path, 30, 20), max_seq_length=64, batch_size=4, use_sequence_packing=False)


@pytest.mark.parametrize("length", [513, 600, 900, 1000])
def test_filler_costs_attention_little_beside_the_document_before_it(tmp_path, length):
    """Work of attention is a document's length squared: a tail as long as the document would
    double it."""
    rows = [{"input_ids": list(range(1, length + 1))}]
    store = build_store(rows, Tokenizer(tiny.tokenizer()), 1024, tmp_path)
    config = ChronicalsConfig(max_seq_length=1024, batch_size=1, gradient_accumulation_steps=1)
    (batch,) = BatchStream(store, config, FILLER, epochs=1)
    lengths = batch.cu_seqlens.diff().tolist()
    assert lengths[0] == length and sum(lengths) == 1024
    assert sum(x * x for x in lengths[1:]) <= 0.25 * length * length


def test_one_document_that_is_a_whole_batch_has_its_own_bounds_alone(tmp_path):
    """By which attention knows it."""
    store = build_store([{"input_ids": list(range(64))}], Tokenizer(tiny.tokenizer()), 64, tmp_path)
    config = ChronicalsConfig(max_seq_length=64, batch_size=1, gradient_accumulation_steps=1)
    (batch,) = BatchStream(store, config, FILLER, epochs=1)
    assert batch.cu_seqlens.tolist() == [0, 64]


def test_a_trained_token_may_have_any_id(tmp_path):
    """Counts go by the mask: 0 is a token like others."""
    store = build_store([{"input_ids": [0, 0, 0, 0]}], Tokenizer(tiny.tokenizer()), 8, tmp_path)
    (batch,) = BatchStream(
        store,
        ChronicalsConfig(max_seq_length=8, batch_size=1, gradient_accumulation_steps=1),
        FILLER,
    )
    assert batch.targets.tolist() == [0, 0, 0, *[IGNORED] * 5]
    assert batch.trained == 3


@pytest.mark.parametrize("field", ["id_starts", "trained_starts", "lengths"])
@pytest.mark.parametrize("value", [-1, 2**40])
def test_a_document_outside_the_file_is_named_and_not_read(tmp_path, field, value):
    store = make_store(tmp_path, 20, 10)
    stream = BatchStream(store, ChronicalsConfig(max_seq_length=32, batch_size=2), FILLER, epochs=1)
    lost = random.randrange(20)
    getattr(store, field)[lost] = value
    with pytest.raises(DataError, match=f"document {lost} is not where the store says it is"):
        list(stream)


def test_a_file_that_is_shorter_than_it_says_is_refused(tmp_path, plant):
    store = make_store(tmp_path, 20, 10)
    plant(stores, "_documents_in", lambda find, *given: np.add(find(*given), [[10**6], [0], [0]]))
    with pytest.raises(DataError, match="its tokens do not lie in the file"):
        TokenStore.open(store.path)
