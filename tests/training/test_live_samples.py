"""``samples.jsonl`` of runs that are trained on data: answers as the run goes on."""

import json

import pytest

import preferences
import runs
import tiny
from chronicals.training.rollouts.samples import read_samples
from chronicals.training.run import live_samples


@pytest.fixture
def unhurried(monkeypatch):
    """Answers take no part of a run's time here: other tests use the same cores."""
    monkeypatch.setattr(live_samples, "SHARE", float("inf"))
    monkeypatch.setattr(live_samples, "SECONDS", 60.0)


def steps_of(folder):
    return [line["step"] for line in read_samples(folder / "run")]


@pytest.mark.slow
def test_answers_are_written_where_a_run_pauses(tmp_path, unhurried):
    result = runs.train(
        tmp_path,
        rows=tiny.chat_rows(20),
        eval_rows=tiny.chat_rows(26)[20:],
        report_samples=2,
        max_steps=30,
        eval_steps=10,
        save_steps=15,
        learning_rate=1e-2,
    )
    assert steps_of(tmp_path) == [0, 0, 10, 10, 15, 15, 20, 20, 30, 30]
    lines = read_samples(tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "samples.json").read_text())
    for number in range(2):
        of_prompt = lines[number::2]
        assert {line["prompt"] for line in of_prompt} == {
            tiny.tokenizer().decode(kept[number]["prompt"])
        }
        first, *_, last = (line["answers"][0]["text"] for line in of_prompt)
        assert first == kept[number]["before"] != last and "the answer to" in last
    assert "Answers of the last rollouts" not in result.report.read_text()


@pytest.mark.slow
def test_they_change_nothing_of_the_training(tmp_path, unhurried):
    for folder, count in (("with", 2), ("without", 0)):
        runs.train(
            tmp_path / folder,
            rows=tiny.chat_rows(20),
            eval_rows=tiny.chat_rows(26)[20:],
            use_lora=True,
            lora_dropout=0.3,
            report_samples=count,
            eval_steps=2,
        )
    assert steps_of(tmp_path / "with") == [0, 0, 2, 2, 4, 4, 6, 6]
    assert steps_of(tmp_path / "without") == []
    assert runs.trajectory(tmp_path / "with") == runs.trajectory(tmp_path / "without")


@pytest.mark.slow
def test_a_resumed_run_answers_later_steps_again(tmp_path, unhurried):
    fields = {"report_samples": 1, "save_steps": 2}
    runs.train(tmp_path, max_steps=4, **fields)
    file = tmp_path / "run" / "samples.jsonl"
    with file.open("a") as lines:  # of a process that was killed after its last checkpoint
        lines.write('{"step": 6, "prompt": "of the killed", "answers": []}\n')
    runs.train(tmp_path, max_steps=8, resume=True, **fields)
    assert steps_of(tmp_path) == [0, 2, 4, 6, 8]
    assert "of the killed" not in file.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["pretraining", "dpo", "kto", "distill"])
def test_other_stages_have_them_too(objective, tmp_path, unhurried):
    rows = {
        "pretraining": [{"text": f"a text of number {n}, and more of it"} for n in range(12)],
        "dpo": preferences.rows(12),
        "kto": preferences.judged_rows(12),
        "distill": tiny.chat_rows(12),
    }[objective]
    more = {}
    if objective == "distill":
        tiny.llama(1).save_pretrained(tmp_path / "teacher")
        tiny.tokenizer().save_pretrained(tmp_path / "teacher")
        more = {"distill": {"teacher": str(tmp_path / "teacher")}}
    runs.train(
        tmp_path,
        rows=rows,
        objective=objective,
        report_samples=1,
        max_steps=2,
        save_steps=1,
        max_seq_length=256,
        **more,
    )
    assert steps_of(tmp_path) == [0, 1, 2]


@pytest.mark.slow
def test_answers_that_take_long_are_rare(tmp_path, monkeypatch):
    """A hundredth of the time: the next ones wait a hundred times as long as the last took."""
    monkeypatch.setattr(live_samples, "SECONDS", 60.0)
    runs.train(tmp_path, report_samples=1, max_steps=6, save_steps=1)
    assert steps_of(tmp_path) == [0, 1]


@pytest.mark.slow
def test_an_error_of_the_model_ends_the_answers_and_not_the_run(
    tmp_path, unhurried, monkeypatch, caplog
):
    def generate(*args, **options):
        raise RuntimeError("no such thing\nsecond line")

    monkeypatch.setattr(live_samples.Turns, "generate", generate)
    with caplog.at_level("INFO"):
        runs.train(tmp_path, report_samples=1, max_steps=4, save_steps=1)
    said = "no more answers are shown while the run goes on: no such thing"
    assert [text for text in caplog.messages if "no more answers" in text] == [said]
    assert steps_of(tmp_path) == [0]
