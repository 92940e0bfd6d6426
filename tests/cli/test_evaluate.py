"""``chronicals evaluate`` of runs with a reference policy: beside the one that they had, or one
that the user names.
"""

import json

import pytest

import preferences
import tiny
from chronicals.cli import main

SHORT = [
    "--max-steps",
    "2",
    "--max-seq-length",
    "128",
    "--cache-dir",
    "tokens",
    "--mixed-precision",
    "fp32",
    "--batch-size",
    "2",
    "--learning-rate",
    "2e-3",
    "--report-samples",
    "0",
    "--keep",
    "last",
    "--no-use-torch-compile",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    for name, seed in {"base": 0, "other": 5}.items():
        tiny.llama(seed).save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
    tiny.llama(9).save_pretrained(folder / "teacher")
    tiny.tokenizer().save_pretrained(folder / "teacher")
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in tiny.chat_rows(8))
    )
    for name, count in {"pairs": 12, "held-out": 6}.items():
        rows = preferences.rows(count, seed=count)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def within(place, monkeypatch, capsys):
    """Runs the command line in ``place``: its exit code, what it printed and what it said."""

    def run(*words):
        monkeypatch.chdir(place)
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main([*words])
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


@pytest.mark.slow
def test_a_run_of_all_weights_is_compared_with_what_it_began_with(place, within):
    """As long as it is there; then with what the user names."""
    code, _, err = within(
        "train",
        "--model",
        "base",
        "--data",
        "pairs.jsonl",
        "--validation-data",
        "held-out.jsonl",
        "--objective",
        "dpo",
        "--output-dir",
        "out",
        *SHORT,
    )
    assert code == 0, err
    lines = [
        json.loads(line) for line in (place / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line)

    def figures(*options):
        code, out, err = within("evaluate", "out", "--data", "held-out.jsonl", *options)
        assert code == 0, err
        return json.loads(out)

    assert (
        figures()["loss"]
        == pytest.approx(trained, rel=1e-4)
        == figures("--reference-model", "base")["loss"]
    )
    assert abs(figures("--reference-model", "other")["loss"] - trained) > 1e-3
    assert figures("--objective", "ipo")["loss"] > 0  # which compares with the same
    (place / "base").rename(place / "moved")
    code, _, err = within("evaluate", "out", "--data", "held-out.jsonl")
    assert (
        code == 1
        and "; give as --reference-model, a folder or hub name, the model that the run began with"
        in err
    )
    assert figures("--reference-model", "moved")["loss"] == pytest.approx(trained, rel=1e-4)
    (place / "moved").rename(place / "base")


@pytest.mark.slow
def test_what_is_no_run_needs_a_reference_and_other_objectives_take_none(within):
    code, _, err = within("evaluate", "base", "--data", "held-out.jsonl", "--objective", "dpo")
    assert (
        code == 1
        and "nothing says which reference policy" in err
        and "give it as --reference-model" in err
    )
    code, out, err = within(
        "evaluate",
        "base",
        "--data",
        "held-out.jsonl",
        "--objective",
        "dpo",
        "--reference-model",
        "base",
    )
    assert code == 0 and json.loads(out)["loss"] == pytest.approx(0.6931, abs=1e-3), err
    asked = (
        "evaluate",
        "base",
        "--data",
        "held-out.jsonl",
        "--objective",
        "simpo",
        "--reference-model",
        "other",
    )
    code, _, err = within(*asked)
    assert (
        code == 1
        and "--reference-model other: --objective simpo compares with no reference policy; leave "
        "it out"
        in err
    )


@pytest.mark.slow
def test_a_student_is_compared_with_the_teacher_that_is_named(place, within):
    """Where that of its run was moved, or the model had none."""
    code, _, err = within(
        "train",
        "--model",
        "base",
        "--data",
        "texts.jsonl",
        "--objective",
        "distill",
        "--teacher",
        "teacher",
        "--output-dir",
        "taught",
        *SHORT,
    )
    assert code == 0, err
    asked = "--data", "texts.jsonl"
    before = json.loads(within("evaluate", "taught", *asked)[1])
    (place / "teacher").rename(place / "there")
    code, _, err = within("evaluate", "taught", *asked)
    assert code == 1 and "there is no such folder here" in err
    assert json.loads(
        within("evaluate", "taught", *asked, "--teacher", "there")[1]
    ) == pytest.approx(before)
    code, out, err = within(
        "evaluate", "base", *asked, "--objective", "distill", "--teacher", "base"
    )
    assert code == 0 and json.loads(out)["loss"] == pytest.approx(0.0, abs=1e-6), err
    code, _, err = within("evaluate", "base", *asked, "--teacher", "there")
    assert code == 1 and "--teacher there: --objective sft has none; leave it out" in err


@pytest.mark.slow
def test_a_run_and_its_adapter_are_planned_for_by_their_base(place, within):
    code, _, err = within(
        "train",
        "--model",
        "base",
        "--data",
        "texts.jsonl",
        "--use-lora",
        "--output-dir",
        "adapted",
        *SHORT,
    )
    assert code == 0, err
    asked = "plan", "--data", "texts.jsonl", "--gpus", "2", "--json", "--use-lora", "--model"
    assert json.loads(within(*asked, "adapted")[1]) == json.loads(within(*asked, "base")[1])
    code, _, err = within(*asked, "adapted", "--lora-rank", "3")
    assert code == 1 and "--lora-rank 3: the model has adapters already" in err
