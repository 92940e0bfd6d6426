"""A preference becomes an item of two documents, each as a row of its own kind would be, for objectives that take it."""

import json

import numpy as np
import pytest

import tiny
from chronicals.data import Tokenizer, TokenStore, build_store
from chronicals.data.documents import Piece, fit
from chronicals.data.gate import DataReport
from chronicals.data.preferences import sides_of

KINDS = ("preference",)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


TEXTS = {"prompt": "what is 2?", "chosen": " two", "rejected": " a number"}
CHATS = {"prompt": [user("what is 2?")], "chosen": [assistant("two")], "rejected": [assistant("a number")]}
ASKED = [user("hello"), assistant("good day"), user("what is 2?")]


@pytest.mark.parametrize(
    ("row", "prompt", "completions"),
    [
        (TEXTS, "what is 2?", [" two", " a number"]),
        (CHATS, CHATS["prompt"], [CHATS["chosen"], CHATS["rejected"]]),
        ({**CHATS, "prompt": "what is 2?"}, CHATS["prompt"], [CHATS["chosen"], CHATS["rejected"]]),
        ({**TEXTS, "prompt": CHATS["prompt"]}, CHATS["prompt"], [[assistant(" two")], [assistant(" a number")]]),
        (
            {"chosen": [*ASKED, assistant("two")], "rejected": [*ASKED, assistant("a number")]},
            ASKED, [[assistant("two")], [assistant("a number")]],
        ),
        (
            {"prompt": "hello", "chosen": [*ASKED, assistant("two")], "rejected": [*ASKED[:1], assistant("no")]},
            ASKED[:1], [[*ASKED[1:], assistant("two")], [assistant("no")]],
        ),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("b")]},
            [user("a")], [[assistant("b")], [assistant("b")]],
        ),
    ],
)  # fmt: skip
def test_both_sides_go_on_from_one_prompt(row, prompt, completions):
    found = sides_of({**row, "source": "a book"}, "row 1")
    assert found == [{"source": "a book", "prompt": prompt, "completion": completion} for completion in completions]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "two", "rejected": "three"}, "row 1: chosen and rejected need a prompt"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "row 1: chosen must be text or a list of messages, this is int"),
    ],
)
def test_what_is_no_pair_is_refused(row, reason):
    with pytest.raises(ValueError, match=reason):
        sides_of(row, "row 1")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_pair_is_one_item_of_two_documents(tmp_path, processes):
    rows = [TEXTS, CHATS, {**TEXTS, "chosen": ""}, {"prompt": "a", "completion": "b"}, TEXTS]
    encoder = Tokenizer(tiny.tokenizer(), kinds=KINDS)
    built = build_store(rows, encoder, 64, tmp_path, processes=processes)
    store = TokenStore.open(built.path)
    assert store.items.tolist() == [0, 2, 5, 7] and store.columns["side"].tolist() == [0, 1, 0, 1, 2, 0, 1]
    assert store.rows.tolist() == [0, 0, 1, 1, 1, 4, 4]
    alone = Tokenizer(tiny.tokenizer())
    expected = [alone.encode(side, "row") for row in (TEXTS, CHATS) for side in sides_of(row, "row")]
    for number, (ids, trained) in enumerate(expected):
        found = store.whole_document(number)
        assert (found[0].tolist(), found[1].tolist()) == (ids, trained)
    assert store.hashes[0] == store.hashes[1] == store.hashes[5] != store.hashes[2]
    findings = store.report.findings
    assert findings["empty_answer"].count == findings["unusable_kind"].count == findings["duplicate_row"].count == 1
    assert "row 4: is of kind completion; the objective takes preference" in findings["unusable_kind"].example
    assert store.report.kinds == {"completion": 3, "chat": 1} and store.chats


def test_the_rejected_side_tells_rows_apart(tmp_path):
    store = build_store([TEXTS, {**TEXTS, "rejected": " three"}], Tokenizer(tiny.tokenizer(), kinds=KINDS), 64, tmp_path)
    assert store.hashes[0] != store.hashes[2] and not store.report.count("duplicate_row")


def test_other_objectives_refuse_pairs_as_before(tmp_path):
    store = build_store([TEXTS, {"text": "a text"}], Tokenizer(tiny.tokenizer()), 64, tmp_path)
    assert len(store) == 1 and store.items is None and not store.columns
    assert "holds a preference pair" in store.report.findings["unusable_kind"].example
    assert json.loads(store.path.with_suffix(".json").read_text())["report"]["kinds"] == {"preference": 1, "text": 1}


@pytest.mark.parametrize(
    ("lengths", "width", "cut"),
    [
        ((5, 7), 12, (5, 7)), ((5, 7), 11, (5, 6)), ((3, 20), 12, (3, 9)), ((20, 3), 12, (9, 3)), ((20, 20), 13, (6, 6)),
        ((9, 9, 1), 13, (6, 6, 1)),
    ],
)  # fmt: skip
def test_the_longest_documents_of_an_item_are_cut_until_it_fits(lengths, width, cut):
    item = [Piece(3, side, np.arange(length), np.ones(length, np.uint8)) for side, length in enumerate(lengths)]
    report = DataReport()
    fitted = fit(item, width, "split", report)
    assert tuple(len(piece.ids) for piece in fitted) == cut and [piece.side for piece in fitted] == [*range(len(lengths))]
    assert report.count("cut_row") == (cut != lengths)
    assert fit(item, width, "drop", DataReport()) == ([] if cut != lengths else item)


def test_an_item_of_which_a_side_lost_its_targets_goes_as_a_whole(tmp_path):
    row = {"prompt": "a long prompt " * 20, "chosen": " a", "rejected": " b" * 400}
    store = build_store([row, TEXTS], Tokenizer(tiny.tokenizer(), kinds=KINDS), 60, tmp_path)
    assert store.rows.tolist() == [1, 1] and store.report.count("masked_by_cut") == 1
