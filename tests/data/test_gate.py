"""The gate stops what would make training wrong, with counts; its report names every finding and its rows."""

import random

import pytest

import tiny
from chronicals.data import DataError, DataReport, Tokenizer, TokenStore

ANSWERED = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
MASKED = {"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}


def report(rows, tmp_path, width=64):
    return TokenStore.build(rows, Tokenizer(tiny.tokenizer()), width, tmp_path).report


def test_data_without_rows_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"^train\.jsonl: holds no rows"):
        report([], tmp_path).check("train.jsonl", max_masked_rows=1.0)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="holds no rows"):
        report(tmp_path / "train.jsonl", tmp_path).check("train.jsonl", max_masked_rows=1.0)


def test_data_with_nothing_to_train_on_is_refused_whatever_share_is_allowed(tmp_path):
    with pytest.raises(DataError) as error:
        report([MASKED] * 12, tmp_path).check("train", max_masked_rows=1.0)
    message = str(error.value)
    assert message.startswith("train: nothing to train on in any of 12 rows")
    assert "12 rows without a trained token" in message
    assert "(rows 1, 2, 3, 4, 5 …)" in message


def test_prompts_that_fill_the_width_are_told_apart_from_masked_rows(tmp_path):
    cut = {"input_ids": [1] * 9, "labels": [-100] * 8 + [1]}
    found = report([ANSWERED, cut, MASKED, cut], tmp_path, width=8)
    assert found.masked_causes == {
        "without a trained token left after the cut at max_seq_length": 2,
        "without a trained token": 1,
    }
    assert found.examples["without a trained token left after the cut at max_seq_length"] == [2, 4]
    assert found.examples["without a trained token"] == [3]
    assert (found.rows, found.masked, found.documents) == (4, 3, 1)


def test_too_large_a_share_of_masked_rows_is_refused_and_the_bound_itself_is_not(tmp_path):
    total = random.choice([16, 32])  # so that the share is a number of binary digits
    masked = random.randrange(1, total)
    rows = [MASKED] * masked + [ANSWERED] * (total - masked)
    random.shuffle(rows)
    found = report(rows, tmp_path)
    found.check("train", max_masked_rows=masked / total)
    with pytest.raises(DataError) as error:
        found.check("train", max_masked_rows=(masked - 0.5) / total)
    message = str(error.value)
    assert message.startswith(f"train: {masked} of {total} rows have nothing to train on")
    where = [number for number, row in enumerate(rows, 1) if row is MASKED][:5]
    assert f"{masked} rows without a trained token (rows {', '.join(map(str, where))} …)" in message
    assert f"now {(masked - 0.5) / total}" in message


def test_good_data_passes_and_is_described_in_one_line(tmp_path):
    found = report([ANSWERED] * 3, tmp_path)
    found.check("train", max_masked_rows=0.0)
    assert found.lines() == ["3 rows, 3 documents, 9 tokens, 6 of them trained (67%)"]


def test_every_finding_has_a_line_with_its_rows(tmp_path):
    tokenizer = Tokenizer(tiny.tokenizer())
    chat = tiny.chat_rows(1)[0]
    width = len(tokenizer.encode(chat, "row")[0])
    rows = [chat, {"text": "the answer " * width}, MASKED, {"input_ids": [5] * (width + 1)}]
    found = report(rows, tmp_path, width)
    assert found.lines()[1:] == [
        "1 rows truncated (rows 4 …)",
        "1 rows stop token cut (rows 4 …)",
        "1 rows split (rows 2 …)",
        "1 rows without a trained token (rows 3 …)",
    ]


def test_a_report_survives_being_written(tmp_path):
    rows = [ANSWERED, MASKED, {"input_ids": [1] * 100}]
    first = TokenStore.build(rows, Tokenizer(tiny.tokenizer()), 16, tmp_path)
    again = TokenStore.open(first.path)
    assert again.report == first.report == DataReport(**first.report.to_dict())
    assert again.report.lines() == first.report.lines()
    assert len(first.report.lines()) == 4


def test_a_share_of_masked_rows_is_compared_as_written():
    """0.29 · 100 is less than 29 in floating point; 29 of 100 rows are no more than 0.29."""
    DataReport(rows=100, documents=71, tokens=200, targets=71, masked=29).check("train", max_masked_rows=0.29)
