import json
import re

import pytest
from typer.testing import CliRunner

import tiny
from chronicals.cli.app import app
from chronicals.cli.verify import TABLE_ROWS


@pytest.fixture
def command(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in tiny.chat_rows())
    )
    flags = {
        "--model": tmp_path / "base",
        "--data": tmp_path / "data.jsonl",
        "--cache-dir": tmp_path / "tokens",
        "--max-seq-length": 128,
        "--batch-size": 1,
        "--output": tmp_path / "figures.json",
        "--max-steps": 50,
    }
    return [
        "verify",
        *(str(part) for flag in flags.items() for part in flag),
        "--no-use-torch-compile",
    ]


@pytest.mark.slow
def test_a_healthy_run(command, tmp_path):
    done = CliRunner(env={"COLUMNS": "80"}).invoke(
        app, [*command, "--use-lora", "--lora-rank", "4"]
    )
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["passed"] and len(figures["losses"]) == 5 and "{" not in done.stdout
    assert re.fullmatch(
        r"passed 5 steps; the worst module is at \d+% of what is allowed",
        done.output.splitlines()[-1],
    )
    assert {"model.layers.0.self_attn.q_proj.lora_B"} <= {
        row["module"] for row in figures["gradients"]
    }
    for words in ("passed", "cosine", "note: lora_dropout=0.05"):
        assert words in done.stdout
    assert not (tmp_path / "chronicals-output").exists()
    first_column = "".join(line.split(" ")[0] for line in done.stdout.splitlines())
    assert (
        sum(first_column.count(name) for name in {row["module"] for row in figures["gradients"]})
        == TABLE_ROWS
    )


@pytest.mark.slow
def test_a_fault_is_exit_code_1_and_named(command, tmp_path, monkeypatch):
    import sys

    targets = sys.modules["chronicals.lora.targets"]
    right = targets.targeted_paths
    monkeypatch.setattr(
        targets, "targeted_paths", lambda *given, **named: right(*given, **named)[:-1]
    )
    done = CliRunner().invoke(app, [*command, "--use-lora", "--lora-rank", "4"])
    assert done.exit_code == 1
    assert "model.layers.1.self_attn.v_proj.lora_A: not trained" in done.stdout
    assert re.fullmatch(
        r"failed \d+ checks in 5 steps; the worst module is at .*", done.output.splitlines()[-1]
    )
    assert not json.loads((tmp_path / "figures.json").read_text())["passed"]


def test_help_says_what_it_does():
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["verify", "--help"])
    assert (
        done.exit_code == 0
        and "plain transformers" in done.output
        and "--gradient-accumulation-steps" in done.output
    )
