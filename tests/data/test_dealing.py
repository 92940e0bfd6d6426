"""Shares of the ranks are the micro-batch: every token once, whole documents whole, split ones
by their chunks.
"""

import random

import numpy as np
import pytest
import torch

import tiny
from chronicals.batch import IGNORED, Batch, Context
from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, Tokenizer, build_store
from chronicals.data.packs.dealing import NOBODY, part_of, rank_share
from chronicals.data.packs.strategies import SPLIT

FILLER = 1_000_000
SHARINGS = [(2, 2), (2, 1), (4, 4), (4, 1), (4, 2)]
"""Ranks that share a micro-batch, and how many of them exchange heads."""


@pytest.fixture
def store(tmp_path):
    """Documents n of random lengths that begin with token n."""
    rows = []
    for n in range(50):
        ids = [
            n,
            *(random.randrange(100, FILLER) for _ in range(random.choice([3, 9, 20, 40, 63]))),
        ]
        rows.append(
            {
                "input_ids": ids,
                "labels": [t if random.random() < 0.7 else IGNORED for t in ids[:-1]] + ids[-1:],
            }
        )
    return build_store(rows, Tokenizer(tiny.tokenizer()), 64, tmp_path)


def config(**changes):
    return ChronicalsConfig(
        max_seq_length=64,
        batch_size=2,
        gradient_accumulation_steps=2,
        seed=5,
        pack_parts=4,
        **changes,
    )


def dealt(store, count, inner, **options):
    """For each step the Batches of all ranks, and the one that one process has."""
    contexts = [Context(rank, count, inner) for rank in range(count)]
    streams = [
        BatchStream(store, config(), FILLER, epochs=1, context=context, **options)
        for context in contexts
    ]
    alone = BatchStream(store, config(), FILLER, epochs=1, **options)
    for together in zip(
        alone.steps(count=alone.left(None)),
        *(stream.steps(count=stream.left(None)) for stream in streams),
    ):
        assert len({str(step.counts) for step in together}) == 1
        yield together


def documents(batch):
    """Columns of each document of a Batch that is no filler."""
    bounds = batch.cu_seqlens.tolist()
    columns = torch.stack([batch.input_ids, batch.targets, batch.position_ids], 1)
    return {
        int(batch.input_ids[a]): columns[a:b]
        for a, b in zip(bounds, bounds[1:])
        if b > a and batch.input_ids[a] < 100
    }


def split_documents(batches):
    """Those of which the ranks have parts, put together as attention does."""
    split = batches[0].split
    if split is None:
        assert all(batch.split is None for batch in batches)
        return {}
    inner = split.context.inner
    found = {}
    sent = [
        torch.stack([batch.input_ids, batch.targets, batch.position_ids], 1)[: batch.split.tokens]
        for batch in batches
    ]
    neighbours = [torch.cat(sent[first : first + inner]) for first in range(0, len(batches), inner)]
    if split.order is not None:
        neighbours = [tokens[split.order] for tokens in neighbours]
        assert torch.equal(split.order[split.back], torch.arange(len(split.back)))
    for batch in batches:
        own = neighbours[batch.split.context.rank // inner]
        queries = batch.split.cu_seqlens.tolist()
        keys = batch.split.keys
        ends = queries if keys is None else keys.cu_seqlens.tolist()
        gathered = own if keys is None else torch.cat(neighbours)[keys.index]
        assert queries[-1] == len(own) and ends[-1] == len(gathered)
        for (first, end), (a, b) in zip(
            zip(queries, queries[1:]), zip(ends, ends[1:]), strict=True
        ):
            seen = gathered[a:b]
            assert torch.equal(seen[len(seen) - (end - first) :], own[first:end]), (
                "the last query stands at its last key"
            )
            known = found.setdefault(int(seen[0, 0]), seen)
            assert torch.equal(known[: len(seen)], seen[: len(known)])
            found[int(seen[0, 0])] = max(
                known, seen, key=len
            )  # the longest that is seen of each document is all of it
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("count", "inner"), SHARINGS)
def test_shares_are_the_micro_batch(store, count, inner):
    several = 0
    for alone, *shares in dealt(
        store, count, inner
    ):  # a step's micro-batches differ, for parts cost otherwise than packs
        expected = {
            name: columns for batch in alone.batches for name, columns in documents(batch).items()
        }
        found = {}
        for batches in zip(*(step.batches for step in shares)):
            for batch in batches:
                n = 0 if batch.split is None else batch.split.tokens
                assert len(batch) == 2 * 64 // count and batch.cu_seqlens[-1] == len(batch)
                assert batch.trained == int((batch.targets != IGNORED).sum())
                first = batch.input_ids[:n].tolist()
                found |= {
                    name: columns for name, columns in documents(batch).items() if name not in first
                }
                if batch.split is not None:
                    begin = len(batch.cu_seqlens) - len(batch.split.whole)
                    assert torch.equal(batch.cu_seqlens[begin:] - n, batch.split.whole)
            together = split_documents(batches)
            several += len(together) > 1
            for name, columns in together.items():
                length = len(expected[name])
                assert (
                    length > 64 // 4
                    and (columns[length:, 0] == FILLER).all()
                    and (columns[length:, 1] == IGNORED).all()
                )
                found[name] = columns[:length]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], columns) for name, columns in expected.items())
    assert several


@pytest.mark.slow
def test_documents_that_fit_are_on_one_rank(store):
    """A part is 16 tokens wide: of those that are no longer no rank needs anything."""
    for _, *shares in dealt(store, 2, 2):
        for batches in zip(*(step.batches for step in shares)):
            for name, columns in (pair for batch in batches for pair in documents(batch).items()):
                if store.lengths[name] <= 16:
                    assert len(columns) == store.lengths[name]


@pytest.mark.parametrize(("count", "inner"), [(2, 1), (3, 1), (4, 1), (4, 2), (6, 3)])
def test_ranks_see_as_many_keys(count, inner):
    contexts = [Context(rank, count, inner) for rank in range(count)]
    shares = [
        rank_share(np.array([0, 24 * count]), np.array([SPLIT]), context) for context in contexts
    ]
    assert {int(share.split.keys.cu_seqlens[-1]) for share in shares} == {12 * (2 * count + inner)}


def test_columns_of_documents_and_of_targets_are_dealt(store):
    values = np.random.rand(int(store.targets.sum()), 3).astype(np.float32)
    given = store.with_column("weight", np.arange(len(store)) + 1.0).with_column(
        "number", np.arange(len(store))
    )

    def rows(batches):
        found = set()
        for batch in batches:
            at = batch.targets != IGNORED
            columns = batch.input_ids[at], batch.weights[at], batch.tokens["top"][at]
            found |= {
                (int(token), float(weight), *map(float, top))
                for token, weight, top in zip(*columns)
            }
            assert not batch.tokens["top"][~at].any()
        return found

    for alone, *shares in dealt(given.with_values("top", values), 2, 1):
        assert rows(batch for step in shares for batch in step.batches) == rows(alone.batches)
        for batch in (batch for step in shares for batch in step.batches):
            names = batch.segments["number"].tolist()
            bounds = batch.cu_seqlens.tolist()
            assert len(names) == len(bounds) - 1
            firsts = [
                int(batch.input_ids[a]) if a < b else FILLER for a, b in zip(bounds, bounds[1:])
            ]
            assert all((name < 0) == (first == FILLER) for name, first in zip(names, firsts))
            assert all(first in (name, FILLER) for name, first in zip(names, firsts) if first < 100)


def test_a_batch_is_dealt_as_a_stream_deals(store):
    """By hand: the same share of documents with weights and columns."""
    lengths = (5, 20, 9, 3, 11)
    ranks = np.array([0, SPLIT, 1, 0, NOBODY])
    context = Context(1, 2, 2)
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    tokens = torch.arange(48)
    columns = {"weights": tokens / 2, "segments": {"n": torch.arange(5)}, "tokens": {"t": tokens}}
    batch = Batch(tokens, tokens + 1, tokens, bounds, 20, **columns)
    part = part_of(batch, ranks, context, filler=77)
    assert part.input_ids.tolist() == [*range(15, 25), *range(25, 34), *[77] * 5]
    assert part.targets.tolist() == [*range(16, 26), *range(26, 35), *[IGNORED] * 5]
    assert part.weights.tolist() == [*(part.input_ids[:19] / 2).tolist(), *[0] * 5]
    assert part.cu_seqlens.tolist() == [0, 10, 19, 24] and part.segments["n"].tolist() == [1, 2, -1]
    assert (
        part.position_ids[19:].tolist() == [0, 1, 2, 3, 4]
        and part.trained == 19
        and part.max_seqlen == 20
    )
    assert part.tokens["t"].tolist() == [*range(15, 34), *[0] * 5]


def test_the_order_of_documents_does_not_depend_on_who_shares_packs(store):
    """A state that one group of processes wrote means the same to another, where parts are as
    many.
    """
    contexts = [None, Context(0, 2, 2), Context(3, 4, 1)]
    streams = [
        BatchStream(store, config(), FILLER, epochs=2, context=context) for context in contexts
    ]
    assert len({stream.fingerprint for stream in streams}) == 1
    state = next(streams[0].steps(count=1)).state
    found = [{str(step.counts) for step in stream.steps(state, 1)} for stream in streams]
    assert found[0] == found[1] == found[2]
    assert (
        streams[0].fingerprint
        != BatchStream(store, config().replace(pack_parts=2), FILLER, epochs=2).fingerprint
    )


def test_packs_are_balanced_by_their_slowest_rank(store):
    stream = BatchStream(store, config(), FILLER, context=Context(0, 2, 2))
    plan = stream.plan
    lengths = store.lengths.astype(np.int64)
    for pack, (first, end) in enumerate(zip(plan.offsets, plan.offsets[1:])):
        squares = lengths[plan.documents[first:end]] ** 2
        part_of = plan.part_of[first:end]
        whole = [squares[(part_of >= 0) & (part_of // 2 == rank)].sum() for rank in range(2)]
        assert stream._sums.costs[pack] == squares[part_of == SPLIT].sum() + 2 * max(whole)


def test_what_cannot_be_dealt_is_refused(store):
    with pytest.raises(
        ValueError, match="11 of 20 tokens on one of 2 ranks: more than it has room for"
    ):
        rank_share(np.array([0, 11, 20]), np.array([0, 1]), Context(0, 2, 2))
    with pytest.raises(
        ValueError,
        match="pack_parts=4: so many parts cannot be divided among context_parallel=3 processes",
    ):
        BatchStream(store, config(), FILLER, context=Context(0, 3, 3))
