"""Every format gives the same rows; what cannot be read is named by file and line."""

import codecs
import csv
import gc
import gzip
import io
import json
import random
import tracemalloc

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from chronicals.data import BadRow, DataError
from chronicals.data.reading import formats as of_formats
from chronicals.data.reading.formats import READERS, reader_of
from chronicals.data.reading.records import parsed

ALPHABET = "ab1 ,;|\t\"'\\/{}[]:\n\r\x00\ufeff\u2028\u0085é中🙂"


def texts(count, longest=40):
    return ["".join(random.choices(ALPHABET, k=random.randrange(longest))) for _ in range(count)]


def made_rows(count=60):
    """Rows of text alone, which every format can hold, of every length."""
    return [dict(zip(("prompt", "comple,tion", 'na"me'), texts(3))) for _ in range(count)]


def read_file(path):
    return ((where, parsed(record)) for where, record in of_formats.read_file(path))


def records(path):
    return [record for _, record in read_file(path)]


def packed(path, content: bytes):
    codec = of_formats.COMPRESSED.get(path.suffix)
    with pa.CompressedOutputStream(str(path), codec) if codec else path.open("wb") as stream:
        stream.write(content)


def json_lines(path, rows):
    packed(
        path,
        b"".join(
            json.dumps(row, ensure_ascii=random.random() < 0.5).encode() + b"\n" for row in rows
        ),
    )


def json_array(path, rows):
    indent = random.choice([None, 0, 1, 7])
    ascii_only = random.random() < 0.5
    packed(path, json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode())


def json_object(path, rows):
    around = {
        "version": "1.0",
        "tags": ["a", {"b": []}],
        "info": {"rows": [{"text": "not a row"}]},
        "rows": rows,
        "empty": [],
    }
    names = random.sample(list(around), len(around))
    packed(
        path,
        json.dumps(
            {name: around[name] for name in names}, indent=random.choice([None, 2])
        ).encode(),
    )


def separated(path, rows, delimiter=","):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(
        text,
        list(rows[0]),
        delimiter=delimiter,
        quoting=random.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    )
    writer.writeheader()
    writer.writerows(rows)
    packed(path, random.choice([b"", codecs.BOM_UTF8]) + text.getvalue().encode())


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=random.randrange(1, 20))


def arrow_file(path, rows):
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=random.randrange(1, 20))


def arrow_stream(path, rows):
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=random.randrange(1, 20))


FORMATS = {
    "rows.jsonl": json_lines,
    "rows.JSONL": json_lines,
    "rows.ndjson": json_lines,
    "rows.jsonl.gz": json_lines,
    "rows.jsonl.zst": json_lines,
    "lines.json": json_lines,
    "rows.json": json_array,
    "rows.json.gz": json_array,
    "object.json": json_object,
    "rows.csv": separated,
    "rows.csv.zst": separated,
    "rows.tsv": lambda path, rows: separated(path, rows, "\t"),
    "rows.parquet": parquet,
    "file.arrow": arrow_file,
    "stream.arrow": arrow_stream,
    "rows.feather": lambda path, rows: pyarrow.feather.write_feather(
        pa.Table.from_pylist(rows), path
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_rows_through_every_format_are_the_same_records(tmp_path, set_constants, name):
    set_constants(of_formats, COLUMNAR_ROWS_AT_ONCE=7)
    rows = made_rows()
    FORMATS[name](tmp_path / name, rows)
    assert records(tmp_path / name) == rows


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if ".csv" not in name and ".tsv" not in name]
)
def test_nested_values_keep_their_types(tmp_path, name):
    rows = [
        {
            "messages": [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), texts(2))
            ],
            "n": n,
            "x": 0.5,
        }
        for n in range(20)
    ]
    FORMATS[name](tmp_path / name, rows)
    assert records(tmp_path / name) == rows


def test_every_ending_has_a_test():
    assert {suffix for suffix in READERS if f"rows{suffix}" not in FORMATS} == {
        ".arrow",
        ".txt",
        ".md",
        ".text",
    }


@pytest.mark.parametrize("window", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("indent", [None, 3])
def test_a_json_text_cut_anywhere_is_read_the_same(tmp_path, set_constants, window, indent):
    set_constants(of_formats, JSON_WINDOW=window)
    values = [
        None,
        True,
        False,
        0,
        -12.5e-7,
        10**20,
        float("inf"),
        float("-inf"),
        "",
        [],
        {},
        *texts(4),
    ]
    rows = [
        {text: random.choice(values) for text in texts(random.randrange(4))} for _ in range(12)
    ] + values
    random.shuffle(rows)
    (tmp_path / "rows.json").write_text(
        json.dumps(rows, indent=indent, ensure_ascii=random.random() < 0.5)
    )
    assert records(tmp_path / "rows.json") == rows


def test_rows_are_numbered_where_people_find_them(tmp_path):
    rows = [{"a": "1", "b": "x\ny\n\nz"}, {"a": "2", "b": ""}, {"a": "3", "b": "w"}]
    for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet"):
        FORMATS[name](tmp_path / name, rows)
    places = {
        name: [where for where, _ in read_file(tmp_path / name)]
        for name in ("rows.jsonl", "rows.json", "rows.parquet")
    }
    assert places["rows.jsonl"] == [f"{tmp_path}/rows.jsonl:{line}" for line in (1, 2, 3)]
    assert places["rows.json"] == [f"{tmp_path}/rows.json: row {row}" for row in (1, 2, 3)]
    assert places["rows.parquet"] == [f"{tmp_path}/rows.parquet: row {row}" for row in (1, 2, 3)]
    (tmp_path / "rows.csv").write_text('a,b\n1,"x\ny\n\nz"\n\n2,\n3,w\n')
    found = list(read_file(tmp_path / "rows.csv"))
    assert found == [(f"{tmp_path}/rows.csv:{line}", row) for line, row in zip((2, 7, 8), rows)]


FAULTS = [
    ("a.jsonl", '{"a": 1}\n{"a": \n{"a": 2}\n', ":2", "does not parse as JSON"),
    ("a.jsonl", '{"a": 1}\n\n{"a": 1} {"a": 2}\n{"a": 2}\n', ":3", "Extra data"),
    ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n{"a": 2}\n', ":2", "can't decode byte 0xff"),
    ("a.jsonl", '{"a": 1}\n{"a": "\\ud83d"}\n{"a": 2}\n', ":2", "half of a character"),
    ("a.jsonl", '{"a": 1}\n' + '{"a":' * 100_000 + "\n" + '{"a": 2}\n', ":2", "recursion"),
    ("a.jsonl", '{"a": 1}\n{"a": ' + "9" * 5000 + '}\n{"a": 2}\n', ":2", "integer string"),
    ("a.json", '[{"a": 1},\n{"a": "\\uDC00"},\n{"a": 2}]', ": row 2", "half of a character"),
    ("a.csv", "a\n1\n2,3\n4\n", ":3", "has 2 fields where the header names 1: a"),
    ("a.csv", 'a,b\n1,2\n"x"y,2\n3,4\n', ":3", "does not parse as CSV"),
    ("a.tsv", "a\tb\n1\t2\n3\n3\t4\n", ":3", "has 1 fields where the header names 2: a, b"),
]


@pytest.mark.parametrize(("name", "content", "place", "reason"), FAULTS)
def test_a_row_that_cannot_be_read_is_handed_on_and_the_others_are_read(
    tmp_path, name, content, place, reason
):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (_, before), (where, bad), (_, after) = read_file(path)
    assert where == f"{path}{place}" and isinstance(bad, BadRow) and bad.rule == "unparsable_line"
    assert reason in bad.reason
    assert isinstance(before, dict) and isinstance(after, dict)


def not_utf8(texts, at):
    raw = [text.encode() for text in texts]
    raw[at] = b"caf\xe9"
    return pa.Array.from_buffers(pa.string(), len(raw), pa.array(raw, pa.binary()).buffers())


def written(table, path):
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
@pytest.mark.parametrize(
    "column", [not_utf8("abc", 1), pa.array([0, 10**18, 1], pa.timestamp("us"))]
)
def test_a_value_that_python_has_none_for_is_the_fault_of_its_row(tmp_path, name, column):
    path = written(pa.table({"text": list("abc"), "other": column}), tmp_path / name)
    (_, first), (place, second), (_, third) = read_file(path)
    assert (first["text"], third["text"]) == ("a", "c")
    assert (place, second.rule) == (f"{path}: row 2", "wrong_type")
    assert second.reason.startswith("column 'other' cannot be read: ")


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
def test_a_name_that_two_columns_have_is_refused(tmp_path, name):
    path = written(
        pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), tmp_path / name
    )
    with pytest.raises(DataError, match="the header names 'text' twice"):
        list(read_file(path))


def test_blank_lines_before_the_header_are_passed_over(tmp_path):
    (tmp_path / "t.csv").write_text("\n\nprompt,completion\na,b\n")
    assert list(read_file(tmp_path / "t.csv")) == [
        (f"{tmp_path}/t.csv:4", {"prompt": "a", "completion": "b"})
    ]


def test_a_quote_that_is_never_closed_is_the_last_row(tmp_path):
    (tmp_path / "a.csv").write_text('a,b\n1,2\n3,"4\n5,6\n')
    (_, first), (where, bad) = read_file(tmp_path / "a.csv")
    assert first == {"a": "1", "b": "2"}
    assert where == f"{tmp_path}/a.csv:3" and "unexpected end" in bad.reason


def test_a_pair_of_surrogates_is_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "\\ud83d\\ude42"}\n')
    assert records(tmp_path / "a.jsonl") == [{"a": "🙂"}]


def test_fields_longer_than_the_csv_module_likes(tmp_path):
    separated(tmp_path / "a.csv", [{"a": "x" * 300_000, "b": "y"}])
    assert records(tmp_path / "a.csv") == [{"a": "x" * 300_000, "b": "y"}]


def cut(content, share=0.5):
    return content[: int(share * len(content))]


def bytes_of(make, name, tmp_path):
    make(tmp_path / f"whole-{name}", made_rows())
    return (tmp_path / f"whole-{name}").read_bytes()


@pytest.mark.parametrize(
    "name",
    ["rows.jsonl.gz", "rows.csv.zst", "rows.parquet", "file.arrow", "stream.arrow", "rows.feather"],
)
@pytest.mark.parametrize("damage", [cut, lambda content: b"not " + content, lambda content: b"x"])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    path = tmp_path / name
    path.write_bytes(damage(bytes_of(FORMATS[name], name, tmp_path)))
    with pytest.raises(
        DataError, match=rf"^{path}: cannot be read \(.*damaged or only partly copied"
    ):
        records(path)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_stream_that_was_cut_between_two_batches_is_named(tmp_path, legacy):
    path = tmp_path / "s.arrow"
    table = pa.table({"text": list("abc")})
    file = io.BytesIO()
    ends = []
    with pa.ipc.new_stream(
        file, table.schema, options=pa.ipc.IpcWriteOptions(use_legacy_format=legacy)
    ) as writer:
        for batch in table.to_batches(1):
            writer.write_batch(batch)
            ends.append(file.tell())
    whole = file.getvalue()
    path.write_bytes(whole)
    assert [record["text"] for record in records(path)] == list("abc")
    for end in ends:
        path.write_bytes(whole[:end])
        with pytest.raises(
            DataError, match=rf"^{path}: cannot be read \(its end-of-stream marker is missing"
        ):
            records(path)


@pytest.mark.parametrize(
    ("content", "place", "reason"),
    [
        ('[{"a": 1},\n {"a": 2}\n {"a": 3}]', ":3", "expected ',' or ']', found '{'"),
        ('[{"a": 1},\n\n {"a": tru}]', ":3", "Expecting value"),
        ('[{"a": 1},\n {"a": 2}', ":2", "expected ',' or ']', found ''"),
        ('[{"a": 1},\n {"a": "2]', ":2", "Unterminated string"),
        ('[{"a": 1}]\n[]', ":2", "something follows the end"),
        ('{"data":\n [{"a": 1}]}\n{}\n', ":3", "something follows the end"),
        ("", ":1", "expected an array of objects"),
        ("text", ":1", "expected an array of objects"),
        ('[{"a": 1},]', ":1", "Expecting value"),
        ('[{"a": ' + "9" * 5000 + "}]", ":1", "integer string"),
        ("[" * 100_000, ":1", "recursion"),
    ],
)
@pytest.mark.parametrize("window", [5, 1 << 20])
def test_a_json_text_that_does_not_parse_names_the_line(
    tmp_path, set_constants, content, place, reason, window
):
    set_constants(of_formats, JSON_WINDOW=window)
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError) as error:
        records(path)
    assert str(error.value).startswith(f"{path}{place}: does not parse as JSON") and reason in str(
        error.value
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"a": [1, 2], "b": {"c": [{"d": 1}]}}', "holds no array of objects"),
        ("{}", "holds no array of objects"),
        ('{"a": [{"b": 1}], "c": [{"b": 2}]}', "holds two arrays of objects, 'a' and 'c'"),
    ],
)
def test_an_object_holds_one_array_of_objects(tmp_path, content, reason):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=reason):
        records(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.csv", "a,b,a\n1,2,3\n", "the header names 'a' twice"),
        ("a.csv", "prompt;completion\n1;2\n", "the header is one column, 'prompt;completion'"),
        ("a.tsv", "prompt,completion\n1,2\n", "the header is one column, 'prompt,completion'"),
        ("a.csv", '"a"b,c\n', "cannot be read (',' expected"),
        (
            "a.csv",
            b"a\nx\ncaf\xe9\n",
            "not UTF-8 text (invalid continuation byte, byte 3 of line 3); save it as UTF-8",
        ),
        ("a.json", b'[{"a":\n "\xff"}]', "not UTF-8 text (invalid start byte, byte 2 of line 2)"),
        ("a.txt", b"abc\xff", "not UTF-8 text (invalid start byte, byte 3 of line 1)"),
        *(
            (name, "[]".encode("utf-16"), "is UTF-16; save it as UTF-8")
            for name in ("a.json", "a.jsonl", "a.csv", "a.txt")
        ),
        ("a.xlsx", "a", "files ending in '.xlsx' cannot be read; give .jsonl"),
        ("a.parquet.gz", "a", "files ending in '.gz' cannot be read"),
        ("a", "a", "files ending in '' cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as error:
        records(path)
    assert str(error.value).startswith(f"{path}: ") and reason in str(error.value)


@pytest.mark.parametrize(
    "name", [*(f"rows{suffix}" for suffix in READERS), "rows.jsonl.gz", "rows.csv.zst"]
)
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(DataError, match=rf"^{tmp_path}/{name}: no such file$"):
        records(tmp_path / name)


@pytest.mark.parametrize(
    "name",
    ["empty.jsonl", "empty.csv", "header.csv", "empty.jsonl.gz", "none.json", "none.parquet"],
)
def test_files_without_rows(tmp_path, name):
    path = tmp_path / name
    if name == "none.parquet":
        pq.write_table(pa.table({"a": pa.array([], pa.string())}), path)
    else:
        text = {"header.csv": b"a,b\n", "none.json": b"[ ]"}.get(name, b"")
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert records(path) == []


def test_compressed_members_one_after_the_other(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(
        b"".join(gzip.compress(b'{"a": %d}\n' % n) for n in range(3))
    )
    assert records(tmp_path / "a.jsonl.gz") == [{"a": n} for n in range(3)]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a b\n\nc d\ne", [("", "a b\n\nc d\ne")]),
        ("123456789\n\nabc\nd", [(":1", "123456789\n\n"), (":3", "abc\nd")]),
        ("123456789\nabc\nde", [(":1", "123456789\n"), (":2", "abc\nde")]),
        ("1234567\n9 bc d f", [(":1", "1234567\n"), (":2", "9 bc d f")]),
        ("1234567 9abcdef", [(":1", "1234567 "), (":1", "9abcdef")]),
        ("123456789abc" * 2 + "\n", [(":1", "123456789abc"), (":1", "123456789abc"), (":1", "\n")]),
    ],
    ids=["short", "paragraph", "line", "line before word", "word", "nowhere"],
)
def test_a_long_text_is_several_rows(tmp_path, set_constants, text, parts):
    set_constants(of_formats, MAX_TEXT_ROW=12)
    path = tmp_path / "a.txt"
    path.write_text(text)
    assert list(read_file(path)) == [(f"{path}{place}", {"text": part}) for place, part in parts]


def test_no_letter_of_a_long_text_is_lost(tmp_path, set_constants):
    set_constants(of_formats, MAX_TEXT_ROW=50)
    path = tmp_path / "a.txt"
    path.write_text("".join(random.choices("ab \né", k=5000)), encoding="utf-8")
    rows = list(read_file(path))
    assert (
        "".join(record["text"] for _, record in rows) == path.read_text(encoding="utf-8")
        and len(rows) >= 100
    )
    lines = path.read_text(encoding="utf-8").split("\n")
    for place, record in rows:
        assert lines[int(place.rpartition(":")[2]) - 1].find(record["text"].partition("\n")[0]) >= 0


def test_endings():
    from pathlib import Path

    assert reader_of(Path("x.y/a.JSON.GZ")) is READERS[".json"]
    assert reader_of(Path("a.gz")) is reader_of(Path("jsonl")) is reader_of(Path(".jsonl")) is None


def peak(path):
    """Bytes that reading takes at most, rows not kept."""
    gc.collect()
    tracemalloc.start()
    count = sum(1 for _ in read_file(path))
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return count, size


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["rows.json", "object.json", "rows.jsonl", "rows.csv", "rows.json.gz"]
)
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    rows = [{"text": f"{n:06} " * 6000, "n": "1"} for n in range(1200)]
    path = tmp_path / name
    FORMATS[name](path, rows)
    count, size = peak(path)
    assert count == 1200 and sum(len(row["text"]) for row in rows) > 50e6
    assert size < 10e6


@pytest.mark.slow
def test_memory_does_not_grow_with_a_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one line of many\n" * 3_000_000)
    count, size = peak(path)
    assert 51e6 / of_formats.MAX_TEXT_ROW < count < 20 and size < 8 * of_formats.MAX_TEXT_ROW


@pytest.mark.slow
def test_arrow_memory_does_not_grow_with_the_file(tmp_path):
    table = pa.table({"text": ["".join(random.choices("abc ", k=500)) for _ in range(30_000)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="none", row_group_size=30_000)
    del table
    gc.collect()
    before = pa.total_allocated_bytes()
    largest = 0
    for number, _ in enumerate(read_file(tmp_path / "a.parquet"), 1):
        if number % 1000 == 0:
            largest = max(largest, pa.total_allocated_bytes() - before)
    assert number == 30_000 and largest < 8e6
