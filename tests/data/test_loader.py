"""Batches hold every document as it was stored, once an epoch, in an order that only seed and
position decide.
"""

import dataclasses
import functools
import itertools
import json
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import chronicals
import tiny
from chronicals.batch import IGNORED, Batch
from chronicals.config import ChronicalsConfig
from chronicals.data import (
    BatchStream,
    DataError,
    Tokenizer,
    build_store,
    create_dataloader,
    plan_packs,
)
from chronicals.data.packs import loader as loader_module
from chronicals.data.packs import step_memory
from chronicals.data.packs.assembly import ENTRY_SHARES, WIDTH_BUCKETS
from chronicals.data.packs.loader import prefetch
from chronicals.data.packs.packing import plan_epoch

FILLER = 1_000_000
"""The padding token; no document holds it."""

SHARINGS = [(1, 8, 1), (2, 4, 1), (8, 1, 1), (2, 2, 2), (1, 2, 4), (4, 1, 2)]
"""Batch size, accumulation and ranks with one product."""


def config(width=64, batch=2, accumulation=2, **changes):
    return ChronicalsConfig(
        max_seq_length=width,
        batch_size=batch,
        gradient_accumulation_steps=accumulation,
        seed=11,
        **changes,
    )


@pytest.fixture
def make_store(tmp_path):
    """Documents n that begin with token n, with random lengths and a random part trained."""

    def make(count=60, longest=40):
        """With a list of lengths, each document takes one of them."""
        rows = []
        for n in range(count):
            length = (
                random.choice(longest) if isinstance(longest, list) else random.randint(2, longest)
            )
            ids = [n, *(random.randrange(FILLER) for _ in range(length - 1))]
            labels = [token if random.random() < 0.6 else IGNORED for token in ids]
            labels[random.randrange(1, len(ids))] = IGNORED
            place = random.randrange(1, len(ids))
            labels[place] = ids[place]
            rows.append({"input_ids": ids, "labels": labels})
        return build_store(
            rows,
            Tokenizer(tiny.tokenizer()),
            max(longest) if isinstance(longest, list) else longest,
            tmp_path,
        )

    return make


def streams(store, settings, ranks=1, **options):
    return [
        BatchStream(store, settings, FILLER, rank=rank, ranks=ranks, **options)
        for rank in range(ranks)
    ]


def pieces(batch):
    """What lies between the bounds, filler included: ids, targets, positions."""
    bounds = batch.cu_seqlens.tolist()
    columns = (batch.input_ids.tolist(), batch.targets.tolist(), batch.position_ids.tolist())
    return [
        tuple(column[a:b] for column in columns) for a, b in itertools.pairwise(bounds) if b > a
    ]


def documents(batch):
    """Numbers of the documents of a batch, in order."""
    return [ids[0] for ids, _, _ in pieces(batch) if ids[0] != FILLER]


def of_step(steps):
    """Numbers of the documents of a step, given each rank's share."""
    return [n for step in steps for batch in step.batches for n in documents(batch)]


def same(left, right):
    fields = ("input_ids", "targets", "position_ids", "cu_seqlens")
    return left.max_seqlen == right.max_seqlen and all(
        torch.equal(getattr(left, f), getattr(right, f)) for f in fields
    )


def same_steps(left, right):
    return len(left) == len(right) and all(
        (a.counts, a.state, len(a.batches)) == (b.counts, b.state, len(b.batches))
        and all(same(x, y) for x, y in zip(a.batches, b.batches))
        for a, b in zip(left, right)
    )


# --- one Batch
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_documents", [None, 3])
@pytest.mark.parametrize(("width", "longest"), [(3, 3), (13, 12), (64, 40), (97, 20), (250, 10)])
def test_every_piece_of_a_batch_is_a_document_or_filler(make_store, width, longest, max_documents):
    store = make_store(60, longest)
    stream = BatchStream(
        store, config(width, batch=3, max_documents=max_documents), FILLER, epochs=2
    )
    for batch in stream:
        assert batch.cu_seqlens.dtype == torch.int32
        assert {t.dtype for t in (batch.input_ids, batch.targets, batch.position_ids)} == {
            torch.int64
        }
        assert batch.trained == (batch.targets != IGNORED).sum()
        bounds = batch.cu_seqlens
        assert bounds[0] == 0
        assert bounds[-1] == len(batch) == 3 * width
        assert (bounds.diff() >= 0).all()
        assert 1 <= bounds.diff().max() <= batch.max_seqlen <= width
        held = [0, 0, 0]
        at = 0
        for ids, targets, positions in pieces(batch):
            assert positions == list(range(len(ids)))
            assert at // width == (at + len(ids) - 1) // width, (
                "a piece crosses from one pack into the next"
            )
            if ids[0] == FILLER:
                assert set(ids) == {FILLER}
                assert set(targets) == {IGNORED}
            else:
                tokens, trained = store.document(ids[0])
                assert ids == tokens.tolist()
                shifted = [token if kept else IGNORED for token, kept in zip(ids[1:], trained[1:])]
                assert targets == [*shifted, IGNORED]
                held[at // width] += 1
            at += len(ids)
        assert at == 3 * width
        assert max_documents is None or max(held) <= max_documents


@pytest.mark.parametrize(("width", "longest"), [(3, 3), (13, 12), (64, 40), (97, 20)])
def test_shapes_never_change_but_for_a_few_numbers_of_entries(make_store, width, longest):
    store = make_store(45, longest)
    stream = BatchStream(store, config(width), FILLER, epochs=3)
    batches = [
        batch for step in stream.steps(count=stream.left(None) + 2) for batch in step.batches
    ]
    names = ("input_ids", "targets", "position_ids")
    assert len({tuple(getattr(batch, name).shape for name in names) for batch in batches}) == 1
    share = -(-2 * (stream.plan.max_documents + WIDTH_BUCKETS) // ENTRY_SHARES)
    for batch in batches:
        entries = len(batch.cu_seqlens) - 1
        assert entries % share == 0 and entries <= ENTRY_SHARES * share
        assert int((batch.cu_seqlens.diff() > 0).sum()) > entries - share, (
            "no more than a share is unused"
        )
    assert {batch.max_seqlen for batch in batches} <= {-(-width // share) for share in (8, 4, 2, 1)}
    assert not any(documents(batch) for batch in batches[-4:]), (
        "packs past the end are part of this"
    )
    assert all(batch.weights is None and not batch.segments for batch in batches)


def test_the_bound_on_lengths_is_the_smallest_that_holds(make_store):
    store = make_store(60, 33)
    for batch in BatchStream(store, config(64, batch=1), FILLER, epochs=1):
        longest = max((len(store.document(n)[0]) for n in documents(batch)), default=1)
        assert batch.max_seqlen == min(bound for bound in (8, 16, 32, 64) if bound >= longest)


@pytest.mark.slow
def test_packs_are_planned_by_the_strategy_of_the_configuration(make_store):
    store = make_store(60, 40)
    for strategy in ("best-fit", "first-fit", "in-order"):
        (stream,) = streams(store, config(64, packing_strategy=strategy), epochs=1, shuffle=False)
        planned = plan_packs(store.lengths, 64, strategy=strategy)
        assert [pack.tolist() for pack in stream.plan] == [pack.tolist() for pack in planned]
    assert [n for pack in stream.plan for n in pack] == list(range(60))


def test_without_packing_a_pack_holds_one_document(make_store):
    store = make_store(30, 20)
    settings = config(64, batch=3, accumulation=1, use_sequence_packing=False)
    stream = BatchStream(store, settings, FILLER, epochs=1)
    assert len(stream) == 10
    seen = []
    for batch in stream:
        starts = [bound for bound in batch.cu_seqlens.tolist() if bound < len(batch)]
        at = [start for start in starts if batch.input_ids[start] != FILLER]
        assert at == [0, 64, 128]
        seen += documents(batch)
    assert sorted(seen) == list(range(30))


@pytest.mark.gpu
def test_pinned_batches_are_pinned_and_the_same(make_store):
    store = make_store()
    plain, pinned = (
        list(BatchStream(store, config(), FILLER, epochs=1, pin=pin)) for pin in (False, True)
    )
    assert all(same(a, b) for a, b in zip(plain, pinned))
    assert all(batch.input_ids.is_pinned() and batch.cu_seqlens.is_pinned() for batch in pinned)


def test_batches_in_memory_of_torch_are_the_same(make_store, plant):
    """What pinned memory is: without a card there is none, so it is asked for without the pin."""
    asked = []

    def pageable(allocate, *sizes, pin_memory=False, **options):
        asked.append(pin_memory)
        return allocate(*sizes, **options)

    plant(step_memory.torch, "empty", pageable)
    store = make_store()
    plain, pinned = (
        list(BatchStream(store, config(), FILLER, epochs=1, pin=pin)) for pin in (False, True)
    )
    assert any(asked)
    assert all(same(a, b) for a, b in zip(plain, pinned, strict=True))


# --- steps
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "accumulation", "ranks"), SHARINGS)
def test_counts_are_of_the_whole_step(make_store, batch, accumulation, ranks):
    store = make_store(70, 30)
    everyone = streams(store, config(40, batch, accumulation), ranks, epochs=2)
    total = 0
    for shares in zip(
        *(stream.steps(count=everyone[0].left(None) + 1) for stream in everyone), strict=True
    ):
        batches = [b for step in shares for b in step.batches]
        assert [len(step.batches) for step in shares] == [accumulation] * ranks
        counts = dict(
            targets=sum(int((b.targets != IGNORED).sum()) for b in batches),
            tokens=sum(int((b.input_ids != FILLER).sum()) for b in batches),
            documents=sum(len(documents(b)) for b in batches),
            items=sum(len(documents(b)) for b in batches),
            first_targets=sum(int((b.targets != IGNORED).sum()) for b in batches),
            slots=sum(len(b) for b in batches),
            packs=sum(int((b.input_ids.view(-1, 40) != FILLER).any(1).sum()) for b in batches),
        )
        assert [step.counts for step in shares] == [counts] * ranks
        total += counts["targets"]
    assert total == 2 * store.targets.sum()


def test_a_step_holds_the_same_documents_however_it_is_shared(make_store):
    store = make_store(150, 30)
    found = []
    for batch, accumulation, ranks in SHARINGS:
        everyone = streams(store, config(40, batch, accumulation), ranks, epochs=2)
        assert {stream.packs_a_step for stream in everyone} == {8}
        steps = list(
            zip(*(stream.steps(count=stream.left(None)) for stream in everyone), strict=True)
        )
        found.append(
            [(sorted(of_step(shares)), shares[0].counts, shares[0].state) for shares in steps]
        )
    assert all(other == found[0] for other in found[1:])
    assert len(found[0]) > 4
    assert len({str(documents) for documents, _, _ in found[0]}) == len(found[0])


def test_one_micro_batch_holds_a_step_as_it_comes(make_store):
    store = make_store(100, 30)
    (stream,) = streams(store, config(40, 8, 1))
    for number, step in enumerate(stream.steps(count=4)):
        assert of_step([step]) == [n for pack in stream.packs_of(number * 8) for n in pack]


def costs(store, shares):
    """Σ length² of every micro-batch of a step, ``[accumulation][ranks]``, given each rank's
    share.
    """
    return [
        [int((store.lengths[documents(b)] ** 2).sum()) for b in batches]
        for batches in zip(*(s.batches for s in shares))
    ]


def in_turn(_, costs, accumulation, ranks, batch_size):
    """Packs as they come, not balanced by cost."""
    return np.arange(costs.size).reshape(accumulation, ranks, batch_size)


@pytest.mark.parametrize(("batch", "accumulation", "ranks"), [(4, 8, 1), (4, 2, 4), (8, 1, 4)])
def test_attention_costs_micro_batches_and_ranks_alike(
    make_store, plant, batch, accumulation, ranks
):
    """Lengths from 2 to 256 with a long tail: of 32 packs a step some cost many times what
    others do.
    """
    store = make_store(
        2000, np.random.lognormal(np.log(40), 0.9, 500).clip(2, 256).astype(int).tolist()
    )

    def found():
        everyone = streams(store, config(256, batch, accumulation), ranks)
        totals = []
        for shares in zip(*(stream.steps(count=6) for stream in everyone), strict=True):
            cost = np.array(costs(store, shares))
            totals.append(
                (
                    sorted(of_step(shares)),
                    cost.max() / cost.mean() - 1,
                    np.ptp(cost, axis=1).max() / cost.mean(),
                )
            )
        return zip(*totals)

    held, imbalance, spread = found()
    plant(loader_module, "balanced_packs", in_turn)
    held_in_turn, plain_imbalance, plain_spread = found()
    assert held == held_in_turn, "the documents of a step do not depend on how they are balanced"
    assert np.mean(imbalance) <= 0.3 * np.mean(plain_imbalance)
    assert np.mean(spread) <= 0.3 * np.mean(plain_spread)


@pytest.mark.parametrize(("batch", "accumulation", "ranks"), SHARINGS)
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_document_comes_once_an_epoch(make_store, batch, accumulation, ranks, epochs):
    store = make_store(90, 30)
    everyone = streams(store, config(40, batch, accumulation), ranks, epochs=epochs)
    steps = list(zip(*(stream.steps(count=stream.left(None)) for stream in everyone), strict=True))
    seen = [n for shares in steps for n in of_step(shares)]
    assert sorted(seen) == sorted(list(range(90)) * epochs)
    assert of_step(steps[-1]), "the last step is not for nothing"


def test_epochs_are_whole_one_after_another_and_differ_in_order(make_store):
    store = make_store(90, 30)
    (stream,) = streams(store, config(40, 1, 1), epochs=4)
    packs = [tuple(documents(batch)) for batch in stream]
    length = len(stream.plan)
    epochs = [packs[start : start + length] for start in range(0, 4 * length, length)]
    assert all(sorted(n for pack in epoch for n in pack) == list(range(90)) for epoch in epochs)
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_past_the_last_epoch_packs_are_empty_and_count_nothing(make_store):
    store = make_store(30, 30)
    (stream,) = streams(store, config(40, 2, 3), epochs=2)
    packs = 2 * len(stream.plan)
    last = stream.left(None)
    steps = list(stream.steps(count=last + 3))
    assert (last - 1) * 6 < packs <= last * 6
    assert sum(step.counts["documents"] for step in steps[:last]) == 60
    for step in steps[last:]:
        assert step.counts == dict(
            targets=0, tokens=0, documents=0, items=0, first_targets=0, slots=240, packs=0
        )
        for batch in step.batches:
            assert (batch.input_ids == FILLER).all()
            assert (batch.targets == IGNORED).all()
            assert batch.cu_seqlens[-1] == 80
    assert [step.began for step in steps] == [6 * n for n in range(last + 3)]
    assert [step.state for step in steps] == [min(6 * (n + 1), packs) for n in range(last + 3)]


def test_an_endless_stream_goes_on(make_store):
    store = make_store(20, 30)
    (stream,) = streams(store, config(40, 1, 1))
    assert stream.left(None) is None
    assert len(stream) == stream.steps_an_epoch == len(stream.plan)
    steps = list(stream.steps(count=5 * len(stream.plan)))
    assert sorted(of_step(steps)) == sorted(list(range(20)) * 5)
    assert stream.epoch(steps[-1].state) == 5


# --- determinism
# -----------------------------------------------------------------------------------------------------


def test_steps_from_a_position_are_the_tail_of_all_steps(make_store):
    store = make_store(60, 30)
    (stream,) = streams(store, config(40, 2, 2), epochs=3)
    steps = list(stream.steps(count=stream.left(None) + 1))
    for done in (0, 1, stream.steps_an_epoch, len(steps) - 1):
        position = steps[done - 1].state if done else 0
        (fresh,) = streams(store, config(40, 2, 2), epochs=3)
        assert same_steps(list(fresh.steps(position, len(steps) - done)), steps[done:])
        assert same_steps(list(stream.steps(position, len(steps) - done)), steps[done:])


def test_a_stream_may_be_read_again_and_twice_at_once(make_store):
    (stream,) = streams(make_store(40, 30), config(40), epochs=2)
    first = list(stream)
    second = list(stream)
    together = list(zip(stream, stream, strict=True))
    assert all(
        same(a, b) and same(a, x) and same(a, y)
        for a, b, (x, y) in zip(first, second, together, strict=True)
    )


def test_the_order_is_a_function_of_the_seed(make_store):
    store = make_store(60, 30)
    orders = []
    for seed in (1, 2, 1):
        (stream,) = streams(store, config(40).replace(seed=seed), epochs=1)
        orders.append([documents(batch) for batch in stream])
    assert orders[0] == orders[2] != orders[1]
    assert sorted(n for batch in orders[0] for n in batch) == sorted(
        n for batch in orders[1] for n in batch
    )


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        (
            {
                "batch_size": 2,
                "gradient_accumulation_steps": 3,
                "num_epochs": 7,
                "learning_rate": 1.0,
            },
            True,
        ),
        ({"seed": 2}, False),
        ({"packing_strategy": "in-order"}, False),
        ({"max_documents": 1}, False),
        ({"use_sequence_packing": False}, False),
    ],
)
def test_the_fingerprint_is_of_the_order(make_store, changes, same):
    store = make_store(60, 30)
    settings = config(90)
    (stream,) = streams(store, settings)
    changed = streams(store, settings.replace(**changes), ranks=2)[1]
    assert (changed.fingerprint == stream.fingerprint) is same


def test_the_fingerprint_is_of_the_documents(make_store):
    """Two parts of one store, of as many documents of the same lengths."""
    store = make_store(60, 30)
    store.lengths[:] = 1
    parts = [store.subset(np.arange(first, first + 20)) for first in (0, 20, 0)]
    prints = [streams(part, config(90))[0].fingerprint for part in parts]
    assert prints[0] == prints[2] != prints[1]


def test_without_shuffling_packs_come_as_planned_in_every_epoch(make_store):
    store = make_store(60, 30)
    (stream,) = streams(store, config(40, 1, 1), epochs=2, shuffle=False)
    assert [documents(batch) for batch in stream] == [pack.tolist() for pack in stream.plan] * 2


def test_a_part_of_a_store_gives_its_documents_alone(make_store):
    store = make_store(60, 30)
    train, validation = store.split(0.3, seed=5)
    found = [
        {n for batch in streams(part, config(40), epochs=1)[0] for n in documents(batch)}
        for part in (train, validation)
    ]
    assert [len(part) for part in found] == [42, 18]
    assert found[0] | found[1] == set(range(60))


# --- the background thread
# -------------------------------------------------------------------------------------------


def builders():
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_an_unreadable_document_raises_in_the_consumer_after_the_steps_before_it(make_store):
    store = make_store(60, 30)
    (whole,) = streams(store, config(40, 1, 1), epochs=1)
    good = list(whole.steps(count=10))
    lost = documents(good[-1].batches[0])[0]
    starts = store.id_starts.copy()
    starts[lost] = len(store.ids) - 1
    (stream,) = streams(dataclasses.replace(store, id_starts=starts), config(40, 1, 1), epochs=1)
    got = []
    with pytest.raises(
        DataError, match=rf"{store.path.name}: document {lost} is not where the store says"
    ):
        for step in stream.steps(count=20):
            got.append(step)
    assert same_steps(got, good[:9])
    assert not builders()


def test_an_error_of_the_thread_reaches_the_consumer(make_store, let_raise):
    let_raise(step_memory, assemble=OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(BatchStream(make_store(), config(), FILLER, epochs=1)))
    assert not builders()


def test_steps_are_assembled_while_python_does_not_let_go(make_store, record_calls):
    """The thread that runs Python keeps the GIL: who needed it for every step would come to none
    of those behind.
    """
    calls = record_calls(step_memory, "assemble")
    (stream,) = streams(make_store(), config())
    steps = stream.steps()
    next(steps)
    until = time.perf_counter() + 10
    while sum(len(columns) for columns, *_ in calls) < 64 and time.perf_counter() < until:
        pass
    steps.close()
    assert [len(columns) for columns, *_ in calls[:4]] == [16] * 4, (
        "a call assembles many steps, so that the GIL is needed for few"
    )


def test_what_was_handed_out_is_never_written_again(make_store, set_constants):
    set_constants(loader_module, PREFETCHED_STEPS=(2, 2))
    (stream,) = streams(make_store(), config())
    kept = []
    for step in stream.steps(count=50):
        kept += [(batch, batch.to("cpu")._map(torch.clone)) for batch in step.batches]
    assert all(same(batch, copy) for batch, copy in kept)
    assert len({batch.input_ids.data_ptr() for batch, _ in kept}) == len(kept) == 100


@pytest.mark.parametrize(
    ("width", "depth", "size"), [(64, 64, 16), (1 << 17, 5, 2), (1 << 20, 2, 1)]
)
def test_memory_of_prefetched_steps_is_bounded(make_store, record_calls, width, depth, size):
    made = record_calls(loader_module, "prefetch")
    (stream,) = streams(make_store(), config(width, 2, 2), epochs=1)
    next(stream.steps(count=1))
    assert [blocks for _, blocks in made] == [depth // size]
    assert depth * stream._sizes.bytes <= loader_module.PREFETCHED_BYTES or depth == 2


@pytest.mark.slow
def test_a_process_ends_with_a_stream_that_nobody_closed(make_store):
    store = make_store()
    script = f"""
        import sys
        sys.path[:0] = {[str(Path(chronicals.__file__).parents[1])]}
        from pathlib import Path
        from chronicals.config import ChronicalsConfig
        from chronicals.data import BatchStream, TokenStore
        settings = ChronicalsConfig(max_seq_length=64, batch_size=2)
        kept = BatchStream(TokenStore.open(Path({str(store.path)!r})), settings).steps()
        next(kept)
        print("taken")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "taken\n", "")


def test_a_consumer_that_stops_early_leaves_no_thread(make_store):
    (stream,) = streams(make_store(), config())
    steps = stream.steps()
    next(steps)
    assert builders()
    steps.close()
    assert not builders()


# --- create_dataloader
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [None, 3])
def test_a_dataloader_yields_batches_and_has_a_length(tmp_path, epochs):
    rows = tiny.chat_rows(60)
    tokenizer = tiny.tokenizer()
    loader = create_dataloader(rows, tokenizer, config(96, cache_dir=tmp_path, num_epochs=epochs))
    batches = list(loader)
    assert len(batches) == len(loader) == -(-len(loader.plan) * (epochs or 1) // 4) * 2
    assert all(isinstance(batch, Batch) and len(batch) == 2 * 96 for batch in batches)
    texts = []
    for batch in batches:
        for ids, targets, _ in pieces(batch):
            if set(targets) != {IGNORED}:
                trained = tokenizer.decode([token for token in targets if token != IGNORED])
                texts.append((tokenizer.decode(ids), trained))
    expected = [
        (
            tokenizer.apply_chat_template(row["messages"], tokenize=False),
            f"{row['messages'][1]['content']}<|im_end|>",
        )
        for row in rows
    ]
    assert sorted(texts) == sorted(expected * (epochs or 1))
    assert list(tmp_path.glob("*.arrow")) == [loader.store.path]


def test_a_dataloader_fills_with_the_padding_token(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = "<|im_start|>"
    batch = next(
        iter(
            create_dataloader(
                [{"input_ids": [9, 8, 7]}], tokenizer, config(16, 1, 1, cache_dir=tmp_path)
            )
        )
    )
    assert batch.input_ids.tolist() == [9, 8, 7, *[tokenizer.pad_token_id] * 13]
    assert batch.targets.tolist() == [8, 7, *[IGNORED] * 14]


@pytest.mark.parametrize("make", [list, iter, "file", "dataset"])
def test_a_dataloader_takes_whatever_holds_rows(tmp_path, make):
    rows = [{"text": f"the answer to {n}"} for n in range(12)]
    if make == "file":
        source = tmp_path / "rows.txt"
        source.write_text("the answer to 7")
    elif make == "dataset":
        source = pytest.importorskip("datasets").Dataset.from_list(rows)
    else:
        source = make(rows)
    loader = create_dataloader(source, tiny.tokenizer(), config(64, cache_dir=tmp_path / "cache"))
    assert loader.store.report.rows == len(loader.store) == (1 if make == "file" else 12)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "dataset: holds no rows"),
        (
            [{"input_ids": [1, 2], "labels": [-100, -100]}] * 3,
            "dataset: nothing to train on in any of 3 rows",
        ),
        (
            [{"input_ids": [1, 2], "labels": [-100, n]} for n in (2, -100, -100)],
            "dataset: breaks 1 .*in 3 rows:\n  masked_row: 2 ",
        ),
        (
            [{"question": "a"}],
            "nothing to train on in any of 1 rows:\n  missing_field: .*row 1: unknown kind of row",
        ),
    ],
)
def test_a_dataloader_refuses_what_cannot_be_trained(tmp_path, rows, reason):
    with pytest.raises(DataError, match=reason):
        create_dataloader(rows, tiny.tokenizer(), config(16, cache_dir=tmp_path))


def test_objective_and_share_of_masked_rows_come_from_the_configuration(tmp_path):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}] * 3
    loader = create_dataloader(
        rows, tiny.tokenizer(), config(16, cache_dir=tmp_path, objective="pretraining")
    )
    assert np.array_equal(loader.store.targets, [2, 2, 2])
    rows[1] = {"input_ids": [1, 2, 3]}
    loader = create_dataloader(
        rows, tiny.tokenizer(), config(16, cache_dir=tmp_path, gate={"masked_row": 0.7})
    )
    assert np.array_equal(loader.store.targets, [2])


# --- tasks computed before they are asked for


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_results_come_in_order_and_so_many_are_asked_for_before():
    taken = []

    def tasks():
        for number in range(9):
            taken.append(number)
            yield functools.partial(int, number)

    results = prefetch(tasks(), 3)
    assert next(results) == 0
    assert taken == [0, 1, 2, 3]
    assert list(results) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not threads()


def test_an_error_comes_in_the_place_of_its_result():
    results = prefetch([lambda: 1, lambda: 1 // 0, lambda: 2], 2)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not threads()


def test_closing_waits_for_the_task_that_runs_and_drops_the_others():
    began = threading.Event()
    go_on = threading.Event()
    done = []

    def slow():
        began.set()
        go_on.wait(10)
        done.append("slow")

    results = prefetch([int, slow, lambda: done.append("dropped")], 2)
    next(results)
    began.wait(10)
    threading.Timer(0.05, go_on.set).start()
    results.close()
    assert done == ["slow"]
    assert not threads()


# --- packs in the order of the data


TOKENIZER = tiny.tokenizer()

SETTINGS = {
    "max_seq_length": 64,
    "batch_size": 2,
    "gradient_accumulation_steps": 3,
    "packing_strategy": "in-order",
}


@pytest.fixture(scope="module")
def numbered_store(tmp_path_factory):
    """Of a file of rows whose lengths go up and down; each says its number."""
    folder = tmp_path_factory.mktemp("in-order")
    rows = [{"text": f"{number} " + "the answer " * (number * 7 % 11)} for number in range(150)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build_store(str(folder / "rows.jsonl"), Tokenizer(TOKENIZER), 64, folder)


def numbers_said(batch) -> list[int]:
    """What the documents of a Batch say, in the order in which they stand there."""
    bounds = batch.cu_seqlens.tolist()
    texts = [TOKENIZER.decode(batch.input_ids[first:end]) for first, end in zip(bounds, bounds[1:])]
    return [int(text.split()[0]) for text in texts if text[:1].isdigit()]


def trained_in_order(numbered_store, state=None, count=None, ranks=1, **changes):
    """Numbers of the documents of each step, as its micro-batches and ranks take them; and the
    state after it.
    """
    config = ChronicalsConfig(**{**SETTINGS, **changes})
    streams = [
        BatchStream(numbered_store, config, epochs=2, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    count = streams[0].left(state) if count is None else count
    for together in zip(*(stream.steps(state, count) for stream in streams), strict=True):
        batches = [
            batch
            for micro in zip(*(step.batches for step in together), strict=True)
            for batch in micro
        ]
        yield [number for batch in batches for number in numbers_said(batch)], together[0].state


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "changes", [{}, {"use_sequence_packing": False}, {"max_documents": 3}], ids=str
)
def test_a_whole_epoch_is_in_the_order_of_the_file(numbered_store, ranks, changes):
    order = [
        number
        for step, _ in trained_in_order(numbered_store, ranks=ranks, **changes)
        for number in step
    ]
    assert order == [*range(150), *range(150)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_goes_on_where_it_was(numbered_store, ranks):
    """Also on the other number of ranks."""
    (_, state), *_ = reversed(list(trained_in_order(numbered_store, count=2, ranks=ranks)))
    before = [
        number
        for step, _ in trained_in_order(numbered_store, count=2, ranks=ranks)
        for number in step
    ]
    assert before == list(range(len(before)))
    for others in (1, 2):
        after = [
            number
            for step, _ in trained_in_order(numbered_store, state, ranks=others)
            for number in step
        ]
        assert [*before, *after] == [*range(150), *range(150)]


def test_nothing_of_it_depends_on_the_seed(numbered_store):
    first, second = (list(trained_in_order(numbered_store, count=2, seed=seed)) for seed in (1, 2))
    assert first == second


def test_other_strategies_are_shuffled(numbered_store):
    order = [
        number
        for step, _ in trained_in_order(numbered_store, packing_strategy="best-fit")
        for number in step
    ]
    assert sorted(order[:150]) == list(range(150)) and order[:150] != list(range(150))


@pytest.mark.slow
def test_parts_of_packs_keep_it_too(numbered_store):
    config = ChronicalsConfig(**SETTINGS, pack_parts=2)
    assert [number for pack in plan_epoch(numbered_store, config) for number in pack] == list(
        range(150)
    )
