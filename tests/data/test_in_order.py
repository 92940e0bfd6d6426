"""``packing_strategy: in-order``: documents are trained in the order of their file, whatever the
steps are made of.
"""

import json

import pytest

import tiny
from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, Tokenizer, build_store
from chronicals.data.packs.loader import plan_epoch

TOKENIZER = tiny.tokenizer()

SETTINGS = {
    "max_seq_length": 64,
    "batch_size": 2,
    "gradient_accumulation_steps": 3,
    "packing_strategy": "in-order",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Of a file of rows whose lengths go up and down; each says its number."""
    folder = tmp_path_factory.mktemp("in-order")
    rows = [{"text": f"{number} " + "the answer " * (number * 7 % 11)} for number in range(150)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build_store(str(folder / "rows.jsonl"), Tokenizer(TOKENIZER), 64, folder)


def numbers(batch) -> list[int]:
    """What the documents of a Batch say, in the order in which they stand there."""
    bounds = batch.cu_seqlens.tolist()
    texts = [TOKENIZER.decode(batch.input_ids[first:end]) for first, end in zip(bounds, bounds[1:])]
    return [int(text.split()[0]) for text in texts if text[:1].isdigit()]


def trained(store, state=None, count=None, ranks=1, **changes):
    """Numbers of the documents of each step, as its micro-batches and ranks take them; and the
    state after it.
    """
    config = ChronicalsConfig(**{**SETTINGS, **changes})
    streams = [
        BatchStream(store, config, epochs=2, rank=rank, ranks=ranks) for rank in range(ranks)
    ]
    count = streams[0].left(state) if count is None else count
    for together in zip(*(stream.steps(state, count) for stream in streams), strict=True):
        batches = [
            batch
            for micro in zip(*(step.batches for step in together), strict=True)
            for batch in micro
        ]
        yield [number for batch in batches for number in numbers(batch)], together[0].state


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "changes", [{}, {"use_sequence_packing": False}, {"max_documents": 3}], ids=str
)
def test_a_whole_epoch_is_in_the_order_of_the_file(store, ranks, changes):
    order = [number for step, _ in trained(store, ranks=ranks, **changes) for number in step]
    assert order == [*range(150), *range(150)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_goes_on_where_it_was(store, ranks):
    """Also on the other number of ranks."""
    (_, state), *_ = reversed(list(trained(store, count=2, ranks=ranks)))
    before = [number for step, _ in trained(store, count=2, ranks=ranks) for number in step]
    assert before == list(range(len(before)))
    for others in (1, 2):
        after = [number for step, _ in trained(store, state, ranks=others) for number in step]
        assert [*before, *after] == [*range(150), *range(150)]


def test_nothing_of_it_depends_on_the_seed(store):
    first, second = (list(trained(store, count=2, seed=seed)) for seed in (1, 2))
    assert first == second


def test_other_strategies_are_shuffled(store):
    order = [number for step, _ in trained(store, packing_strategy="best-fit") for number in step]
    assert sorted(order[:150]) == list(range(150)) and order[:150] != list(range(150))


def test_parts_of_packs_keep_it_too(store):
    config = ChronicalsConfig(**SETTINGS, pack_parts=2)
    assert [number for pack in plan_epoch(store, config) for number in pack] == list(range(150))
