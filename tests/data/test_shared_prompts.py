"""Answers to one prompt share its tokens in a pack: nothing is lost, and every answer attends to
what it would alone.
"""

import numpy as np
import pytest
import torch

import tiny
from chronicals.batch import IGNORED
from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, Tokenizer, build_store
from chronicals.data.making import documents as module
from chronicals.data.making.documents import (
    IS_SHARED,
    MIN_SHARED_TOKENS,
    DocumentPiece,
    fit_item,
    share_prompt,
)
from chronicals.data.packs.step_memory import shared_keys
from chronicals.data.reading.gate import DataReport
from mutants import mutant


def piece(side, prompt, answer):
    ids = np.array([*prompt, *answer], np.int32)
    return DocumentPiece(
        3, side, ids, np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(answer)])
    )


PROMPT = range(100, 100 + MIN_SHARED_TOKENS + 5)


def test_each_document_is_whole_behind_its_prompt():
    item = [piece(0, PROMPT, [1, 2, 3]), piece(1, PROMPT, [1, 5])]
    first, second, prompt = share_prompt(item)
    assert [one.shared for one in (first, second, prompt)] == [
        MIN_SHARED_TOKENS + 4,
        MIN_SHARED_TOKENS + 4,
        IS_SHARED,
    ]
    assert first.ids.tolist() == [PROMPT[-1], 1, 2, 3] and second.trained.tolist() == [0, 1, 1]
    assert [one.side for one in (first, second, prompt)] == [0, 1, 2] and not prompt.trained.any()
    for whole, side in zip(item, (first, second)):
        assert np.array_equal(np.concatenate([prompt.ids, side.ids]), whole.ids)
        assert np.array_equal(np.concatenate([prompt.trained, side.trained]), whole.trained)


@pytest.mark.parametrize(
    "item",
    [
        [piece(0, range(MIN_SHARED_TOKENS), [1]), piece(1, range(MIN_SHARED_TOKENS), [2])],
        [piece(0, PROMPT, [1])],
        [piece(0, [7, *PROMPT], [1]), piece(1, [8, *PROMPT], [1])],
        [
            piece(0, PROMPT, [1])._replace(trained=np.ones(MIN_SHARED_TOKENS + 6, np.uint8)),
            piece(1, PROMPT, [2]),
        ],
    ],
    ids=["short", "one answer", "other beginnings", "trained prompt"],
)
def test_what_is_not_shared_stays_as_it_is(item):
    assert share_prompt(item) is item


def test_tokens_that_answers_begin_with_are_not_shared():
    """They are trained, on each side."""
    sides = share_prompt([piece(0, PROMPT, [1, 2, 3]), piece(1, PROMPT, [1, 2, 4])])
    assert sides[0].ids.tolist() == [PROMPT[-1], 1, 2, 3] and sides[0].trained.tolist() == [
        0,
        1,
        1,
        1,
    ]


def test_answers_are_cut_and_prompts_are_not():
    item = share_prompt([piece(0, PROMPT, range(9)), piece(1, PROMPT, range(4))])
    report = DataReport()
    width = len(item[2].ids) + 10
    first, second, prompt = fit_item(item, width, "cut", report)
    assert [len(one.ids) for one in (first, second)] == [5, 5] and prompt is item[2]
    assert report.count("cut_row") == 1
    assert (
        fit_item(item, len(prompt.ids) + 3, "cut", report) == []
        and report.count("masked_by_cut") == 1
    )


def batch_of(tmp_path, rows, width=128):
    config = ChronicalsConfig(max_seq_length=width, batch_size=3, gradient_accumulation_steps=1)
    store = build_store(rows, Tokenizer(tiny.tokenizer(), kinds=("preference",)), width, tmp_path)
    stream = BatchStream(store, config, epochs=1, shuffle=False)
    (step,) = stream.steps(count=1)
    return store, stream, step.batches[0]


def rows(count):
    return [
        {
            "prompt": [{"role": "user", "content": "what is the answer " * (n % 3 + 1)}],
            "chosen": [{"role": "assistant", "content": "forty two " * (n % 4 + 1)}],
            "rejected": [{"role": "assistant", "content": f"{n}"}],
        }
        for n in range(count)
    ]


@pytest.mark.slow
def test_keys_of_a_batch_are_the_whole_documents(tmp_path):
    """Of an answer its prompt's tokens and its own; positions go on from the prompt's; all
    others attend to themselves.
    """
    store, stream, batch = batch_of(tmp_path, rows(6))
    keys = batch.keys
    bounds = batch.cu_seqlens.tolist()
    ends = batch.keys.cu_seqlens.tolist()
    numbers = [number for pack in stream.packs_of(0) for number in pack]
    found = 0
    for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
        attended = keys.index[ends[n] : ends[n + 1]]
        assert attended[len(attended) - (end - start) :].tolist() == list(range(start, end))
        if batch.segments["group"][n] < 0:
            assert len(attended) == end - start
            continue
        ids, _ = store.whole_document(numbers[found])
        assert batch.input_ids[attended].tolist() == ids.tolist()
        assert batch.position_ids[start:end].tolist() == list(
            range(len(ids) - (end - start), len(ids))
        )
        found += 1
    assert (
        found == len(store)
        and max(ends[n + 1] - ends[n] for n in range(len(bounds) - 1)) <= keys.max_seqlen <= 128
    )


@pytest.mark.slow
def test_every_key_has_its_place(tmp_path):
    keys = batch_of(tmp_path, rows(6))[2].keys
    places = keys.places
    assert len(places) == 3
    for copies in places.unbind():
        there = copies >= 0
        assert torch.equal(keys.index[copies[there]], torch.arange(places.shape[1])[there])
    assert sorted(places[places >= 0].tolist()) == list(range(keys.cu_seqlens[-1]))
    assert not len(keys.index) % (-(-places.shape[1] // 16))


@pytest.mark.slow
def test_real_tokens_are_counted_once(tmp_path):
    store, stream, batch = batch_of(tmp_path, rows(6))
    (step,) = stream.steps(count=1)
    assert (
        step.counts["tokens"]
        == store.lengths.sum()
        < sum(len(store.whole_document(n)[0]) for n in range(len(store)))
    )
    assert (
        step.counts["targets"] == int((batch.targets != IGNORED).sum()) == int(store.targets.sum())
    )
    whole = sum(
        len(store.whole_document(n)[0])
        for n in range(len(store))
        if store.columns["shared"][n] >= 0
    )
    assert store.tokens_shared == whole - step.counts["tokens"] > 0
    assert step.counts["items"] == 6 and store.longest == max(
        len(store.whole_document(n)[0]) for n in range(len(store))
    )


FAULTS = {
    "one token too many": (
        "shared = min(common, untrained) - 1",
        "shared = min(common, untrained)",
    ),
    "trained tokens shared": ("shared = min(common, untrained) - 1", "shared = common - 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_of_sharing_are_found(fault):
    broken = mutant(module, *FAULTS[fault])
    first, _, prompt = broken.share_prompt(
        [piece(0, PROMPT, [1, 2, 3]), piece(1, PROMPT, [1, 2, 4])]
    )
    whole = piece(0, PROMPT, [1, 2, 3])
    targets = [int(trained) for trained in first.trained[1:]]
    assert targets != [1, 1, 1] or not np.array_equal(
        np.concatenate([prompt.ids, first.ids]), whole.ids
    )


def test_a_prompt_is_looked_for_in_the_documents_own_item():
    """Two items side by side, and filler behind them."""
    shared = np.array([4, 4, -1, 0, 5, 5, -1, 0])
    sides = np.array([0, 1, 2, 0, 0, 1, 2, -1])
    lengths = np.array([2, 3, 4, 6, 2, 2, 5, 8])
    bounds = np.append(0, np.cumsum(lengths)).astype(np.int32)
    keys = shared_keys(shared, sides, bounds, 32)
    ends = keys.cu_seqlens.tolist()
    assert keys.index[ends[1] : ends[2]].tolist() == [5, 6, 7, 8, 2, 3, 4]
    assert keys.index[ends[4] : ends[5]].tolist() == [19, 20, 21, 22, 23, 15, 16]
    assert keys.index[ends[6] : ends[7]].tolist() == [19, 20, 21, 22, 23] and keys.max_seqlen == 8
