"""An optional field that is missing is missing however that is written, and text is never a
list, whatever its length.
"""

import json
from decimal import Decimal

import numpy as np
import pandas
import pyarrow as pa
import pytest

import tiny
from chronicals.config import ChronicalsConfig, DataSource
from chronicals.data import DataError, Tokenizer, build_store, create_dataloader
from chronicals.data.kinds.rows import DOCUMENT_KINDS
from chronicals.data.making.worker import chunk_of_frame, frame_of_chunk
from chronicals.data.reading.plain_values import is_missing, list_items
from chronicals.data.reading.records import MEDIA_FIELDS, READ_FIELDS, RowChunk, parsed

ASKED = {"role": "user", "content": "what is 2?"}
ANSWERED = {"role": "assistant", "content": "two"}
CHAT = [ASKED, ANSWERED]
CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "add", "arguments": {"numbers": [1, 1]}}}],
}

ROWS = {
    "chat": {"messages": CHAT},
    "chat with a call": {
        "messages": [ASKED, CALL, ANSWERED],
        "tools": [{"name": "add", "parameters": {"type": "object"}}],
    },
    "conversations": {
        "conversations": [{"from": "human", "value": "what is 2?"}, {"from": "gpt", "value": "two"}]
    },
    "completion": {"prompt": "what is 2?", "completion": " two"},
    "completion of messages": {"prompt": [ASKED], "completion": [ANSWERED]},
    "response": {"prompt": "what is 2?", "response": " two"},
    "question": {"question": "what is 2?", "answer": " two"},
    "query": {"query": "what is 2?", "response": " two"},
    "input": {"input": "what is 2?", "output": " two"},
    "instruction": {"instruction": "what is 2?", "output": "two"},
    "instruction with a history": {
        "instruction": "what is 2?",
        "response": "two",
        "history": [["hi", "yo"]],
    },
    "text": {"text": "two is two"},
    "tokens": {"input_ids": [5, 6, 7, 8]},
}
PAIRS = {
    "pair": {"prompt": "what is 2?", "chosen": " two", "rejected": " three"},
    "pair of messages": {
        "prompt": [ASKED],
        "chosen": [ANSWERED],
        "rejected": [{**ANSWERED, "content": "three"}],
    },
    "pair of conversations": {
        "chosen": CHAT,
        "rejected": [ASKED, {**ANSWERED, "content": "three"}],
    },
    "pair with calls": {
        "prompt": [ASKED],
        "chosen": [CALL, ANSWERED],
        "rejected": [CALL, {**ANSWERED, "content": "three"}],
    },
    "ranked": {"prompt": "what is 2?", "responses": [" two", " three"], "scores": [1.0, 0.0]},
    "pair after an instruction": {
        "instruction": "what is 2?",
        "chosen": "two",
        "rejected": "three",
    },
}
JUDGED = {
    "judged": {"prompt": "what is 2?", "completion": " two", "label": True},
    "judged response": {"prompt": "what is 2?", "response": " two", "label": False},
    "judged conversation": {"messages": CHAT, "label": True},
    "judged output": {"instruction": "what is 2?", "output": "two", "label": 1},
}
OTHER = {"prompt": "what is 3?", "completion": " three", "label": True}
KINDS = {"sft": ROWS, "pairs": PAIRS, "judged": JUDGED}
TAKEN = {"pairs": ("preference",), "judged": ("unpaired preference",)}
CASES = [(objective, name) for objective, rows in KINDS.items() for name in rows]

NULLS = {
    "None": None,
    "nan": float("nan"),
    "float32 nan": np.float32("nan"),
    "NaT": pandas.NaT,
    "NA": pandas.NA,
    "numpy's NaT": np.datetime64("NaT"),
    "decimal": Decimal("nan"),
    "arrow": pa.scalar(None, pa.string()),
    "array without dimensions": np.array(float("nan")),
}
EMPTY = {
    "list": [],
    "tuple": (),
    "array": np.array([]),
    "objects": np.array([], object),
    "series": pandas.Series([], dtype=object),
    "object": {},
}
MISSING = {**NULLS, **EMPTY}
SHAPES = {
    "tuple": tuple,
    "array": lambda items: objects(items),
    "series": lambda items: pandas.Series(objects(items)),
}
"""Makes a sequence of another class of a list."""


def objects(items):
    """An array of objects, as pandas reads a column of lists."""
    array = np.empty(len(items), object)
    for place, item in enumerate(items):
        array[place] = item
    return array


def encoder(kinds=DOCUMENT_KINDS):
    """With a template that shows what is called, and what there is to call."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{{ m['content'] or '' }}"
        "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% "
        "endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return Tokenizer(tokenizer, kinds=kinds)


def documents_of(rows, objective, folder):
    """For each row the documents that it becomes, as ids and what of them is trained; of judged
    answers beside another one.
    """
    rows = [OTHER, *rows] if objective == "judged" else rows
    store = build_store(rows, encoder(TAKEN.get(objective, DOCUMENT_KINDS)), 512, folder)
    documents = [[] for _ in rows]
    for number, row in enumerate(store.rows):
        documents[row].append([part.tolist() for part in store.whole_document(number)])
    assert all(documents), store.report.entries()
    return documents[1:] if objective == "judged" else documents


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "name"), CASES)
def test_a_missing_field_is_missing_in_every_spelling(objective, name, tmp_path):
    row = KINDS[objective][name]
    spare = sorted({*READ_FIELDS, *MEDIA_FIELDS} - {*row})
    filled = [{**row, **dict.fromkeys(spare, value)} for value in MISSING.values()]
    filled += [
        {**row, field: MISSING[spelling]}
        for field in spare
        for spelling in ("nan", "NA", "list", "array")
    ]
    expected, *found = documents_of([row, *filled], objective, tmp_path)
    for variant, documents in zip(filled, found, strict=True):
        assert documents == expected, variant


@pytest.mark.parametrize(("objective", "name"), CASES)
def test_a_list_is_a_list_whatever_class_it_has(objective, name, tmp_path):
    row = KINDS[objective][name]
    variants = [
        {field: shaped(value, shape) for field, value in row.items()} for shape in SHAPES.values()
    ]
    expected, *found = documents_of([row, *variants], objective, tmp_path)
    assert found == [expected] * len(variants)


def shaped(value, shape):
    """The value with every list in it, however deep, as another kind of sequence."""
    if isinstance(value, dict):
        return {name: shaped(one, shape) for name, one in value.items()}
    return shape([shaped(one, shape) for one in value]) if isinstance(value, list) else value


@pytest.mark.parametrize("spelling", MISSING)
@pytest.mark.parametrize(
    "field",
    ["weight", "train", "name", "tool_calls", "reasoning_content", "images", "tool_call_id"],
)
def test_a_field_that_a_message_lacks_is_missing_in_every_spelling(field, spelling):
    filled = [{**message, field: MISSING[spelling]} for message in CHAT]
    expected = encoder().encode({"messages": CHAT}, "row 1")
    assert encoder().encode({"messages": filled}, "row 1") == expected
    if spelling in ("None", "nan", "list"):
        assert encoder().encode({"messages": json.dumps(filled)}, "row 1") == expected


@pytest.mark.parametrize("content", ["None", "nan", "list", "array", "NA"])
def test_a_message_that_calls_needs_no_content(content):
    called = [ASKED, {**CALL, "content": MISSING[content]}, ANSWERED]
    assert encoder().encode({"messages": called}, "") == encoder().encode(
        {"messages": [ASKED, CALL, ANSWERED]}, ""
    )


@pytest.mark.parametrize("value", ["null", "[]", "NaN", "", *MISSING.values()], ids=str)
def test_json_text_may_say_that_there_is_nothing(value):
    row = ROWS["instruction"]
    assert encoder().encode({**row, "history": value, "tools": value}, "") == encoder().encode(
        row, ""
    )


TEXTS = ["ab", "hi", "yo", "abc", "x"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        *(
            ({"instruction": "a?", "output": "b", "history": history}, "history must be a list of")
            for history in [
                ["hi", "yo"],
                ("hi", "yo"),
                np.array(["hi", "yo"]),
                [b"hi"],
                [["hi", "yo", "so"]],
                [{"a": 1, "b": 2}],
                '["hi", "yo"]',
                {"hi": "yo"},
                3,
                '"hi"',
                "12",
            ]
        ),
        *(
            ({"messages": messages}, "messages must be a list of messages, this is str")
            for messages in TEXTS
        ),
        *(({"messages": TEXTS[:count]}, "must be an object") for count in (1, 2, 4)),
        (
            {"messages": [ASKED, {**ANSWERED, "content": [{"type": "text", "text": ["a"]}]}]},
            "part of type",
        ),
        *(
            ({"messages": CHAT, "tools": tools}, "tools must be a list of objects")
            for tools in [["ab"], '"ab"', {"a": 1}]
        ),
        *(
            ({"messages": [ASKED, {**CALL, "tool_calls": calls}]}, "tool_calls")
            for calls in ["ab", ["ab"], '"ab"']
        ),
        *(({"input_ids": ids}, "input_ids must be a list") for ids in ["ab", ["a", "b"]]),
        *(
            ({"input_ids": [1, 2], "labels": labels}, "labels must be a list")
            for labels in ["ab", ["a", "b"]]
        ),
        *(
            ({"input_ids": [1, 2], "attention_mask": mask}, "attention_mask must hold")
            for mask in ["11", ["1", "1"]]
        ),
    ],
)
def test_text_is_never_a_list(row, words):
    with pytest.raises(DataError, match=words):
        encoder().encode(row, "row 1")


@pytest.mark.parametrize("field", ["responses", "scores"])
def test_text_is_no_list_of_ranked_answers(field, tmp_path):
    store = build_store(
        [{**PAIRS["ranked"], field: "ab"}],
        Tokenizer(tiny.tokenizer(), kinds=("preference",)),
        64,
        tmp_path,
    )
    assert "must be a list, this is str" in store.report.findings["wrong_type"].example


def test_calls_are_the_same_as_text_and_as_objects(tmp_path):
    """A conversation is found in its prompt whatever the form of its calls: JSON text is not
    read letter by letter.
    """
    as_text = {**CALL, "tool_calls": json.dumps(CALL["tool_calls"])}
    whole = {
        "chosen": [ASKED, CALL, ANSWERED],
        "rejected": [ASKED, CALL, {**ANSWERED, "content": "three"}],
    }
    expected, found = documents_of(
        [whole, {**whole, "prompt": [ASKED, as_text]}], "pairs", tmp_path
    )
    assert found == expected


@pytest.mark.slow
def test_rows_of_data_frames_are_taken_as_their_error_advises(tmp_path):
    rows = [
        {"instruction": "add", "input": "1+1", "output": "2"},
        {"instruction": "greet", "output": "hello"},
    ]
    frame = pandas.DataFrame(rows)
    config = ChronicalsConfig(max_seq_length=64, cache_dir=tmp_path)
    with pytest.raises(DataError, match=r"give frame\.to_dict\('records'\)"):
        create_dataloader(frame, tiny.tokenizer(), config)
    expected = documents_of(rows, "sft", tmp_path)
    for made in (frame, frame.convert_dtypes(), frame.astype("category")):
        assert documents_of(made.to_dict("records"), "sft", tmp_path) == expected
    for wrong in (frame.to_dict(), frame.to_dict("list"), frame.to_dict("series")):
        with pytest.raises(DataError, match=r"a list of objects, one a row.*to_dict\('records'\)"):
            create_dataloader(wrong, tiny.tokenizer(), config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.jsonl"])
def test_files_of_mixed_kinds_are_read_as_their_rows(name, tmp_path):
    """A table has every column in every row: NaN where pandas fills it up, nothing where Arrow
    does, and NaN in JSON.
    """
    rows = [
        ROWS[kind]
        for kind in ("chat", "completion", "instruction", "text", "tokens", "conversations")
    ]
    records = pandas.DataFrame(rows).to_dict("records")
    path = tmp_path / name
    if name.endswith("jsonl"):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        assert "NaN" in path.read_text()
    elif name.endswith("parquet"):
        pandas.DataFrame(rows).to_parquet(path)
    else:
        table = pa.table({name: [row.get(name) for row in rows] for name in records[0]})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    expected = documents_of(rows, "sft", tmp_path)
    for source in (
        path,
        records,
        pandas.read_parquet(path).to_dict("records") if name.endswith("parquet") else records,
    ):
        store = build_store(source, encoder(), 512, tmp_path)
        assert [
            [[part.tolist() for part in store.document(n)]] for n in range(len(store))
        ] == expected


def test_a_column_of_an_object_that_a_row_does_not_have_is_missing(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"q": "what is 2?", "a": "two", "about": about}
        for about in ({"system": "be kind"}, None, float("nan"))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"instruction": "q", "output": "a", "system": "about.system"}
    store = build_store(
        DataSource(str(path), columns=columns), Tokenizer(tiny.tokenizer()), 64, tmp_path
    )
    assert len(store) == 3 and store.lengths[0] > store.lengths[1] == store.lengths[2]


def test_other_processes_see_pictures_too():
    """They are sent rows without the fields that nobody reads, and pictures are read no further
    than that there are some.
    """
    rows = [{**ROWS["text"], "images": images} for images in (["a.png"], [], float("nan"), None)]
    header, body = frame_of_chunk(RowChunk(0, ["row"] * len(rows), rows))
    sent = [parsed(line)["images"] for line in chunk_of_frame(header, body).records]
    assert sent == [1, 0, 0, None]


@pytest.mark.parametrize(
    "value",
    [0, 0.0, False, "", "nan", "None", b"", np.array([0.0]), [None], [[]], -1, np.bool_(False)],
    ids=repr,
)
def test_other_values_are_there(value):
    assert not is_missing(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "ab",
        b"ab",
        bytearray(b"ab"),
        np.str_("ab"),
        {"a": 1},
        3,
        None,
        np.array("ab"),
        np.int64(3),
    ],
)
def test_what_is_no_list_has_no_items(value):
    assert list_items(value) is None
