"""A plan of packs is a partition, is best-fit decreasing to the document, and leaves Python free
while it is made.
"""

import collections
import dataclasses
import random
import threading
import time

import numpy as np
import pytest
import torch

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import SequencePacker, plan_packs
from chronicals.data.packs.packing import plan_parts
from chronicals.data.packs.strategies import SPLIT, STRATEGIES

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


def first_fit_decreasing(lengths, width, limit):
    """Documents of the packs, each where the first pack has room."""
    packs = []
    for document in sorted(range(len(lengths)), key=lambda d: (-lengths[d], d)):
        fits = (
            p
            for p in packs
            if sum(lengths[d] for d in p) + lengths[document] <= width and len(p) < limit
        )
        pack = next(fits, None)
        if pack is None:
            packs.append(pack := [])
        pack.append(document)
    return packs


def next_fit(lengths, width, limit):
    """Documents of the packs, in the order of the data."""
    packs = []
    for document, length in enumerate(lengths):
        if (
            not packs
            or sum(lengths[d] for d in packs[-1]) + length > width
            or len(packs[-1]) == limit
        ):
            packs.append([])
        packs[-1].append(document)
    return packs


def faults(plan, lengths, width, limit):
    """What is wrong with a plan, whatever its strategy."""
    packs = list(plan)
    checks = {
        "not a partition": sorted(plan.documents) == list(range(len(lengths))),
        "offsets": plan.offsets[0] == 0
        and plan.offsets[-1] == len(lengths)
        and len(packs) == len(plan.offsets) - 1,
        "packs and documents differ": np.array_equal(np.concatenate(packs), plan.documents),
        "an empty pack": all(len(pack) for pack in packs),
        "too many documents": all(len(pack) <= (limit or len(lengths)) for pack in packs),
        "too wide": all(lengths[pack].sum() <= width for pack in packs),
        "most documents": plan.max_documents == max(map(len, packs)),
        "tokens": plan.tokens == lengths.sum(),
        "fill": plan.fill == lengths.sum() / (len(plan) * width),
    }
    return [name for name, holds in checks.items() if not holds]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("limit", [None, 1, 2, 5])
@pytest.mark.parametrize(("count", "width", "distribution"), CASES)
def test_a_plan_is_a_partition_within_its_bounds(count, width, distribution, limit, strategy):
    lengths = draw(count, width, distribution)
    assert not faults(plan_packs(lengths, width, limit, strategy), lengths, width, limit)


def test_a_wrong_plan_is_found_by_what_is_checked():
    lengths = np.array([40, 24] * 10)
    plan = plan_packs(lengths, 64, 5)
    twice = plan.documents.copy()
    swapped = plan.documents.copy()
    moved = plan.offsets.copy()
    twice[7] = twice[8]
    swapped[[1, 2]] = swapped[[2, 1]]  # 40 beside 40
    moved[4] = moved[3]
    planted = {
        "not a partition": {"documents": twice},
        "too wide": {"documents": swapped},
        "an empty pack": {"offsets": moved},
        "offsets": {"offsets": plan.offsets[:-1]},
        "tokens": {"tokens": plan.tokens + 1},
    }
    for fault, changes in planted.items():
        assert fault in faults(dataclasses.replace(plan, **changes), lengths, 64, 5)
    assert "too many documents" in faults(plan_packs(lengths, 64), lengths, 64, 1)


@pytest.mark.parametrize("limit", [None, 1, 2, 5])
@pytest.mark.parametrize(("count", "width", "distribution"), CASES)
@pytest.mark.parametrize(
    ("strategy", "plain"), [("first-fit", first_fit_decreasing), ("in-order", next_fit)]
)
def test_plans_are_those_of_the_plain_algorithms(
    strategy, plain, count, width, distribution, limit
):
    lengths = draw(count, width, distribution)
    plan = plan_packs(lengths, width, limit, strategy)
    assert [pack.tolist() for pack in plan] == plain(lengths.tolist(), width, limit or count)


@pytest.mark.parametrize("limit", [None, 3])
def test_in_order_changes_no_order(limit):
    lengths = draw(500, 256, "uniform")
    assert plan_packs(lengths, 256, limit, "in-order").documents.tolist() == list(range(500))
    for strategy in ("best-fit", "first-fit"):
        assert plan_packs(lengths, 256, limit, strategy).documents.tolist() != list(range(500))


@pytest.mark.parametrize("limit", [None, 2, 5])
@pytest.mark.parametrize(("count", "width", "distribution"), CASES)
def test_every_document_goes_where_best_fit_decreasing_puts_it(count, width, distribution, limit):
    """Replays the plan longest document first; of packs with equal room any may be taken."""
    lengths = draw(count, width, distribution)
    plan = plan_packs(lengths, width, limit)
    pack_of = {document: number for number, pack in enumerate(plan) for document in pack}
    room = {}
    held = collections.Counter()
    for document in sorted(range(count), key=lambda d: (-lengths[d], d)):
        size = lengths[document]
        pack = pack_of[document]
        fits = [room[p] for p in room if room[p] >= size and held[p] < (limit or count)]
        if fits:
            assert room.get(pack) == min(fits), (
                f"document {document} of {size} tokens is not in the fullest pack"
            )
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
    first = plan_packs(lengths, 256)
    second = plan_packs(lengths.tolist(), 256)
    assert np.array_equal(first.documents, second.documents)
    assert np.array_equal(first.offsets, second.offsets)


@pytest.mark.parametrize("strategy", ["best-fit", "first-fit"])
@pytest.mark.parametrize("width", [2048, 8192])
def test_a_usual_mix_of_lengths_fills_the_packs(width, strategy):
    lengths = np.clip(np.random.lognormal(np.log(400), 0.8, 20_000), 1, width).astype(np.int64)
    assert plan_packs(lengths, width, strategy=strategy).fill >= 0.99


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_documents_make_no_packs(strategy):
    plan = plan_packs([], 64, strategy=strategy)
    assert (len(plan), plan.tokens, plan.max_documents, plan.fill, list(plan)) == (0, 0, 0, 0.0, [])


@pytest.mark.parametrize("wrong", [0, -1, 65])
def test_a_length_out_of_range_is_named(wrong):
    lengths = [5] * 20
    place = random.randrange(20)
    lengths[place] = wrong
    with pytest.raises(
        ValueError, match=rf"lengths\[{place}\]={wrong}: must be between 1 and max_seq_length=64"
    ):
        plan_packs(lengths, 64)


def test_a_pack_must_hold_a_document():
    with pytest.raises(ValueError, match="max_documents=0"):
        plan_packs([1], 64, max_documents=0)


def test_an_unknown_strategy_is_refused_with_those_there_are():
    with pytest.raises(
        ValueError,
        match=r"strategy='worst-fit': no such strategy; there are best-fit, first-fit, in-order",
    ):
        plan_packs([1], 64, strategy="worst-fit")


def test_the_configuration_takes_the_strategies_there_are():
    assert [
        ChronicalsConfig(packing_strategy=name).packing_strategy for name in STRATEGIES
    ] == list(STRATEGIES)
    assert ChronicalsConfig().packing_strategy == "best-fit"
    with pytest.raises(
        ConfigurationError,
        match="packing_strategy='worst-fit'.*'best-fit', 'first-fit' or 'in-order'",
    ):
        ChronicalsConfig(packing_strategy="worst-fit")


@pytest.mark.slow
def test_other_threads_run_while_a_plan_is_made():
    lengths = np.random.randint(1, 2048, 4_000_000)
    plan_packs(lengths[:10], 2048)  # compiled
    ticks = []
    done = threading.Event()

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


# --- packs in parts


MIXES = {
    "any": lambda: np.random.randint(1, 97, 150),
    "short": lambda: np.random.randint(1, 20, 150),
    "all split": lambda: np.random.randint(49, 97, 60),
    "full": lambda: np.random.choice([96, 48, 24], 60),
    "one": lambda: np.array([96]),
    "none": lambda: np.zeros(0, np.int64),
}


def faults_in_parts(plan, lengths, width, parts, limit):
    """What is wrong with a plan in parts."""
    found = []
    part_width = width // parts
    if sorted(plan.documents) != list(range(len(lengths))) or len(plan.part_of) != len(lengths):
        found.append("not a partition")
    for pack, first, end in zip(plan, plan.offsets, plan.offsets[1:]):
        used = np.zeros(parts, int)
        held = np.zeros(parts, int)
        part_of = plan.part_of[first:end]
        for length, part in zip(lengths[pack], part_of):
            if (part == SPLIT) != (length > part_width):
                found.append("split and fits, or whole and does not")
            used[slice(None) if part == SPLIT else part] += (
                2 * -(-length // (2 * parts)) if part == SPLIT else length
            )
            held[slice(None) if part == SPLIT else part] += 1
        if used.max() > part_width:
            found.append("too wide")
        if limit is not None and (held.max() > limit // parts or len(pack) > limit):
            found.append("too many documents")
        if not len(pack):
            found.append("an empty pack")
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("limit", [None, 4, 9])
@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("mix", MIXES)
def test_a_plan_is_a_partition_within_its_parts(mix, parts, limit, strategy):
    lengths = MIXES[mix]()
    plan = plan_parts(lengths, 96, limit, strategy, None, parts)
    assert (
        not faults_in_parts(plan, lengths, 96, parts, limit)
        and plan.tokens == lengths.sum()
        and plan.parts == parts
    )


def test_a_wrong_plan_in_parts_is_found_by_what_is_checked():
    lengths = np.array([96, 30, 30, 10, 10])
    plan = plan_parts(lengths, 96, None, "best-fit", None, 2)
    plan.part_of[:] = 0
    assert set(faults_in_parts(plan, lengths, 96, 2, 2)) >= {
        "split and fits, or whole and does not",
        "too wide",
        "too many documents",
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packs_of_one_part_are_those_of_plan_packs(strategy):
    lengths = MIXES["any"]()
    one = plan_parts(lengths, 96, 5, strategy, None, 1)
    plain = plan_packs(lengths, 96, 5, strategy)
    assert (
        one.documents.tolist() == plain.documents.tolist()
        and one.offsets.tolist() == plain.offsets.tolist()
    )
    assert one.part_of is None and one.parts == 1


def costs(plan, lengths):
    """Of each part of each pack, the squared lengths of its whole documents."""
    found = np.zeros((len(plan), plan.parts), int)
    for number, (first, end) in enumerate(zip(plan.offsets, plan.offsets[1:])):
        for document, part in zip(plan.documents[first:end], plan.part_of[first:end]):
            if part != SPLIT:
                found[number, part] += lengths[document] ** 2
    return found


def test_parts_are_dealt_evenly():
    """Best fit has both documents of 24 in one part, and six of 8 in the other."""
    lengths = np.array([24, 24, 8, 8, 8, 8, 8, 8])
    plan = plan_parts(lengths, 96, None, "best-fit", None, 2)
    assert costs(plan, lengths).tolist() == [[24**2 + 3 * 8**2] * 2]


def test_new_parts_share_a_pack_with_their_like():
    """Of parts with one, three and many documents, those that cost as much are together."""
    lengths = np.array([48] * 4 + [16] * 12 + [4] * 24)
    plan = plan_parts(lengths, 96, None, "best-fit", None, 2)
    found = costs(plan, lengths)
    assert (found.max(1) == found.min(1)).all() and plan.fill == 1.0


def test_in_order_nothing_is_sorted():
    lengths = MIXES["any"]()
    assert plan_parts(lengths, 96, None, "in-order", None, 2).documents.tolist() == list(
        range(len(lengths))
    )


def test_in_order_a_split_document_counts_beside_those_before_it():
    """6, the long one and 7 would be three in the first part, of which two may be."""
    plan = plan_parts(np.array([6, 57, 7]), 96, 4, "in-order", None, 2)
    assert plan.part_of.tolist() == [0, SPLIT, 1] and len(plan) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_items_are_whole_and_lie_in_one_part(strategy):
    lengths = np.random.randint(1, 17, 120)
    items = np.arange(0, 121, 3)
    plan = plan_parts(lengths, 96, None, strategy, items, 2)
    assert not faults_in_parts(plan, lengths, 96, 2, None)
    place = np.empty(120, int)
    place[plan.documents] = np.arange(120)
    for first in items[:-1]:
        assert (np.diff(place[first : first + 3]) == 1).all()
        assert len({plan.part_of[place[first + n]] for n in range(3)}) == 1


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(
        ValueError, match=r"max_seq_length=98: packs in 2 parts .* need a multiple of 4"
    ):
        plan_parts(np.array([5]), 98, None, "best-fit", None, 2)
    with pytest.raises(
        ValueError,
        match="item 1 has 60 tokens in 2 documents, which one process must have: at most .* = 48",
    ):
        plan_parts(np.array([5, 6, 30, 30]), 96, None, "best-fit", np.array([0, 2, 4]), 2)
    with pytest.raises(ValueError, match="max_documents=1: 2 parts of a pack must hold 1 each"):
        plan_parts(np.array([5]), 96, 1, "best-fit", None, 2)
    with pytest.raises(ValueError, match="must be between 1 and max_seq_length=96"):
        plan_parts(np.array([5, 97]), 96, None, "best-fit", None, 2)
    with pytest.raises(ValueError, match="no such strategy"):
        plan_parts(np.array([5]), 96, None, "worst-fit", None, 2)


# --- rows packed without a store


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
