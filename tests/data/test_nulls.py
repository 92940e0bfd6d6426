"""Nulls that a columnar file fills objects with are left out; those that may be meant are kept."""

import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chronicals.data import read_records
from chronicals.data.reading import nulls
from chronicals.log_once import LOGGED

CALLS = [
    {"name": "weather", "arguments": {"city": "Oslo", "unit": None}},
    {"name": "time", "arguments": {"zone": "UTC"}},
]
ROWS = [
    {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}],
        "tools": [{"name": call["name"], "parameters": {"type": "object", "default": None}}],
        "about": {"source": None, "place": "here"},
    }
    for call in CALLS
]
FILLED = [
    {
        "messages": [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "tool_calls": [{"name": name, "arguments": arguments}],
            },
        ],
        "tools": [{"name": name, "parameters": {"type": "object"}}],
        "about": {"source": None, "place": "here"},
    }
    for name, arguments in (("weather", {"city": "Oslo"}), ("time", {"zone": "UTC"}))
]


def rows_of(source):
    return [record for _, record in read_records(source)]


@pytest.fixture
def said(caplog):
    LOGGED.clear()
    with caplog.at_level(logging.INFO):
        yield caplog


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_nulls_of_json_are_as_they_were_written(tmp_path, name, said):
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, ROWS)) if name.endswith("l") else json.dumps(ROWS))
    assert rows_of(path) == ROWS == rows_of(ROWS)
    assert not said.records


def test_nulls_that_fill_the_objects_of_a_columnar_file_are_left_out_and_it_is_said_once(
    tmp_path, said
):
    for name in ("one.parquet", "two.parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / name)
    assert rows_of(tmp_path) == FILLED * 2
    assert sorted(record.getMessage().split(" of columnar")[0] for record in said.records) == [
        "a null in arguments",
        "a null in tools",
    ]


def test_nulls_of_maps_and_of_texts_stay():
    kind = pa.list_(pa.struct([("name", pa.string()), ("more", pa.map_(pa.string(), pa.string()))]))
    table = pa.table(
        {
            "tools": pa.array(
                [[{"name": "f", "more": [("unit", None)]}, {"name": None, "more": None}]], kind
            )
        }
    )
    clean = nulls.cleaner(table.schema)
    row = table.to_pylist(maps_as_pydicts="lossy")[0]
    assert clean(row) == {"tools": [{"name": "f", "more": {"unit": None}}, {}]}
    assert (
        nulls.cleaner(
            pa.schema([("text", pa.string()), ("about", pa.struct([("a", pa.string())]))])
        )
        is None
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_nulls_of_datasets_are_left_out(streaming):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(ROWS)
    assert rows_of(dataset.to_iterable_dataset() if streaming else dataset) == FILLED
    assert [nulls.without_nulls(row) for row in dataset] == FILLED


def test_values_that_a_transform_has_replaced_stay_as_they_are():
    datasets = pytest.importorskip("datasets")
    more = [{"more": [("a", None)]} for _ in ROWS]
    dataset = datasets.Dataset.from_list(
        [{**row, **one} for row, one in zip(ROWS, more, strict=True)]
    )
    texts = {
        "messages": ["a", "b"],
        "tools": [["f"], [["g"]]],
        "about": ["c", 3],
        "more": ["x", None],
    }
    replaced = dataset.with_transform(
        lambda batch: {name: column[: len(batch["about"])] for name, column in texts.items()}
    )
    assert rows_of(replaced)[0] == {name: column[0] for name, column in texts.items()}
    kind = pa.map_(pa.string(), pa.list_(pa.struct([("a", pa.string())])))
    clean = nulls.cleaner(pa.schema([("more", kind)]))
    for value in ("text", ["text"], 3, None):
        assert clean({"more": value}) == {"more": value}
    assert (
        clean({"more": {"k": [{"a": None}]}})
        == {"more": {"k": [{}]}}
        == clean({"more": [("k", [{"a": None}])]})
    )
