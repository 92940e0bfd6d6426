"""Files of runs, models and token stores beside rows are no rows; files of users that have such
names are.
"""

import json
import logging

import pytest

from chronicals.data import read_records
from chronicals.data.reading.own_files import own_files

REPORT = {
    "data": "a",
    "rows": 1,
    "documents": 1,
    "tokens": 3,
    "targets": 2,
    "kinds": {},
    "findings": [],
}
ROW = {"text": "a row"}

INSIDE = {
    "a run that was kept": {
        "resume.yaml": "model: a",
        "metrics.jsonl": "{}",
        "checkpoints/step-00000001/state.json": "{}",
    },
    "a run from Python": {
        "model/chronicals.json": "{}",
        "model/config.json": "{}",
        "metrics.jsonl": "{}",
    },
    "a run that was killed": {
        "checkpoints/step-00000002/manifest.json": "{}",
        "metrics.jsonl": "{}",
    },
    "a check": {"train_dataset.json": json.dumps(REPORT), "eval_dataset.json": json.dumps(REPORT)},
    "a model": {
        "config.json": "{}",
        "model.safetensors": "",
        "generation_config.json": "{}",
        "tokenizer.json": "{}",
    },
    "a tokenizer": {"config.json": "{}", "tokenizer_config.json": "{}", "vocab.json": "{}"},
    "an adapter": {"adapter_config.json": "{}", "tokenizer_config.json": "{}"},
    "a token store": {
        f"{'0a' * 16}.arrow": "",
        f"{'0a' * 16}.json": "{}",
        "file-digests.json": "{}",
    },
}


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def texts(source):
    return [record for _, record in read_records(source)]


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("place", [".", "inside", "one/two"])
@pytest.mark.parametrize("pattern", ["", "**/*.json*"])
def test_they_are_left_out_of_folders_and_patterns_and_said_by_name(
    tmp_path, name, place, pattern, caplog
):
    write(tmp_path / place, INSIDE[name])
    write(tmp_path, {"rows.jsonl": json.dumps(ROW), "one/more.jsonl": json.dumps(ROW)})
    with caplog.at_level(logging.INFO):
        assert texts(f"{tmp_path}/{pattern}" if pattern else tmp_path) == [ROW, ROW]
    said = next(
        said
        for said in map(logging.LogRecord.getMessage, caplog.records)
        if "files of runs, models" in said
    )
    assert (
        str((tmp_path / place / next(iter(INSIDE[name])).split("/")[0]).resolve()) in said
        or pattern
    )


def test_rows_of_users_with_such_names_are_read(tmp_path):
    rows = {
        "train_dataset.json": [ROW],
        "metrics.jsonl": ROW,
        "model/config.json": [ROW],
        "vocab.json": [ROW],
    }
    write(tmp_path, {name: json.dumps(content) for name, content in rows.items()})
    assert texts(tmp_path) == [ROW] * 4
    write(tmp_path / "run", {**INSIDE["a run that was kept"], "answers.jsonl": json.dumps(ROW)})
    assert texts(tmp_path) == [ROW] * 5
    assert texts(tmp_path / "metrics.jsonl") == [ROW]


def test_what_is_named_itself_is_read(tmp_path):
    write(tmp_path, {**INSIDE["a run that was kept"], "metrics.jsonl": json.dumps(ROW)})
    assert own_files(tmp_path, ["resume.yaml", "metrics.jsonl"]) == {"resume.yaml", "metrics.jsonl"}
    assert texts(tmp_path / "metrics.jsonl") == [ROW]
