"""The rows by name: each is what the command takes, the card names the file, and one time limit
is shared.
"""

import json
import sys

import pytest
import scripts
import torch

from chronicals.benchmark.pairs import PairWork
from chronicals.benchmark.work import Work

rows = scripts.script("rows")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla T4", "tesla-t4"),
    ],
)
def test_a_card_by_its_model(name, short, let_return):
    let_return(torch.cuda, is_available=True)
    let_return(torch.cuda, get_device_name=name)
    assert rows.card() == short


@pytest.fixture
def run(monkeypatch, let_return):
    """Runs the script with arguments and what measures a row."""

    def main(measure, *arguments):
        let_return(rows, card="h200")
        monkeypatch.setattr(rows, "measure", measure)
        monkeypatch.setattr(sys, "argv", ["rows.py", *map(str, arguments)])
        rows.main()

    return main


@pytest.fixture
def seconds_of_rows(run, monkeypatch):
    """The seconds each row was given, where each takes 100."""
    now = [0.0]
    given = []

    def measure(name, output, work, seconds, options):
        given.append((name, output.name, round(seconds)))
        now[0] += 100.0
        return True

    def main(*arguments):
        monkeypatch.setattr(rows.time, "monotonic", lambda: now[0])
        run(measure, *arguments)
        return given

    return main


TWO = ["row-0.5b-full-ragged", "row-0.5b-lora-ragged"]


def test_rows_share_the_time_and_the_later_ones_have_what_is_left(tmp_path, seconds_of_rows):
    given = seconds_of_rows(tmp_path, *TWO, "--time-limit", 500)
    assert given == [(TWO[0], f"{TWO[0]}-h200.json", 240), (TWO[1], f"{TWO[1]}-h200.json", 390)]


def test_a_row_for_which_there_is_no_time_is_not_begun(tmp_path, seconds_of_rows, capsys):
    assert len(seconds_of_rows(tmp_path, *TWO, "--time-limit", 105, "--run", 2)) == 1
    assert (
        f"not begun, the time limit is reached: {tmp_path / TWO[1]}-h200-2.json"
        in capsys.readouterr().out
    )


def test_a_note_is_added_to_the_rows_own(tmp_path, run, let_return):
    def measure(name, output, *given):
        output.write_text(json.dumps({"notes": ["its own"], "seconds": 1.0}))
        return True

    let_return(rows, table="")
    run(measure, tmp_path, TWO[0], "--note", "beside another row")
    assert json.loads((tmp_path / f"{TWO[0]}-h200.json").read_text()) == {
        "notes": ["its own", "beside another row"],
        "seconds": 1.0,
    }


def test_the_table_has_every_arm(tmp_path):
    measured = {
        "status": "measured",
        "tokens_per_second": {"median": 1000.0},
        "share_of_floor": None,
        "peak_gib": 2.0,
    }
    arms = {
        "ours": {**measured, "padding_share": 0.0, "rounds": 3},
        "liger": {"status": "absent", "reason": "not installed"},
    }
    result = {
        "commit": "abc",
        "seconds": 10.0,
        "arms": arms,
        "ratios": {"unsloth": {"median": 1.5}},
        "notes": ["said"],
    }
    (tmp_path / "row-x-h200.json").write_text(json.dumps(result))
    said = rows.table([tmp_path / "row-x-h200.json", tmp_path / "not-there.json"])
    for words in (
        "row-x-h200, abc",
        "1,000",
        "absent: not installed",
        "ours / unsloth 1.500",
        "said",
    ):
        assert words in said


@pytest.mark.parametrize("name", rows.ROWS)
def test_every_row_is_a_command(name, monkeypatch, let_return):
    """Up to where it would measure."""
    from typer.testing import CliRunner

    from chronicals.cli.app import app

    class Measured(Exception):
        pass

    def measure(work, *_):
        raise Measured(work.name, work.mode, work.data)

    monkeypatch.setattr("chronicals.benchmark.rounds.measure_row", measure)
    for kind in (Work, PairWork):
        let_return(kind, write_documents=None)
    done = CliRunner().invoke(app, ["benchmark", *rows.ROWS[name]])
    assert isinstance(done.exception, Measured), done.output
    shape, mode, data = done.exception.args
    assert (
        shape.split("-")[-1] in name
        and f"-{mode}-" in name
        and (data == "ragged") == ("ragged" in name)
    )


def test_there_is_a_preference_row_of_every_kind():
    """Whose options the command knows."""
    names = [
        f"row-{kind}-{objective}-{share}"
        for kind in ("0.5b-full", "8b-lora", "8b-qlora")
        for objective in ("dpo", "orpo")
        for share in (30, 50, 70)
    ]
    assert sorted(rows.PREFERENCE) == sorted(names) and rows.PREFERENCE.items() <= rows.ROWS.items()
    options = rows.ROWS["row-8b-qlora-orpo-30"]
    given = dict(zip(options[::2], options[1::2]))
    assert given == {
        "--model": "llama-3.1-8b",
        "--mode": "qlora",
        "--objective": "orpo",
        "--data": "pairs-30",
        "--reference-steps": "2",
        "--against": "trl,unsloth-alone",
    }
    half = rows.ROWS["row-8b-qlora-orpo-50"]
    assert "--reference-steps" not in half and half[-1] == "trl,unsloth-alone"
