"""Which messages are trained: by role, by turn and by their own word; and where each of them
begins and ends.
"""

import json
import random

import pytest

import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import DataError, TemplateError, Tokenizer
from data import stock_templates
from data.stock_templates import assistant, called, saying, shipped, user, with_template

MESSAGES = [
    {"role": "system", "content": "be kind"},
    user("what is one?"),
    assistant("the first"),
    user("and two?"),
    assistant("the second"),
]


def texts(tokenizer, messages, **options):
    ids, trained = Tokenizer(tokenizer, **options).encode({"messages": messages}, "row 1")
    return [tokenizer.decode(ids[start:end]) for start, end in stock_templates.spans(trained)]


def marked(*marks):
    """The messages, some with a word of their own about being trained."""
    return [
        message if mark is None else {**message, "train": mark}
        for message, mark in zip(MESSAGES, marks, strict=True)
    ]


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, [2, 4]),
        ({"train_on_turns": "last"}, [4]),
        ({"train_on_roles": ["user"]}, [1, 3]),
        ({"train_on_roles": ["user"], "train_on_turns": "last"}, [3]),
        ({"train_on_roles": ["user", "assistant"]}, [1, 2, 3, 4]),
        ({"train_on_roles": ["system", "user"], "train_on_turns": "last"}, [3]),
        ({"train_on_roles": ["system"]}, [0]),
        ({"train_on_roles": ["tool"]}, []),
    ],
)
def test_roles_and_turns_are_chosen(options, trained):
    expected = [f"{MESSAGES[number]['content']}<|im_end|>" for number in trained]
    assert texts(tiny.tokenizer(), MESSAGES, **options) == expected


@pytest.mark.parametrize(
    ("marks", "options", "trained"),
    [
        ((None, None, False, None, None), {}, [4]),
        ((None, True, None, None, False), {}, [1, 2]),
        ((None, None, True, None, None), {"train_on_turns": "last"}, [2, 4]),
        ((None, None, None, None, False), {"train_on_turns": "last"}, []),
        ((None, None, True, False, None), {"train_on_roles": ["user"]}, [1, 2]),
    ],
)
def test_a_messages_own_word_wins(marks, options, trained):
    expected = [f"{MESSAGES[number]['content']}<|im_end|>" for number in trained]
    assert texts(tiny.tokenizer(), marked(*marks), **options) == expected


def test_a_prompt_is_trained_only_where_it_says_so():
    row = {"prompt": marked(None, None, True, None, None)[:4], "completion": MESSAGES[4:]}
    ids, trained = Tokenizer(tiny.tokenizer()).encode(row, "row 1")
    said = [
        tiny.tokenizer().decode(ids[start:end]) for start, end in stock_templates.spans(trained)
    ]
    assert said == ["the first<|im_end|>", "the second<|im_end|>"]


def test_the_word_does_not_reach_the_template():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content']", "(message | string)"
    )
    rendered = Tokenizer(tokenizer).template.text(
        Tokenizer(tokenizer).template.form(marked(*[True] * 5), "row 1")
    )
    assert "train" not in rendered


@pytest.mark.parametrize("word", ["yes", 1, 0.0, [True]])
def test_a_word_that_is_neither_true_nor_false_is_named(word):
    with pytest.raises(
        DataError, match=r"^row 7: message 3 \(assistant\): train=.* must be true or false"
    ):
        Tokenizer(tiny.tokenizer()).encode(
            {"messages": marked(None, None, word, None, None)}, "row 7"
        )


@pytest.mark.parametrize(
    "options", [{"train_on_roles": ["robot"]}, {"train_on_roles": []}, {"train_on_turns": "first"}]
)
def test_unknown_choices_are_refused_by_name(options):
    (name,) = options
    with pytest.raises(ConfigurationError, match=name):
        Tokenizer(tiny.tokenizer(), **options)
    with pytest.raises(ConfigurationError, match=name):
        ChronicalsConfig(**options)


def test_choices_are_part_of_the_fingerprint_and_of_the_configuration():
    tokenizer = tiny.tokenizer()
    choices = [
        {},
        {"train_on_turns": "last"},
        {"train_on_roles": ["user"]},
        {"train_on_roles": ["user", "assistant"]},
    ]
    prints = [Tokenizer(tokenizer, **choice).fingerprint() for choice in choices]
    assert len(set(prints)) == len(choices)
    assert prints == [
        Tokenizer.configured(tokenizer, ChronicalsConfig(**choice)).fingerprint()
        for choice in choices
    ]
    assert prints[3] == Tokenizer(tokenizer, train_on_roles=["assistant", "user"]).fingerprint()


def test_the_last_turn_of_a_template_that_renders_earlier_ones_otherwise_can_be_trained():
    tokenizer = with_template(shipped("qwen3_5_think"))
    row = stock_templates.record("thinking turns")
    with pytest.raises(TemplateError, match="set train_on_turns='last'"):
        texts(tokenizer, row["messages"])
    thought, answer = (row["messages"][-1][name] for name in ("reasoning_content", "content"))
    said = f"{thought}\n</think>\n\n{answer}<|im_end|>"
    assert texts(tokenizer, row["messages"], train_on_turns="last") == [said]
    earlier = [
        {**m, "train": False} if m["role"] == "assistant" else m for m in row["messages"][:-1]
    ]
    assert texts(tokenizer, [*earlier, row["messages"][-1]]) == [said]


CLOSED = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "gemma": "<end_of_turn>",
    "gptoss": "<|end|>",
    "llama3": "<|eot_id|>",
    "phi3": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "smolvlm": "<end_of_utterance>",
}


@pytest.mark.parametrize("name", CLOSED)
def test_questions_are_trained_with_what_closes_them(name):
    tokenizer = with_template(shipped(name))
    row = stock_templates.record("turns")
    questions = [message["content"] for message in row["messages"] if message["role"] == "user"]
    expected = [f"{question}{CLOSED[name]}" for question in questions]
    assert [
        text.lstrip() for text in texts(tokenizer, row["messages"], train_on_roles=["user"])
    ] == expected


@pytest.mark.parametrize("role", ["user", "system", "tool"])
@pytest.mark.parametrize("name", stock_templates.names())
def test_messages_of_others_are_trained_exactly_or_refused(name, role):
    tokenizer = with_template(shipped(name))
    row = stock_templates.record({"user": "turns", "system": "system", "tool": "tools"}[role])
    try:
        ids, trained = Tokenizer(tokenizer, train_on_roles=[role]).encode(row, "row 1")
    except TemplateError as error:
        assert str(error).startswith("row 1: ")
        return
    contents = [message["content"] for message in row["messages"] if message["role"] == role]
    spans = stock_templates.spans(trained)
    assert len(spans) == len(contents)
    for (start, end), content in zip(spans, contents):
        assert tokenizer.decode(ids[start : end - 1]).strip() == content
        assert ids[end - 1] in tokenizer.added_tokens_decoder


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ m['role'] + ': ' + m['content'] + '\n' }}", "no special token of this message's own"),
        ("{{ m['content'] + m['content'] + '<|im_end|>' }}", "once and as it is"),
        ("{{ m['content'] | upper + '<|im_end|>' }}", "once and as it is"),
        ("{{ '<|im_end|>' }}", "once and as it is"),
    ],
)
def test_a_role_that_cannot_be_delimited_is_refused_by_name(template, reason):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
    with pytest.raises(
        TemplateError, match=rf"^row 1: message 1 \(user\): .*{reason}.*; leave this role out"
    ):
        texts(tokenizer, [user("how so?"), assistant("so")], train_on_roles=["user"])


def test_a_system_message_that_becomes_part_of_a_question_is_refused():
    tokenizer = with_template(shipped("gemma3"))
    row = stock_templates.record("system")
    with pytest.raises(TemplateError, match=r"message 1 \(system\)"):
        texts(tokenizer, row["messages"], train_on_roles=["system"])


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "qwen3_5_think", "gemma4_v5"])
def test_arguments_as_json_text_are_the_same_as_an_object(name):
    tokenizer = with_template(shipped(name))
    row = stock_templates.record("tools")
    call = row["messages"][1]["tool_calls"][0]
    content = call["function"]["arguments"]["thing"]
    as_text = called()
    as_text["tool_calls"][0]["function"]["arguments"] = json.dumps({"thing": content})
    other = {**row, "messages": [row["messages"][0], as_text, *row["messages"][2:]]}
    assert Tokenizer(tokenizer).encode(row, "row 1") == Tokenizer(tokenizer).encode(other, "row 1")


def test_arguments_that_are_no_object_are_named():
    call = called()
    call["tool_calls"][0]["function"]["arguments"] = random.choice(["{", "[1]", "3"])
    with pytest.raises(DataError, match=r"^row 1: message 2: the arguments of a call"):
        Tokenizer(tiny.tokenizer()).encode({"messages": [user(saying()), call]}, "row 1")


@pytest.mark.parametrize("answer", ["completion", "response"])
def test_messages_as_json_text_are_those_of_a_conversation(answer):
    asked = MESSAGES[:2]
    said = MESSAGES[2:3]
    for as_chat in (False, True):
        encoder = Tokenizer(tiny.tokenizer(), completions_as_chat=as_chat)
        expected = encoder.encode({"prompt": asked, answer: said}, "row 1")
        found = encoder.encode({"prompt": json.dumps(asked), answer: json.dumps(said)}, "row 1")
        assert [[*each] for each in found] == [[*each] for each in expected]
