"""A store gives back what was tokenised, is made once for the same content, and is whole or not
there.
"""

import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers

import chronicals
import tiny
from chronicals.config import ConfigurationError
from chronicals.data import DataError, Tokenizer, TokenStore, build_store
from chronicals.data.making import building
from chronicals.data.reading import records
from chronicals.data.tokens.batch_encoding import BatchEncoder
from data import stock_templates

WIDTH = 64


def tokenizer(train_on="answers"):
    return Tokenizer(tiny.tokenizer(), train_on)


def token_rows(count, longest=12):
    """Documents that share no token, each with at least one target and its first token trained
    or not.
    """
    rows, start = [], 10  # past the special tokens
    for _ in range(count):
        ids = list(range(start, start + random.randint(2, longest)))
        start = ids[-1] + 1
        labels = [random.choice([token, -100]) for token in ids]
        labels[-1] = ids[-1]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def documents(store):
    return [tuple(column.tolist() for column in store.document(n)) for n in range(len(store))]


def expected(rows):
    return [(row["input_ids"], [int(label != -100) for label in row["labels"]]) for row in rows]


def found(store):
    return {rule: finding.count for rule, finding in store.report.findings.items()}


# --- content
# ---------------------------------------------------------------------------------------------------------


def test_documents_come_back_exactly(tmp_path):
    rows = token_rows(50)
    store = build_store(rows, tokenizer(), WIDTH, tmp_path)
    assert documents(store) == expected(rows)
    ids, trained = store.document(7)
    assert (ids.dtype, trained.dtype) == (np.int32, np.uint8)
    assert store.lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert store.targets.tolist() == [
        sum(label != -100 for label in row["labels"][1:]) for row in rows
    ]
    assert store.max_id == rows[-1]["input_ids"][-1]
    assert store.kinds == ["tokens"]
    assert len(store) == 50


@pytest.mark.parametrize(
    ("rows", "alike"),
    [
        ([[5, 6, 7], [7, 8, 9]], True),
        ([[5, 6, 7], [7, 8]], False),
        ([], False),
    ],
)
def test_documents_are_alike_in_tokens_and_targets(tmp_path, rows, alike):
    given = [{"input_ids": ids} for ids in rows or [[5, 6]]]
    store = build_store(given, tokenizer(), WIDTH, tmp_path)
    store = store.subset(np.arange(len(rows)))
    assert store.alike == alike


def test_documents_of_other_targets_are_not_alike(tmp_path):
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, last]} for last in (7, -100)]
    assert not build_store(rows, tokenizer(), WIDTH, tmp_path).alike


def test_every_kind_of_row_comes_back_as_it_was_encoded(tmp_path):
    rows = [
        *tiny.chat_rows(5),
        {"text": "hello world"},
        {"prompt": "what", "completion": "forty"},
        *token_rows(3),
    ]
    random.shuffle(rows)
    encoded = [tokenizer().encode(row, "row") for row in rows]
    store = build_store(rows, tokenizer(), 200, tmp_path)
    assert documents(store) == [(ids, [int(flag) for flag in trained]) for ids, trained in encoded]
    assert store.kinds == ["chat", "completion", "text", "tokens"]
    assert store.max_id == max(max(ids) for ids, _ in encoded)


def test_a_conversation_as_prompt_and_completion_counts_as_chat(tmp_path):
    """So that the trained model is asked through the template it was trained with."""
    (row,) = tiny.chat_rows(1)
    rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]}]
    store = build_store(rows, tokenizer(), WIDTH, tmp_path)
    assert documents(store) == documents(build_store([row], tokenizer(), WIDTH, tmp_path))
    assert store.kinds == ["chat"]


@pytest.mark.parametrize("count", [6, 7, 8, 40, 49])
def test_more_documents_than_a_batch_of_the_file_holds(tmp_path, set_constants, count):
    set_constants(records, CHUNK_ROWS=7)
    rows = token_rows(count)
    rows.insert(random.randrange(count), {"input_ids": [9, 9], "labels": [-100, -100]})
    store = build_store(rows, tokenizer(), WIDTH, tmp_path)
    with pa.memory_map(str(store.path)) as source:
        batches = -(-(count + 1) // 7)
        assert pa.ipc.open_file(source).num_record_batches in (
            batches - 1,
            batches,
        )  # the masked row may be alone in one
    assert documents(store) == expected([row for row in rows if row["input_ids"] != [9, 9]])
    assert store.report.count("masked_row") == 1
    assert store.targets.sum() == store.report.targets


def test_the_report_counts_what_is_stored(tmp_path):
    rows = [
        *tiny.chat_rows(20),
        *token_rows(10, 100),
        *({"text": "the answer " * n} for n in range(1, 60, 7)),
    ]
    store = build_store(rows, tokenizer(), 48, tmp_path)
    report = store.report
    masks = [trained for _, trained in documents(store)]
    assert report.rows == len(rows)
    assert report.documents == len(store)
    assert report.tokens == store.lengths.sum() == sum(map(len, masks))
    assert report.targets == store.targets.sum() == sum(sum(mask[1:]) for mask in masks)
    assert (
        report.count("split_row")
        == sum("text" in row and len(tokenizer().encode(row, "row")[0]) > 48 for row in rows)
        > 0
    )
    assert report.count("cut_row") > 0
    assert store.lengths.max() == 48


# --- too long
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 9, 10, 11, 19, 20, 28, 29, 101])
@pytest.mark.parametrize("width", [2, 3, 10])
def test_a_long_row_of_pretraining_keeps_every_target_once(tmp_path, width, length):
    ids = random.sample(range(1000), length)
    store = build_store([{"input_ids": ids}], tokenizer("all"), width, tmp_path)
    pairs = [pair for piece, _ in documents(store) for pair in itertools.pairwise(piece)]
    assert pairs == list(itertools.pairwise(ids))
    assert store.lengths.min() >= 2
    assert store.lengths.max() == min(width, length)
    assert store.targets.tolist() == (store.lengths - 1).tolist()
    assert found(store) == ({"split_row": 1} if length > width else {})
    assert store.report.targets == length - 1


@pytest.mark.parametrize("width", [2, 17, 64])
def test_a_long_text_keeps_every_target_once(tmp_path, width):
    row = {"text": " ".join(random.choices(tiny.TEXTS, k=30))}
    ids, _ = tokenizer().encode(row, "row")
    store = build_store([row], tokenizer(), width, tmp_path)
    assert [target for piece, _ in documents(store) for target in piece[1:]] == ids[1:]
    assert all(trained == [1] * len(trained) for _, trained in documents(store))
    assert store.lengths.max() <= width
    assert (found(store), store.report.rows) == ({"split_row": 1}, 1)
    assert store.report.documents == len(store) == -(-(len(ids) - 1) // (width - 1))


@pytest.mark.parametrize(
    ("missing", "truncated", "stop_cut"),
    [(0, 0, 0), (1, 1, 0), (2, 1, 1), (4, 1, 1)],
    ids=["fits", "newline cut", "stop cut", "answer cut"],
)
def test_a_long_conversation_is_cut_and_counted(tmp_path, missing, truncated, stop_cut):
    """ChatML ends with a newline that is not trained, after the stop token."""
    (row,) = tiny.chat_rows(1)
    ids, trained = tokenizer().encode(row, "row")
    width = len(ids) - missing
    store = build_store([row], tokenizer(), width, tmp_path)
    assert documents(store) == [(ids[:width], [int(flag) for flag in trained[:width]])]
    assert found(store) == dict(list({"cut_row": 1, "cut_stop": 1}.items())[: truncated + stop_cut])


def test_a_conversation_whose_answer_is_cut_away_is_left_out(tmp_path):
    (row,) = tiny.chat_rows(1)
    _, trained = tokenizer().encode(row, "row")
    store = build_store([row, *token_rows(1, 2)], tokenizer(), trained.index(True), tmp_path)
    assert len(store) == 1
    assert found(store) == {"cut_row": 1, "cut_stop": 1, "masked_by_cut": 1}
    assert (store.report.rows, store.report.documents) == (2, 1)


@pytest.mark.parametrize("kind", ["chat", "text", "tokens"])
def test_what_becomes_of_long_rows_can_be_chosen(tmp_path, kind):
    row = {
        "chat": tiny.chat_rows(1)[0],
        "text": {"text": "what is the answer"},
        "tokens": token_rows(1, 12)[0],
    }[kind]
    if kind == "tokens":
        row = {"input_ids": random.sample(range(1000), 12)}
    ids, trained = tokenizer().encode(row, "row")
    width = len(ids) - random.randint(1, 3)
    cut, split, drop = (
        build_store([row], tokenizer(), width, tmp_path, overlong=o)
        for o in ("cut", "split", "drop")
    )
    assert documents(cut) == [(ids[:width], [int(flag) for flag in trained[:width]])]
    targets = [
        token
        for piece in documents(split)
        for token, flag in list(zip(*piece, strict=True))[1:]
        if flag
    ]
    assert targets == [token for token, flag in list(zip(ids, trained, strict=True))[1:] if flag]
    assert len(drop) == 0 and found(drop) == {"dropped_row": 1}
    assert len({cut.key, split.key, drop.key}) == 3


def test_nulls_in_the_text_of_a_call_are_kept_whichever_way_a_row_is_tokenised(tmp_path):
    arguments = '{"a": null}'
    row = {
        "messages": [
            {"role": "user", "content": "a?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"name": "f", "arguments": arguments}],
            },
        ],
        "tools": '[{"type": "function", "function": {"name": "f", "default": null}}]',
    }
    inner = stock_templates.with_template(stock_templates.shipped("qwen3"))
    for trained in (["assistant"], ["assistant", "user"]):
        encoder = Tokenizer(inner, train_on_roles=trained)
        ((ids, _),) = documents(build_store([row], encoder, 4096, tmp_path))
        assert ids == encoder.encode(row, "row 1")[0]
        assert arguments in inner.decode(ids) and '"default": null' in inner.decode(ids)


# --- the key
# ---------------------------------------------------------------------------------------------------------


def test_the_same_content_is_opened_and_not_tokenised_again(tmp_path, must_not_call):
    rows = tiny.chat_rows(10)
    first = build_store(rows, tokenizer(), WIDTH, tmp_path)
    written = first.path.stat()
    must_not_call(BatchEncoder, "encode", "the rows are tokenised again")
    again = build_store((dict(row) for row in rows), tokenizer(), WIDTH, tmp_path)
    assert again.path == first.path
    assert (again.path.stat().st_mtime_ns, again.path.stat().st_ino) == (
        written.st_mtime_ns,
        written.st_ino,
    )
    assert documents(again) == documents(first)
    assert (again.report, again.kinds, again.max_id) == (first.report, first.kinds, first.max_id)
    assert again.key == first.key
    assert len(list(tmp_path.glob("*.arrow"))) == 1


def test_a_file_is_known_by_its_content_wherever_it_lies(tmp_path, must_not_call):
    text = '{"text": "hello world"}\n{"text": "the answer"}\n'
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(text)
    first = build_store(tmp_path / "a.jsonl", tokenizer(), WIDTH, tmp_path / "cache")
    must_not_call(BatchEncoder, "encode", "the rows are tokenised again")
    assert (
        build_store(str(tmp_path / "b.jsonl"), tokenizer(), WIDTH, tmp_path / "cache").path
        == first.path
    )


@pytest.mark.slow
def test_a_file_that_changed_is_tokenised_again(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "hello world"}\n')
    first = build_store(path, tokenizer(), WIDTH, tmp_path / "cache")
    path.write_text('{"text": "hello worlds"}\n')
    second = build_store(path, tokenizer(), WIDTH, tmp_path / "cache")
    assert second.key != first.key
    assert documents(second) != documents(first)


def test_a_file_that_changes_while_it_is_tokenised_is_refused(tmp_path, plant):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "hello world"}\n')

    def write_and_encode(encode, self, batches):
        with path.open("a") as more:
            more.write('{"text": "more"}\n')
        return encode(self, batches)

    plant(BatchEncoder, "encode", write_and_encode)
    with pytest.raises(
        DataError, match=r"a\.jsonl: was written to while it was tokenised; start again"
    ):
        build_store(path, tokenizer(), WIDTH, tmp_path / "cache")
    assert not [
        file
        for file in (tmp_path / "cache").iterdir()
        if file.suffix != ".json" or len(file.stem) == 32
    ]


def test_a_slow_tokenizer_is_known_by_what_it_does(tmp_path):
    class Slow(transformers.PreTrainedTokenizer):
        def __init__(self, splitting, **tokens):
            self.splitting = splitting
            self.vocabulary = {chr(letter): letter for letter in range(1, 0x3000)}
            super().__init__(**tokens)

        vocab_size = 0x3000

        def get_vocab(self):
            return self.vocabulary

        def _tokenize(self, text):
            return list(text if self.splitting else text.lower())

        def _convert_token_to_id(self, token):
            return self.vocabulary.get(token, 0)

        def _convert_id_to_token(self, index):
            return chr(index)

    prints = [
        Tokenizer(Slow(splitting, eos_token="\x01")).fingerprint()
        for splitting in (True, False, True)
    ]
    assert prints[0] == prints[2] != prints[1]


@pytest.mark.slow
def test_the_key_changes_with_whatever_changes_the_tokens(tmp_path):
    rows = tiny.chat_rows(3)
    other_rows = tiny.chat_rows(3)
    other_rows[2]["messages"][0]["content"] += "?"
    other_template, other_end, more_tokens, splitting = (tiny.tokenizer() for _ in range(4))
    other_template.chat_template = other_template.chat_template.replace(
        "<|im_end|>\n", "<|im_end|>"
    )
    other_end.eos_token = "<|im_end|>"
    more_tokens.add_tokens(["answer"])
    splitting.split_special_tokens = True
    builds = {
        "as it is": (rows, tokenizer(), WIDTH),
        "data": (other_rows, tokenizer(), WIDTH),
        "order": (rows[::-1], tokenizer(), WIDTH),
        "fewer rows": (rows[:2], tokenizer(), WIDTH),
        "width": (rows, tokenizer(), WIDTH + 1),
        "objective": (rows, tokenizer("all"), WIDTH),
        "template": (rows, Tokenizer(other_template), WIDTH),
        "end of text": (rows, Tokenizer(other_end), WIDTH),
        "vocabulary": (rows, Tokenizer(more_tokens), WIDTH),
        "special tokens as text": ([{"text": "<|im_end|>"}], Tokenizer(splitting), WIDTH),
        "special tokens": ([{"text": "<|im_end|>"}], tokenizer(), WIDTH),
    }
    keys = {name: build_store(*build, tmp_path).key for name, build in builds.items()}
    assert len(set(keys.values())) == len(builds), keys
    assert len(list(tmp_path.glob("*.arrow"))) == len(builds)


@pytest.mark.parametrize("as_array", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_the_key_changes_with_one_token_of_a_long_array(tmp_path, as_array):
    ids = list(range(5000))
    first = build_store([{"input_ids": as_array(ids)}], tokenizer(), 8192, tmp_path)
    ids[2500] = 7
    second = build_store([{"input_ids": as_array(ids)}], tokenizer(), 8192, tmp_path)
    assert second.document(0)[0].tolist() == ids
    assert second.key != first.key


def test_the_key_changes_with_the_order_in_which_a_template_writes_fields(tmp_path):
    inner = tiny.tokenizer()
    inner.chat_template = "{{ tools | tojson }}" + inner.chat_template
    (row,) = tiny.chat_rows(1)
    first, second = (
        {**row, "tools": [tool]} for tool in ({"a": "x", "b": "y"}, {"b": "y", "a": "x"})
    )
    rendered = [Tokenizer(inner).encode(row, "row")[0] for row in (first, second)]
    assert rendered[0] != rendered[1]
    for row, ids in zip((first, second), rendered):
        assert build_store([row], Tokenizer(inner), 200, tmp_path).document(0)[0].tolist() == ids


@pytest.mark.parametrize(
    "row", [{"text": "hello world"}, tiny.chat_rows(1)[0]], ids=["text", "chat"]
)
def test_padding_set_on_the_tokenizer_elsewhere_changes_no_key(tmp_path, row):
    """Mesh that only open stores must look for the names that the building rank gives, second
    store included.
    """
    inner = tiny.tokenizer()
    before = Tokenizer(inner).fingerprint()
    inner(["a", "b c d"], padding=True, truncation=True, max_length=5)
    padded = Tokenizer(inner).fingerprint()
    ids = build_store([row], Tokenizer(inner), 200, tmp_path).document(0)[0].tolist()
    assert ids == tokenizer().encode(row, "row")[0]
    assert Tokenizer(inner).fingerprint() == padded == before


# --- whole or not there
# ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 10, 29])
def test_a_row_that_fails_is_left_out_and_stops_at_the_gate(tmp_path, set_constants, place):
    set_constants(records, CHUNK_ROWS=7)
    rows = token_rows(30)
    rows[place] = {"input_ids": [1, 2], "labels": [5, 5]}
    store = build_store(rows, tokenizer(), WIDTH, tmp_path / "cache")
    assert documents(store) == expected([row for n, row in enumerate(rows) if n != place])
    assert store.rows.tolist() == [n for n in range(30) if n != place]
    assert found(store) == {"wrong_type": 1}
    assert store.report.findings["wrong_type"].rows == [place + 1]
    with pytest.raises(DataError, match=rf"row {place + 1}: labels\[0\]"):
        store.report.check("train")


def test_a_store_is_written_chunk_by_chunk(tmp_path, set_constants):
    set_constants(records, CHUNK_ROWS=10)
    rows = token_rows(32)
    store = build_store(rows, tokenizer(), WIDTH, tmp_path)
    assert documents(store) == expected(rows)
    reader = pa.ipc.open_file(pa.memory_map(str(store.path)))
    assert [reader.get_batch(n).num_rows for n in range(reader.num_record_batches)] == [
        10,
        10,
        10,
        2,
    ]


def test_a_build_that_is_interrupted_leaves_no_file_behind(tmp_path, let_raise):
    rows = token_rows(5)
    let_raise(BatchEncoder, encode=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        build_store(rows, tokenizer(), WIDTH, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["taken", "taken/tokens", "closed"])
@pytest.mark.parametrize("from_file", [False, True])
def test_a_cache_that_cannot_be_written_is_named(tmp_path, name, from_file):
    (tmp_path / "taken").touch()
    (tmp_path / "closed").symlink_to("/proc")  # where the root user, too, makes no file
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "hello world"}))
    os.utime(file, (1, 1))
    with pytest.raises(
        ConfigurationError,
        match=f"^cache_dir='{tmp_path}/{name}': .* name a folder that can be written$",
    ):
        build_store(
            file if from_file else [{"text": "hello world"}], tokenizer(), 8, tmp_path / name
        )


def test_a_missing_file_makes_no_folder(tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        build_store(tmp_path / "absent.jsonl", tokenizer(), WIDTH, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


BUILDER = """
    import sys, time
    from pathlib import Path
    import tiny
    from chronicals.data import Tokenizer, build_store
    from chronicals.data.tokens.batch_encoding import BatchEncoder

    me, other, cache = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    encode, tokenizer = BatchEncoder.encode, Tokenizer(tiny.tokenizer())

    def together(self, batches):
        (cache / f"begun-{source.stem}-{me}").touch()
        until = time.monotonic() + 60
        while not (cache / f"begun-{source.stem}-{other}").exists():
            assert time.monotonic() < until, "the other process does not build"
            time.sleep(0.0005)
        return encode(self, batches)

    BatchEncoder.encode = together
    for source in sorted(cache.glob("rows-*.jsonl")):
        store = build_store(source, tokenizer, 64, cache / "stores")
        print(source.name, store.key, len(store), int(sum(store.document(n)[0].sum() for n in range(len(store)))))
    assert "pandas" not in sys.modules, "which takes longer to import than a store to open"
"""


@pytest.mark.slow
def test_two_processes_that_build_the_same_stores_end_with_one_of_each(tmp_path):
    sources = [tmp_path / f"rows-{number}.jsonl" for number in range(5)]
    for number, source in enumerate(sources):
        rows = [
            {"prompt": f"what is {n}?", "completion": f"forty {n + number}"} for n in range(200)
        ]
        source.write_text("\n".join(map(json.dumps, rows)))
    paths = [str(Path(chronicals.__file__).parents[1]), str(Path(tiny.__file__).parent)]
    script = f"import sys; sys.path[:0] = {paths}\n{textwrap.dedent(BUILDER)}"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, me, other, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me, other in (("one", "two"), ("two", "one"))
    ]
    while any(process.poll() is None for process in running):
        if any(process.poll() for process in running):  # the other would wait for it
            for process in running:
                process.kill()
        time.sleep(0.02)
    finished = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(
        errors for _, errors in finished
    )
    assert (
        len(list(tmp_path.glob("begun-rows-*-one")))
        == len(list(tmp_path.glob("begun-rows-*-two")))
        == 5
    )
    assert finished[0][0] == finished[1][0]
    names = []
    for source, line in zip(sources, finished[0][0].splitlines(), strict=True):
        name, key, count, _ = line.split()
        assert (name, count) == (source.name, "200")
        store = TokenStore.open(tmp_path / "stores" / f"{key}.arrow")
        fresh = build_store(source, tokenizer(), 64, tmp_path / "alone")
        assert store.key == fresh.key
        assert documents(store) == documents(fresh)
        assert store.report == fresh.report
        names += [f"{key}.arrow", f"{key}.json"]
    assert sorted(path.name for path in (tmp_path / "stores").iterdir()) == sorted(
        [*names, "file-digests.json"]
    )


@pytest.mark.parametrize("moment", [0, 1])
def test_another_process_may_finish_the_same_store_at_any_moment(
    moment, tmp_path, monkeypatch, plant
):
    """Whatever file is about to get its name: another process gives its own that name just
    before.
    """
    rows = token_rows(5)
    renamed = []

    def replace_late(replace, source, target):
        renamed.append(target)
        if len(renamed) == moment + 1:
            with monkeypatch.context() as other:
                other.setattr(building.os, "getpid", lambda: -1)
                other.setattr(building.os, "replace", replace)
                build_store(rows, tokenizer(), WIDTH, tmp_path)
        replace(source, target)

    plant(building.os, "replace", replace_late)
    store = build_store(rows, tokenizer(), WIDTH, tmp_path)
    assert len(renamed) == 2
    assert documents(store) == expected(rows)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".arrow", ".json"]


def test_a_process_that_does_not_build_waits_for_the_file(tmp_path, plant, must_not_call):
    rows = token_rows(5)
    elsewhere = build_store(rows, tokenizer(), WIDTH, tmp_path / "elsewhere")
    (tmp_path / "here").mkdir()
    waits = []

    def sleep(_, seconds):
        waits.append(seconds)
        if len(waits) == 3:
            for suffix in (".json", ".arrow"):
                there = elsewhere.path.with_suffix(suffix)
                (tmp_path / "here" / there.name).write_bytes(there.read_bytes())

    plant(building.time, "sleep", sleep)
    must_not_call(BatchEncoder, "encode", "the rows are tokenised again")
    store = build_store(rows, tokenizer(), WIDTH, tmp_path / "here", builder=False)
    assert len(waits) == 3
    assert documents(store) == expected(rows)


@pytest.mark.slow
def test_who_waits_gives_up_when_nothing_is_written(tmp_path, plant, set_constants):
    rows = token_rows(3)
    waited = 0.0
    path = build_store(rows, tokenizer(), WIDTH, tmp_path).path
    path.unlink()
    aside = path.with_name(f".{path.stem}.1.a")

    def sleep(_, seconds):
        nonlocal waited
        waited += seconds
        if waited < 40 * building.MINUTE:  # longer than patience lasts
            aside.write_bytes(bytes(int(waited)))
        else:
            aside.unlink(missing_ok=True)

    plant(building.time, "sleep", sleep)
    set_constants(building, QUIET_MINUTES=5)
    with pytest.raises(DataError, match="has written nothing for 5 minutes"):
        build_store(rows, tokenizer(), WIDTH, tmp_path, builder=False)
    assert waited / building.MINUTE == pytest.approx(46, abs=1.5)


def test_a_store_without_its_description_is_built_again(tmp_path):
    rows = token_rows(9)
    store = build_store(rows, tokenizer(), WIDTH, tmp_path)
    store.path.with_suffix(".json").unlink()
    assert documents(build_store(rows, tokenizer(), WIDTH, tmp_path)) == expected(rows)


# --- parts of a store
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "share", "held"), [(40, 0.25, 10), (7, 0.01, 1), (2, 0.5, 1), (33, 0.5, 16)]
)
def test_a_split_is_disjoint_and_complete(tmp_path, count, share, held):
    rows = token_rows(count)
    store = build_store(rows, tokenizer(), WIDTH, tmp_path)
    train, validation = store.split(share, seed=3)
    assert (len(train), len(validation)) == (count - held, held)
    assert sorted(documents(train) + documents(validation)) == sorted(expected(rows))
    for part in (train, validation):
        assert part.lengths.tolist() == [len(ids) for ids, _ in documents(part)]
        assert part.targets.tolist() == [sum(trained[1:]) for _, trained in documents(part)]


def test_a_split_is_a_function_of_the_seed(tmp_path):
    store = build_store(token_rows(60), tokenizer(), WIDTH, tmp_path)
    again = TokenStore.open(store.path)
    held = [documents(store.split(0.5, seed)[1]) for seed in range(5)]
    assert held == [documents(again.split(0.5, seed)[1]) for seed in range(5)]
    assert len({str(part) for part in held}) == 5


@pytest.mark.parametrize("overlong", ["cut", "split"])
def test_a_split_keeps_equal_rows_on_one_side(tmp_path, overlong):
    """Whichever they are: of 40 pairs, a quarter held out, chance alone would have all on one
    side once in 10^8 draws.
    """
    rows = [{"text": f"{n} {'is followed by ' * (n % 7)}{n + 1}"} for n in range(40)]
    rows = [*rows, *rows]
    random.shuffle(rows)
    store = build_store(rows, tokenizer(), WIDTH, tmp_path, overlong=overlong)
    for seed in range(3):
        train, validation = (documents(part) for part in store.split(0.25, seed))
        assert validation and not [document for document in validation if document in train]
        assert sorted(train + validation) == sorted(documents(store))


@pytest.mark.parametrize(("count", "share"), [(1, 0.1), (2, 0.9), (10, 0.99)])
def test_a_split_that_leaves_nothing_is_refused(tmp_path, count, share):
    store = build_store(token_rows(count), tokenizer(), WIDTH, tmp_path)
    with pytest.raises(
        DataError, match=f"validation_split={share}: leaves none of {count} documents"
    ):
        store.split(share, seed=0)


def test_a_subset_holds_the_documents_asked_for(tmp_path):
    rows = token_rows(30)
    store = build_store(rows, tokenizer(), WIDTH, tmp_path)
    chosen = np.array(random.sample(range(30), 12))
    part = store.subset(chosen)
    assert documents(part) == [expected(rows)[n] for n in chosen]
    assert np.array_equal(part.lengths, store.lengths[chosen])
    assert np.array_equal(part.targets, store.targets[chosen])
    assert documents(store) == expected(rows)


def test_a_subset_of_a_subset_counts_within_it(tmp_path):
    rows = token_rows(30)
    store = build_store(rows, tokenizer(), WIDTH, tmp_path)
    outer = np.array(random.sample(range(30), 12))
    inner = np.array(random.sample(range(12), 5))
    part = store.subset(outer).subset(inner)
    assert documents(part) == [expected(rows)[n] for n in outer[inner]]
    train, validation = store.subset(outer).split(0.25, seed=0)
    assert sorted(documents(train) + documents(validation)) == sorted(
        expected(rows)[n] for n in outer
    )
