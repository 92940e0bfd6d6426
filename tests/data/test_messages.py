"""Messages that a field holds as JSON text are read; any other text stays a text."""

import json

import pytest

from chronicals.data import DataError
from chronicals.data.kinds.messages import (
    refuse_printed_messages,
    with_conversations,
)

ASKED = "what is the answer?"
SAID = "forty two"
MESSAGES = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]
CALL = {
    "type": "function",
    "function": {"name": "measure", "arguments": {"thing": "table", "times": 2}},
}


@pytest.mark.parametrize(
    "said",
    [
        MESSAGES,
        MESSAGES[:1],
        [{"from": "human", "value": ASKED}],
        [{"role": "assistant", "tool_calls": [CALL]}],
    ],
)
def test_a_text_that_is_a_conversation_is_read_as_one(said):
    spaced = f"\n {json.dumps(said, indent=1)}\n"
    for text, messages in (
        (json.dumps(said), said),
        (spaced, said),
        (json.dumps(said[0]), said[:1]),
    ):
        assert with_conversations({"prompt": text}) == {"prompt": messages}


@pytest.mark.parametrize("printed", [MESSAGES, MESSAGES[0], {"from": "gpt", "value": "it's"}])
def test_messages_as_python_prints_them_are_refused(printed):
    with pytest.raises(
        DataError, match="^row 1: chosen holds messages as Python prints them; write JSON"
    ):
        refuse_printed_messages({"prompt": "{'a': 1}", "chosen": str(printed)}, "row 1")
    refuse_printed_messages(
        {"completion": "{'role': admin}", "response": "{'content': 'a'}"}, "row 1"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "what is 2?",
        "[",
        "[{",
        "[]",
        "[1, 2]",
        '["user"]',
        "[[]]",
        "{}",
        '[{"role": "user"}]',
        '[{"content": "a"}]',
        '[{"name": "a", "value": 3}]',
        json.dumps([*MESSAGES, 3]),
        json.dumps([*MESSAGES, {}]),
        json.dumps(MESSAGES) + " is JSON",
        "so " + json.dumps(MESSAGES),
        json.dumps(json.dumps(MESSAGES)),
        '[{"role": "user", "content": ' + "9" * 5000 + "}]",
        '[{"a": ' * 10**5,
        "\xa0" + json.dumps(MESSAGES),
    ],
)
def test_any_other_text_stays_what_it_is(text):
    record = dict.fromkeys(("prompt", "completion", "chosen", "rejected", "response"), text)
    assert with_conversations(record) is record


@pytest.mark.parametrize("name", ["prompt", "completion", "response", "chosen", "rejected"])
def test_fields_of_texts_or_messages_may_hold_them_as_json(name):
    record = {
        name: json.dumps(MESSAGES),
        "text": json.dumps(MESSAGES),
        "output": json.dumps(MESSAGES),
    }
    before = repr(record)
    assert with_conversations(record) == {**record, name: MESSAGES}
    assert repr(record) == before
