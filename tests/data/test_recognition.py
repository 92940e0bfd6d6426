"""A judged answer becomes an item: the answer, and the answer to another prompt, which the
divergence is estimated by.
"""

import csv
import json

import numpy as np
import pytest

import tiny
from chronicals.config import ChronicalsConfig, DataSource
from chronicals.data import BatchStream, Tokenizer, build_store
from chronicals.data.kinds.preferences import ROWS_LOOKED_BACK, nearest_other_prompts
from chronicals.data.reading import records
from chronicals.data.reading.records import CHUNK_ROWS

KINDS = ("unpaired preference",)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def stored(rows, folder, width=128, **changes):
    return build_store(rows, Tokenizer(tiny.tokenizer(), kinds=KINDS), width, folder, **changes)


def texts(store):
    """Of every item the own answer and the mismatched one, with their prompts, as text."""
    found = [
        tiny.tokenizer().decode(store.whole_document(n)[0])
        for n in range(len(store))
        if store.columns["shared"][n] >= 0
    ]
    return [*zip(found[::2], found[1::2], strict=True)]


JUDGED = {"prompt": "what is 2?", "completion": " two", "label": True}


@pytest.mark.parametrize("label", [None, "yes", 2, float("nan"), "", "2", "1.5", "true false"])
def test_a_label_that_is_missing_or_wrong_is_told(label, tmp_path):
    rows = [JUDGED, {**JUDGED, "label": label}, {**JUDGED, "completion": " a", "label": 0.0}]
    report = build_store(rows, Tokenizer(tiny.tokenizer(), kinds=KINDS), 64, tmp_path).report
    finding = report.findings["unusable_label"]
    said = (
        None if label != label or label == "" else label
    )  # a table's words for a label that is missing
    assert (
        finding.rows == [2]
        and f"label={said!r}: must be true for a good answer or false" in finding.example
    )


@pytest.mark.parametrize(
    ("good", "bad"),
    [("true", "false"), ("TRUE", " False "), ("1", "0"), (" 1\t", "0 "), ("1.0", "0.0")],
)
def test_labels_of_a_table_are_texts(good, bad, tmp_path):
    with open(tmp_path / "judged.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [JUDGED, ["what is 2?", " two", good], ["what is 3?", " a number", bad]]
        )
    store = stored(DataSource(str(tmp_path / "judged.csv")), tmp_path)
    other = {"prompt": "what is 3?", "completion": " a number", "label": False}
    assert (
        store.columns["label"].tolist()
        == stored([JUDGED, other], tmp_path).columns["label"].tolist()
    )
    assert len(texts(store)) == 2 and "unusable_label" not in store.report.findings


def test_judged_conversations_may_repeat_their_prompt(tmp_path):
    """The mismatched answer is what comes behind the prompt of the row before."""
    rows = [
        {"prompt": text, "completion": [user(text), assistant(answer)], "label": answer == "two"}
        for text, answer in (("what is 2?", "two"), ("what is 3?", "a number"))
    ]
    encoder = Tokenizer(tiny.tokenizer(), kinds=KINDS)
    store = build_store(rows, encoder, 128, tmp_path)
    expected = [
        ("what is 2?", "two"),
        ("what is 2?", "a number"),
        ("what is 3?", "a number"),
        ("what is 3?", "two"),
    ]
    found = [
        store.whole_document(n)[0].tolist()
        for n in range(len(store))
        if store.columns["shared"][n] >= 0
    ]
    alone = Tokenizer(tiny.tokenizer())
    assert found == [
        alone.encode({"messages": [user(q), assistant(a)]}, "row")[0] for q, a in expected
    ]


@pytest.mark.parametrize("place", [1, 3])
def test_an_unusable_answer_is_given_to_no_other_row(place, tmp_path, set_constants):
    """Nor where it is the last of the rows before a chunk."""
    set_constants(records, CHUNK_ROWS=4)
    rows = [
        {
            "prompt": [user(f"what is {n}?")],
            "completion": [assistant(f"a {n}")],
            "label": n % 2 == 0,
        }
        for n in range(8)
    ]
    rows[place]["completion"] = [{"role": "narrator", "content": "x"}, assistant("y")]
    store = build_store(rows, Tokenizer(tiny.tokenizer(), kinds=KINDS), 128, tmp_path)
    assert store.report.findings["unknown_role"].rows == [place + 1]
    assert len(texts(store)) == 7 and not any(
        "narrator" in text for item in texts(store) for text in item
    )


@pytest.mark.parametrize("what", ["not trained", "refused"])
def test_an_answer_without_a_target_takes_no_other_row_along(what, tmp_path):
    rows = [
        {
            "prompt": [user(f"what is {n}?")],
            "completion": [assistant(f"a {n}")],
            "label": n % 2 == 0,
        }
        for n in range(4)
    ]
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    rows[1]["completion"] = (
        [{**assistant("x"), "train": False}] if what == "not trained" else [call]
    )
    store = build_store(rows, Tokenizer(tiny.tokenizer(), kinds=KINDS), 128, tmp_path)
    (finding,) = [found for found in store.report.findings.values() if 2 in found.rows]
    assert finding.rows == [2] and len(texts(store)) == 3
    assert [other.count("a 0") for _, other in texts(store)] == [0, 1, 0]


def test_a_row_with_no_other_answer_goes_by_its_own_rule(tmp_path):
    rows = [
        {
            "prompt": [user(f"what is {n}?")],
            "completion": [assistant(f"a {n}")],
            "label": n % 2 == 0,
        }
        for n in range(2)
    ]
    rows[1]["completion"][0]["train"] = False
    store = build_store(rows, Tokenizer(tiny.tokenizer(), kinds=KINDS), 128, tmp_path)
    found = {rule: finding.rows for rule, finding in store.report.findings.items()}
    assert len(store) == 0 and found.items() >= {"no_other_prompt": [1], "masked_row": [2]}.items()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("what is 2?"), assistant("two")]},
        {
            "conversations": [
                {"from": "human", "value": "what is 2?"},
                {"from": "gpt", "value": "two"},
            ]
        },
        {"messages": json.dumps([user("what is 2?"), assistant("two")])},
        {"completion": [user("what is 2?"), assistant("two")]},
        {"completion": json.dumps([user("what is 2?"), assistant("two")])},
        {"prompt": json.dumps([user("what is 2?")]), "completion": json.dumps([assistant("two")])},
        {"prompt": json.dumps([user("what is 2?")]), "response": "two"},
        {"prompt": [user("what is 2?")], "completion": assistant("two")},
        {"prompt": "what is 2?", "response": {"from": "gpt", "value": "two"}},
        {"messages": [user("what is 2?")], "completion": "two"},
        {"instruction": "what is 2?", "input": "", "output": "two"},
        {"instruction": "what is 2?", "response": "two"},
    ],
)
def test_a_judged_answer_is_found_where_people_write_it(row, tmp_path):
    """The last message of a conversation is what is judged."""
    rows = [
        {**row, "label": True},
        {"prompt": [user("what is 3?")], "completion": [assistant("three")], "label": False},
    ]
    usual = [
        {"prompt": [user("what is 2?")], "completion": [assistant("two")], "label": True},
        rows[1],
    ]
    store = stored(rows, tmp_path)
    expected = stored(usual, tmp_path)
    assert texts(store) == texts(expected) and len(texts(store)) == 2
    assert store.columns["label"].tolist() == expected.columns["label"].tolist()
    for number in range(len(store)):
        assert (store.whole_document(number)[1] == expected.whole_document(number)[1]).all()


def test_names_of_plain_questions_and_answers(tmp_path):
    rows = [{"question": f"what is {n}?", "answer": f" {n}", "label": n % 2} for n in (1, 2)]
    usual = [{"prompt": f"what is {n}?", "completion": f" {n}", "label": n % 2} for n in (1, 2)]
    store = stored(rows, tmp_path)
    assert texts(store) == texts(stored(usual, tmp_path))
    assert store.report.findings["columns_recognised"].count == 2


@pytest.mark.parametrize("prompt", ["what is 2? ", "hello", [user("what is 2?")]])
def test_a_judged_conversation_has_its_prompt_once(prompt, tmp_path):
    asked = [user("hello"), assistant("good day"), user("what is 2?")]
    other = {"prompt": [user("what is 3?")], "completion": [assistant("three")], "label": False}
    row = {"prompt": prompt, "completion": [*asked, assistant("two")], "label": True}
    usual = {"prompt": asked, "completion": [assistant("two")], "label": True}
    assert texts(stored([row, other], tmp_path)) == texts(stored([usual, other], tmp_path))


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"completion": "two", "label": True}, "missing_field"),
        ({"messages": [user("what is 2?")], "label": True}, "no_assistant_turn"),
        ({"messages": [assistant("two")], "label": True}, "no_common_prompt"),
        (
            {
                "prompt": "what is 3?",
                "completion": [user("what is 2?"), assistant("two")],
                "label": True,
            },
            "other_prompt",
        ),
        ({"messages": [user("what is 2?"), assistant("two")]}, "unusable_label"),
        ({"question": "what is 2?", "answer": "two"}, "unusable_label"),
        ({"text": "a text"}, "unusable_kind"),
    ],
)
def test_what_is_no_judged_answer_is_told(row, rule, tmp_path):
    rows = [{"prompt": f"what is {n}?", "completion": f" {n}", "label": n % 2} for n in range(4)]
    report = stored([*rows, row], tmp_path).report
    assert report.findings[rule].rows == [5], report.findings


def test_a_label_beside_a_chat_says_nothing_to_fine_tuning(tmp_path):
    row = {"messages": [user("what is 2?"), assistant("two")], "label": 3}
    assert build_store([row], Tokenizer(tiny.tokenizer()), 64, tmp_path).report.kinds == {"chat": 1}


# --- the answer to another prompt
# ------------------------------------------------------------------------------------


def rows_of(prompts):
    """Answered by their place."""
    return [
        {"prompt": [user(prompt)], "completion": [assistant(f"answer {n}")]}
        for n, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("prompts", "earlier", "others"),
    [
        ("abc", "", [1, 0, 1]),
        ("aabbb", "", [2, 2, 1, 1, 1]),
        ("abab", "", [1, 0, 1, 2]),
        ("aab", "cb", ["1", "1", 1]),
        ("aab", "ba", ["0", "0", 1]),
        ("aab", "aa", [2, 2, 1]),
        ("aa", "", [None, None]),
        ("aa", "aa", [None, None]),
        ("a", "", [None]),
        ("", "ab", []),
    ],
)
def test_it_is_of_the_nearest_row_before_that_asks_something_else(prompts, earlier, others):
    """A number in quotes is of the earlier rows."""
    rows = rows_of(prompts)
    before = rows_of(earlier)
    found = nearest_other_prompts(rows, before)
    expected = [
        None if at is None else before[int(at)] if isinstance(at, str) else rows[at]
        for at in others
    ]
    assert all(one is other for one, other in zip(found, expected, strict=True))


def test_prompts_are_the_same_whatever_their_dialect():
    rows = rows_of("aab")
    rows[1]["prompt"] = [{"from": "human", "value": "a"}]
    assert nearest_other_prompts(rows)[1] is rows[2]


def numbered(count, prompts):
    """Good and bad answers in turn; each prompt so many times side by side."""
    return [
        {
            "prompt": f"what is number {n // prompts} of them all?",
            "completion": f" it is {n}",
            "label": n % 2 == 0,
        }
        for n in range(count)
    ]


def pairs_of_numbers(store):
    """The number of the prompt and of the answer of each mismatched document."""
    words = [text.removesuffix("<|endoftext|>").split() for _, text in texts(store)]
    return [(int(said[said.index("number") + 1]), int(said[-1])) for said in words]


@pytest.mark.slow
@pytest.mark.parametrize("count", [CHUNK_ROWS + 1, CHUNK_ROWS + 3])
def test_answers_written_side_by_side_have_one_of_another_prompt(count, tmp_path):
    """Across the end of a chunk, too, of which the last may have one row alone."""
    store = stored(numbered(count, 2), tmp_path)
    found = pairs_of_numbers(store)
    assert len(found) == count and not store.report.count("no_other_prompt")
    assert found[:4] == [(0, 2), (0, 2), (1, 1), (1, 1)]
    assert found[2:] == [(n // 2, n // 2 * 2 - 1) for n in range(2, count)]


@pytest.mark.slow
def test_prompts_in_cells_of_json_text_have_the_same_other_answers(tmp_path):
    """Those of the rows before a chunk, too."""
    rows = [{**row, "prompt": [user(row["prompt"])]} for row in numbered(CHUNK_ROWS + 1, 2)]
    cells = [{**row, "prompt": json.dumps(row["prompt"])} for row in rows]
    assert texts(stored(cells, tmp_path)) == texts(stored(rows, tmp_path))


@pytest.mark.slow
def test_rows_without_another_prompt_near_them_are_left_out_and_told(tmp_path):
    rows = numbered(CHUNK_ROWS, 2) + [
        {**numbered(1, 1)[0], "completion": f" it is {n}"} for n in range(ROWS_LOOKED_BACK + 1)
    ]
    assert not stored(rows, tmp_path).report.count(
        "no_other_prompt"
    )  # the rows before the chunk ask something else
    alone = [{**row, "prompt": "what is number 0 of them all?"} for row in rows]
    store = stored(alone, tmp_path)
    assert store.report.count("no_other_prompt") == len(alone) and not len(store)
    assert store.report.level("no_other_prompt", {}) == "error"


@pytest.mark.slow
def test_rows_that_cannot_be_used_are_nobodys_other_answer(tmp_path):
    rows = numbered(CHUNK_ROWS + 1, 1)
    for broken in ({"completion": ""}, {"label": None}, {"prompt": None}):
        rows[CHUNK_ROWS - 1] = {**numbered(CHUNK_ROWS, 1)[-1], **broken}
        assert pairs_of_numbers(stored(rows, tmp_path))[-1] == (CHUNK_ROWS, CHUNK_ROWS - 2)


@pytest.mark.parametrize("overlong", ["cut", "drop"])
@pytest.mark.parametrize("prompt", ["what is 2?", "what is 2? " * 8])
def test_a_long_neighbour_does_not_cut_the_rows_own_answer(overlong, prompt, tmp_path):
    """It is cut to what is left itself, be the prompt shared or not."""
    rows = [
        {"prompt": [user(prompt)], "completion": [assistant("two")], "label": True},
        {"prompt": [user("3")], "completion": [assistant("three " * 60)], "label": False},
    ]
    width = 130
    store = stored(rows, tmp_path, width, overlong=overlong)
    (own, mismatched) = texts(store)[0]
    alone = Tokenizer(tiny.tokenizer()).encode(
        {"messages": [user(prompt), assistant("two")]}, "row"
    )[0]
    assert own == tiny.tokenizer().decode(alone)
    assert "three three" in mismatched and sum(store.lengths[store.rows == 0]) == width
    assert all(
        1 not in found.rows for found in store.report.findings.values()
    )  # the other one is too long by itself


@pytest.mark.parametrize("overlong", ["cut", "drop"])
@pytest.mark.parametrize("shared", [True, False])
def test_an_answer_that_fits_by_itself_is_whole_whatever_is_left(overlong, shared, tmp_path):
    """Where no target of the other one has room, be its prompt shared or not, it stands alone,
    behind a prompt of its own.
    """
    prompt = "2 " * 30 if shared else "2?"
    encoder = Tokenizer(tiny.tokenizer())
    rows = [
        {"prompt": p, "completion": said, "label": True}
        for p, said in ((prompt, " two" * 30), ("3?", " three"))
    ]
    ids, trained = encoder.encode({"prompt": prompt, "completion": " two" * 30}, "row")
    least = 2 if shared else len(ids) - sum(trained) + 1
    for spare in range(least + 1):
        store = stored(rows, tmp_path, len(ids) + spare, overlong=overlong)
        first, *others = np.flatnonzero(store.rows == 0)
        assert [part.tolist() for part in store.whole_document(first)] == [list(ids), list(trained)]
        assert not {"cut_row", "dropped_row"} & store.report.findings.keys()
        assert store.report.count("no_room_for_other") == (not others) == (spare < least)


def test_rows_without_another_answer_are_not_counted_among_those_that_have_one(tmp_path):
    """Nor do they take part in the mean of the divergence."""
    rows = numbered(8, 1)
    rows[3]["completion"] = " two" * 60
    width = len(Tokenizer(tiny.tokenizer()).encode({**rows[3], "label": None}, "row")[0])
    store = stored(rows, tmp_path, width)
    assert (np.bincount(store.rows) == 1).tolist() == [n == 3 for n in range(8)]
    config = ChronicalsConfig(max_seq_length=width, batch_size=8, gradient_accumulation_steps=1)
    (step,) = BatchStream(store, config, epochs=1).steps(count=1)
    assert (step.counts["items"], step.counts["mismatched_items"], step.counts["good_items"]) == (
        8,
        7,
        4,
    )


def test_an_answer_that_is_too_long_itself_leaves_a_target_of_the_other(tmp_path):
    rows = [
        {"prompt": [user("what is 2?")], "completion": [assistant("two " * 80)], "label": True},
        {"prompt": [user("what is 3?")], "completion": [assistant("three " * 3)], "label": False},
    ]
    store = stored(rows, tmp_path, 64)
    of_first = store.rows == 0
    targets = store.targets[of_first & (store.columns["shared"] >= 0)]
    assert targets[1] == 1 and targets[0] > 20 and store.lengths[of_first].sum() == 64
    assert store.report.findings["cut_row"].rows == store.report.findings["cut_stop"].rows == [1]


def test_a_row_is_the_same_whatever_stands_before_it(tmp_path):
    """Written twice it is found, and so is a held-out row that is trained on."""
    rows = numbered(4, 1)
    report = stored([*rows, rows[1]], tmp_path).report
    assert report.findings["duplicate_row"].rows == [5]
    one = stored(rows, tmp_path)
    other = stored(rows[::-1], tmp_path)
    assert np.unique(one.hashes).tolist() == np.unique(other.hashes).tolist()
