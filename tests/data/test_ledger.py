"""Rows that were read are trained, held out or left out, each once, and the log, the report and
``--check`` say the same.
"""

import json
import logging
import random
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import torch

import tiny
from chronicals.config import ChronicalsConfig, DataSource
from chronicals.data import Ledger, open_divided, open_held_out, open_store, read_records
from chronicals.data.reading.gate import RULES, DataError
from chronicals.objectives import OBJECTIVES
from chronicals.training.run.report import Report, data_reports

WIDTH = 96
ALLOWED = dict.fromkeys(RULES, 1.0)
LONG = "two " * WIDTH

ROWS = {
    "chat": lambda n: tiny.chat_rows(n + 1)[n],
    "instruction": lambda n: {"instruction": f"what is {n}?", "output": f"it is {n}"},
    "completion": lambda n: {"prompt": f"what is {n}?", "completion": f" it is {n}"},
    "text": lambda n: {"text": f"{n} is a number"},
    "tokens": lambda n: {"input_ids": [5, 6, n + 7, 8]},
    "preference": lambda n: {
        "prompt": f"of all the numbers there are what is {n}?",
        "chosen": f" {n}",
        "rejected": " none",
    },
    "unpaired preference": lambda n: {
        "prompt": f"what is {n}?",
        "completion": f" it is {n}",
        "label": n % 2 == 0,
    },
    "prompt": lambda n: {"prompt": f"what is {n}?"},
}
"""A good row of each kind."""

FAULTS = {
    "unrecognised": [{"asked": "what?"}, "a text", '{"messages": ['],
    "chat": [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "robot", "content": "?"}]},
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": " "}]},
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": LONG}]},
        {"messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": "?"}]},
    ],
    "text": [{"text": "see", "images": ["a.png"]}, {"text": ""}, {"text": LONG}, {"text": 3}],
    "tokens": [{"input_ids": [5, 6], "labels": [-100, -100]}, {"input_ids": ["a"]}],
    "completion": [{"prompt": "what?", "completion": ""}, {"prompt": LONG, "completion": "so"}],
    "preference": [
        {"prompt": "what?", "chosen": "a", "rejected": "a"},
        {"chosen": "a", "rejected": "b"},
        {"prompt": LONG, "chosen": "a", "rejected": "b"},
        {"prompt": "?", "responses": ["a", "b"], "scores": [1, 1]},
    ],
    "unpaired preference": [
        {"prompt": "what?", "completion": "so", "label": 3},
        {"prompt": LONG, "completion": "a", "label": 1},
    ],
}
"""Rows by their kind that some objective, width or rule leaves out."""


def mixed(count=40):
    """Rows of every kind in any order, among them faulty ones and repeated ones, and the kind of
    each.
    """
    good = [
        (kind, make(random.randrange(count)))
        for kind, make in ROWS.items()
        for _ in range(count // len(ROWS))
    ]
    faulty = [(kind, row) for kind, rows in FAULTS.items() for row in rows]
    rows = [*good, *faulty, *random.sample(good, 5)]
    random.shuffle(rows)
    return rows


def written(rows, path):
    path.write_text(
        "".join(
            f"{row if isinstance(row, str) and row[0] == '{' else json.dumps(row)}\n"
            for _, row in rows
        )
    )
    return path


def opened(source, config, folder=None):
    """Both stores, as training opens them."""
    kinds = OBJECTIVES[config.objective].row_kinds
    file = folder and folder / "train_dataset.json"
    if not config.validation_split:
        return open_store(
            source, tiny.tokenizer(), config, "rows", kinds=kinds, report_file=file
        ), None
    training, rest = open_divided(
        source, tiny.tokenizer(), config, "rows", kinds=kinds, report_file=file
    )
    return training, open_held_out(rest, config, folder and folder / "eval_dataset.json")


@pytest.mark.parametrize("objective", ["sft", "pretraining", "distill", "dpo", "reward", "kto"])
@pytest.mark.parametrize("split", [0.0, 0.3])
@pytest.mark.parametrize("overlong", [None, "drop", "cut", "split"])
def test_what_was_read_is_trained_held_out_and_left_out_together(
    objective, split, overlong, tmp_path
):
    """Counted once more, row by row, from the documents of both stores."""
    rows = [mixed(), mixed()]
    files = [written(some, tmp_path / f"{n}.jsonl") for n, some in enumerate(rows)]
    weighted = [
        DataSource(str(files[0]), weight=2),
        DataSource(str(files[1]), weight=random.choice([0.5, 1])),
    ]
    config = ChronicalsConfig(
        objective=objective,
        max_seq_length=WIDTH,
        overlong=overlong,
        validation_split=split,
        gate=ALLOWED,
        cache_dir=tmp_path,
        seed=random.randrange(100),
    )
    read = read_records(weighted, config.seed)
    kinds = [
        rows[where.startswith(str(files[1]))][int(where.rsplit(":", 1)[1]) - 1][0]
        for where, _ in read
    ]
    store, rest = opened(weighted, config)
    trained = set(store.rows.tolist())
    held_out = set() if rest is None else set(rest.rows.tolist())
    ledger = store.ledger
    assert ledger.read == Counter(kinds) == store.report.kinds and store.report.rows == len(kinds)
    assert ledger.trained == Counter(kinds[row] for row in trained)
    assert ledger.held_out == Counter(kinds[row] for row in held_out - trained)
    assert ledger.divided == len(held_out & trained)
    left_out = Counter(kind for row, kind in enumerate(kinds) if row not in trained | held_out)
    assert {kind: sum(causes.values()) for kind, causes in ledger.left_out.items()} == left_out
    for rule, count in ledger.causes.items():
        assert count <= store.report.count(rule)
    sums = [tuple(int(cell.replace(",", "")) for cell in line[1:5]) for line in ledger.table()]
    assert all(line[0] == sum(line[1:]) for line in sums) and sums[-1][0] == len(kinds)
    if rest is not None:
        assert rest.ledger.read == rest.ledger.held_out == Counter(kinds[row] for row in held_out)
        assert not rest.ledger.trained and not rest.ledger.left_out
    kept = np.concatenate([store.lengths] + ([] if rest is None else [rest.lengths]))
    assert (
        store.report.documents == len(store)
        and store.report.tokens == store.lengths.sum() <= kept.sum()
    )


@pytest.mark.slow
def test_every_row_that_is_left_out_has_its_cause(tmp_path):
    """The rule under which the gate counts it."""
    for objective in ("sft", "dpo", "kto"):
        kinds = OBJECTIVES[objective].row_kinds
        beside = [(kind, ROWS[kind](n)) for n in range(3) for kind in kinds if kind in ROWS]
        config = ChronicalsConfig(
            objective=objective,
            max_seq_length=WIDTH,
            overlong="drop",
            gate=ALLOWED,
            cache_dir=tmp_path,
        )
        for kind, rows in FAULTS.items():
            for row in rows:
                source = written([*beside, (kind, row)], tmp_path / "rows.jsonl")
                report = open_store(source, tiny.tokenizer(), config, kinds=kinds).report
                for cause in report.left_out.get(kind, {}):
                    assert report.count(cause) == 1, (objective, row)
                assert sum(report.kinds.values()) == len(beside) + 1


def test_sums_that_do_not_agree_are_no_ledger():
    with pytest.raises(
        ValueError, match="chat: 3 rows read, but 1 trained, 1 held out and 0 left out"
    ):
        Ledger({"chat": 3}, {"chat": 1}, {"chat": 1})
    assert Ledger({"chat": 3}, {"chat": 1}, {"chat": 1}, {"chat": {"empty_answer": 1}}).causes == {
        "empty_answer": 1
    }


TWO_KINDS = [ROWS[kind](n) for n in range(200) for kind in ("chat", "instruction")]


def test_a_share_that_is_held_out_is_counted_by_kind(tmp_path, caplog):
    config = ChronicalsConfig(max_seq_length=WIDTH, validation_split=0.05, cache_dir=tmp_path)
    with caplog.at_level(logging.INFO):
        store, rest = opened(TWO_KINDS, config, tmp_path)
    trained, held_out = (dict(sorted(part.rows_by_kind.items())) for part in (store, rest))
    assert sum(trained.values()) == 380 and sum(held_out.values()) == 20 and len(held_out) == 2
    one, two = (
        ", ".join(f"{count} {kind}" for kind, count in part.items()) for part in (trained, held_out)
    )
    assert (
        f"rows: 400 rows (200 chat, 200 instruction): 380 ({one}) trained, 20 ({two}) held out, "
        "380 documents" in caplog.text
    )
    assert f"validation_split=0.05: 20 rows ({two}), 20 documents" in caplog.text
    assert "of them scored" in caplog.text
    first, second = data_reports(tmp_path)
    assert (
        first["ledger"] == json.loads(json.dumps(asdict(store.ledger)))
        and second["kinds"] == held_out
    )
    page = tmp_path / "report.html"
    Report("run", {}, [], [first, second], config).write(page, torch.device("cpu"))
    for line in store.ledger.table():
        assert "".join(f"<td><pre>{cell}</pre></td>" for cell in line) in page.read_text()
    assert "400 (200 chat, 200 instruction)" in page.read_text()


PAIRS = [ROWS["preference"](n) for n in range(20)]


def test_pairs_are_pairs_for_every_objective(tmp_path, caplog):
    """Their documents are named: answers, and the prompts that are there once."""
    config = ChronicalsConfig(max_seq_length=WIDTH, cache_dir=tmp_path)
    with caplog.at_level(logging.INFO):
        store, _ = opened(PAIRS, config.replace(objective="dpo"))
        assert len(store) == 60
        assert "rows: 20 rows (20 preference), 40 answers, 20 shared prompts, " in caplog.text
        with pytest.raises(DataError, match="unusable_kind: 20 "):
            opened(PAIRS, config)
        assert (
            "rows: 20 rows (20 preference): 20 left out (20 unusable_kind), 0 documents"
            in caplog.text
        )
        opened([ROWS["unpaired preference"](n) for n in range(6)], config.replace(objective="kto"))
    assert (
        "rows: 6 rows (6 unpaired preference), 6 answers, 6 answers to other prompts, "
        in caplog.text
    )


def test_rows_that_are_refused_have_their_kind(tmp_path, caplog):
    config = ChronicalsConfig(
        max_seq_length=WIDTH, cache_dir=tmp_path, validation_split=0.5, objective="dpo"
    )
    with caplog.at_level(logging.INFO), pytest.raises(DataError, match="is of kind chat"):
        opened(tiny.chat_rows(3), config, tmp_path)
    assert "rows: 3 rows (3 chat): 3 left out (3 unusable_kind)" in caplog.text
    assert data_reports(tmp_path)[0]["ledger"]["left_out"] == {"chat": {"unusable_kind": 3}}


def test_a_text_that_is_held_out_in_part_is_counted_once(tmp_path, caplog):
    config = ChronicalsConfig(max_seq_length=WIDTH, cache_dir=tmp_path, validation_split=0.25)
    with caplog.at_level(logging.INFO):
        store, rest = opened([{"text": "the answer to life " * 20 * WIDTH}], config)
    assert store.ledger == Ledger({"text": 1}, {"text": 1}, divided=1) and len(rest)
    assert (
        "1 rows (text): " not in caplog.text
        and "1 of those trained are held out in part" in caplog.text
    )
