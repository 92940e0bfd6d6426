"""What is told of the parts of a conversation is what the template renders of them, and popular
templates are told of.
"""

import random

import numpy as np
import pytest
import stock_templates as stock

from chronicals.data import DataError, Tokenizer
from chronicals.data.kinds.rows import NormalRow
from chronicals.data.tokens import prefixes
from chronicals.data.tokens.batch_encoding import BatchEncoder
from chronicals.data.tokens.prefixes import Prefixes

TOLD = [
    "cohere",
    "gemma",
    "gemma3",
    "idefics3",
    "lfm2",
    "lfm2_v2",
    "llama3",
    "llama3_1",
    "llama3_2",
    "llava_next",
    "phi3",
    "phi3_5",
    "qwen2_5",
    "qwen2_5_vl",
    "qwen3_instruct_2507",
    "qwen3_vl",
    "smolvlm",
]
"""Stock templates that are linear in the turns of plain conversations."""

SAID = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
LOOP = "{% for m in messages %}"
END = "{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

LINEAR = {
    "ChatML": LOOP + SAID + END + ASKED,
    "with loop": "{% for m in messages %}{% if loop.first %}<s>{% endif %}" + SAID + END + ASKED,
    "of a slice": "{{ messages[0].role }}{% set rest = messages[1:] %}{% for m in rest %}"
    + SAID
    + END
    + ASKED,
    "with the last role in a namespace": "{% set ns = namespace(last='') %}{% for m in messages %}"
    + SAID
    + "{% set ns.last = m.role %}{% endfor %}{% if ns.last == 'user' %}"
    + ASKED
    + "{% endif %}",
}
OTHERS = {
    "looks ahead": LOOP + SAID + "{% if loop.last %}" + ASKED + "{% endif %}{% endfor %}",
    "looks at the next": LOOP + SAID + "{% if loop.nextitem %}+{% endif %}{% endfor %}" + ASKED,
    "at the length": "{{ messages|length }}{% for m in messages %}" + SAID + END + ASKED,
    "at the length in the loop": "{% for m in messages %}{{ loop.length }}" + SAID + END + ASKED,
    "from the end": "{{ messages[-1].content }}{% for m in messages %}" + SAID + END + ASKED,
    "backwards": "{% for m in messages[::-1] %}" + SAID + END + ASKED,
    "at one far ahead": "{% if messages[9] %}!{% endif %}{% for m in messages %}"
    + SAID
    + END
    + ASKED,
    "at the last, afterwards": LOOP + SAID + "{% endfor %}{{ messages[-1].content }}" + ASKED,
    "in two loops": LOOP + SAID + "{% endfor %}{% for m in messages %}" + SAID + END + ASKED,
    "in nested loops": "{% for a in messages %}"
    + LOOP
    + "{{ m.role }}{% endfor %}{{ a.content }}{% endfor %}"
    + ASKED,
    "in a macro": "{% macro all(some) %}{% for m in some %}"
    + SAID
    + "{% endfor %}{% endmacro %}{{ all(messages) }}"
    + ASKED,
    "in a buffer": "{% set all %}{% for m in messages %}"
    + SAID
    + "{% endfor %}{% endset %}{{ all }}"
    + ASKED,
    "in a filter": "{% filter upper %}{% for m in messages %}"
    + SAID
    + "{% endfor %}{% endfilter %}"
    + ASKED,
    "those of a role": "{% for m in messages if m.role == 'user' %}" + SAID + END + ASKED,
    "with a cycler": "{% set c = cycler(1, 2) %}{% for m in messages %}{{ c.next() }}"
    + SAID
    + "{% endfor %}{{ c.next() }}",
    "counting": "{% set ns = namespace(n=0) %}"
    + LOOP
    + "{% set ns.n = ns.n + 1 %}"
    + SAID
    + "{% endfor %}{{ ns.n }}",
    "the prompt in the loop": LOOP
    + "{% if m.content == 'x5' %}"
    + ASKED
    + "{% endif %}"
    + SAID
    + END,
    "refusing": "{% set ns = namespace(last='') %}{% for m in messages %}"
    + SAID
    + "{% set ns.last = m.role %}{% endfor %}"
    "{% if ns.last == 'user' %}{{ raise_exception('no') }}{% endif %}",
    "with an iterator": "{% set mark = ['A', 'B']|map('string') %}"
    + LOOP
    + "{% if m.content == 'x5' %}{{ mark|first }}{% endif %}"
    + SAID
    + END
    + "{{ mark|first }}",
    "with an iterator in a list": "{% set marks = [['A', 'B']|map('string')] %}"
    + LOOP
    + "{% if m.content == 'x5' %}{{ marks[0]|first }}{% endif %}"
    + SAID
    + END
    + "{{ marks[0]|first }}",
    "with an iterator of another loop": "{% for mark in [['A', 'B']|map('string')] %}"
    + LOOP
    + "{% if m.content == 'x5' %}{{ mark|first }}{% endif %}"
    + SAID
    + END
    + "{{ mark|first }}{% endfor %}",
    "with an iterator in a namespace": "{% set ns = namespace(mark=['A', 'B']|batch(1)) %}"
    + LOOP
    + "{% if m.content == 'x5' %}{{ ns.mark|first }}{% endif %}"
    + SAID
    + END
    + "{{ ns.mark|first }}",
    "with an iterator of a test": "{% set mark = 'A' if 0 else ['A', 'B']|reverse %}"
    + LOOP
    + "{% if m.content == 'x5' %}{{ mark|first }}{% endif %}"
    + SAID
    + END
    + "{{ mark|first }}",
    "going on within": LOOP
    + SAID
    + "{% if m.content == 'x5' %}{% for n in loop %}{{ n.content }}{% endfor %}!{% endif %}"
    + END,
    "with a loop kept": "{% for x in [1] %}{% set kept = loop %}"
    + LOOP
    + SAID
    + "{% if m.content == 'x5' %}{{ kept.changed(1) }}{% endif %}"
    + END
    + "{{ kept.changed(1) }}{% endfor %}",
    "joined": "{{ messages|map(attribute='content')|join('+') }}{% for m in messages %}"
    + SAID
    + END,
    "as JSON": "{{ messages|tojson }}",
}


def parts_of(template, messages, tools=None):
    """Each part that is told: how many messages, with the prompt or not, and its text; asserts
    that they are right.
    """
    formed = template.form(messages, "row 1")
    whole = template.text(formed, tools)
    prefixes = Prefixes(template, formed, tools, whole)
    told = []
    for count in range(1, len(formed)):
        for generation in (True, False):
            if (part := prefixes.part(count, generation)) is not None:
                assert whole[: part[0]] + part[1] == template.text(
                    formed[:count], tools, generation
                ), (count, generation)
                told.append((count, generation))
    return told


def plain(count=24):
    return [(stock.user, stock.assistant)[n % 2](f"x{n}") for n in range(count)]


@pytest.mark.parametrize("name", LINEAR)
def test_all_parts_are_told_of_templates_that_go_forward(name):
    assert len(parts_of(Tokenizer(stock.with_template(LINEAR[name])).template, plain())) == 2 * 23


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_told_of_others_is_right(name):
    template = Tokenizer(stock.with_template(OTHERS[name])).template
    template.__dict__["dialect"] = type(template.dialect)()
    parts_of(template, plain())


@pytest.mark.slow
@pytest.mark.parametrize("name", stock.names())
def test_what_is_told_of_stock_templates_is_right_and_of_the_popular_all_is(name):
    template = Tokenizer(stock.with_template(stock.shipped(name))).template
    for kind in ("turns", "tools", "thinking turns"):
        rows = [stock.record(kind) for _ in range(4)]
        messages = [message for row in rows for message in row["messages"]]
        tools = rows[0].get("tools")
        try:
            told = parts_of(template, messages, tools)
        except DataError:
            continue
        if kind == "turns" and name in TOLD:
            assert len(told) == 2 * (len(messages) - 1)


@pytest.mark.parametrize("name", [*LINEAR, "looks ahead", "counting", "at the length"])
def test_masks_of_long_conversations_are_those_of_the_definition(name):
    encoder = Tokenizer(stock.with_template({**LINEAR, **OTHERS}[name], eos_token="<|im_end|>"))
    rows = [
        {
            "messages": [
                m
                for _ in range(16)
                for m in (stock.user(stock.saying()), stock.assistant(stock.saying()))
            ]
        }
    ]
    found = BatchEncoder(encoder).encode_batch([NormalRow("chat", row) for row in rows], ["row 1"])
    try:
        ids, trained = encoder.encode(rows[0], "row 1")
    except DataError as error:
        assert str(found[0]) == str(error)
    else:
        assert found[0][0].tolist() == ids and np.array_equal(found[0][1], trained)
        assert name not in LINEAR or sum(trained) > 16


def test_a_long_conversation_is_rendered_a_few_times(record_calls):
    encoder = Tokenizer(stock.with_template(LINEAR["ChatML"]))
    assert encoder.template.stop
    calls = record_calls(encoder.tokenizer, "apply_chat_template")
    row = {"messages": plain(random.choice([40, 80, 160]))}
    (found,) = BatchEncoder(encoder).encode_batch([NormalRow("chat", row)], ["row 1"])
    assert found[1].any() and len(calls) < 12


@pytest.mark.parametrize("value", ["m", "m.content", "[m.content, 1, none, 2.5]", "{'a': m.role}"])
def test_namespaces_may_hold_what_their_state_tells(value):
    template = (
        "{% set ns = namespace(last='') %}"
        + LOOP
        + SAID
        + "{% set ns.last = VALUE %}"
        + END
        + ASKED
    )
    told = parts_of(
        Tokenizer(stock.with_template(template.replace("VALUE", value))).template, plain(12)
    )
    assert len(told) == 2 * 11 if value == "{'a': m.role}" else told


def test_templates_that_use_iterators_up_where_they_stand_are_told():
    used = (
        "{{ ['b', 'a']|reject('eq', 'a')|map('upper')|join }}{% for n in ['a']|select %}{{ n "
        "}}{% endfor %}"
    )
    template = Tokenizer(
        stock.with_template(used + LOOP + SAID + used + END + used + ASKED)
    ).template
    assert len(parts_of(template, plain())) == 2 * 23


def test_no_more_states_are_kept_than_are_used():
    template = Tokenizer(stock.with_template(OTHERS["counting"])).template
    messages = template.form(plain(200), "row 1")
    run = prefixes._Run(template, messages, None, False)
    assert (
        len(set(run.states)) <= prefixes.MAX_STATES + 1
        and len(run.places) == 200
        and run.places[-1] is None
    )
