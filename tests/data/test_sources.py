"""Records are read whole and in order; whatever cannot be read is named by file and line."""

import json
import random

import pytest

import tiny
from chronicals.data import DataError, read_records


def lines(path, *texts):
    path.write_bytes(b"\n".join(text if isinstance(text, bytes) else text.encode() for text in texts) + b"\n")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_lines_come_back_in_order_with_their_line(tmp_path, suffix, ascii_only):
    alphabet = 'ab \n\t"\\é\u2028\u0085中🙂'
    rows = [{"text": "".join(random.choices(alphabet, k=random.randrange(30))), "n": n} for n in range(50)]
    path = lines(tmp_path / f"rows{suffix}", *(json.dumps(row, ensure_ascii=ascii_only) for row in rows))
    assert list(read_records(path)) == [(f"{path}:{number}", row) for number, row in enumerate(rows, 1)]
    assert list(read_records(str(path))) == list(read_records(path))


def test_blank_lines_are_passed_over_and_counted(tmp_path):
    path = lines(tmp_path / "rows.jsonl", '{"text": "a"}', "", "  \t", '{"text": "b"}')
    assert list(read_records(path)) == [(f"{path}:1", {"text": "a"}), (f"{path}:4", {"text": "b"})]


def test_a_byte_order_mark_and_carriage_returns_are_harmless(tmp_path):
    path = lines(tmp_path / "rows.jsonl", b'\xef\xbb\xbf{"text": "a"}\r', b'{"text": "b"}\r')
    assert [record for _, record in read_records(path)] == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    "wrong", ['{"text": "a"', "{'text': 'a'}", "text", '{"text": "a"} {"text": "b"}', b'{"text": "\xff\xfe"}']
)
def test_a_line_that_does_not_parse_names_file_and_line(tmp_path, wrong):
    before = random.randrange(1, 20)
    path = lines(tmp_path / "rows.jsonl", *['{"text": "fine"}'] * before, wrong, '{"text": "fine"}')
    records = read_records(path)
    for _ in range(before):
        next(records)
    with pytest.raises(DataError) as error:
        next(records)
    assert str(error.value).startswith(f"{path}:{before + 1}: does not parse as JSON")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        list(read_records(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="no such file"):
        list(read_records(tmp_path))


def test_a_file_of_another_kind_is_refused_with_what_can_be_read(tmp_path):
    path = lines(tmp_path / "rows.xlsx", "a")
    with pytest.raises(DataError, match=r"'\.xlsx' cannot be read; give \.jsonl"):
        list(read_records(path))


@pytest.mark.parametrize("suffix", [".txt", ".md", ".text"])
def test_a_text_file_is_one_record(tmp_path, suffix):
    path = tmp_path / f"book{suffix}"
    path.write_text("first line\n\nsecond\té🙂\n", encoding="utf-8")
    assert list(read_records(path)) == [(str(path), {"text": "first line\n\nsecond\té🙂\n"})]


def test_a_text_file_that_is_not_utf_8_names_the_byte(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"book\.txt: not UTF-8 text .*byte 3"):
        list(read_records(path))


@pytest.mark.parametrize("make", [list, tuple, iter, lambda rows: (row for row in rows)])
def test_rows_in_memory_are_numbered_from_one(make):
    rows = tiny.chat_rows(7)
    assert list(read_records(make(rows))) == [(f"row {number}", row) for number, row in enumerate(rows, 1)]


def test_a_dataset_of_datasets_is_rows_in_memory():
    datasets = pytest.importorskip("datasets")
    rows = tiny.chat_rows(7)
    got = list(read_records(datasets.Dataset.from_list(rows)))
    assert got == [(f"row {number}", row) for number, row in enumerate(rows, 1)]
