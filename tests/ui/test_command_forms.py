"""Commands with flags, and what pages read of their results."""

import json

import pytest

from chronicals.ui.command_forms import CommandForm
from chronicals.ui.fields import FormField
from chronicals.ui.pages.benchmark import arm_row, measured, results
from chronicals.ui.pages.export import check_row, found_proofs
from chronicals.ui.pages.tuner import trial_row
from chronicals.ui.place import Place
from chronicals.ui.recipes import Faults
from chronicals.ui.studies import studies
from chronicals.ui.words import words_of

FIELDS = {
    "file": FormField("file", "", "text", "", required=True),
    "batch_size": FormField("batch_size", "", "number", ""),
    "name": FormField("name", "", "text", ""),
}


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path.resolve())


@pytest.fixture
def form(place):
    return CommandForm(place, ["data", "show"], FIELDS, ["file"], ["file"])


def test_texts_become_arguments_and_flags(form):
    texts = {"name": "a b; rm -rf /", "batch_size": " 4 ", "file": "x.jsonl", "other": "?"}
    assert form.arguments(texts, ["--json"]) == [
        *("data", "show", "x.jsonl", "--batch-size=4", "--name=a b; rm -rf /", "--json")
    ]


@pytest.mark.parametrize(
    "texts, field, words",
    [
        ({}, "file", "required"),
        ({"file": "../x"}, "file", "is outside of"),
        ({"file": "--help"}, "file", "begins like a flag"),
        ({"file": "x", "batch_size": "many"}, "batch_size", "is no number"),
    ],
)
def test_what_is_wrong_is_told_at_its_field(form, texts, field, words):
    with pytest.raises(Faults) as raised:
        form.arguments(texts)
    assert raised.value.by_field.keys() == {field} and words in raised.value.by_field[field]


def test_results_of_benchmarks(place, tmp_path):
    assert list(results(place)) == []
    (tmp_path / "benchmarks").mkdir()
    rate = {"median": 10.0, "lowest": 9.0, "highest": 11.0}
    fast = {"status": "measured", "tokens_per_second": rate, "last_loss": 2.5, "grad_norms": [1, 2]}
    slow = {**fast, "tokens_per_second": {**rate, "median": 5.0}}
    refused = {"status": "refused", "reason": "the loss deviates", "last_loss": 9.0}
    record = {"row": {}, "arms": {"slow": slow, "wrong": refused, "fast": fast}}
    (tmp_path / "benchmarks" / "1.json").write_text(json.dumps(record))
    (tmp_path / "benchmarks" / "2.json").write_text("torn")
    (tmp_path / "benchmarks" / "3.json").symlink_to("/etc/passwd")
    ((name, found),) = results(place)
    assert name == "benchmarks/1.json" and list(measured(found)) == ["fast", "slow"]
    row = arm_row("wrong", refused)
    assert (row["rate"], row["loss"], row["status"]) == ("", "9.0000", "refused the loss deviates")
    assert arm_row("fast", fast)["rate"] == "10" and arm_row("fast", fast)["grad_norm"] == "2.000"


def test_proofs_of_exports(place, tmp_path):
    folder = tmp_path / "run" / "export"
    folder.mkdir(parents=True)
    check = {"name": "weights", "client": "transformers", "passed": True, "detail": ""}
    check |= {"value": 0.25, "bound": 0.5}
    (folder / "a-merged.proof.json").write_text(json.dumps({"checks": [check]}))
    (folder / "a-merged").mkdir()
    assert [name for name, _ in found_proofs(place, "run/export")] == ["run/export/a-merged"]
    assert list(found_proofs(place, "nowhere")) == []
    say = words_of("en")
    row = check_row(check, say)
    assert (row["result"], row["measure"], row["bound"]) == ("equal", "0.25", "0.5")
    assert check_row({**check, "passed": False}, say)["result"] == "differs"
    missing = {**check, "passed": None, "value": None, "bound": None, "detail": "no llama.cpp"}
    assert check_row(missing, say)["result"] == "not run"
    assert check_row(missing, say)["measure"] == "no llama.cpp"
    assert check_row({**missing, "value": 0.0}, say)["result"] == "reported"


def write_trial(folder, number, value, state="complete", repeats=None):
    trial = {"number": number, "params": {"lora_rank": 8 * number}, "state": state, "value": value}
    trial |= {"repeats": repeats, "reason": ""}
    path = folder / "trials" / f"{number:04d}"
    path.mkdir(parents=True)
    (path / "trial.json").write_text(json.dumps(trial))


def test_studies_and_their_best_trials(place, tmp_path):
    assert studies(place) == []
    folder = tmp_path / "studies" / "1"
    for number, value in ((0, 2.0), (1, 1.5), (3, 9.0)):
        write_trial(folder, number, value)
    write_trial(folder, 2, None, "pruned")
    write_trial(folder, 4, 0.5, repeats=1)
    (folder / "study.json").write_text(json.dumps({"settings": {"metric": "loss"}}))
    (study,) = studies(place)
    assert study.name == "studies/1" and len(study.trials) == 5
    assert [trial["number"] for trial in study.best_first()] == [1, 0, 3]
    larger = {"settings": {"metric": "tokens_per_second", "direction": "maximize"}}
    (folder / "study.json").write_text(json.dumps(larger))
    assert study.best_first()[0]["number"] == 3
    assert trial_row(study.trials[4]) == {
        "trial": "4 (= 1)",
        "values": "lora_rank=32",
        "state": "complete",
        "score": "0.5",
        "reason": "",
    }
