"""Whatever is given as data is read whole and in order; what cannot be is named by place, with
the remedy.
"""

import collections
import itertools
import json
import logging
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from chronicals.cli.wording import Wording
from chronicals.config import ConfigurationError, DataSource
from chronicals.data import BadRow, DataError, read_records, source_fingerprint
from chronicals.data.reading import sources


def json_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(first, count=3):
    return [{"text": f"text {n}"} for n in range(first, first + count)]


def records(source, **options):
    return [record for _, record in read_records(source, **options)]


def test_bytes_that_will_be_read(tmp_path):
    json_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    size = (tmp_path / "a.jsonl").stat().st_size
    assert sources.bytes_to_read(tmp_path) == sources.bytes_to_read([tmp_path / "a.jsonl"]) == size
    assert sources.bytes_to_read([DataSource(str(tmp_path), weight=2.5), tmp_path]) == int(
        3.5 * size
    )
    assert sources.bytes_to_read([{"text": "a"}]) == sources.bytes_to_read("owner/name") == 0


def test_blank_lines_are_passed_over_and_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n  \t\n{"text": "b"}\n')
    assert list(read_records(path)) == [(f"{path}:1", {"text": "a"}), (f"{path}:4", {"text": "b"})]
    assert list(read_records(str(path))) == list(read_records(path))


def test_a_byte_order_mark_and_carriage_returns_are_harmless(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert records(tmp_path / "rows.jsonl") == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize("suffix", [".txt", ".md", ".text"])
def test_a_text_file_is_one_record(tmp_path, suffix):
    path = tmp_path / f"book{suffix}"
    path.write_text("first line\n\nsecond\té🙂\n", encoding="utf-8")
    assert list(read_records(path)) == [(str(path), {"text": "first line\n\nsecond\té🙂\n"})]


@pytest.mark.parametrize("make", [list, tuple, iter, lambda rows: (row for row in rows)])
def test_rows_in_memory_are_numbered_from_one(make):
    rows = tiny.chat_rows(7)
    assert list(read_records(make(rows))) == [
        (f"row {number}", row) for number, row in enumerate(rows, 1)
    ]


@pytest.mark.parametrize("make", [lambda data: data, lambda data: data.to_iterable_dataset()])
def test_a_dataset_of_datasets_is_rows_in_memory(make):
    datasets = pytest.importorskip("datasets")
    rows = tiny.chat_rows(7)
    got = list(read_records(make(datasets.Dataset.from_list(rows))))
    assert got == [(f"row {number}", row) for number, row in enumerate(rows, 1)]


def test_several_splits_at_once_are_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict(
        train=datasets.Dataset.from_list(numbered(0)), test=datasets.Dataset.from_list(numbered(3))
    )
    with pytest.raises(
        DataError, match="rows are wanted, this is a DatasetDict; choose one of train, test"
    ):
        records(splits)


def test_what_holds_no_rows_is_refused(tmp_path):
    pandas = pytest.importorskip("pandas")
    for source, reason in (
        (pandas.DataFrame(numbered(0)), "this is a DataFrame; give frame.to_dict"),
        (None, "this is NoneType"),
    ):
        for use in (records, lambda source: source_fingerprint(source, tmp_path)):
            with pytest.raises(DataError, match=reason):
                use(source)


def test_reading_is_lazy(tmp_path):
    path = json_lines(tmp_path / "rows.jsonl", numbered(0))
    missing = tmp_path / "missing.jsonl"
    rows = read_records([path, missing])
    assert [record for _, record in itertools.islice(rows, 3)] == numbered(0)
    with pytest.raises(DataError, match="missing.jsonl: no such file"):
        next(rows)


# Folders and patterns


@pytest.fixture
def folder(tmp_path):
    """Parts of several formats, two levels deep, and what does not belong to them."""
    place = tmp_path / "data"
    json_lines(place / "b.jsonl", numbered(3))
    (place / "a.csv").parent.mkdir(exist_ok=True)
    (place / "a.csv").write_text("text\n" + "".join(f"text {n}\n" for n in range(3)))
    (place / "c").mkdir()
    pq.write_table(pa.Table.from_pylist(numbered(6)), place / "c" / "part-0.parquet")
    pq.write_table(pa.Table.from_pylist(numbered(9)), place / "c" / "part-1.parquet")
    json_lines(place / ".hidden.jsonl", [{"text": "hidden"}])
    json_lines(place / ".cache" / "d.jsonl", [{"text": "hidden"}])
    (place / "README.md").write_text("about the data")
    (place / "script.py").write_text("")
    return place


def test_a_folder_is_its_readable_files_in_order(folder, caplog):
    with caplog.at_level(logging.INFO):
        assert records(folder) == numbered(0, 12)
    assert f"{folder}: 4 files read, left out: README.md, script.py" in caplog.text
    assert [where for where, _ in read_records(folder)][-1] == f"{folder}/c/part-1.parquet: row 3"


def test_links_in_a_folder_are_followed_and_those_to_nowhere_are_said(folder, tmp_path, caplog):
    elsewhere = tmp_path / "elsewhere"
    json_lines(elsewhere / "e.jsonl", numbered(12))
    (folder / "d").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(folder)
    (folder / "gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    with caplog.at_level(logging.INFO):
        assert records(folder) == numbered(0, 15)
    assert "left out: README.md, gone.jsonl, script.py" in caplog.text


def test_what_datasets_writes_about_rows_is_no_row(folder, caplog):
    (folder / "c" / "dataset_info.json").write_text('[{"text": "about"}]')
    with caplog.at_level(logging.INFO):
        assert records(folder) == numbered(0, 12)
    assert "left out: README.md, c/dataset_info.json, script.py" in caplog.text


def test_a_folder_of_texts_is_a_record_a_file(tmp_path):
    for name in ("b.txt", "a.md", "c.txt"):
        (tmp_path / name).write_text(name)
    assert list(read_records(tmp_path)) == [
        (f"{tmp_path}/{name}", {"text": name}) for name in ("a.md", "b.txt", "c.txt")
    ]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("c/*.parquet", numbered(6, 6)),
        ("c/part-[1-9].parquet", numbered(9)),
        ("**/*.[cj]s*", numbered(0, 6)),
        ("c*", numbered(6, 6)),
        ("**", numbered(0, 12)),
    ],
)
def test_a_pattern_is_its_matches_in_order(folder, pattern, expected):
    if pattern == "**":
        (folder / "README.md").unlink()
        (folder / "script.py").unlink()
        pattern = "**/*.*"
    assert records(f"{folder}/{pattern}") == expected


def test_what_exists_is_no_pattern(tmp_path):
    path = json_lines(tmp_path / "rows[1].jsonl", numbered(0))
    json_lines(tmp_path / "rows1.jsonl", numbered(3))
    assert records(str(path)) == numbered(0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("*.jsonl", r"\*\.jsonl: no file matches this pattern"),
        ("missing.jsonl", r"missing\.jsonl: no such file or folder"),
        ("missing", "missing: no such file or folder"),
        ("", "holds no file that can be read; those end in .jsonl, .ndjson, .json, .csv"),
    ],
)
def test_nothing_to_read_is_an_error(tmp_path, name, reason):
    (tmp_path / "table.xlsx").write_text("")
    for use in (records, lambda source: source_fingerprint(source, tmp_path / "tokens")):
        with pytest.raises(DataError, match=reason):
            use(f"{tmp_path}/{name}")


def test_a_file_that_a_pattern_names_must_be_readable(folder):
    with pytest.raises(DataError, match=r"script\.py: files ending in '\.py' cannot be read"):
        records(f"{folder}/*.py")


def test_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    json_lines(tmp_path / "rows.jsonl", numbered(0))
    assert records("~/rows.jsonl") == numbered(0)


@pytest.mark.parametrize("field", ["split", "subset"])
def test_files_have_neither_split_nor_subset(folder, field):
    with pytest.raises(DataError, match=rf"data: {field}='train' belongs to a hub name"):
        records(DataSource(folder, **{field: "train"}))


# Folders of datasets, and the hub


@pytest.mark.slow
def test_a_saved_dataset_is_read_as_it_was_saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = tiny.chat_rows(20)
    datasets.Dataset.from_list(rows).shuffle(seed=1).save_to_disk(tmp_path / "one", num_shards=3)
    shuffled = datasets.Dataset.from_list(rows).shuffle(seed=1).to_list()
    place = f"{tmp_path}/one"
    assert list(read_records(place)) == [
        (f"{place}: row {n}", row) for n, row in enumerate(shuffled, 1)
    ]
    with pytest.raises(
        DataError, match="one: split='test': this folder holds a single dataset without splits"
    ):
        records(DataSource(place, split="test"))
    with pytest.raises(DataError, match="one: subset='main' belongs to a hub name"):
        records(DataSource(place, subset="main"))


def test_a_saved_dataset_that_a_pattern_matches_is_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_list(numbered(0)) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    with pytest.raises(
        DataError,
        match=r"matches .*saved, a folder of save_to_disk, which may hold several splits; name it",
    ):
        records(f"{tmp_path}/*")


@pytest.mark.slow
def test_a_saved_dataset_with_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = {"train": numbered(0), "test": numbered(3)}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    ).save_to_disk(tmp_path / "d")
    assert records(tmp_path / "d") == numbered(0)
    assert records(DataSource(tmp_path / "d", split="test")) == numbered(3)
    with pytest.raises(
        DataError, match="split='validation': there is no such split; choose one of train, test"
    ):
        records(DataSource(tmp_path / "d", split="validation"))
    cache = tmp_path / "tokens"
    assert source_fingerprint(
        DataSource(tmp_path / "d", split="test"), cache
    ) != source_fingerprint(tmp_path / "d", cache)


@pytest.fixture
def hub(tmp_path, monkeypatch, set_constants):
    """No network, and a cache that holds revision abcdef of owner/name."""
    datasets = pytest.importorskip("datasets")
    set_constants(datasets.config, HF_HUB_OFFLINE=True)
    set_constants(datasets.config, HF_DATASETS_CACHE=str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "hub" / "owner___name" / "default" / "0.0.0" / "abcdef"
    place.mkdir(parents=True)
    table = pa.Table.from_pylist(numbered(0))
    with pa.ipc.new_stream(place / "name-train.arrow", table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_stream(place / "name-test.arrow", table.schema) as writer:
        writer.write_table(pa.Table.from_pylist(numbered(3)))
    info = {
        "builder_name": "parquet",
        "dataset_name": "name",
        "config_name": "default",
        "version": {"version_str": "0.0.0"},
        "features": {"text": {"dtype": "string", "_type": "Value"}},
        "splits": {
            name: {"name": name, "num_examples": 3, "dataset_name": "name"}
            for name in ("train", "test")
        },
    }
    (place / "dataset_info.json").write_text(json.dumps(info))
    return place


def test_a_hub_name(hub):
    assert list(read_records("owner/name")) == [
        (f"owner/name: row {n}", row) for n, row in enumerate(numbered(0), 1)
    ]
    assert records(DataSource("owner/name", split="test", weight=2)) == numbered(3) * 2


def test_subset_and_split_reach_the_hub_and_rows_are_streamed(hub, plant):
    import datasets

    asked = []

    def load_dataset(_, *given, **options):
        asked.append((given, options))
        return datasets.Dataset.from_list(numbered(0)).to_iterable_dataset()

    plant(datasets, "load_dataset", load_dataset)
    assert records(DataSource("owner/name", subset="main", split="test")) == numbered(0)
    assert asked == [(("owner/name", "main"), {"split": "test", "streaming": True})]


def test_a_hub_name_is_known_by_its_revision(hub, tmp_path):
    def fingerprint(**fields):
        return source_fingerprint(DataSource("owner/name", **fields), tmp_path / "tokens")

    now = fingerprint()
    assert now == fingerprint() != fingerprint(split="test")
    hub.rename(hub.with_name("fedcba"))
    assert fingerprint() != now


def test_what_exists_is_no_hub_name(hub, tmp_path):
    json_lines(tmp_path / "owner" / "name" / "rows.jsonl", numbered(9))
    assert records("owner/name") == numbered(9)


@pytest.mark.parametrize(
    "use", [records, lambda source: source_fingerprint(source, Path("tokens"))]
)
def test_a_name_that_is_nowhere_says_what_to_do(hub, use):
    with pytest.raises(
        DataError,
        match=r"^nobody/nothing: no such file or folder here, .*save_to_disk and give that folder",
    ):
        use("nobody/nothing")
    with pytest.raises(DataError, match=r"^owner/rows\.jsonl: no such file or folder$"):
        use("owner/rows.jsonl")


def test_a_fault_while_streaming_names_the_source(hub, let_return):
    import datasets

    def rows():
        yield {"text": "a"}
        raise OSError("connection lost")

    let_return(datasets, load_dataset=rows())
    with pytest.raises(DataError, match=r"^owner/name: .*OSError: connection lost"):
        records("owner/name")


def test_without_datasets_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"owner/name: .*pip install 'chronicals\[data\]'"):
        records("owner/name")


# Mixtures


def test_several_sources_follow_each_other(tmp_path):
    one = json_lines(tmp_path / "1.jsonl", numbered(0))
    two = json_lines(tmp_path / "2.jsonl", numbered(3))
    assert records([one, str(two)]) == records((DataSource(one), two)) == numbered(0, 6)


def test_a_whole_weight_repeats_every_row(tmp_path):
    path = json_lines(tmp_path / "rows.jsonl", numbered(0))
    assert list(read_records(DataSource(path, weight=3))) == list(read_records(path)) * 3


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.25, 0.5, 2.5])
def test_a_fraction_is_drawn_by_the_seed_alone(tmp_path, seed, weight):
    count = 4000
    path = json_lines(tmp_path / "rows.jsonl", numbered(0, count))
    found = records(DataSource(path, weight=weight), seed=seed)
    assert found == records(DataSource(path, weight=weight), seed=seed)
    assert found != records(DataSource(path, weight=weight), seed=seed + 1)
    times = collections.Counter(row["text"] for row in found)
    whole, share = divmod(weight, 1)
    often = sum(times[row["text"]] == whole + 1 for row in numbered(0, count))
    assert set(times.values()) | {whole} == {whole, whole + 1}
    assert abs(often - share * count) < 5 * (share * (1 - share) * count) ** 0.5
    order = [int(row["text"].split()[1]) for row in found][int(whole) * count :]
    assert order == sorted(order)


def test_more_weight_adds_rows_and_takes_none_away(tmp_path):
    path = json_lines(tmp_path / "rows.jsonl", numbered(0, 500))
    few, more = (
        {row["text"] for row in records(DataSource(path, weight=weight))} for weight in (0.3, 0.6)
    )
    assert few < more


def test_the_same_source_twice_is_drawn_twice(tmp_path):
    path = json_lines(tmp_path / "rows.jsonl", numbered(0, 200))
    found = records([DataSource(path, weight=0.5)] * 2)
    half = records(DataSource(path, weight=0.5))
    assert found[: len(half)] == half and found[len(half) :] != half


def test_a_name_stands_before_the_place(tmp_path):
    path = json_lines(tmp_path / "rows.jsonl", numbered(0, 1))
    assert list(read_records(DataSource(path, name="essays"))) == [
        (f"essays: {path}:1", numbered(0, 1)[0])
    ]


# Columns


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"prompt": "question", "completion": "answer"},
            {"prompt": "q", "completion": "a", "meta": {"x.y": 1, "z": {"w": 2}}},
        ),
        (
            {"question": "answer", "answer": "question"},
            {"question": "a", "answer": "q", "meta": {"x.y": 1, "z": {"w": 2}}},
        ),
        ({"meta": "meta.z.w"}, {"question": "q", "answer": "a", "meta": 2}),
        (
            {"text": "question", "again": "question"},
            {"text": "q", "again": "q", "answer": "a", "meta": {"x.y": 1, "z": {"w": 2}}},
        ),
    ],
)
def test_columns_get_our_names_and_the_others_stay(tmp_path, columns, expected):
    row = {"question": "q", "answer": "a", "meta": {"x.y": 1, "z": {"w": 2}}}
    assert records(DataSource(json_lines(tmp_path / "rows.jsonl", [row]), columns=columns)) == [
        expected
    ]


def test_a_dot_in_a_name_is_tried_as_it_is_first(tmp_path):
    path = json_lines(tmp_path / "rows.jsonl", [{"a.b": 1, "a": {"b": 2}}])
    assert records(DataSource(path, columns={"n": "a.b"})) == [{"n": 1, "a": {"b": 2}}]


def test_what_is_mapped_tells_the_kind(tmp_path):
    row = {
        "messages": [{"role": "user", "content": "a"}],
        "summary": "b",
        "label": True,
        "asked": "c",
        "tools": None,
        "said": "d",
    }
    path = json_lines(tmp_path / "rows.jsonl", [row])
    assert records(DataSource(path, columns={"text": "summary"})) == [
        {"text": "b", "asked": "c", "tools": None, "said": "d"}
    ]
    (mapped,) = records(DataSource(path, columns={"prompt": "asked", "completion": "said"}))
    assert mapped == {"prompt": "c", "completion": "d", "summary": "b", "tools": None}
    (prompt,) = records(DataSource(path, columns={"prompt": "asked"}))
    assert (
        prompt["prompt"] == "c"
        and prompt["label"] is True
        and prompt["messages"] == row["messages"]
    )
    (pair,) = records(DataSource(path, columns={"chosen": "summary", "rejected": "said"}))
    assert pair == {
        "chosen": "b",
        "rejected": "d",
        **{name: row[name] for name in ("messages", "label", "asked", "tools")},
    }
    (ranked,) = records(
        DataSource(path, columns={"responses": "summary", "scores": "said", "chosen": "asked"})
    )
    assert "chosen" in ranked and ranked["messages"] == row["messages"]
    (other,) = records(DataSource(path, columns={"tools": "asked"}))
    assert other["messages"] == row["messages"] and other["tools"] == "c"


def test_one_conversation_is_not_taken_for_rows(tmp_path):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}, indent=1))
    with pytest.raises(DataError, match="is one conversation; put it into an array"):
        records(path)


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (
            "body",
            "column 'body' is missing (no 'body' in 'title', 'meta'); columns={'text': "
            "'THEIR_NAME'} must name one that",
        ),
        ("meta.body", "column 'meta.body' is missing (no 'body' in 'x', 'y')"),
        ("title.body", "column 'title.body' is missing (no 'body' in str)"),
    ],
)
def test_a_missing_column_names_the_row_and_the_columns_there_are(tmp_path, theirs, reason):
    full = {"title": {"body": "t"}, "meta": {"body": "m"}, "body": "b"}
    path = json_lines(
        tmp_path / "rows.jsonl", [full, {"title": "t", "meta": {"x": 1, "y": 2}}, full]
    )
    (_, first), (where, bad), (_, last) = read_records(DataSource(path, columns={"text": theirs}))
    assert "text" in first and first == last
    assert where == f"{path}:2" and bad.rule == "missing_field" and bad.reason.startswith(reason)


def test_rows_that_cannot_be_read_have_no_columns(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": \n3\n')
    (_, bad), (_, three) = read_records(DataSource(path, columns={"text": "a"}))
    assert isinstance(bad, BadRow) and "does not parse" in bad.reason and three == 3


# Fingerprints


def rewritten(path, rows):
    """Other content, and a time that is not the last one's."""
    status = path.stat()
    json_lines(path, rows)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def test_a_fingerprint_is_of_the_content_and_of_all_that_changes_the_rows(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", numbered(0))
    cache = tmp_path / "tokens"

    def fingerprint(source=path, **fields):
        return source_fingerprint(DataSource(source, **fields) if fields else source, cache)

    plain = fingerprint()
    other = json_lines(tmp_path / "elsewhere" / "b.jsonl", numbered(0))
    assert (
        plain
        == fingerprint()
        == fingerprint(other)
        == fingerprint(name="essays")
        == fingerprint([path])
    )
    different = [
        fingerprint(weight=2),
        fingerprint(weight=0.5),
        fingerprint(columns={"text": "body"}),
        fingerprint([path, path]),
        fingerprint(json_lines(tmp_path / "a.json", numbered(0))),
        fingerprint(numbered(0)),
    ]
    rewritten(path, numbered(1))
    assert len({plain, fingerprint(), *different}) == 2 + len(different)


def test_the_seed_counts_where_it_draws(tmp_path, seed):
    path = json_lines(tmp_path / "a.jsonl", numbered(0))
    for weight, equal in ((2, True), (0.5, False)):
        one, two = (
            source_fingerprint(DataSource(path, weight=weight), tmp_path, s)
            for s in (seed, seed + 1)
        )
        assert (one == two) is equal


def test_the_fingerprint_of_a_folder_is_that_of_what_is_read(folder, tmp_path):
    def fingerprint():
        return source_fingerprint(folder, tmp_path / "tokens")

    first = fingerprint()
    (folder / "README.md").write_text("more about the data")
    assert fingerprint() == first
    json_lines(folder / "z.jsonl", numbered(12))
    assert fingerprint() != first


def test_a_saved_dataset_changes_its_fingerprint(tmp_path):
    datasets = pytest.importorskip("datasets")
    found = []
    for name, rows in (("a", numbered(0)), ("b", numbered(0, 2))):
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / name)
        found.append(source_fingerprint(tmp_path / name, tmp_path / "tokens"))
    assert len(set(found)) == 2


def test_rows_in_memory_are_known_by_their_values(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [
        {"input_ids": np.arange(5000), "labels": None},
        {"input_ids": [1, 2], "labels": [1, -100]},
    ]
    first = source_fingerprint(rows, tmp_path)
    assert first == source_fingerprint(tuple({**row} for row in rows), tmp_path)
    rows[0]["input_ids"][2500] += 1
    assert first != source_fingerprint(rows, tmp_path)
    data = datasets.Dataset.from_list(numbered(0))
    assert source_fingerprint(data, tmp_path) == source_fingerprint(data, tmp_path)
    assert source_fingerprint(data, tmp_path) != source_fingerprint(data.select([0, 1]), tmp_path)
    stream = data.to_iterable_dataset()
    assert (
        source_fingerprint(stream, tmp_path)
        == source_fingerprint(stream, tmp_path)
        == source_fingerprint(numbered(0), tmp_path)
    )


def test_a_generator_has_no_fingerprint(tmp_path):
    with pytest.raises(DataError, match=r"read only once; give list\(rows\)"):
        source_fingerprint((row for row in numbered(0)), tmp_path)


def test_a_source_is_checked_when_it_is_made():
    with pytest.raises(ConfigurationError, match="weight=0: "):
        DataSource("rows.jsonl", weight=0)


# Kinds


def test_a_missing_column_is_told_with_a_remedy_that_can_be_typed():
    row = sources._renamed({"output_dir": "x"}, {"prompt": "question"})
    assert row.reason == (
        "column 'question' is missing (no 'question' in 'output_dir'); columns={'prompt': "
        "'THEIR_NAME'} must name one that "
        "every row has"
    )
    said = Wording({"columns": False, "output_dir": False})(row.reason)
    assert "in 'output_dir'); --columns THEIR_NAME=prompt must" in said
