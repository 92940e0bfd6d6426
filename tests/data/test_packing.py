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

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import plan_packs
from chronicals.data.packs.packing import STRATEGIES

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
