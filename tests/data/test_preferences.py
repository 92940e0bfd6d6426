"""A preference becomes an item of two documents, each as a row of its own kind would be, for
objectives that take it.
"""

import csv
import json
import math
import re

import numpy as np
import pytest

import tiny
from chronicals.config import DataSource
from chronicals.data import Tokenizer, TokenStore, build_store
from chronicals.data.kinds.preferences import PAIR_FIELDS, sides_of
from chronicals.data.making.documents import DocumentPiece, fit_item
from chronicals.data.reading.gate import DataError, DataReport
from data.stock_templates import names, record, shipped, with_template

KINDS = ("preference",)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


TEXTS = {"prompt": "what is 2?", "chosen": " two", "rejected": " a number"}
CHATS = {
    "prompt": [user("what is 2?")],
    "chosen": [assistant("two")],
    "rejected": [assistant("a number")],
}
ASKED = [user("hello"), assistant("good day"), user("what is 2?")]


@pytest.mark.parametrize(
    ("row", "prompt", "completions"),
    [
        (TEXTS, "what is 2?", [" two", " a number"]),
        (CHATS, CHATS["prompt"], [CHATS["chosen"], CHATS["rejected"]]),
        ({**CHATS, "prompt": "what is 2?"}, CHATS["prompt"], [CHATS["chosen"], CHATS["rejected"]]),
        (
            {**TEXTS, "prompt": CHATS["prompt"]},
            CHATS["prompt"],
            [[assistant(" two")], [assistant(" a number")]],
        ),
        (
            {"chosen": [*ASKED, assistant("two")], "rejected": [*ASKED, assistant("a number")]},
            ASKED,
            [[assistant("two")], [assistant("a number")]],
        ),
        (
            {
                "prompt": "hello",
                "chosen": [*ASKED, assistant("two")],
                "rejected": [*ASKED[:1], assistant("no")],
            },
            ASKED[:1],
            [[*ASKED[1:], assistant("two")], [assistant("no")]],
        ),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("b")]},
            [user("a")],
            [[assistant("b")], [assistant("b")]],
        ),
        (
            {"chosen": "Q: what is 2? A: two", "rejected": "Q: what is 2? A: a"},
            "Q: what is 2? A:",
            [" two", " a"],
        ),
        ({"chosen": "is it so? no", "rejected": "is it so? now"}, "is it so?", [" no", " now"]),
        ({"chosen": "yes it is", "rejected": "yes it is not"}, "yes it", [" is", " is not"]),
        ({"chosen": "A:\n\nit is", "rejected": "A:\n\nwho"}, "A:\n", ["\nit is", "\nwho"]),
        (
            {**CHATS, "messages": [*ASKED, assistant("two")]},
            CHATS["prompt"],
            [CHATS["chosen"], CHATS["rejected"]],
        ),
        (
            {"prompt": "a", "responses": ["b", "c", "d", "e"], "scores": [2, 3, 0.5, 3]},
            "a",
            ["c", "d"],
        ),
        (
            {
                "prompt": "a",
                "responses": [[assistant("b")], [assistant("c")]],
                "scores": np.array([1.0, -1.0]),
            },
            [user("a")],
            [[assistant("b")], [assistant("c")]],
        ),
        (
            {"prompt": [user("a")], "responses": ["b", "c"], "scores": [-2, -1]},
            [user("a")],
            [[assistant(x)] for x in "cb"],
        ),
    ],
)
def test_both_sides_go_on_from_one_prompt(row, prompt, completions):
    found = sides_of({**row, "source": "a book"}, "row 1")
    assert found == [
        {"source": "a book", "prompt": prompt, "completion": completion}
        for completion in completions
    ]


ANSWERS = {"chosen": "the answer is two", "rejected": "the answer is life"}
SAID = [[assistant("the answer is two")], [assistant("the answer is life")]]
HUMAN = [{"from": "human", "value": "what is 2?"}]
MESSAGES = {"chosen": assistant("two"), "rejected": {"from": "gpt", "value": "a number"}}


@pytest.mark.parametrize(
    ("row", "named", "prompt", "completions"),
    [
        ({"question": "what is 2?", **ANSWERS}, "question", "what is 2?", [*ANSWERS.values()]),
        ({"query": "what is 2?", **ANSWERS}, "query", "what is 2?", [*ANSWERS.values()]),
        (
            {"input": "what is 2?", "instruction": "", **ANSWERS},
            "input",
            "what is 2?",
            [*ANSWERS.values()],
        ),
        (
            {"instruction": "what is 2?", "input": "", **ANSWERS},
            "instruction",
            [user("what is 2?")],
            SAID,
        ),
        (
            {"instruction": "say it:", "input": "2", "history": [["hello", "good day"]], **ANSWERS},
            "instruction",
            [*ASKED[:2], user("say it:\n\n2")],
            SAID,
        ),
        (
            {"prompt": "2?", "history": [["hello", "good day"]], **ANSWERS},
            None,
            [*ASKED[:2], user("2?")],
            SAID,
        ),
        (
            {"question": "2?", "history": '[["hello", "good day"]]', **ANSWERS},
            "question",
            [*ASKED[:2], user("2?")],
            SAID,
        ),
        (
            {"question": "what is 2?", "history": [], **ANSWERS},
            "question",
            "what is 2?",
            [*ANSWERS.values()],
        ),
        (
            {"question": "what is 2?", "history": "[]", **ANSWERS},
            "question",
            "what is 2?",
            [*ANSWERS.values()],
        ),
        ({"messages": ASKED, **ANSWERS}, "messages", ASKED, SAID),
        ({"conversations": json.dumps(HUMAN), **ANSWERS}, "conversations", HUMAN, SAID),
        (
            {"conversations": HUMAN, **MESSAGES},
            "conversations",
            HUMAN,
            [[MESSAGES["chosen"]], [MESSAGES["rejected"]]],
        ),
        (
            {"messages": user("what is 2?"), **MESSAGES},
            "messages",
            [user("what is 2?")],
            [[m] for m in MESSAGES.values()],
        ),
        (
            {"prompt": user("what is 2?"), **MESSAGES},
            None,
            [user("what is 2?")],
            [[m] for m in MESSAGES.values()],
        ),
        (
            {"prompt": "what is 2?", **MESSAGES, "question": "?"},
            None,
            [user("what is 2?")],
            [[m] for m in MESSAGES.values()],
        ),
        (
            {"question": "what is 2?", "responses": ["a", "b"], "scores": [1, 2]},
            "question",
            "what is 2?",
            ["b", "a"],
        ),
        (
            {
                "messages": [*ASKED, assistant("two")],
                "question": "?",
                "chosen": [*ASKED, assistant("two")],
                "rejected": [*ASKED, assistant("a")],
            },
            None,
            ASKED,
            [[assistant("two")], [assistant("a")]],
        ),
        (
            {
                "conversations": HUMAN,
                "chosen": [user("what is 2?"), assistant("two")],
                "rejected": [user("what is 2?"), assistant("a")],
            },
            None,
            [user("what is 2?")],
            [[assistant("two")], [assistant("a")]],
        ),
        (
            {
                "prompt": [user("what is 2?")],
                "chosen": [user("what is 2?"), assistant("two")],
                "rejected": [user("what is 2?"), assistant("a")],
            },
            None,
            [user("what is 2?")],
            [[assistant("two")], [assistant("a")]],
        ),
    ],
)
def test_the_prompt_is_found_under_the_names_that_people_give_it(row, named, prompt, completions):
    """And told; what the answers begin with is not taken for it."""
    told = []
    found = sides_of({**row, "source": "a book"}, "row 1", told.append)
    assert found == [
        {"source": "a book", "prompt": prompt, "completion": completion}
        for completion in completions
    ]
    assert told == [named] * (named is not None)


def test_a_question_is_in_the_tokens_of_both_sides(tmp_path):
    """The same as under its usual name, and counted."""
    encoder = Tokenizer(tiny.tokenizer(), kinds=KINDS)
    store = build_store([{"question": "what is 2?", **ANSWERS}], encoder, 64, tmp_path)
    usual = build_store([{"prompt": "what is 2?", **ANSWERS}], encoder, 64, tmp_path)
    assert store.hashes.tolist() == usual.hashes.tolist()
    assert store.report.findings["columns_recognised"].example == "row 1: question is the prompt"
    assert "columns_recognised" not in usual.report.findings


def test_an_instruction_is_rendered_as_it_is_in_fine_tuning(tmp_path):
    row = {"system": "be kind", "instruction": "what is 2?", "input": "quickly", **ANSWERS}
    store = build_store([row], Tokenizer(tiny.tokenizer(), kinds=KINDS), 128, tmp_path)
    for number, answer in enumerate(ANSWERS.values()):
        trained = {
            "system": "be kind",
            "instruction": "what is 2?",
            "input": "quickly",
            "output": answer,
        }
        found = store.whole_document(number)
        expected = Tokenizer(tiny.tokenizer()).encode(trained, "row")
        assert (found[0].tolist(), found[1].tolist()) == tuple(map(list, expected))
        assert "what is 2?\n\nquickly" in tiny.tokenizer().decode(found[0])


SYSTEM = {"role": "system", "content": "be kind"}
TWO = assistant("two")
NUMBER = assistant("a number")
PARTS = {"role": "user", "content": [{"type": "text", "text": "what is 2?"}]}


def call(*given, content=None):
    """Of a tool; what it is given is written as JSON text by some."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": each}} for each in given]
    return {"role": "assistant", "content": content, "tool_calls": calls}


WRONG = {"role": "tool", "content": "an error"}


def sides(*before):
    """Both answers behind what a row of conversations has before them."""
    return {"chosen": [*before, TWO], "rejected": [*before, NUMBER]}


@pytest.mark.parametrize(
    ("row", "prompt", "completions"),
    [
        ({"prompt": [SYSTEM, ASKED[0]], **sides(ASKED[0])}, [SYSTEM, ASKED[0]], [[TWO], [NUMBER]]),
        ({"prompt": [SYSTEM, ASKED[0]], **sides(*ASKED)}, [SYSTEM, *ASKED], [[TWO], [NUMBER]]),
        ({"prompt": ASKED, **sides(*ASKED[2:])}, ASKED, [[TWO], [NUMBER]]),
        ({"prompt": ASKED[2:], **sides(SYSTEM, *ASKED)}, [SYSTEM, *ASKED], [[TWO], [NUMBER]]),
        ({"prompt": "what is 2?", **sides(*ASKED)}, ASKED, [[TWO], [NUMBER]]),
        ({"prompt": "hello", **sides(SYSTEM, *ASKED)}, [SYSTEM, *ASKED], [[TWO], [NUMBER]]),
        ({"prompt": "what is 2? ", **sides(ASKED[2])}, ASKED[2:], [[TWO], [NUMBER]]),
        ({"prompt": "what is 2?", **sides(PARTS)}, [PARTS], [[TWO], [NUMBER]]),
        ({"prompt": "", **sides(ASKED[2])}, ASKED[2:], [[TWO], [NUMBER]]),
        ({"prompt": [*ASKED, TWO], **sides(*ASKED)}, ASKED, [[TWO], [NUMBER]]),
        ({"prompt": [SYSTEM], **sides(ASKED[0])}, [SYSTEM], [[ASKED[0], TWO], [ASKED[0], NUMBER]]),
        (
            {"prompt": ASKED[2:], "chosen": [ASKED[2], TWO], "rejected": [NUMBER]},
            ASKED[2:],
            [[TWO], [NUMBER]],
        ),
        (
            {"prompt": "what is 2?", "chosen": [ASKED[2], TWO], "rejected": "a number"},
            ASKED[2:],
            [[TWO], [NUMBER]],
        ),
        ({"conversations": json.dumps(HUMAN), **sides(ASKED[2])}, ASKED[2:], [[TWO], [NUMBER]]),
        (
            {"instruction": "what is", "input": "2?", **sides(user("what is\n\n2?"))},
            [user("what is\n\n2?")],
            [[TWO], [NUMBER]],
        ),
        (
            {
                "prompt": "what is 2?",
                "chosen": [user("what is 2?\n"), TWO],
                "rejected": [HUMAN[0], NUMBER],
            },
            [user("what is 2?\n")],
            [[TWO], [NUMBER]],
        ),
        (
            {"chosen": [user("what is 2? "), TWO], "rejected": [ASKED[2], NUMBER]},
            [user("what is 2? ")],
            [[TWO], [NUMBER]],
        ),
        (
            {
                "prompt": [ASKED[2], call({"x": 1}), WRONG],
                "chosen": [call({"x": 2}), WRONG, TWO],
                "rejected": [NUMBER],
            },
            [ASKED[2], call({"x": 1}), WRONG],
            [[call({"x": 2}), WRONG, TWO], [NUMBER]],
        ),
        (
            {
                "prompt": [ASKED[2], call({"x": 1}), WRONG],
                **sides(call('{"x":1}', content=""), WRONG),
            },
            [ASKED[2], call('{"x":1}', content=""), WRONG],
            [[TWO], [NUMBER]],
        ),
        (
            {
                "prompt": [ASKED[2], call({"x": 1, "y": 2}), WRONG],
                **sides(call('{"y": 2, "x": 1}'), WRONG),
            },
            [ASKED[2], call('{"y": 2, "x": 1}'), WRONG],
            [[TWO], [NUMBER]],
        ),
        (
            {"chosen": [{**ASKED[2], "name": None}, TWO], "rejected": [ASKED[2], NUMBER]},
            [{**ASKED[2], "name": None}],
            [[TWO], [NUMBER]],
        ),
        (
            {"prompt": "2?", "history": np.array([["hello", "good day"]], object), **sides()},
            [*ASKED[:2], user("2?")],
            [[TWO], [NUMBER]],
        ),
    ],
)
def test_a_prompt_that_answers_repeat_stands_once(row, prompt, completions):
    """Whole, its end, or the last question of what both conversations begin with, none of which
    is trained.
    """
    found = sides_of(row, "row 1")
    assert found == [{"prompt": prompt, "completion": completion} for completion in completions]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "what is 3?", **sides(ASKED[2])},
        {"prompt": "a rule. what is 2?", **sides(ASKED[2])},
        {"prompt": [SYSTEM, ASKED[2]], **sides({**SYSTEM, "content": "be wise"}, ASKED[2])},
        {"prompt": ASKED, "chosen": [*ASKED, TWO], "rejected": [ASKED[0], NUMBER]},
        {"prompt": "what is 2?", "chosen": [SYSTEM, ASKED[2], TWO], "rejected": [NUMBER]},
        {
            "prompt": "what is 2?",
            "chosen": [user("what is 3?"), TWO],
            "rejected": [ASKED[2], NUMBER],
        },
    ],
)
def test_an_answer_that_asks_something_else_first_is_refused(row):
    words = (
        "row 1: chosen and rejected: the question before the answer is not that of prompt; "
        "leave prompt out"
    )
    with pytest.raises(DataError, match=words) as refused:
        sides_of(row, "row 1")
    assert refused.value.rule == "other_prompt"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"chosen": "two", "rejected": "three"},
            "no_common_prompt: chosen and rejected have no prompt, and begin with no",
        ),
        (
            {"chosen": " two", "rejected": " a"},
            "no_common_prompt: chosen and rejected have no prompt",
        ),
        (
            {"chosen": ASKED, "rejected": ASKED[2:]},
            "no_common_prompt: chosen and rejected begin with different messages",
        ),
        (
            {"chosen": ASKED, "rejected": "a"},
            "missing_field: chosen and rejected need a prompt, or must both be",
        ),
        (
            {"prompt": "a", "chosen": 3, "rejected": "b"},
            "wrong_type: chosen must be text or a list of messages, this is int",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "empty_answer: rejected is empty"),
        (
            {"prompt": "a", "chosen": [TWO, user("b")], "rejected": [TWO]},
            "no_assistant_turn: chosen does not end with",
        ),
        (
            {"chosen": [*ASKED, TWO], "rejected": ASKED},
            "no_assistant_turn: rejected does not end with the assistant",
        ),
        (
            {"prompt": [user("a")], "chosen": [], "rejected": [assistant("b")]},
            "empty_answer: chosen is empty",
        ),
        (
            {"question": "a", "query": "b", **ANSWERS},
            "missing_field: question and query may both be the prompt; name it: col",
        ),
        (
            {"messages": [user("a"), assistant("b")], **ANSWERS},
            "missing_field: messages ends with the assistant, so that",
        ),
        (
            {"messages": "what is 2?", **ANSWERS},
            "wrong_type: messages must be a list of messages, this is str",
        ),
        ({"instruction": ["a"], **ANSWERS}, "wrong_type: instruction must be text, this is list"),
        (
            {"chosen": assistant("a"), "rejected": assistant("b")},
            "no_common_prompt: chosen and rejected begin with different",
        ),
        (
            {"prompt": "a", "responses": ["b", "c"], "scores": [1]},
            "unusable_scores: 2 responses and 1 scores",
        ),
        (
            {"prompt": "a", "responses": ["b"], "scores": [1]},
            "unusable_scores: responses has 1, of which no pair",
        ),
        (
            {"prompt": "a", "responses": ["b", "c"], "scores": [1, math.nan]},
            "unusable_scores: score 2 is nan, not a finite",
        ),
        (
            {"prompt": "a", "responses": ["b", "c"], "scores": [None, 1]},
            "unusable_scores: score 1 is None, not a finite",
        ),
        (
            {"prompt": "a", "responses": ["b", "c"], "scores": ["1", 2]},
            "unusable_scores: score 1 is '1', not a finite",
        ),
        (
            {"prompt": "a", "responses": "b", "scores": [1, 2]},
            "wrong_type: responses must be a list, this is str",
        ),
        (
            {"prompt": "a", "responses": '["b", "c"', "scores": [1, 2]},
            "wrong_type: responses must be a list, this is str",
        ),
        (
            {"prompt": "a", "responses": '{"b": 1}', "scores": [1, 2]},
            "wrong_type: responses must be a list, this is str",
        ),
        (
            {"prompt": "a", "responses": ["b", "c"], "scores": "12"},
            "wrong_type: scores must be a list, this is str",
        ),
        (
            {"prompt": "a", "responses": ["b", "c"], "scores": "[1, NaN]"},
            "unusable_scores: score 2 is nan, not a finite",
        ),
        (
            {"prompt": "a", "responses": ["b", "c"], "scores": [2, 2.0]},
            "tied_scores: all 2 scores are 2",
        ),
    ],
)
def test_what_is_no_pair_is_refused(row, reason):
    rule, _, message = reason.partition(": ")
    with pytest.raises(DataError, match=f"row 1: {message}") as refused:
        sides_of(row, "row 1")
    assert refused.value.rule == rule


def test_a_row_with_messages_beside_its_pair_is_a_pair(tmp_path):
    """As in UltraFeedback, whose ``messages`` are the prompt and the chosen answer."""
    row = {
        **CHATS,
        "messages": [*CHATS["prompt"], *CHATS["chosen"]],
        "score_chosen": 8.0,
        "score_rejected": 6.0,
    }
    store = build_store([row], Tokenizer(tiny.tokenizer(), kinds=KINDS), 64, tmp_path)
    alone = build_store([CHATS], Tokenizer(tiny.tokenizer(), kinds=KINDS), 64, tmp_path)
    assert store.items.tolist() == [0, 3] and store.hashes.tolist() == alone.hashes.tolist()
    assert build_store([row], Tokenizer(tiny.tokenizer()), 64, tmp_path).items is None


@pytest.mark.parametrize(
    "names", [["prompt"], ["chosen", "rejected"], ["prompt", "chosen", "rejected"]]
)
def test_conversations_in_cells_of_json_text_are_read(names, tmp_path):
    """A table has texts alone; a prompt, which both begin with, need not have a column."""
    whole = {name: [*ASKED, *CHATS[name]] for name in PAIR_FIELDS}
    encoder = Tokenizer(tiny.tokenizer(), kinds=KINDS)
    for row in (CHATS, whole) if len(names) == 2 else (CHATS,):
        cells = {**row, **{name: json.dumps(row[name]) for name in names}}
        found, expected = (build_store([each], encoder, 128, tmp_path) for each in (cells, row))
        assert len(found) and found.hashes.tolist() == expected.hashes.tolist()


def test_a_table_of_conversations_is_one_of_pairs(tmp_path):
    with open(tmp_path / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows([CHATS, [json.dumps(value) for value in CHATS.values()]])
    encoder = Tokenizer(tiny.tokenizer(), kinds=KINDS)
    found = build_store(DataSource(str(tmp_path / "pairs.csv")), encoder, 64, tmp_path)
    assert found.hashes.tolist() == build_store([CHATS], encoder, 64, tmp_path).hashes.tolist()


def test_ranked_lists_are_stored_as_pairs(tmp_path):
    ranked = {
        "prompt": CHATS["prompt"],
        "responses": ["none", "a number", "two"],
        "scores": [2, 1, 5],
    }
    encoder = Tokenizer(tiny.tokenizer(), kinds=KINDS)
    assert (
        build_store([ranked], encoder, 64, tmp_path).hashes[0]
        == build_store([CHATS], encoder, 64, tmp_path).hashes[0]
    )


def test_ranked_lists_in_cells_of_json_text_are_read(tmp_path):
    ranked = {
        "prompt": CHATS["prompt"],
        "responses": ["none", CHATS["rejected"], CHATS["chosen"]],
        "scores": [2, 1, 5.5],
    }
    with open(tmp_path / "ranked.csv", "w", newline="") as file:
        csv.writer(file).writerows([ranked, [json.dumps(value) for value in ranked.values()]])
    encoder = Tokenizer(tiny.tokenizer(), kinds=KINDS)
    store = build_store(DataSource(str(tmp_path / "ranked.csv")), encoder, 64, tmp_path)
    assert store.hashes.tolist() == build_store([CHATS], encoder, 64, tmp_path).hashes.tolist()


def test_columns_of_ranked_lists_are_named(tmp_path):
    """By the usual setting; what else is in the row does not make it another kind."""
    rows = [
        {
            "question": "what is 2?",
            "answers": [" two", " a number"],
            "ratings": [5, 1],
            "text": "a text",
        }
    ]
    path = tmp_path / "ranked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DataSource(
        str(path), columns={"prompt": "question", "responses": "answers", "scores": "ratings"}
    )
    store = build_store(source, Tokenizer(tiny.tokenizer(), kinds=KINDS), 64, tmp_path)
    assert (
        store.hashes[0]
        == build_store([TEXTS], Tokenizer(tiny.tokenizer(), kinds=KINDS), 64, tmp_path).hashes[0]
    )


def test_several_turns_with_tools_are_those_of_two_chats(tmp_path):
    name = "qwen3" if "qwen3" in names() else "qwen2_5"
    tokenizer = with_template(shipped(name))
    whole = record("tools")
    asked = whole["messages"][:-1]
    answer = whole["messages"][-1]
    other = {**answer, "content": "another answer"}
    row = {"tools": whole["tools"], "chosen": [*asked, answer], "rejected": [*asked, other]}
    store = build_store([row], Tokenizer(tokenizer, kinds=KINDS), 4096, tmp_path)
    alone = Tokenizer(tokenizer)
    sides = [
        {"tools": whole["tools"], "prompt": asked, "completion": [last]} for last in (answer, other)
    ]
    for number, side in enumerate(sides):
        ids, trained = alone.encode(side, "row")
        found = store.whole_document(number)
        assert (found[0].tolist(), found[1].tolist()) == (list(ids), list(trained))
    assert "measure" in tokenizer.decode(store.whole_document(0)[0])


def test_answers_that_the_cut_makes_equal_go(tmp_path):
    row = {"prompt": "a", "chosen": " b" * 90 + " c", "rejected": " b" * 90 + " d"}
    store = build_store([row, TEXTS], Tokenizer(tiny.tokenizer(), kinds=KINDS), 60, tmp_path)
    assert store.rows.tolist() == [1, 1] and store.report.findings["identical_answers"].rows == [1]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_pair_is_one_item_of_two_documents(tmp_path, processes):
    rows = [TEXTS, CHATS, {**TEXTS, "chosen": ""}, {"prompt": "a", "completion": "b"}, TEXTS]
    encoder = Tokenizer(tiny.tokenizer(), kinds=KINDS)
    built = build_store(rows, encoder, 64, tmp_path, processes=processes)
    store = TokenStore.open(built.path)
    assert store.items.tolist() == [0, 2, 5, 7] and store.columns["side"].tolist() == [
        0,
        1,
        0,
        1,
        2,
        0,
        1,
    ]
    assert store.rows.tolist() == [0, 0, 1, 1, 1, 4, 4]
    alone = Tokenizer(tiny.tokenizer())
    expected = [
        alone.encode(side, "row") for row in (TEXTS, CHATS) for side in sides_of(row, "row")
    ]
    for number, (ids, trained) in enumerate(expected):
        found = store.whole_document(number)
        assert (found[0].tolist(), found[1].tolist()) == (ids, trained)
    assert store.hashes[0] == store.hashes[1] == store.hashes[5] != store.hashes[2]
    findings = store.report.findings
    assert (
        findings["empty_answer"].count
        == findings["unusable_kind"].count
        == findings["duplicate_row"].count
        == 1
    )
    assert (
        "row 4: is of kind completion; the objective takes preference"
        in findings["unusable_kind"].example
    )
    assert store.report.forms == {"completion": 2, "chat": 1} and store.chats
    assert store.report.kinds == {"preference": 4, "completion": 1} and store.rows_by_kind == {
        "preference": 3
    }


SYSTEM_LAST = {**CHATS, "chosen": [assistant("two"), SYSTEM, user("why?"), assistant("so")]}
TWICE = [assistant("two"), assistant("or so")]


@pytest.mark.parametrize(
    ("row", "rules"),
    [
        (TEXTS, {"plain_completion"}),
        (
            {**TEXTS, "system": "be kind", "tools": [{"name": "measure"}]},
            {"plain_completion", "unread_field"},
        ),
        (
            {**CHATS, "chosen": TWICE, "rejected": [*TWICE, assistant("no")]},
            {"consecutive_answers"},
        ),
        (
            {**SYSTEM_LAST, "rejected": [*SYSTEM_LAST["chosen"], user("?"), assistant("a")]},
            {"late_system_message"},
        ),
    ],
)
def test_what_both_sides_have_is_counted_as_one_row(row, rules, tmp_path):
    """A share is of the rows: it never is above one, and a limit of it holds."""
    report = build_store(
        [row, CHATS], Tokenizer(tiny.tokenizer(), kinds=KINDS), 512, tmp_path
    ).report
    assert {
        rule: (found.count, found.rows) for rule, found in report.findings.items()
    } == dict.fromkeys(rules, (1, [1]))
    report.check("train", dict.fromkeys(rules, 0.5))
    assert sum(report.kinds.values()) == 2


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ({"prompt": "frage"}, {"frage": "what is 2?", **ANSWERS}),
        ({"prompt": "question"}, {"question": "what is 2?", "query": "another", **ANSWERS}),
        (
            {"prompt": "query"},
            {"query": "what is 2?", "responses": [*ANSWERS.values()], "scores": [2, 1]},
        ),
    ],
)
def test_a_prompt_that_is_named_leaves_the_answers_their_names(columns, row, tmp_path):
    """As errors about prompts advise."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    store = build_store(
        DataSource(str(path), columns=columns),
        Tokenizer(tiny.tokenizer(), kinds=KINDS),
        128,
        tmp_path,
    )
    assert len(store) >= 2 and not {"unusable_kind", "missing_field"} & store.report.findings.keys()


JUDGES = ("unpaired preference",)
TAKES = "the objective takes preference: chosen and rejected, or responses and scores"


@pytest.mark.parametrize(
    ("kinds", "row", "rule", "words"),
    [
        (
            KINDS,
            {"prompt": "a", "completion": "b", "label": True},
            "unusable_kind",
            f"take objective='kto'.*{TAKES}",
        ),
        (
            KINDS,
            {"messages": [*ASKED, TWO], "label": True},
            "unusable_kind",
            f"take objective='kto'.*{TAKES}",
        ),
        (
            KINDS,
            {**ANSWERS, "prompt": "[{'role': 'user', 'content': 'a'}]"},
            "wrong_type",
            "prompt holds messages as Python",
        ),
        (
            KINDS,
            {**TEXTS, "chosen": "[{'content': 'a', 'role': 'assistant'}]"},
            "wrong_type",
            "chosen holds messages as",
        ),
        (
            KINDS,
            {"prompt": "a"},
            "unusable_kind",
            f"columns={{'chosen': 'THEIR_BETTER', 'rejected': .*{TAKES}",
        ),
        (KINDS, {"text": "a"}, "unusable_kind", f"is of kind text; {TAKES}"),
        (
            KINDS,
            {"prompt": "a", "responses": ["b", "c"]},
            "missing_field",
            "has responses, but no scores; .*{'scores': 'THE",
        ),
        (
            KINDS,
            {"question": "a", "responses": ["b", "c"]},
            "missing_field",
            "has responses, but no scores",
        ),
        (KINDS, {"prompt": "a", "scores": [1, 2]}, "missing_field", "has scores, but no responses"),
        (
            KINDS,
            {"question": "a", "rejected": "b"},
            "missing_field",
            "has rejected, but no chosen; a pair is of both",
        ),
        (
            KINDS,
            {"asked": "a"},
            "missing_field",
            "expected chosen and rejected, or responses and scores",
        ),
        (
            JUDGES,
            TEXTS,
            "unusable_kind",
            "make two rows of it, .*the objective takes unpaired preference: an answer",
        ),
        (
            JUDGES,
            {**CHATS, "messages": [*ASKED, TWO]},
            "unusable_kind",
            "take an objective of pairs for these",
        ),
        (
            JUDGES,
            {"prompt": "a"},
            "unusable_kind",
            "{'completion': 'THEIR_ANSWER', 'label': 'THEIR_LABEL'}",
        ),
        (
            JUDGES,
            {"text": "a"},
            "unusable_kind",
            "is of kind text; the objective takes unpaired preference: an answer",
        ),
        (JUDGES, {"asked": "a"}, "missing_field", "expected an answer .* and its label"),
    ],
)
def test_what_the_objective_does_not_take_is_told_in_its_words(kinds, row, rule, words, tmp_path):
    finding = build_store(
        [row], Tokenizer(tiny.tokenizer(), kinds=kinds), 64, tmp_path
    ).report.findings[rule]
    assert re.search(f"row 1: .*{words}", finding.example), finding.example
    assert "pretraining" not in finding.example and "rollouts" not in finding.example


JUDGED_CHATS = [
    {"prompt": [user(f"what is {n}?")], "completion": [TWO], "label": True} for n in (2, 3)
]


@pytest.mark.parametrize(
    ("kind", "rows"), [("preference", [CHATS] * 2), ("unpaired preference", JUDGED_CHATS)]
)
def test_a_row_whose_documents_all_begin_with_two_bos_is_one(kind, rows, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = "<s><s>" + tokenizer.chat_template
    finding = build_store(rows, Tokenizer(tokenizer, kinds=(kind,)), 128, tmp_path).report.findings[
        "double_bos"
    ]
    assert (finding.count, finding.rows) == (2, [1, 2])


def test_the_rejected_side_tells_rows_apart(tmp_path):
    store = build_store(
        [TEXTS, {**TEXTS, "rejected": " three"}],
        Tokenizer(tiny.tokenizer(), kinds=KINDS),
        64,
        tmp_path,
    )
    assert store.hashes[0] != store.hashes[2] and not store.report.count("duplicate_row")


def test_other_objectives_refuse_pairs_as_before(tmp_path):
    store = build_store([TEXTS, {"text": "a text"}], Tokenizer(tiny.tokenizer()), 64, tmp_path)
    assert len(store) == 1 and store.items is None and not store.columns
    assert "holds a preference pair" in store.report.findings["unusable_kind"].example
    assert json.loads(store.path.with_suffix(".json").read_text())["report"]["kinds"] == {
        "preference": 1,
        "text": 1,
    }


@pytest.mark.parametrize(
    ("lengths", "width", "cut"),
    [
        ((5, 7), 12, (5, 7)),
        ((5, 7), 11, (5, 6)),
        ((3, 20), 12, (3, 9)),
        ((20, 3), 12, (9, 3)),
        ((20, 20), 13, (6, 6)),
        ((9, 9, 1), 13, (6, 6, 1)),
    ],
)
def test_the_longest_documents_of_an_item_are_cut_until_it_fits(lengths, width, cut):
    item = [
        DocumentPiece(3, side, np.arange(length), np.ones(length, np.uint8))
        for side, length in enumerate(lengths)
    ]
    report = DataReport()
    fitted = fit_item(item, width, "split", report)
    assert tuple(len(piece.ids) for piece in fitted) == cut and [
        piece.side for piece in fitted
    ] == [*range(len(lengths))]
    assert report.count("cut_row") == (cut != lengths)
    assert fit_item(item, width, "drop", DataReport()) == ([] if cut != lengths else item)


def test_an_item_of_which_a_side_lost_its_targets_goes_as_a_whole(tmp_path):
    row = {"prompt": "a long prompt " * 20, "chosen": " a", "rejected": " b" * 400}
    store = build_store([row, TEXTS], Tokenizer(tiny.tokenizer(), kinds=KINDS), 60, tmp_path)
    assert store.rows.tolist() == [1, 1] and store.report.count("masked_by_cut") == 1
