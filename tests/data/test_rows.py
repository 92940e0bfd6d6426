"""Rows of every dialect become the same messages; what is wrong is named with its rule, its row
and its message.
"""

import dataclasses
import json
import random

import numpy as np
import pyarrow as pa
import pytest

import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError, DataSource, Recipe
from chronicals.config.data_source import ROW_FIELDS
from chronicals.data import DataError, Tokenizer, build_store
from chronicals.data.kinds.messages import (
    ROLE_ALIASES,
    check_answers,
    conversation_oddities,
    refuse_media,
)
from chronicals.data.kinds.rows import kind_of, normalise, plain_row, texts_of, unread_fields
from chronicals.data.reading.records import KIND_FIELDS, READ_FIELDS

ASKED = "what is the answer?"
SAID = "forty two"
MESSAGES = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]
CALL = {
    "type": "function",
    "function": {"name": "measure", "arguments": {"thing": "table", "times": 2}},
}

NESTED: list = []
for _ in range(2000):
    NESTED = [NESTED]


def normal(record, where="row 1"):
    record = plain_row(record, where)
    return normalise(record, kind_of(record, where), where).record


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"messages": []}, "chat"),
        ({"conversations": []}, "chat"),
        ({"prompt": "a", "completion": "b"}, "completion"),
        ({"prompt": "a", "response": "b"}, "completion"),
        ({"prompt": [], "completion": []}, "chat"),
        ({"instruction": "a", "output": "b"}, "instruction"),
        ({"instruction": "a", "input": "", "output": "b", "text": "all of it"}, "instruction"),
        ({"text": "a"}, "text"),
        ({"input_ids": np.arange(3), "labels": None}, "tokens"),
        ({"text": "a", "messages": [], "id": 3}, "chat"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "messages": MESSAGES}, "chat"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"chosen": MESSAGES, "rejected": MESSAGES}, "preference"),
        ({"prompt": "a", "completion": "b", "label": False}, "unpaired preference"),
        ({"text": "a", "prompt": "b"}, "text"),
        ({"prompt": "b", "completion": None}, "prompt"),
    ],
)
def test_the_fields_of_a_row_tell_its_kind(record, kind):
    assert kind_of(record, "row 1") == kind
    assert kind in dict(KIND_FIELDS)


def test_an_unknown_kind_names_the_row_its_fields_and_what_is_expected():
    with pytest.raises(DataError) as error:
        kind_of({"asked": "a", "answer": "b"}, "rows.jsonl:7")
    message = str(error.value)
    assert message.startswith("rows.jsonl:7: unknown kind of row with fields ['answer', 'asked']")
    assert all(
        field in message for field in ("messages", "prompt", "completion", "text", "input_ids")
    )
    assert error.value.rule == "missing_field"


@pytest.mark.parametrize("record", ["a text", 3, None, ["a"]])
def test_a_row_that_is_no_object_is_refused(record):
    with pytest.raises(
        DataError, match=rf"^row 4: a row must be an object.*{type(record).__name__}"
    ) as error:
        kind_of(record, "row 4")
    assert error.value.rule == "wrong_type"


@pytest.mark.parametrize(
    "record",
    [
        {"messages": MESSAGES},
        {"messages": [{**m, "tool_calls": None, "name": None} for m in MESSAGES], "tools": None},
        {"messages": pa.array([MESSAGES]).to_pylist()[0]},
        {"messages": np.array(MESSAGES, dtype=object)},
        {"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": SAID}]},
        {"conversations": [{"role": "user", "content": ASKED}, {"role": "model", "content": SAID}]},
        {
            "messages": [
                {**m, "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES
            ]
        },
        {
            "messages": [
                {**m, "content": [{"type": "text", "text": m["content"][:4]}, m["content"][4:]]}
                for m in MESSAGES
            ]
        },
        {"instruction": ASKED, "input": "", "output": SAID},
        {"instruction": ASKED, "response": SAID},
    ],
)
def test_dialects_of_a_conversation_become_the_same_messages(record):
    before = repr(record)
    assert normal(record) == {"messages": MESSAGES, "tools": None}
    assert repr(record) == before


def test_instructions_with_all_they_can_have():
    record = {
        "system": "be kind",
        "history": [["hello", "hi"]],
        "instruction": "add",
        "input": "1 2",
        "output": "3",
    }
    assert normal(record)["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "add\n\n1 2"},
        {"role": "assistant", "content": "3"},
    ]


SHAREGPT = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": SAID}]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHAREGPT},
        {"messages": MESSAGES},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    ],
)
@pytest.mark.parametrize("own", ["system", "developer"])
def test_the_system_beside_a_conversation_comes_first_unless_it_has_one(row, own):
    before = repr(row)
    (asked, *rest), system = row.items(), {"role": "system", "content": "be kind"}
    row = normal({**row, "system": "be kind"})
    assert [*row.get("messages", row.get("prompt")), *row.get("completion", ())] == [
        system,
        *MESSAGES,
    ]
    brief = {"role": own, "content": "be brief"}
    row = normal({asked[0]: [brief, *asked[1]], **dict(rest), "system": "be kind"})
    assert [*row.get("messages", row.get("prompt")), *row.get("completion", ())] == [
        brief,
        *MESSAGES,
    ]
    assert repr(dict([asked, *rest])) == before


@pytest.mark.parametrize("tools", [None, [], "", "[]", np.array([], dtype=object)])
def test_no_tools_are_none_however_they_are_written(tools):
    assert normal({"messages": MESSAGES, "tools": tools})["tools"] is None


@pytest.mark.parametrize("written", [lambda value: value, json.dumps])
def test_nulls_in_tools_and_arguments_are_kept_and_elsewhere_are_fields_that_are_not_there(written):
    tool = {
        "type": "function",
        "function": {"name": "f", "default": None, "enum": ["a", None, {"const": None}]},
    }
    assert normal({"messages": MESSAGES, "tools": written([tool])})["tools"] == [tool]
    arguments = {"a": None, "b": [None, {"c": None}]}
    call = {
        "id": None,
        "type": None,
        "function": {"name": "f", "arguments": written(arguments), "strict": None},
    }
    said = {"role": "assistant", "content": None, "name": None, "tool_calls": [call]}
    assert normal({"messages": [said]})["messages"] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
        }
    ]


def test_a_history_may_be_a_cell_of_text():
    row = {"instruction": ASKED, "output": SAID}
    assert normal({**row, "history": "[]"}) == normal({**row, "history": ""}) == normal(row)
    assert normal({**row, "history": '[["a", "b"]]'}) == normal({**row, "history": [["a", "b"]]})


def test_plain_completions_say_what_of_them_is_not_read():
    row = {"prompt": "a", "completion": "b", "system": "be kind", "tools": "", "history": None}
    assert unread_fields(row, "completion") == ["system"]
    assert unread_fields(row, "chat") == []


@pytest.mark.parametrize("picture", ["cat.png", ["cat.png"], {"bytes": b"1"}, np.zeros((2, 2)), 7])
def test_pictures_and_sound_are_not_read(picture):
    row = {
        "messages": MESSAGES,
        "audio": None,
        "video": [],
        "videos": np.zeros(0),
        "system": "be kind",
    }
    refuse_media(row, "row 3")
    for name in ("images", "image"):
        with pytest.raises(
            DataError, match=f"row 3: '{name}' holds pictures, video or sound; only text"
        ) as error:
            refuse_media({**row, name: picture}, "row 3")
        assert error.value.rule == "pictures_or_sound"


@pytest.mark.parametrize("kind", ["image", "image_url", "video", "input_audio"])
def test_parts_that_are_no_text_are_refused_even_with_a_text(kind):
    said = [
        {"type": kind, "text": "a cat", kind: "cat.png"},
        {"type": "text", "text": "what is it?"},
    ]
    with pytest.raises(
        DataError, match=rf"message 1 \(user\): content has a part of type '{kind}'; only text"
    ) as error:
        normal({"messages": [{"role": "user", "content": said}, MESSAGES[-1]]})
    assert error.value.rule == "pictures_or_sound"
    with pytest.raises(DataError, match="message 1: 'images' holds pictures"):
        normal(
            {"messages": [{"role": "user", "content": "hi", "images": ["cat.png"]}, MESSAGES[-1]]}
        )


def test_parts_of_text_from_a_table_have_an_empty_column_of_pictures():
    """As arrow fills a list of objects of two kinds."""
    said = [{"type": "text", "text": "what is it?", "image": None}]
    assert (
        normal({"messages": [{"role": "user", "content": said}]})["messages"][0]["content"]
        == "what is it?"
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])},
        {
            "role": "assistant",
            "tool_calls": [{"name": "measure", "arguments": {"thing": "table", "times": 2}}],
        },
        {
            "role": "assistant",
            "tool_calls": [
                {"function": {"name": "measure", "arguments": '{"thing": "table", "times": 2}'}}
            ],
        },
        {
            "role": "assistant",
            "tool_calls": [{"function": {**CALL["function"], "other": None}, "id": None}],
        },
        {
            "from": "function_call",
            "value": '{"name": "measure", "arguments": {"thing": "table", "times": 2}}',
        },
    ],
)
def test_calls_of_tools_become_the_same(message):
    """Of a table's cell of text, too."""
    assert normal({"messages": json.dumps([MESSAGES[0], message])}) == normal(
        {"messages": [MESSAGES[0], message]}
    )
    row = normal({"messages": [MESSAGES[0], message], "tools": '[{"type": "function"}]'})
    assert row["messages"][1] == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert row["tools"] == [{"type": "function"}]


def test_openais_weight_leaves_messages_out_and_trains_none_that_would_not_be():
    said = [
        MESSAGES[0],
        {**MESSAGES[1], "weight": 0},
        {**MESSAGES[0], "weight": 1},
        {**MESSAGES[1], "weight": 1.0},
    ]
    messages = normal({"messages": said})["messages"]
    assert [message.get("train") for message in messages] == [None, False, None, None]
    assert not any("weight" in message for message in messages)


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("weight", ["0", "1", 0.5, 2, -1, np.array([0, 1]), [0], "high"])
def test_other_weights_are_refused_by_value(role, weight):
    with pytest.raises(
        DataError, match=rf"^row 3: message 1 \({role}\): weight=.*is not supported.*0 or 1"
    ) as error:
        normal({"messages": [{"role": role, "content": "a", "weight": weight}]}, "row 3")
    assert error.value.rule == "wrong_type"


def test_a_weight_of_zero_and_train_contradict_each_other():
    with pytest.raises(DataError, match="weight=0 contradicts train=True"):
        normal({"messages": [{**MESSAGES[1], "weight": 0, "train": True}]})
    assert (
        normal({"messages": [{**MESSAGES[1], "weight": 1, "train": False}]})["messages"][0]["train"]
        is False
    )


@pytest.mark.parametrize(("speaker", "role"), ROLE_ALIASES.items())
def test_other_names_of_the_roles(speaker, role):
    message = {"from": speaker, "value": '{"name": "f"}' if speaker == "function_call" else "said"}
    assert normal({"conversations": [message]})["messages"][0]["role"] == role


@pytest.mark.parametrize(
    ("record", "rule", "words"),
    [
        ({"messages": []}, "empty_conversation", "at least one message"),
        ({"messages": "hello"}, "wrong_type", "must be a list of messages, this is str"),
        ({"messages": [MESSAGES[0], "hello"]}, "wrong_type", "message 2 must be an object"),
        ({"messages": [{"content": "hello"}]}, "missing_field", "message 1 has no role"),
        (
            {"messages": [*MESSAGES, {"role": "assistant"}]},
            "missing_field",
            r"message 3 \(assistant\) has no content",
        ),
        (
            {"messages": [{"role": "narrator", "content": "a"}]},
            "unknown_role",
            "unknown role 'narrator'",
        ),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown_role", "unknown role"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "wrong_type",
            r"message 1 \(user\): content must be text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "pictures_or_sound",
            "type 'image'",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "missing_field",
            "a tool call has no name",
        ),
        ({"messages": MESSAGES, "tools": "[{"}, "wrong_type", "tools cannot be read as JSON"),
        (
            {"messages": MESSAGES, "tools": {"name": "f"}},
            "wrong_type",
            "tools must be a list of objects",
        ),
        ({"messages": MESSAGES, "tools": '["f"]'}, "wrong_type", "tools must be a list of objects"),
        (
            {"messages": MESSAGES, "tools": "[" * 10**5 + "]" * 10**5},
            "wrong_type",
            "tools cannot be read as JSON",
        ),
        ({"messages": MESSAGES, "tools": NESTED}, "wrong_type", "nested too deeply"),
        ({"messages": "[" + "9" * 5000 + "]"}, "wrong_type", "messages cannot be read as JSON"),
        ({"messages": MESSAGES, "system": 3}, "wrong_type", "system must be text"),
        ({"instruction": 3, "output": "a"}, "wrong_type", "instruction must be text, this is int"),
        (
            {"instruction": "a", "output": "a", "history": [["b"]]},
            "wrong_type",
            "history must be a list of",
        ),
        ({"prompt": "a"}, "unusable_kind", "a prompt without an answer"),
        ({"prompt": "a", "response": "b", "label": True}, "unusable_kind", "a judged answer"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
            "wrong_type",
            "function must be an object",
        ),
        ({"messages": "[{"}, "wrong_type", "messages cannot be read as JSON"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "unusable_kind", "a preference pair"),
        ({"prompt": "a", "completion": "b", "label": True}, "unusable_kind", "a judged answer"),
    ],
)
def test_what_is_wrong_is_named(record, rule, words):
    with pytest.raises(DataError, match=rf"^rows\.jsonl:7.*{words}") as error:
        normal(record, "rows.jsonl:7")
    assert error.value.rule == rule


def test_a_response_is_a_completion():
    assert normal({"prompt": "a", "response": "b"})["completion"] == "b"
    said = [{"role": "assistant", "content": "b"}]
    assert normal({"prompt": MESSAGES[:1], "response": said})["completion"] == said


def test_a_call_or_a_thought_is_an_answer_but_blanks_are_none():
    for answer in ({"tool_calls": [CALL]}, {"reasoning_content": "hm"}, {"content": "a"}):
        assert check_answers(
            [MESSAGES[0], {"role": "assistant", "content": "", **answer}], 0, "row 1"
        )
    for answer in ("", " \n\t", None):
        with pytest.raises(DataError, match=r"message 2 \(assistant\) is empty"):
            check_answers(
                [MESSAGES[0], {"role": "assistant", "content": answer}, *MESSAGES], 0, "row 1"
            )
    assert not check_answers(MESSAGES[:1], 0, "row 1") and not check_answers(
        MESSAGES, len(MESSAGES), "row 1"
    )


def test_oddities():
    system = {"role": random.choice(["system", "developer"]), "content": "be kind"}
    assert conversation_oddities([system, system, *MESSAGES, *MESSAGES]) == []
    assert conversation_oddities([*MESSAGES, MESSAGES[1]]) == ["consecutive_answers"]
    assert conversation_oddities([MESSAGES[0], system, MESSAGES[1]]) == ["late_system_message"]


def test_texts_are_what_people_wrote():
    assert texts_of({"messages": [*MESSAGES, {"role": "assistant", "content": None}]}) == [
        ASKED,
        SAID,
    ]
    assert texts_of({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}) == [ASKED, SAID]
    assert texts_of({"prompt": ASKED, "completion": SAID}) == [ASKED, SAID]
    assert texts_of({"text": SAID}) == [SAID]
    assert texts_of({"input_ids": [1, 2]}) == []


# --- other names of prompt and completion


PAIRS = [("prompt", "response"), ("question", "answer"), ("query", "response"), ("input", "output")]
PLAIN = {"prompt": "what is 2?", "completion": "two"}
CHAT = {
    "messages": [{"role": "user", "content": "what is 2?"}, {"role": "assistant", "content": "two"}]
}


def store_of(rows, folder, **options):
    return build_store(rows, Tokenizer(tiny.tokenizer(), **options), 64, folder)


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_are_completions_and_it_is_said_how_they_were_read(tmp_path, pair):
    row = {**dict(zip(pair, PLAIN.values())), "source": "a book"}
    assert kind_of(row, "row 1") == "completion"
    normal = normalise(row, "completion", "row 1").record
    assert (normal["prompt"], normal["completion"]) == tuple(PLAIN.values())
    store = store_of([row], tmp_path)
    assert store.document(0)[0].tolist() == Tokenizer(tiny.tokenizer()).encode(PLAIN, "row 1")[0]
    said = store.report.findings.get("columns_recognised")
    if pair[0] == "prompt":
        assert said is None
    else:
        assert (
            said.count == 1
            and said.example == f"row 1: {pair[0]} is the prompt, {pair[1]} the completion"
        )
        assert store.report.level("columns_recognised", {}) == "info"


def test_a_pair_beside_a_label_stays_a_completion(tmp_path):
    """Under its usual names it would be a judged answer; the kind is found once, by the names
    that it came with.
    """
    row = {"question": "what is 2?", "answer": "two", "label": 1}
    assert Tokenizer(tiny.tokenizer()).encode(row, "row 1") == Tokenizer(tiny.tokenizer()).encode(
        PLAIN, "row 1"
    )
    assert store_of([row], tmp_path).report.kinds == {"completion": 1}


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"instruction": "add"}, "instruction"),
        ({"text": "all of it"}, "text"),
        ({"messages": CHAT["messages"]}, "chat"),
        ({"prompt": "a", "completion": "b"}, "completion"),
    ],
)
def test_other_kinds_come_first(more, kind):
    row = {"input": "1 2", "output": "3", "question": "a", "answer": "b", **more}
    assert kind_of(row, "row 1") == kind
    if kind == "completion":
        assert normalise(row, kind, "row 1").record["prompt"] == "a" == row["prompt"]


def test_completions_are_plain_and_warned_about_unless_they_are_asked_to_be_chats(tmp_path):
    rows = [PLAIN, {"question": "what is 2?", "answer": "two", "system": "be kind"}]
    plain = store_of(rows, tmp_path)
    assert plain.report.kinds == {"completion": 2} and plain.report.count("plain_completion") == 2
    assert plain.report.level("plain_completion", {}) == "warning"
    chats = store_of(rows, tmp_path, completions_as_chat=True)
    assert (
        chats.key != plain.key
        and chats.report.kinds == {"completion": 2}
        and chats.kinds == ["instruction"]
    )
    assert not {"plain_completion", "unread_field"} & chats.report.findings.keys()
    system = {"messages": [{"role": "system", "content": "be kind"}, *CHAT["messages"]]}
    encoder = Tokenizer(tiny.tokenizer(), completions_as_chat=True)
    for number, chat in enumerate((CHAT, system)):
        assert (
            chats.document(number)[0].tolist()
            == encoder.encode(chat, "row")[0]
            == encoder.encode(rows[number], "row")[0]
        )
    without = tiny.tokenizer()
    without.chat_template = None
    assert not build_store(rows, Tokenizer(without), 64, tmp_path).report.count("plain_completion")
    assert not store_of(rows, tmp_path, train_on="all").report.count("plain_completion")


def test_names_of_columns_in_a_recipe_are_those_of_configurations():
    assert ROW_FIELDS == READ_FIELDS


@pytest.mark.parametrize(
    "columns",
    [
        ["question=prompt,answer=completion"],
        ["question=prompt", "answer=completion"],
        {"prompt": "question", "completion": "answer"},
    ],
)
def test_columns_of_a_recipe_name_those_of_every_source_without_its_own(columns, tmp_path):
    own = DataSource("b.csv", columns={"text": "body"})
    recipe = Recipe(
        model="base", data=["a.jsonl=2", own], validation_data="c.jsonl", columns=columns
    )
    named = {"prompt": "question", "completion": "answer"}
    assert recipe.columns == named
    first = DataSource("a.jsonl", weight=2, columns=named)
    assert recipe.sources == ([first, own], [DataSource("c.jsonl", columns=named)])
    recipe.to_yaml(tmp_path / "recipe.yaml")
    assert Recipe.from_yaml(tmp_path / "recipe.yaml").sources == recipe.sources
    assert "columns" not in {field.name for field in dataclasses.fields(recipe.config())}
    assert Recipe(model="base", data="a.jsonl").sources == ("a.jsonl", None)


def test_columns_may_be_named_the_other_way_round_where_that_is_clear():
    assert Recipe(model="m", data="d", columns=["prompt=Frage", "Antwort=completion"]).columns == {
        "prompt": "Frage",
        "completion": "Antwort",
    }


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["question"], "'question' is not THEIRS=OURS"),
        (["a=b"], "'b' is no field that is read; there are answer, attention_mask"),
        (["a=prompt,b=prompt"], "'prompt' is named twice"),
        ({"promt": "question"}, "'promt' is no field that is read"),
    ],
)
def test_columns_that_cannot_be_are_refused(columns, words):
    with pytest.raises(ConfigurationError, match=f"columns.*{words}"):
        Recipe(model="m", data="d", columns=columns)


def test_completions_as_chat_is_a_field():
    assert Tokenizer.configured(
        tiny.tokenizer(), ChronicalsConfig(completions_as_chat=True)
    ).completions_as_chat


@pytest.mark.parametrize("as_chat", [False, True])
def test_pictures_are_refused_however_completions_are_rendered(tmp_path, as_chat):
    rows = [{"question": "what is 2?", "answer": "two", "image": "cat.png"}]
    assert (
        store_of(rows, tmp_path, completions_as_chat=as_chat).report.count("pictures_or_sound") == 1
    )
