"""Rows in batches are the rows one by one: the same ids, masks and errors, for every template
and tokenizer.
"""

import random

import numpy as np
import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

import tiny
from chronicals.data import DataError, TemplateError, Tokenizer
from chronicals.data.kinds.rows import NormalRow, kind_of
from chronicals.data.tokens import batch_encoding
from chronicals.data.tokens.batch_encoding import BatchEncoder
from chronicals.data.tokens.tokenizer_training import train_tokenizer
from data import stock_templates
from data.stock_templates import assistant, shipped, user, with_template
from mutants import mutant

LETTERS = [
    "a",
    "b",
    " ",
    "  ",
    "\n",
    "\t",
    ".",
    "é",
    "e\u0301",
    "\u212b",
    "🙂",
    "漢",
    "<|",
    "|>",
    "▁",
    "<think>",
    "</think>",
]


def wild(tokenizer):
    """Text with blanks at its ends, accents composed and not, and what looks like special tokens
    or is one.
    """
    special = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return "".join(random.choices([*LETTERS, random.choice(special)], k=random.randrange(1, 25)))


def wild_record(tokenizer):
    """A conversation of any kind, some of whose words are wild."""
    row = stock_templates.record(random.choice(stock_templates.KINDS))
    for message in row["messages"]:
        for name in ("content", "reasoning_content"):
            if message.get(name) and random.random() < 0.5:
                message[name] = wild(tokenizer)
        if random.random() < 0.1:
            message["train"] = random.random() < 0.5
    return row


def one_by_one(encoder, records):
    rows = []
    for number, record in enumerate(records):
        try:
            rows.append(encoder.encode(record, f"row {number}"))
        except DataError as error:
            rows.append(error)
    return rows


def assert_same(encoder, records):
    """In batches of any size, by threads beside and on one core; returns how many rows have
    tokens.
    """
    many = batch_encoding.BatchEncoder(encoder)
    assert_same_as_now(many, records)
    many.on_one_core()
    return assert_same_as_now(many, records)


def assert_same_as_now(many, records):
    size = random.choice([1, 3, 100])
    wheres = [f"row {number}" for number in range(len(records))]
    rows = [NormalRow(kind_of(record, where), record) for record, where in zip(records, wheres)]
    parts = [(rows[n : n + size], wheres[n : n + size]) for n in range(0, len(rows), size)]
    batch = [row for rows in many.encode(parts) for row in rows]
    expected = one_by_one(many.encoder, records)
    assert len(batch) == len(expected)
    for got, wanted in zip(batch, expected):
        if isinstance(wanted, DataError):
            assert (type(got), str(got)) == (type(wanted), str(wanted))
        else:
            ids, trained = got
            assert (ids.dtype, trained.dtype) == (np.int32, np.uint8)
            assert (ids.tolist(), trained.astype(bool).tolist()) == wanted
    return sum(not isinstance(row, DataError) for row in expected)


@pytest.mark.parametrize("name", ["lfm2", "qwen2_5"])
def test_a_thought_that_is_lost_is_missed_though_the_answer_repeats_it(name):
    row = {
        "messages": [
            user("What is 2 + 2?"),
            assistant("four, as two and two are four", reasoning_content="two and two"),
        ]
    }
    assert "does not render 'two and two' in this assistant turn" in stock_templates.refusal(
        name, row
    )
    assert assert_same(Tokenizer(with_template(shipped(name))), [row]) == 0


@pytest.mark.parametrize("name", stock_templates.names())
def test_conversations_of_every_template_are_the_same(name):
    tokenizer = with_template(shipped(name))
    if random.random() < 0.5:
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    records = [wild_record(tokenizer) for _ in range(12)]
    options = random.choice([{"train_on_turns": "last"}, {"train_on_roles": ["user", "assistant"]}])
    for encoder in (
        Tokenizer(tokenizer),
        Tokenizer(tokenizer, **options),
        Tokenizer(tokenizer, "all"),
    ):
        assert_same(encoder, records)


def metaspace(scheme):
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return tokenizer


def prefixing():
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def normalising(*steps):
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


def with_tokens(*texts, **how):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([AddedToken(text, **{"normalized": False, **how}) for text in texts])
    return tokenizer


def stripping():
    """As Phi-3's: special tokens that take the blanks after them."""
    tokenizer = with_template(shipped("phi3"))
    tokenizer.add_tokens(
        [AddedToken(text, special=True, rstrip=True) for text in ("<|end|>", "<|assistant|>")], True
    )
    return tokenizer


OTHERS = {
    "blanks become marks, at the first": lambda: metaspace("first"),
    "blanks become marks, everywhere": lambda: metaspace("always"),
    "a blank before every piece": prefixing,
    "lower case, accents gone": lambda: normalising(
        normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()
    ),
    "a mark before every piece": lambda: normalising(
        normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    ),
    "tokens that take the blanks after them": stripping,
    "tokens between words alone": lambda: with_tokens("ab", "b a", single_word=True),
    "tokens that are normalised": lambda: with_tokens("ab", "b a", normalized=True),
    "tokens within tokens": lambda: with_tokens(
        "<|im_end|>\n", "<|im_start|>assistant", "a", "\n\n"
    ),
    "tokens of blanks": lambda: with_tokens("  ", "\n", " "),
}


@pytest.mark.parametrize("name", OTHERS)
def test_conversations_under_other_tokenizers_are_the_same(name):
    tokenizer = OTHERS[name]()
    records = []
    for _ in range(40):
        turns = [
            (user(wild(tokenizer)), assistant(wild(tokenizer))) for _ in range(random.randint(1, 3))
        ]
        records.append({"messages": [message for turn in turns for message in turn]})
    assert_same(Tokenizer(tokenizer), records)


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "llama3", "gemma3", "phi3", "cohere2", "smolvlm"]
)
def test_plain_conversations_are_not_left_to_the_definition(name, must_not_call):
    records = [stock_templates.record(random.choice(["single", "turns"])) for _ in range(20)]
    encoder = Tokenizer(with_template(shipped(name)))
    expected = one_by_one(encoder, records)
    must_not_call(Tokenizer, "encode_conversation", "left to the definition")
    found = BatchEncoder(encoder).encode_batch(
        [NormalRow("chat", record) for record in records], ["row"] * 20
    )
    for (ids, trained), (wanted, mask) in zip(found, expected):
        assert (ids.tolist(), trained.astype(bool).tolist()) == (wanted, mask)


def test_on_one_core_rows_are_not_left_to_the_rust_part(must_not_call):
    many = BatchEncoder(Tokenizer(tiny.tokenizer()))
    many.on_one_core()
    must_not_call(BatchEncoder, "_by_rust", "left to the Rust part")
    assert (
        assert_same_as_now(
            many, [{"text": "a"}, {"prompt": "a", "completion": "é"}, *tiny.chat_rows(5)]
        )
        == 7
    )


def test_a_template_that_cannot_be_read_is_said_where_it_is_used():
    tokenizer = tiny.tokenizer()
    for template_text in ("{% for", {"a": "b", "c": "d"}, None):
        tokenizer.chat_template = template_text
        many = BatchEncoder(Tokenizer(tokenizer))
        many.on_one_core()
        assert assert_same_as_now(many, tiny.chat_rows(2)) == 0


def merging():
    """A tokenizer under which an answer that begins with newlines merges with its opening, and
    such an answer.
    """
    tokenizer = train_tokenizer(["a\n\n\n"] * 20, vocab_size=300)
    return tokenizer, [{"messages": [user("a"), assistant("\n\nb")]}]


def test_an_answer_that_merges_with_its_opening_is_refused_alike():
    tokenizer, records = merging()
    assert assert_same(Tokenizer(tokenizer), records) == 0


@pytest.mark.slow
def test_the_comparison_finds_a_bound_that_is_not_checked(monkeypatch):
    tokenizer, records = merging()
    broken = mutant(batch_encoding, "row.ids[place:start].tolist() != ids", "False")
    monkeypatch.setattr(batch_encoding, "BatchEncoder", broken.BatchEncoder)
    with pytest.raises(AssertionError):
        assert_same(Tokenizer(tokenizer), records)


def test_the_comparison_finds_an_answer_that_ends_too_late(plant):
    plant(
        BatchEncoder,
        "_closing",
        lambda right, self, conversation, number, row, *_: len(row.ends) - 1,
    )
    with pytest.raises(AssertionError):
        assert_same(Tokenizer(tiny.tokenizer()), [stock_templates.record("turns")])


def test_a_template_that_cannot_be_masked_gives_the_error_for_each_row():
    encoder = Tokenizer(with_template(shipped("deepseekv3")))
    records = [NormalRow("chat", stock_templates.record("single")) for _ in range(3)]
    rows = BatchEncoder(encoder).encode_batch(records, ["a:1", "a:2", "a:3"])
    assert [type(row) for row in rows] == [TemplateError] * 3
    assert [str(row).split(": ")[0] for row in rows] == ["a:1", "a:2", "a:3"]


def marking(before, after):
    """A tokenizer that puts special tokens around every text, as those of Llama and T5 do."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    marks = [(text, tokenizer.convert_tokens_to_ids(text)) for text in (before, after) if text]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{before} $A {after}".strip(), special_tokens=marks
    )
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("train_on", ["answers", "all"])
@pytest.mark.parametrize("marks", [("", ""), ("<bos>", ""), ("<bos>", "<|endoftext|>")])
def test_rows_of_every_kind_are_the_same_and_keep_their_order(marks, train_on):
    tokenizer = marking(*marks)
    wrong = [
        {"text": "a\ud800"},
        {"text": 3},
        {"prompt": "a", "completion": 3},
        {"input_ids": [-1]},
    ]
    make = [
        lambda: {"text": wild(tokenizer)},
        lambda: {
            "text": random.choice(
                ["", "<bos>", "<bos><bos>a", "a<|endoftext|><|endoftext|>", "<|endoftext|>"]
            )
        },
        lambda: {
            "prompt": wild(tokenizer),
            "completion": wild(tokenizer) + random.choice(["", "<|endoftext|>"]),
        },
        lambda: {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        lambda: wild_record(tokenizer),
        lambda: random.choice(wrong),
        lambda: {"messages": [user("a\ud800"), assistant("b")]},
    ]
    assert assert_same(Tokenizer(tokenizer, train_on), [random.choice(make)() for _ in range(60)])


@pytest.mark.parametrize("alone", [False, True])
def test_what_the_last_caller_left_in_the_tokenizer_does_not_matter(alone):
    tokenizer = tiny.tokenizer()
    tokenizer(["a", "b c d e f"], padding="max_length", truncation=True, max_length=2)
    many = BatchEncoder(Tokenizer(tokenizer))
    if alone:
        many.on_one_core()
    assert assert_same_as_now(many, [{"text": "what is the answer?"}, *tiny.chat_rows(2)]) == 3


def test_a_tokenizer_that_splits_special_tokens_is_taken_at_its_word():
    tokenizer = tiny.tokenizer()
    tokenizer.split_special_tokens = True
    assert_same(Tokenizer(tokenizer), [{"text": "a <|im_end|> b"}, *tiny.chat_rows(2)])


def test_no_rows_are_no_rows():
    assert BatchEncoder(Tokenizer(tiny.tokenizer())).encode_batch([], []) == []
