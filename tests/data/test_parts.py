"""Documents that fit in a part of a pack lie whole in one, longer ones in all; parts are as even
as the rule makes them.
"""

import numpy as np
import pytest

from chronicals.data import plan_packs
from chronicals.data.packs.packing import STRATEGIES
from chronicals.data.packs.parts import SPLIT, plan_parts

MIXES = {
    "any": lambda: np.random.randint(1, 97, 150),
    "short": lambda: np.random.randint(1, 20, 150),
    "all split": lambda: np.random.randint(49, 97, 60),
    "full": lambda: np.random.choice([96, 48, 24], 60),
    "one": lambda: np.array([96]),
    "none": lambda: np.zeros(0, np.int64),
}


def faults(plan, lengths, width, parts, limit):
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
        not faults(plan, lengths, 96, parts, limit)
        and plan.tokens == lengths.sum()
        and plan.parts == parts
    )


def test_a_wrong_plan_is_found_by_what_is_checked():
    lengths = np.array([96, 30, 30, 10, 10])
    plan = plan_parts(lengths, 96, None, "best-fit", None, 2)
    plan.part_of[:] = 0
    assert set(faults(plan, lengths, 96, 2, 2)) >= {
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
    assert not faults(plan, lengths, 96, 2, None)
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
