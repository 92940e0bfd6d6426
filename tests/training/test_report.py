"""The report of a run tells what was trained, on what, how, and when."""

import errno
import html
import importlib.metadata
import json
import re

import pytest
import torch

import runs
import tiny
from chronicals.policies.needed_memory import FILLED
from chronicals.training.rollouts import turns
from chronicals.training.run import report


def cells(page: str, table: str) -> dict[str, list[str]]:
    """First cell of each row, and the others, of the tables below the heading ``table``."""
    below = re.search(rf"<h[12]>{table}.*?(?=<h2>|</body>)", page, re.DOTALL)[0]
    rows = [
        re.findall(r"<t[hd]>(?:<pre>)?(.*?)(?:</pre>)?</t[hd]>", row, re.DOTALL)
        for row in re.split(r"<tr", below)[1:]
    ]
    return {row[0]: [html.unescape(cell) for cell in row[1:]] for row in rows if row}


@pytest.mark.slow
@pytest.mark.draws
def test_the_report_of_a_run(tmp_path):
    rows = [*tiny.chat_rows(20), tiny.chat_rows(1)[0]]
    result = runs.train(
        tmp_path, rows=rows, use_lora=True, gate={"duplicate_row": 1.0}, validation_split=0.2
    )
    page = result.report.read_text()
    facts = cells(page, "chronicals: run")
    assert facts["steps"] == ["6"] and facts["held-out loss"] == [f"{result.evaluation.loss:.4f}"]
    assert re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d ", facts["finished"][0])
    assert re.match(r"0:\d\d:\d\d", facts["time in steps"][0])
    assert (
        f"torch {importlib.metadata.version('torch')}" in facts["versions"][0] and facts["device"]
    )
    data = cells(page, "Data: train_dataset")
    assert data["rows"] == ["21 (21 chat)"] and "%)" in data["trained tokens"][0]
    assert data["chat"] == ["21", "17", "4", "0", ""] and data["documents"] == ["17"]
    assert cells(page, "Data: validation_split=0.2")["chat"] == ["4", "0", "4", "0", ""]
    assert data["warning"][0] == "duplicate_row" and "more than once" in data["warning"][3]
    assert "Data: validation_split=0.2" in page
    settings = cells(page, "Settings")
    assert settings["use_lora"] == ["True", "set"] and settings["learning_rate"] == ["0.003", "set"]
    assert settings["seed"] == ["42", "default"] and settings["lora_rank"] == ["64", "default"]
    assert "<svg" not in page and "data:image/svg+xml;base64," in page


@pytest.mark.slow
def test_answers_before_and_after(tmp_path, set_constants):
    set_constants(report, SECONDS=60.0)  # other tests use the same cores and card
    result = runs.train(
        tmp_path, rows=tiny.chat_rows(20), report_samples=2, max_steps=30, learning_rate=1e-2
    )
    rows = cells(result.report.read_text(), "Answers before and after")
    asked = [prompt for prompt in rows if "what is" in prompt or "<|im_start|>" in prompt]
    assert len(asked) == 2 and all(
        before != after for before, after in (rows[prompt] for prompt in asked)
    )
    assert "the answer to" in rows[asked[0]][1]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_answers_that_are_compared_are_asked_for_by_their_whole_prompt(objective, tmp_path):
    """Once for each row, whether the prompt is long enough to be shared or not."""
    import preferences

    rows = (preferences.judged_rows if objective == "kto" else preferences.rows)(12)
    runs.train(
        tmp_path, rows=rows, objective=objective, report_samples=20, max_steps=1, max_seq_length=256
    )
    read = tiny.tokenizer().decode
    asked = [
        read(one["prompt"]) for one in json.loads((tmp_path / "run" / "samples.json").read_text())
    ]
    template = tiny.tokenizer().apply_chat_template
    assert asked and set(asked) <= {
        template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows
    }
    assert len(asked) == len(set(asked))


def test_prompts_for_which_no_time_is_left_have_no_answer(tmp_path, monkeypatch):
    """As a model leaves them that generates an answer at a time."""
    given = []
    inner = report.generate_many

    def generate_many(*asked, seconds):
        given.append(seconds)
        found = inner(*asked, seconds=None)
        if len(given) == 1:
            found[1][0].tokens.clear()
        return found

    monkeypatch.setattr(report, "generate_many", generate_many)
    page = runs.train(
        tmp_path, rows=tiny.chat_rows(20), report_samples=2, max_steps=1
    ).report.read_text()
    assert given == [report.SECONDS] * 2
    asked = [
        prompt
        for prompt in cells(page, "Answers before and after")
        if "what is" in prompt or "<|im_start|>" in prompt
    ]
    assert len(asked) == 1


@pytest.mark.slow
def test_answers_change_nothing_of_the_training(tmp_path):
    for folder, count in (("with", 2), ("without", 0)):
        runs.train(tmp_path / folder, use_lora=True, lora_dropout=0.3, report_samples=count)
    assert runs.trajectory(tmp_path / "with") == runs.trajectory(tmp_path / "without")
    assert "Answers before" not in (tmp_path / "without" / "run" / "report.html").read_text()


@pytest.mark.slow
def test_a_resumed_run_shows_the_answers_of_before_its_first_step(tmp_path):
    runs.train(tmp_path, report_samples=1, max_steps=3)
    kept = (tmp_path / "run" / "samples.json").read_text()
    result = runs.train(tmp_path, report_samples=1, max_steps=5, resume=True)
    assert (tmp_path / "run" / "samples.json").read_text() == kept
    assert "Answers before and after" in result.report.read_text()


def test_a_model_that_cannot_generate_is_trained_all_the_same(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(report, "generate_many", None)
    with caplog.at_level("INFO"):
        result = runs.train(tmp_path, report_samples=2, max_steps=1)
    assert "the report has no sample answers: " in caplog.text
    assert "Answers before" not in result.report.read_text()


def test_answers_take_no_more_memory_than_the_run_gives_them(tmp_path, caplog):
    """Keys and values of one answer of ``tiny.llama`` take tens of KB."""
    with caplog.at_level("INFO"):
        runs.train(tmp_path, report_samples=1, max_steps=1, cache_memory="1e-3MB")
    assert re.search(r"no sample answers: request 0: .* MiB \(cache_memory\); ask", caplog.text)


def test_by_default_answers_take_what_the_peak_leaves(tmp_path, monkeypatch):
    held, peak = 10 * 10**9, 30 * 10**9
    card = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held + 10**9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    usual = runs.config(tmp_path)
    filled = int(FILLED * 80 * 10**9)
    assert turns.cache_memory(usual, card, 0) == filled - peak
    assert turns.cache_memory(usual, card, 40 * 10**9) == filled - 40 * 10**9
    bounded = runs.config(tmp_path, gpu_memory=24)
    assert turns.cache_memory(bounded, card, 0) == peak - held
    # others hold the rest of the card
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 80 * 10**9))
    assert turns.cache_memory(usual, card, 0) == 2 * 10**9
    given = runs.config(tmp_path, cache_memory="512MiB")
    assert turns.cache_memory(given, card, 0) == 2**29
    assert turns.cache_memory(usual, torch.device("cpu"), 0) is None


def test_a_batch_that_shrank_is_told_as_fitted(tmp_path):
    from chronicals.training import ChronicalsTrainer

    left = {name for name in runs.config(tmp_path).explicit if name != "batch_size"}
    config = runs.config(tmp_path)
    config = type(config)(**{name: getattr(config, name) for name in left})
    result = ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), config).train(tiny.chat_rows(20))
    assert cells(result.report.read_text(), "Settings")["batch_size"] == ["1", "fitted to the data"]


def test_what_users_write_is_escaped(tmp_path):
    rows = [{"prompt": "<script>alert(1)</script>", "completion": "x"}] * 12
    page = runs.train(tmp_path, rows=rows, max_steps=1, run_name="<b>bold</b>").report.read_text()
    assert "<script>" not in page and "<b>" not in page and "&lt;b&gt;bold" in page


def test_a_report_that_cannot_be_written_fails_no_run(tmp_path, let_raise, caplog):
    let_raise(report.Report, write=OSError(errno.ENOSPC, "No space left on device"))
    result = runs.train(tmp_path, max_steps=1)
    assert runs.weights(tmp_path) and not result.report.exists()
    assert "report.html: the report cannot be written (OSError" in caplog.text


def test_a_report_on_data_that_cannot_be_written_stops_no_process_alone(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "run" / "train_dataset.json").mkdir(parents=True)
    assert runs.train(tmp_path, max_steps=1).steps == 1
    assert (
        "train_dataset.json: the report on the data cannot be written there (Is a directory)"
        in caplog.text
    )
