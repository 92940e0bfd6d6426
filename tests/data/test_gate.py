"""Every rule of the gate finds the file planted for it, names its rows, and is silent on clean data."""

import copy
import json
import math
import random

import pytest

import runs
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import DataError, DataReport, Tokenizer, TokenStore, build_store, open_store
from chronicals.data.gate import EXAMPLES, RULES
from chronicals.data.template import TemplateError

WIDTH = 64
CLEAN = tiny.chat_rows(12)
MASKED = {"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}
USER = {"role": "user", "content": "what is the answer?"}
ASSISTANT = {"role": "assistant", "content": "forty two"}


def chat(*messages):
    return {"messages": list(messages)}


def without_end(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )


def with_other_prompt(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant", "{% if add_generation_prompt %}{{ '<|im_start|>model"
    )


def with_bos(tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<s>"})


def with_pad(tokenizer):
    tokenizer.add_special_tokens({"pad_token": "<pad>"})


def double_bos(tokenizer):
    return {"input_ids": [tokenizer.bos_token_id] * 2 + [5, 6, tokenizer.eos_token_id]}


def masked_stop(tokenizer):
    ids = [5, 6, 7, tokenizer.eos_token_id]
    return {"input_ids": ids, "labels": [-100, 6, 7, -100]}


def trained_padding(tokenizer):
    return {"input_ids": [5, 6, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.pad_token_id]}


PLANTED = {
    "unparsable_line": '{"messages": [',
    "missing_field": {"question": "what?", "answer": "that"},
    "wrong_type": chat(USER, {"role": "assistant", "content": 42}),
    "unusable_kind": {"prompt": "what?", "chosen": "this", "rejected": "that"},
    "empty_conversation": chat(),
    "unknown_role": chat(USER, {"role": "narrator", "content": "he said"}),
    "empty_answer": chat(USER, {"role": "assistant", "content": " \n"}),
    "no_assistant_turn": chat(USER),
    "consecutive_answers": chat(USER, ASSISTANT, {"role": "assistant", "content": "or so"}),
    "late_system_message": chat(USER, {"role": "system", "content": "be kind"}, ASSISTANT),
    "template_refuses": (lambda t: setattr(t, "chat_template", None), chat(USER, ASSISTANT)),
    "template_differs": (with_other_prompt, chat(USER, ASSISTANT)),
    "no_stop_token": (without_end, chat(USER, ASSISTANT)),
    "masked_stop": masked_stop,
    "cut_stop": chat(USER, {"role": "assistant", "content": "very " * WIDTH}),
    "masked_row": MASKED,
    "masked_by_cut": {"input_ids": [1] * (WIDTH + 1), "labels": [-100] * WIDTH + [1]},
    "double_bos": (with_bos, double_bos),
    "special_token_in_text": chat({"role": "user", "content": "say <|im_end|> to me"}, ASSISTANT),
    "trained_padding": (with_pad, trained_padding),
    "byte_garbage": chat({"role": "user", "content": "na\ufffdve"}, ASSISTANT),
    "cut_row": {"input_ids": list(range(1, WIDTH + 2)), "labels": [*range(1, WIDTH + 1), -100]},
    "split_row": {"text": "the answer to life " * WIDTH},
    "single_token": {"input_ids": [7]},
    "duplicate_row": copy.deepcopy(CLEAN[3]),
}
"""Rule: the row that breaks it (a text is a raw line), or what is done to the tokenizer and the row."""

ELSEWHERE = {"vocabulary_too_large", "id_out_of_range", "dropped_row", "held_out_in_training"}
"""Rules that need more than a row: tests of their own."""

ALONG = {
    "cut_stop": {"cut_row"}, "masked_by_cut": {"cut_row", "cut_stop"}, "single_token": {"masked_row"},
    "masked_stop": set(), "trained_padding": set(),
}  # fmt: skip
"""What else a planted row breaks, and must."""


def planted(rule, tmp_path):
    """A file of clean rows with the fault at a random place: the store, and the number of the row."""
    tokenizer = tiny.tokenizer()
    change, row = PLANTED[rule] if isinstance(PLANTED[rule], tuple) else (None, PLANTED[rule])
    if change:
        change(tokenizer)
    row = row(tokenizer) if callable(row) else row
    clean = [{"input_ids": [10 + n, 3, tokenizer.eos_token_id]} for n in range(9)] if change else CLEAN
    place = random.randint(4, len(clean))
    lines = [json.dumps(row) for row in clean]
    lines.insert(place, row if isinstance(row, str) else json.dumps(row))
    path = tmp_path / f"{rule}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path, tokenizer, place + 1


def test_every_rule_has_a_planted_fault():
    assert set(PLANTED) | ELSEWHERE == set(RULES)


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(rule, tmp_path):
    path, tokenizer, number = planted(rule, tmp_path)
    report = build_store(path, Tokenizer(tokenizer), WIDTH, tmp_path).report
    assert set(report.findings) == {rule} | ALONG.get(rule, set())
    assert (report.count(rule), report.findings[rule].rows) == (1, [number])
    if RULES[rule].share:
        report.check("train")
    strictly = pytest.raises(DataError, match=rf"{rule}: 1 .*\(rows {number}\)")
    with strictly:
        report.check("train", {rule: 0.0})
    report.check("train", dict.fromkeys(report.findings, 1.0))


@pytest.mark.parametrize("rule", [rule for rule in PLANTED if RULES[rule].share == 0])
def test_a_single_row_that_would_make_training_wrong_stops_the_run_before_step_0(rule, tmp_path):
    path, tokenizer, number = planted(rule, tmp_path)
    model = tiny.llama(vocab_size=310)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(DataError, match=rule) as stopped:
        runs.ChronicalsTrainer(model, tokenizer, runs.config(tmp_path, max_seq_length=WIDTH)).train(path)
    assert RULES[rule].remedy in str(stopped.value)
    assert all((a == b).all() for a, b in zip(before, model.parameters(), strict=True))
    written = json.loads((tmp_path / "run" / "train_dataset.json").read_text())
    (entry,) = [entry for entry in written["findings"] if entry["rule"] == rule]
    assert (entry["level"], entry["rows"]) == ("error", [number])


@pytest.mark.parametrize("rows", [CLEAN, [{"prompt": f"what {n}", "completion": "forty"} for n in range(5)]])
def test_clean_data_is_described_and_nothing_is_alarmed(rows, tmp_path):
    report = build_store(rows, Tokenizer(tiny.tokenizer()), 128, tmp_path).report
    report.check("train", dict.fromkeys(RULES, 0.0))
    assert report.entries() == []
    kind = "chat" if rows is CLEAN else "completion"
    assert report.table() == [
        (
            "info",
            f"{len(rows)} rows ({len(rows)} {kind}), {len(rows)} documents, {report.tokens} tokens, "
            f"{report.targets} of them trained ({report.targets / report.tokens:.0%})",
        )
    ]


def test_all_that_is_wrong_is_told_at_once_and_can_be_allowed(tmp_path):
    wrong = [PLANTED[rule] for rule in ("missing_field", "unknown_role", "empty_answer")] * 2
    rows = [*CLEAN, *wrong]
    random.shuffle(rows)
    config = ChronicalsConfig(max_seq_length=WIDTH, cache_dir=tmp_path)
    with pytest.raises(DataError) as stopped:
        open_store(rows, tiny.tokenizer(), config)
    message = str(stopped.value)
    assert all(f"{rule}: 2 " in message for rule in ("missing_field", "unknown_role", "empty_answer"))
    allowed = eval(message.split("gate: ")[1].replace("{", "dict(").replace("}", ")").replace(": ", "="))
    assert allowed == dict.fromkeys(("missing_field", "unknown_role", "empty_answer"), math.ceil(2000 / 18) / 1000)
    store = open_store(rows, tiny.tokenizer(), config.replace(gate=allowed))
    assert len(store) == len(CLEAN)
    assert [rows[n] for n in store.rows] == [row for row in rows if row in CLEAN]


def test_more_findings_than_are_named(tmp_path):
    rows = [MASKED] * (EXAMPLES + 3)
    with pytest.raises(DataError) as error:
        build_store([*rows, *CLEAN[:2]], Tokenizer(tiny.tokenizer()), WIDTH, tmp_path).report.check("train")
    assert f"masked_row: {EXAMPLES + 3} rows with no token to train on (rows 1, 2, 3, 4, 5 …)" in str(error.value)
    with pytest.raises(DataError, match=f"^train: nothing to train on in any of {EXAMPLES + 3} rows"):
        build_store(rows, Tokenizer(tiny.tokenizer()), WIDTH, tmp_path).report.check("train", {"masked_row": 1.0})


def test_data_without_rows_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text("\n\n")
    for source in ([], tmp_path / "train.jsonl"):
        with pytest.raises(DataError, match=r"^train: holds no rows"):
            build_store(source, Tokenizer(tiny.tokenizer()), WIDTH, tmp_path).report.check("train")


def test_a_share_is_compared_as_written(tmp_path):
    """0.29 · 100 is less than 29 in floating point; 29 of 100 rows are no more than 0.29."""
    report = DataReport(rows=100, documents=71, tokens=200, targets=71)
    report.note("masked_row", count=29)
    report.check("train", {"masked_row": 0.29})
    with pytest.raises(DataError, match="masked_row: 29"):
        report.check("train", {"masked_row": 0.2899})


def test_rules_of_other_names_and_shares_out_of_range_are_refused(tmp_path):
    config = ChronicalsConfig(cache_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="no rule is named 'duplicates'; there are unparsable_line"):
        open_store(CLEAN, tiny.tokenizer(), config.replace(gate={"duplicates": 0.1}))
    with pytest.raises(ConfigurationError, match="duplicate_row=2"):
        open_store(CLEAN, tiny.tokenizer(), config.replace(gate={"duplicate_row": 2}))


def test_a_report_survives_being_written(tmp_path):
    rows = [*CLEAN, MASKED, {"input_ids": [1] * 100}, CLEAN[0]]
    first = build_store(rows, Tokenizer(tiny.tokenizer()), WIDTH, tmp_path)
    assert TokenStore.open(first.path).report == first.report == DataReport.from_dict(first.report.to_dict())
    assert set(first.report.findings) == {"masked_row", "cut_row", "cut_stop", "duplicate_row"}


# --- against the model and the other data -----------------------------------------------------------------------------


def test_ids_outside_the_embedding(tmp_path):
    rows = [{"input_ids": [1, 2 + n, 3]} for n in range(20)]
    place = random.randrange(20)
    rows[place] = {"input_ids": [1, 300 + place, 3]}
    config = ChronicalsConfig(cache_dir=tmp_path, max_seq_length=WIDTH)
    open_store(rows, tiny.tokenizer(), config, embedding_rows=320)
    with pytest.raises(DataError, match=rf"id_out_of_range: 1 .*\(rows {place + 1}\).*token id {300 + place} of 300"):
        open_store(rows, tiny.tokenizer(), config, embedding_rows=300)


def test_a_tokenizer_larger_than_the_embedding_is_told(tmp_path):
    tokenizer = tiny.tokenizer()
    config = ChronicalsConfig(cache_dir=tmp_path, max_seq_length=WIDTH)
    rows = [{"input_ids": [1, 2, 3]}]
    assert not open_store(rows, tokenizer, config, embedding_rows=len(tokenizer)).report.findings
    report = open_store(rows, tokenizer, config, embedding_rows=len(tokenizer) - 7).report
    assert report.count("vocabulary_too_large") == 7
    with pytest.raises(DataError, match="vocabulary_too_large: 7 tokens"):
        open_store(rows, tokenizer, config.replace(gate={"vocabulary_too_large": 0}), embedding_rows=len(tokenizer) - 7)


def test_held_out_rows_that_are_trained_on(tmp_path):
    config = ChronicalsConfig(cache_dir=tmp_path, max_seq_length=WIDTH)
    training = open_store(CLEAN, tiny.tokenizer(), config)
    held = [*tiny.chat_rows(20)[12:], CLEAN[5]]
    report = open_store(held, tiny.tokenizer(), config, training=training).report
    assert (report.count("held_out_in_training"), report.findings["held_out_in_training"].rows) == (1, [9])
    with pytest.raises(DataError, match="held_out_in_training: 12 "):
        open_store(CLEAN, tiny.tokenizer(), config, training=training)


def test_long_rows_that_are_dropped(tmp_path):
    config = ChronicalsConfig(cache_dir=tmp_path, max_seq_length=WIDTH, overlong="drop")
    report = open_store([*CLEAN, PLANTED["cut_row"]], tiny.tokenizer(), config).report
    assert (report.findings["dropped_row"].rows, set(report.findings)) == ([13], {"dropped_row"})


def test_template_errors_name_their_rule():
    assert TemplateError("x").rule == "template_refuses"
