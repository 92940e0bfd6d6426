"""Every rule of the gate finds the file planted for it, names its rows, and is silent on clean
data.
"""

import ast
import importlib.util
import json
import math
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import rollouts
import runs
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError, DataSource
from chronicals.data import (
    DataError,
    DataReport,
    Tokenizer,
    TokenStore,
    build_store,
    open_divided,
    open_held_out,
    open_store,
)
from chronicals.data.reading import records
from chronicals.data.reading.gate import EXAMPLES, RULES
from chronicals.data.tokens.chat_template import TemplateError
from data.planted_faults import (
    ALONG,
    CLEAN,
    ELSEWHERE,
    MASKED,
    PLANTED,
    WIDTH,
    clean_rows,
    encoder,
    objective_of,
    planted,
    rule_of,
)
from data.stock_templates import KINDS, names, record, refusal, shipped, with_template


def test_every_rule_has_a_planted_fault():
    assert set(PLANTED) & set(RULES) | ELSEWHERE == set(RULES) >= {*map(rule_of, PLANTED)}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(name, tmp_path):
    path, tokenizer, number = planted(name, tmp_path)
    report = build_store(path, encoder(name, tokenizer), WIDTH, tmp_path).report
    rule = rule_of(name)
    assert set(report.findings) == {rule} | ALONG.get(name, set())
    assert (report.count(rule), report.findings[rule].rows) == (1, [number])
    if RULES[rule].share != 0:
        report.check("train")
    strictly = pytest.raises(DataError, match=rf"{rule}: 1 .*\(rows {number}\)")
    with strictly:
        report.check("train", {rule: 0.0})
    report.check("train", dict.fromkeys(report.findings, 1.0))


@pytest.mark.parametrize(
    ("name", "may_split"), [("cut_stop/dpo", False), ("cut_stop/kto", False), ("cut_row", True)]
)
def test_whole_answers_are_not_told_to_split(name, may_split, tmp_path):
    """Their objectives refuse it."""
    path, tokenizer, _ = planted(name, tmp_path)
    report = build_store(path, encoder(name, tokenizer), WIDTH, tmp_path).report
    (entry,) = [entry for entry in report.entries() if entry["rule"] == "cut_row"]
    assert ("'split'" in entry["remedy"]) == may_split and "or set overlong='drop'" in entry[
        "remedy"
    ]
    assert entry["remedy"] in "".join(line for _, line in report.table())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLANTED if RULES[rule_of(name)].share == 0])
def test_a_single_row_that_would_make_training_wrong_stops_the_run_before_step_0(name, tmp_path):
    rule = rule_of(name)
    (path, tokenizer, number) = planted(name, tmp_path)
    model = tiny.llama(vocab_size=310)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(DataError, match=rule) as stopped:
        usual = rollouts.config if objective_of(name) == "grpo" else runs.config
        config = usual(tmp_path, max_seq_length=WIDTH, objective=objective_of(name))
        runs.ChronicalsTrainer(model, tokenizer, config).train(path)
    assert RULES[rule].remedy in str(stopped.value)
    assert all((a == b.cpu()).all() for a, b in zip(before, model.parameters(), strict=True))
    written = json.loads((tmp_path / "run" / "train_dataset.json").read_text())
    (entry,) = [entry for entry in written["findings"] if entry["rule"] == rule]
    assert (entry["level"], entry["rows"]) == ("error", [number])


@pytest.mark.parametrize(
    "rows", [CLEAN, [{"prompt": f"what {n}", "completion": "forty"} for n in range(5)]]
)
def test_clean_data_is_described_and_nothing_is_alarmed(rows, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template if rows is CLEAN else None
    report = build_store(rows, Tokenizer(tokenizer), 128, tmp_path).report
    report.check("train", dict.fromkeys(RULES, 0.0))
    assert report.entries() == []
    kind = "chat" if rows is CLEAN else "completion"
    assert report.table() == [
        (
            "info",
            f"{len(rows)} rows ({len(rows)} {kind}), {len(rows)} documents, {report.tokens} "
            "tokens, "
            f"{report.targets} of them trained ({report.targets / report.tokens:.0%})",
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["no_common_prompt", "unusable_label"])
def test_clean_preferences_alarm_nothing(rule, tmp_path):
    rows = clean_rows(rule)
    report = build_store(rows, encoder(rule, tiny.tokenizer()), WIDTH, tmp_path).report
    kind = "preference" if rule == "no_common_prompt" else "unpaired preference"
    assert (
        report.entries() == []
        and report.kinds == {kind: len(rows)}
        and report.forms == {"chat": len(rows)}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_the_stock_templates_alarm_nothing(name, tmp_path):
    rows = [row for row in map(record, KINDS) if not refusal(name, row)]
    report = build_store(rows, Tokenizer(with_template(shipped(name))), 4096, tmp_path).report
    assert (report.findings, report.documents) == ({}, len(rows))


def test_all_that_is_wrong_is_told_at_once_and_can_be_allowed(tmp_path):
    wrong = [PLANTED[rule] for rule in ("missing_field", "unknown_role", "empty_answer")] * 2
    rows = [*CLEAN, *wrong]
    random.shuffle(rows)
    config = ChronicalsConfig(max_seq_length=WIDTH, cache_dir=tmp_path)
    with pytest.raises(DataError) as stopped:
        open_store(rows, tiny.tokenizer(), config)
    message = str(stopped.value)
    assert all(
        f"{rule}: 2 " in message for rule in ("missing_field", "unknown_role", "empty_answer")
    )
    allowed = ast.literal_eval(message.split("gate=")[1])
    assert allowed == dict.fromkeys(
        ("missing_field", "unknown_role", "empty_answer"), math.ceil(2000 / 18) / 1000
    )
    store = open_store(rows, tiny.tokenizer(), config.replace(gate=allowed))
    assert len(store) == len(CLEAN)
    assert [rows[n] for n in store.rows] == [row for row in rows if row in CLEAN]


def test_more_findings_than_are_named(tmp_path):
    rows = [MASKED] * (EXAMPLES + 3)
    with pytest.raises(DataError) as error:
        build_store([*rows, *CLEAN[:2]], Tokenizer(tiny.tokenizer()), WIDTH, tmp_path).report.check(
            "train"
        )
    assert (
        f"masked_row: {EXAMPLES + 3} rows with no token to train on (rows 1, 2, 3, 4, 5 …)"
        in str(error.value)
    )
    with pytest.raises(
        DataError, match=f"^train: nothing to train on in any of {EXAMPLES + 3} rows"
    ):
        build_store(rows, Tokenizer(tiny.tokenizer()), WIDTH, tmp_path).report.check(
            "train", {"masked_row": 1.0}
        )


def test_rows_and_places_that_are_named_are_as_many_however_data_is_divided():
    """Of chunks that each found more or fewer than are named."""
    whole = DataReport()
    for first, count in ((0, 3), (100, 4), (200, 2)):
        part = DataReport()
        for row in range(first, first + count):
            part.note("empty_answer", row)
        part.findings["empty_answer"].places = [
            f"b.jsonl:{row + 1}" for row in range(first, first + count)
        ]
        whole.add(part)
    found = whole.findings["empty_answer"]
    assert found.count == 9 and found.rows == [1, 2, 3, 101, 102]
    assert found.places == [f"b.jsonl:{row}" for row in found.rows]


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
    with pytest.raises(
        ConfigurationError, match="no rule is named 'duplicates'; there are unparsable_line"
    ):
        open_store(CLEAN, tiny.tokenizer(), config.replace(gate={"duplicates": 0.1}))
    with pytest.raises(ConfigurationError, match="duplicate_row=2"):
        open_store(CLEAN, tiny.tokenizer(), config.replace(gate={"duplicate_row": 2}))


def test_a_report_survives_being_written(tmp_path):
    rows = [*CLEAN, MASKED, {"input_ids": [1] * 100}, CLEAN[0]]
    first = build_store(rows, Tokenizer(tiny.tokenizer()), WIDTH, tmp_path)
    assert (
        TokenStore.open(first.path).report
        == first.report
        == DataReport.from_dict(asdict(first.report))
    )
    assert set(first.report.findings) == {"masked_row", "cut_row", "cut_stop", "duplicate_row"}


# --- against the model and the other data
# -----------------------------------------------------------------------------


def test_ids_outside_the_embedding(tmp_path):
    rows = [{"input_ids": [1, 2 + n, 3]} for n in range(20)]
    place = random.randrange(20)
    rows[place] = {"input_ids": [1, 300 + place, 3]}
    config = ChronicalsConfig(cache_dir=tmp_path, max_seq_length=WIDTH)
    open_store(rows, tiny.tokenizer(), config, embedding_rows=320)
    with pytest.raises(
        DataError,
        match=rf"id_out_of_range: 1 .*\(rows {place + 1}\).*token id {300 + place} of 300",
    ):
        open_store(rows, tiny.tokenizer(), config, embedding_rows=300)


@pytest.mark.slow
def test_a_tokenizer_larger_than_the_embedding_is_told(tmp_path):
    tokenizer = tiny.tokenizer()
    config = ChronicalsConfig(cache_dir=tmp_path, max_seq_length=WIDTH)
    rows = [{"input_ids": [1, 2, 3]}]
    assert not open_store(rows, tokenizer, config, embedding_rows=len(tokenizer)).report.findings
    report = open_store(rows, tokenizer, config, embedding_rows=len(tokenizer) - 7).report
    assert report.count("vocabulary_too_large") == 7
    with pytest.raises(DataError, match="vocabulary_too_large: 7 tokens"):
        open_store(
            rows,
            tokenizer,
            config.replace(gate={"vocabulary_too_large": 0}),
            embedding_rows=len(tokenizer) - 7,
        )


def test_held_out_rows_that_are_trained_on(tmp_path):
    config = ChronicalsConfig(cache_dir=tmp_path, max_seq_length=WIDTH)
    training = open_store(CLEAN, tiny.tokenizer(), config)
    held = [*tiny.chat_rows(20)[12:], CLEAN[5]]
    report = open_store(held, tiny.tokenizer(), config, training=training).report
    assert (report.count("held_out_in_training"), report.findings["held_out_in_training"].rows) == (
        1,
        [9],
    )
    with pytest.raises(DataError, match="held_out_in_training: 12 "):
        open_store(CLEAN, tiny.tokenizer(), config, training=training)


def test_equal_rows_stay_on_one_side_of_a_split(tmp_path):
    config = ChronicalsConfig(cache_dir=tmp_path, max_seq_length=WIDTH, validation_split=0.25)
    twice = random.randint(1, 4)
    store = open_store([*CLEAN, *[CLEAN[0]] * twice], tiny.tokenizer(), config)
    training, rest = store.split(0.25, seed=random.randrange(1000))
    assert not np.isin(rest.hashes, training.hashes).any()
    assert len(np.unique(rest.hashes)) == 3 and len(training) + len(rest) == len(store)
    held_out = open_held_out(rest, config, tmp_path / "reports" / "eval_dataset.json")
    assert (held_out.report.rows, held_out.report.documents, held_out.chats) == (
        len(rest),
        len(rest),
        True,
    )
    written = json.loads((tmp_path / "reports" / "eval_dataset.json").read_text())
    assert written["data"] == "validation_split=0.25" and written["documents"] == len(rest)


def test_the_rows_that_are_held_out_have_a_seed_of_their_own(tmp_path):
    def held_out(**seeds):
        config = ChronicalsConfig(
            cache_dir=tmp_path, max_seq_length=WIDTH, validation_split=0.25, **seeds
        )
        return open_divided(CLEAN, tiny.tokenizer(), config)[1].rows.tolist()

    assert held_out(seed=1) == held_out(seed=2, validation_seed=1) != held_out(seed=2)
    assert held_out(seed=2) == held_out(seed=1, validation_seed=2)


def test_pieces_of_a_long_text_may_fall_on_both_sides(tmp_path):
    config = ChronicalsConfig(cache_dir=tmp_path, max_seq_length=WIDTH, validation_split=0.25)
    store = open_store([{"text": "the answer to life " * 20 * WIDTH}], tiny.tokenizer(), config)
    training, rest = store.split(0.25, seed=1)
    assert min(len(training), len(rest)) > 1
    assert open_held_out(rest, config).report.findings == {}


ANSWER = {"role": "assistant", "content": "forty two"}
SILENT = {"role": "assistant", "content": " "}
ASKED = [{"role": "user", "content": "what?"}]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "what?", "completion": " "}, {"empty_answer"}),
        ({"prompt": "what?", "response": ""}, {"empty_answer"}),
        ({"prompt": ASKED, "completion": [SILENT]}, {"empty_answer"}),
        ({"prompt": ASKED, "completion": ASKED}, {"no_assistant_turn"}),
        ({"prompt": [*ASKED, SILENT, *ASKED], "completion": [ANSWER]}, set()),
        (
            {
                "prompt": ASKED,
                "completion": [ANSWER, {"role": "system", "content": "be kind"}, ANSWER],
            },
            {"late_system_message"},
        ),
        ({"prompt": [*ASKED, ANSWER], "completion": [ANSWER]}, {"consecutive_answers"}),
        ({"messages": [*ASKED, {**SILENT, "train": False}, *ASKED, ANSWER]}, set()),
        ({"messages": [{**ASKED[0], "train": True}]}, set()),
        ({"text": "a"}, {"single_token"}),
        (
            {"messages": [*ASKED, {**ANSWER, "reasoning_content": "na\ufffdve"}]},
            {"byte_garbage", "template_refuses"},
        ),
        ({"messages": [*ASKED, {**ANSWER, "thinking": "<|im_end|>"}]}, {"special_token_in_text"}),
    ],
)
def test_answers_are_looked_at_whatever_the_kind_of_row(row, found, tmp_path):
    report = build_store([*CLEAN, row], Tokenizer(tiny.tokenizer()), WIDTH, tmp_path).report
    assert set(report.findings) == found
    assert all(finding.rows == [len(CLEAN) + 1] for finding in report.findings.values())


def test_who_is_trained_need_not_be_the_assistant(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"what is {n}?"}]} for n in range(12)]
    report = build_store(
        rows, Tokenizer(tiny.tokenizer(), train_on_roles=["user"]), WIDTH, tmp_path
    ).report
    assert (report.documents, report.findings) == (12, {})


def test_errors_of_a_mixture_name_the_file_and_its_row(tmp_path):
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    rows = [*CLEAN, {"messages": [{"role": "narrator", "content": "a"}]}]
    for file in files:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    number = len(CLEAN) + 1
    report = build_store(
        [str(file) for file in files], Tokenizer(tiny.tokenizer()), WIDTH, tmp_path
    ).report
    with pytest.raises(
        DataError, match=rf"\({files[0]}:{number}, {files[1]}:{number}\): use system"
    ):
        report.check("mixture", {"duplicate_row": 1.0})
    assert any(f"{files[1]}:{number}" in text for _, text in report.table())
    alone = build_store(str(files[1]), Tokenizer(tiny.tokenizer()), WIDTH, tmp_path).report
    with pytest.raises(DataError, match=rf"\(rows {number}\)"):
        alone.check("alone")


def test_rows_that_a_weight_repeats_are_no_duplicates(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*CLEAN, CLEAN[2]]))
    once = build_store(path, Tokenizer(tiny.tokenizer()), WIDTH, tmp_path).report
    twice = build_store(
        DataSource(str(path), weight=2.5), Tokenizer(tiny.tokenizer()), WIDTH, tmp_path
    ).report
    assert once.findings["duplicate_row"].rows == [13]
    assert set(twice.findings["duplicate_row"].rows) <= {13, 26, *range(27, 40)} and twice.rows > 26
    clean = tmp_path / "clean.jsonl"
    clean.write_text("".join(json.dumps(row) + "\n" for row in CLEAN))
    assert not build_store(
        DataSource(str(clean), weight=3), Tokenizer(tiny.tokenizer()), WIDTH, tmp_path
    ).report.findings


def test_a_finding_says_where_its_first_row_lies(tmp_path):
    path, tokenizer, number = planted("cut_stop", tmp_path)
    report = build_store(path, Tokenizer(tokenizer), WIDTH, tmp_path).report
    assert report.findings["cut_stop"].example == f"{path}:{number}"


def test_a_share_that_is_offered_is_one_that_is_taken(tmp_path):
    tokenizer = tiny.tokenizer()
    config = ChronicalsConfig(
        cache_dir=tmp_path, max_seq_length=WIDTH, gate={"vocabulary_too_large": 0}
    )
    with pytest.raises(DataError, match=r"gate=\{'vocabulary_too_large': 1.0"):
        open_store(CLEAN, tokenizer, config, embedding_rows=len(tokenizer) - 100)


def test_a_beginning_that_pads_as_well_is_no_trained_padding(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "pad_token": "<s>"})
    begin = tokenizer.bos_token_id
    end = tokenizer.eos_token_id
    sound = {"input_ids": [begin, 5, 6, end]}
    padded = {"input_ids": [begin, 5, end, begin]}
    report = build_store([sound, padded, sound], Tokenizer(tokenizer), WIDTH, tmp_path).report
    assert report.findings["trained_padding"].rows == [2]


def test_texts_in_a_list_are_of_the_wrong_type(tmp_path):
    report = build_store(
        [{"text": ["a", "b"]}], Tokenizer(tiny.tokenizer()), WIDTH, tmp_path
    ).report
    assert report.findings["wrong_type"].example == "row 1: text must be text, this is list"


def test_given_ids_count_towards_a_chunk(set_constants):
    set_constants(records, CHUNK_LETTERS=1000)
    rows = [(f"row {n}", {"input_ids": list(range(1, 51))}) for n in range(100)]
    assert [len(chunk.records) for chunk in records.chunks_of(rows)] == [20] * 5


@pytest.mark.parametrize("label", [True, False])
def test_answers_that_are_all_good_or_all_bad_are_told(label, tmp_path):
    """A warning: the loss is defined for them, unlearning takes bad answers alone, and few
    held-out rows may be of one kind.
    """
    rows = clean_rows("unusable_label")
    encoding = encoder("unusable_label", tiny.tokenizer())
    (entry,) = build_store(
        [{**row, "label": label} for row in rows], encoding, WIDTH, tmp_path
    ).report.entries()
    assert (entry["rule"], entry["level"], entry["count"]) == ("one_label", "warning", 1)
    assert entry["example"] == f"every answer is {'good' if label else 'bad'}"
    assert not build_store(
        [*rows[:11], {**rows[11], "label": label}], encoding, WIDTH, tmp_path
    ).report.count("one_label")


def test_long_rows_that_are_dropped(tmp_path):
    config = ChronicalsConfig(cache_dir=tmp_path, max_seq_length=WIDTH, overlong="drop")
    report = open_store([*CLEAN, PLANTED["cut_row"]], tiny.tokenizer(), config).report
    assert (report.findings["dropped_row"].rows, set(report.findings)) == ([13], {"dropped_row"})


def test_template_errors_name_their_rule():
    assert TemplateError("x").rule == "template_refuses"


def test_shares_are_given_as_a_mapping_or_as_texts():
    wanted = {"duplicate_row": 0.1, "byte_garbage": 1.0}
    assert (
        ChronicalsConfig(gate=wanted).gate
        == ChronicalsConfig(gate=["duplicate_row=0.1", "byte_garbage=1"]).gate
        == wanted
    )
    with pytest.raises(ConfigurationError, match="gate"):
        ChronicalsConfig(gate=["duplicate_row"])


@pytest.mark.slow
def test_the_documentation_has_the_table_that_the_script_writes():
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location(
        "planted_faults_page", root / "benchmarks" / "planted_faults.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.page() == (root / "docs" / "gate.md").read_text(), (
        "run python benchmarks/planted_faults.py"
    )


@pytest.mark.slow
def test_prompts_leave_room_for_their_answers(tmp_path):
    """A row that fits by itself, but not with an answer behind it, is left out and counted."""
    rows = [*rollouts.prompts(12), {"prompt": "what is the answer, the answer, " * 8}]
    longest = max(len(tiny.tokenizer()(row["prompt"])["input_ids"]) for row in rows)
    with pytest.raises(DataError, match="no_room"):
        rollouts.train(tmp_path, rows, max_seq_length=longest + 7, gate={"no_room": 0.0})
    rollouts.train(tmp_path, rows, max_seq_length=longest + 7, max_steps=1)
    written = json.loads((tmp_path / "run" / "train_dataset.json").read_text())
    assert written["documents"] == 12
