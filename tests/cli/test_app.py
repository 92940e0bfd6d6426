import dataclasses
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file

import tiny
from chronicals import generation
from chronicals.cli import main
from chronicals.cli.app import HELP_TABLE_COLUMNS
from chronicals.config import Recipe
from chronicals.saving import SavedModel
from chronicals.training import preparation

pytestmark = pytest.mark.of_file(15)

SOURCE = Path(__file__).parent.parent.parent / "src"


def chronicals(*arguments, folder, columns=200, **options):
    command = [
        sys.executable,
        "-c",
        "from chronicals.cli import main; main()",
        *map(str, arguments),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "COLUMNS": str(columns),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, **options
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model folder, a data file and a recipe."""
    folder = tmp_path_factory.mktemp("place")
    tiny.llama().save_pretrained(folder / "base")
    tiny.tokenizer().save_pretrained(folder / "base")
    (folder / "data.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in tiny.chat_rows(40))
    )
    recipe = {
        "model": "base",
        "data": "data.jsonl",
        "max_seq_length": 128,
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
        "mixed_precision": "fp32",
        "learning_rate": "3e-3",
        "output_dir": "out",
        "cache_dir": "tokens",
        "max_steps": 50,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


class Ran(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def within(place, monkeypatch, capsys):
    """Runs the command line in this process: no imports are paid for."""

    def run(*arguments, typed=""):
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as exit:
            main([*map(str, arguments)])
        said = capsys.readouterr()
        return Ran(exit.value.code, said.out, said.err)

    return run


@pytest.fixture(scope="module")
def trained(place):
    done = chronicals(
        "train", "recipe.yaml", "--max-steps", 4, "--use-lora", "--lora-rank", 4, folder=place
    )
    assert done.returncode == 0, done.stderr
    return done


def test_train_with_a_recipe_and_flags(place, trained):
    assert "generate out" in trained.stdout
    state = json.loads(next((place / "out" / "checkpoints").glob("*/state.json")).read_text())
    assert (
        state["step"] == 4
        and state["config"]["lora_rank"] == 4
        and state["config"]["learning_rate"] == 3e-3
    )
    assert (place / "out" / "model" / "adapter_model.safetensors").exists()


def test_the_command_that_comes_next_can_be_pasted(place, within):
    done = within("train", "recipe.yaml", "--max-steps", 1, "--output-dir", "a run [x]")
    assert done.code == 0 and done.stdout.endswith("next: chronicals generate 'a run [x]'\n")


def test_model_and_data_are_enough(place, within):
    done = within("train", "--model", "base", "--data", "data.jsonl")
    assert done.code == 0, done.stderr
    lines = [
        json.loads(line)
        for line in (place / "chronicals-output" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[-1]["epoch"] == 1.0
    assert sum(line["epoch"] == 1.0 for line in lines) == 1


@pytest.mark.parametrize("model", ["out", "out/model"])
def test_an_adapter_is_trained_on(place, trained, within, tmp_path, model):
    """With a rate that changes next to nothing it stays what it was."""
    arguments = [
        "train",
        "recipe.yaml",
        "--model",
        model,
        "--max-steps",
        1,
        "--learning-rate",
        1e-7,
        "--output-dir",
    ]
    ran = within(*arguments, tmp_path / "more")
    assert ran.code == 0, ran.stderr
    before, after = (
        load_file(run / "model" / "adapter_model.safetensors")
        for run in (place / "out", tmp_path / "more")
    )
    assert before.keys() == after.keys()
    assert all(
        torch.allclose(before[name], after[name], atol=2e-5) and before[name].any()
        for name in before
    )
    described = json.loads((tmp_path / "more" / "model" / "adapter_config.json").read_text())
    assert (described["r"], described["base_model_name_or_path"]) == (4, str(place / "base"))
    ran = within(*arguments, tmp_path / "other", "--use-lora", "--lora-rank", 8)
    assert ran.code == 1 and "--lora-rank 8: the model has adapters already, with 4" in ran.stderr


def test_what_takes_a_model_takes_an_adapter(place, trained, within, tmp_path):
    """Whether it says which its model is, or that is given."""
    shutil.copytree(place / "out" / "model", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": None}))
    assert within("data", "show", "data.jsonl", "--model", "out", "--rows", 1).code == 0
    given = ["recipe.yaml", "--output-dir", tmp_path / "checked", "--model", tmp_path / "adapter"]
    ran = within("train", *given, "--check")
    assert ran.code == 1 and "does not say which model it belongs to; give base_model" in ran.stderr
    assert within("train", *given, "--check", "--base-model", "base").code == 0
    assert within("verify", *given, "--base-model", "base", "--steps", 5).code == 0
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "moved"})
    )
    ran = within("evaluate", tmp_path / "adapter", "--data", "data.jsonl")
    assert (
        ran.code == 1
        and f"{tmp_path / 'adapter'}: its base moved: there is no such folder here" in ran.stderr
    )
    ran = within(
        "train", "recipe.yaml", "--output-dir", tmp_path / "checked", "--base-model", "base"
    )
    assert ran.code == 1 and "--base-model base: base is no adapter's folder" in ran.stderr


def test_evaluate_prints_a_table_and_json(place, trained, within):
    done = within("evaluate", "out", "--data", "data.jsonl", "--output", "figures.json")
    assert done.code == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures == json.loads((place / "figures.json").read_text())
    assert figures["targets"] > 100 and 0 < figures["loss"] < 7 and "perplexity" in done.stderr


def test_evaluate_keeps_its_tokens_where_it_is_told(place, within, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(place / "data.jsonl"))
    done = within("evaluate", "base", "--data", "data.jsonl")
    assert (
        done.code == 1
        and f"--cache-dir {place}/data.jsonl/.cache/chronicals: token stores cannot be"
        in done.stderr
    )
    done = within("evaluate", "base", "--data", "data.jsonl", "--cache-dir", tmp_path / "tokens")
    assert done.code == 0 and list((tmp_path / "tokens").glob("*.arrow"))


def test_evaluate_scores_what_the_run_trained(place, within):
    flags = (
        "--objective",
        "pretraining",
        "--max-seq-length",
        48,
        "--max-steps",
        1,
        "--output-dir",
        "all-tokens",
    )
    assert within("train", "recipe.yaml", *flags).code == 0

    def targets(*options):
        return json.loads(
            within("evaluate", "all-tokens", "--data", "data.jsonl", *options).stdout
        )["targets"]

    as_taught = targets()
    answers = targets("--objective", "sft")
    assert as_taught == targets("--objective", "pretraining", "--max-seq-length", 48) > 2 * answers
    assert targets("--objective", "sft", "--max-seq-length", 128) > answers


def test_evaluate_takes_the_gate_of_the_run_or_another(place, within):
    rows = (place / "data.jsonl").read_text() + '{"prompt": "what?", "completion": ""}\n'
    (place / "one-silent.jsonl").write_text(rows)
    flags = (
        "--data",
        "one-silent.jsonl",
        "--gate",
        "empty_answer=0.1",
        "--max-steps",
        1,
        "--output-dir",
        "let-pass",
    )
    assert within("train", "recipe.yaml", *flags).code == 0
    asked = "evaluate", "let-pass", "--data", "one-silent.jsonl"
    assert within(*asked).code == 0
    strict = within(*asked, "--gate", "empty_answer=0")
    assert strict.code == 1 and "empty_answer: 1 " in strict.stderr
    plain = "evaluate", "base", "--data", "one-silent.jsonl"
    assert within(*plain).code == 1 and within(*plain, "--gate", "empty_answer=0.1").code == 0


def test_evaluate_takes_all_the_data_that_is_named(place, within):
    for name, rows in (("first", tiny.chat_rows(4)), ("second", tiny.chat_rows(9)[4:])):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def targets(*files):
        done = within(
            "evaluate", "base", *(part for file in files for part in ("--data", f"{file}.jsonl"))
        )
        return json.loads(done.stdout)["targets"]

    assert targets("first", "second") == targets("first") + targets("second")


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "broken", "--data", "data.jsonl", "--output", "broken.json"],
        ["generate", "broken", "--prompt", "hi"],
        ["generate", "broken", "--prompt", "hi", "--temperature", 1],
    ],
    ids=lambda command: " ".join(map(str, command)),
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_predicts_nothing_finite_is_an_error_in_a_line(place, within, command, value):
    model = tiny.llama()
    torch.nn.init.constant_(model.lm_head.weight, value)
    model.save_pretrained(place / "broken")
    tiny.tokenizer().save_pretrained(place / "broken")
    done = within(*command)
    assert done.code == 1 and not done.stdout and not (place / "broken.json").exists()
    assert "not finite; its weights are damaged" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "flag, value", [("--max-seq-length", 0), ("--objective", ""), ("--train-on-turns", "")]
)
def test_evaluate_refuses_what_a_run_would(within, flag, value):
    done = within("evaluate", "base", "--data", "data.jsonl", flag, value)
    assert done.code == 1 and f"{flag} {shlex.quote(str(value))}: " in done.stderr


def test_evaluate_needs_a_run_for_a_teacher(within):
    done = within("evaluate", "base", "--data", "held-out.jsonl", "--objective", "distill")
    assert (
        done.code == 1
        and "--objective distill: the model was not trained beside a teacher" in done.stderr
    )


def test_evaluate_takes_the_flags_that_its_errors_name(place, within):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(place / "plain")
    tiny.llama().save_pretrained(place / "plain")
    asked = "evaluate", "plain", "--data", "data.jsonl"
    bare = within(*asked)
    assert bare.code == 1 and "--chat-template chatml" in bare.stderr
    assert within(*asked, "--chat-template", "chatml").code == 0
    (place / "pairs.jsonl").write_text(
        '{"prompt": "what?", "completion": "that and this and so on"}\n'
    )

    def figure(name, *options):
        return json.loads(within("evaluate", "base", "--data", "pairs.jsonl", *options).stdout)[
            name
        ]

    assert (
        figure("loss", "--completions-as-chat")
        != figure("loss")
        == figure("loss", "--no-completions-as-chat")
    )
    short = "--max-seq-length", 12, "--gate", "cut_stop=1"
    assert figure("targets", *short, "--overlong", "split") > figure("targets", *short)


def test_generate_once_and_in_a_chat(trained, within):
    once = within("generate", "out", "--prompt", "what is 3?", "--max-new-tokens", 5)
    assert once.code == 0, once.stderr
    assert (
        within(
            "generate", "out", "--prompt", "what is 3?", "--max-new-tokens", 5, "--no-stream"
        ).stdout
        == once.stdout
    )
    chat = within(
        "generate", "out", "--max-new-tokens", 5, typed="what is 3?\n\nand 4?\n/reset\nwhat is 3?\n"
    )
    assert chat.code == 0, chat.stderr
    answers = chat.stdout.splitlines()  # standard output holds answers alone
    assert answers[0] == answers[-1] == once.stdout.splitlines()[0]
    assert (
        "you" in chat.stderr
        and "/help lists the commands" in chat.stderr
        and "you" not in chat.stdout
    )


def test_a_program_chats_in_lines_of_json(trained, within):
    once = within("generate", "out", "--prompt", "what is 3?", "--max-new-tokens", 5)
    before = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    asked = [{"prompt": "what is 3?"}, {"prompt": "what is 3?", "messages": before}, {}]
    typed = "".join(json.dumps(one) + "\n" for one in asked) + "no json\n"
    said = within("generate", "out", "--json-lines", "--max-new-tokens", 5, typed=typed)
    assert said.code == 0, said.stderr
    lines = [json.loads(line) for line in said.stdout.splitlines()]
    ends = [line for line in lines if "part" not in line]
    assert ends[0] == {"ready": True} and ends[1] == {"answer": once.stdout.removesuffix("\n")}
    assert "answer" in ends[2] and [list(line) for line in ends[3:]] == [["error"], ["error"]]
    first = lines[1 : lines.index(ends[1])]
    assert once.stdout.startswith("".join(line["part"] for line in first))
    refused = within("generate", "out", "--json-lines", "--prompt", "hi")
    assert refused.code == 1 and "standard input" in refused.stderr


WRONG_LINES = {
    "no json": "a line is no JSON",
    "[]": "has no text as prompt",
    "{}": "has no text as prompt",
    '{"prompt": 5}': "has no text as prompt",
    '{"prompt": "a", "messages": 5}': "messages must be a list of messages",
    '{"prompt": "a", "messages": ["b"]}': "message 1 must be an object with 'role' and 'content'",
}


def test_a_wrong_line_of_json_is_told_in_words(within, let_return):
    let_return(generation, load_trained=types.SimpleNamespace(chats=True))
    typed = "".join(f"{line}\n" for line in WRONG_LINES)
    said = within("generate", "out", "--json-lines", typed=typed)
    _, *answers = [json.loads(line) for line in said.stdout.splitlines()]
    for answer, words in zip(answers, WRONG_LINES.values(), strict=True):
        assert words in answer["error"]


def test_without_stream_a_line_of_json_has_its_answer_alone(within, let_return, monkeypatch):
    let_return(generation, load_trained=types.SimpleNamespace(chats=True))

    def answer(trained, prompt, say=None, **settings):
        if say is not None:
            say("yes")
        return "yes"

    monkeypatch.setattr(generation.answer, "generate_answer", answer)
    typed = '{"prompt": "a"}\n'
    said = within("generate", "out", "--json-lines", "--no-stream", typed=typed)
    assert [json.loads(line) for line in said.stdout.splitlines()][1:] == [{"answer": "yes"}]
    said = within("generate", "out", "--json-lines", typed=typed)
    assert '{"part": "yes"}' in said.stdout


def test_a_file_of_answers_that_cannot_be_written_is_told_at_once(place, within):
    (place / "folder").mkdir()
    (place / "prompts.txt").write_text("a\n")
    refused = within("generate", "nowhere", "--prompts", "prompts.txt", "--output", "folder")
    assert refused.code == 1 and "--output folder: is a folder" in refused.stderr
    (place / "link.txt").symlink_to("prompts.txt")
    for same in ("prompts.txt", "folder/../prompts.txt", "link.txt"):
        refused = within("generate", "nowhere", "--prompts", "prompts.txt", "--output", same)
        told = f"--output {same}: is the file of --prompts prompts.txt, which the answers would"
        assert refused.code == 1 and told in refused.stderr
    assert (place / "prompts.txt").read_text() == "a\n"


def test_commands_of_a_chat(trained, within):
    chat = within("generate", "out", typed="/help\n/halp\n/exit\nnever asked\n")
    assert chat.code == 0 and not chat.stdout
    assert (
        "/reset" in chat.stderr
        and "/halp: no such command; there are /reset, /exit, /help" in chat.stderr
    )


def test_a_question_that_cannot_be_asked_does_not_end_the_chat(place, within):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=300, n_positions=64)
    ).save_pretrained(place / "short")
    tiny.tokenizer().save_pretrained(place / "short")
    long = "what is the answer to everything? " * 20
    chat = within("generate", "short", "--max-new-tokens", 2, typed=f"hello\n{long}\nhello\n")
    assert (
        chat.code == 0
        and "ask something shorter" in chat.stderr
        and "/reset makes room" in chat.stderr
    )
    assert within("generate", "short", typed=f"{long}\n").code == 1


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_model_with_stop_strings_can_be_asked(place, within, temperature):
    shutil.copytree(place / "base", place / "stops", dirs_exist_ok=True)
    file = place / "stops" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "stop_strings": ["zz"]}))
    done = within(
        "generate",
        "stops",
        "--prompt",
        "what is 3?",
        "--max-new-tokens",
        4,
        "--temperature",
        temperature,
    )
    assert done.code == 0, done.stderr


def test_draws_are_shaped_and_repeated(trained, within):
    asked = [
        "generate",
        "base",
        "--prompt",
        "what is 3?",
        "--max-new-tokens",
        8,
        "--temperature",
        2,
    ]
    first = within(*asked, "--seed", 4)
    again = within(*asked, "--seed", 4)
    narrow = within(*asked, "--top-k", 1, "--seed", 4)
    likely = within("generate", "base", "--prompt", "what is 3?", "--max-new-tokens", 8)
    assert first == again and first.stdout != narrow.stdout == likely.stdout
    refused = within("generate", "base", "--prompt", "hi", "--top-p", 0.9)
    assert refused.code == 1 and "--top-p 0.9: has no effect at temperature 0" in refused.stderr


def test_python_runs_the_package(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chronicals", "generate", "nowhere"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_module("chronicals", run_name="__main__")
    assert exit.value.code == 1 and "nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_prompts_of_a_file_are_answered(trained, within, place):
    (place / "asked.txt").write_text("what is 3?\nwhat is 4?\n")
    asked = "generate", "out", "--prompts", "asked.txt", "--max-new-tokens", 5
    printed = within(*asked)
    assert printed.code == 0, printed.stderr
    found = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [row["prompt"] for row in found] == ["what is 3?", "what is 4?"]
    once = within("generate", "out", "--prompt", "what is 3?", "--max-new-tokens", 5)
    assert found[0]["answers"][0]["text"] == once.stdout.strip()
    drawn = *asked, "--temperature", 1.5, "--answers", 3, "--output", "answers.jsonl"
    others = "--min-p", 0.01, "--cache-memory", "100MiB", "--generation-exact"
    answered = within(*drawn, *others)
    assert answered.code == 0 and answered.stdout == "", answered.stderr
    rows = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    assert [len(row["answers"]) for row in rows] == [3, 3]
    drawn, full = (
        [answer[f"{name}_log_probability"] for row in rows for answer in row["answers"]]
        for name in ("drawn", "full")
    )
    assert max(drawn) < 0 and max(full) < 0 and drawn != full


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "x.jsonl"], "--output x.jsonl: has no effect without --prompts FILE"),
        (["--answers", 2], "--answers 2: has no effect without --prompts FILE"),
        (["--prompts", "data.jsonl", "--prompt", "hi"], "--prompt hi: is not for --prompts FILE"),
        (["--prompts", "data.jsonl", "--answers", 2], "--answers 2: at temperature 0 all would be"),
        (
            ["--prompts", "data.jsonl", "--cache-memory", 1e-6],
            "(--cache-memory); ask for fewer tokens, or give it more memory",
        ),
        (
            ["--prompts", "data.jsonl", "--cache-memory", "3 parsecs"],
            "--cache-memory '3 parsecs': the unit parsecs is not known; take GB, GiB, MB, MiB, TB or TiB",
        ),
    ],
)
def test_options_of_prompts_that_do_nothing_are_refused(within, options, message):
    refused = within("generate", "base", *options)
    assert refused.code == 1 and message in refused.stderr.replace("\n", " "), refused.stderr


SAID = "d[:key:], d[:x:]\t# :100: [bold]hi[/] [/x] " + "and so on " * 40
"""What rich would make pictures, tags and lines of."""


def test_an_answer_is_printed_as_it_is(within, let_return):
    let_return(generation, load_trained=types.SimpleNamespace(chats=True))
    let_return(generation.answer, generate_answer=SAID)
    assert within("generate", "out", "--prompt", "what?").stdout == SAID + "\n"
    assert within("generate", "out", typed="what?\n").stdout == SAID + "\n"


def test_a_question_in_json_brings_what_was_said_before(within, let_return, monkeypatch):
    let_return(generation, load_trained=types.SimpleNamespace(chats=True))
    seen = []

    def answer(trained, prompt, say=None, **settings):
        seen.append(prompt)
        return "yes"

    monkeypatch.setattr(generation.answer, "generate_answer", answer)
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked = [{"prompt": "c", "messages": before}, {"prompt": "d"}]
    typed = "".join(json.dumps(one) + "\n" for one in asked)
    assert within("generate", "out", "--json-lines", "--system", "s", typed=typed).code == 0
    system = {"role": "system", "content": "s"}
    assert seen == [
        [system, *before, {"role": "user", "content": "c"}],
        [system, {"role": "user", "content": "d"}],
    ]


def test_quickstart_prints_words_as_they_are(within, let_return, tmp_path):
    from chronicals.training import quickstart
    from chronicals.training.quickstart import AnsweredQuestion, Quickstart
    from chronicals.training.run.evaluation import Evaluation

    words = " ".join(SAID.split())
    score = Evaluation(1.0, 2.7, 0.5, 10)
    result = types.SimpleNamespace(report=tmp_path / "[x] :100:", model_dir=tmp_path / "model")
    done = Quickstart(
        3,
        1000,
        score,
        score,
        [AnsweredQuestion("what is [x]:key:?", SAID, SAID, SAID)] * 2,
        result,
        None,
    )
    let_return(quickstart, run_quickstart=done)
    said = within("quickstart", "--folder", tmp_path / "quick [y]").stdout
    assert said.count(f"  {words}\n") == 6 and said.count("what is [x]:key:? (") == 2
    assert f"report {tmp_path}/[x] :100:\n" in said and said.endswith(
        f"generate '{tmp_path}/quick [y]'\n"
    )


def test_paths_and_errors_are_printed_as_they_are(place, within):
    where = "checked [x] :100:" + "/long" * 60
    done = within("train", "recipe.yaml", "--check", "--output-dir", where)
    assert done.code == 0 and done.stdout.endswith(f"the report is in {where}\n")
    done = within("train", "recipe.yaml", "--data", ":key:[a].jsonl", "--output-dir", "untouched")
    assert done.code == 1 and ":key:[a].jsonl" in done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["train", "--model", "nowhere", "--data", "data.jsonl"],
            "--model nowhere: there is no such folder here, and as",
        ),
        (
            ["train", "--model", "../nowhere", "--data", "data.jsonl"],
            "--model ../nowhere: there is no such folder here, and",
        ),
        (
            ["train", "--model", "base", "--data", "missing.jsonl", "--output-dir", "new"],
            "missing.jsonl: no such file",
        ),
        (["train", "--data", "data.jsonl"], "--model: required"),
        (["train", "recipe.yaml", "--preset", "turbo"], "memory-lean"),
        (["train", "recipe.yaml", "--lora-rank", "0"], "--lora-rank 0: "),
        (["generate", "tokens"], "neither a model"),
        (["train", "recipe.yaml", "--use-lora"], "resume"),
    ],
)
def test_errors_say_what_to_do(within, trained, arguments, message):
    done = within(*arguments)
    assert done.code == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_system_refuses_is_an_error_in_a_line(place, within, let_raise):
    (place / "file").touch()
    done = within("train", "recipe.yaml", "--check", "--output-dir", "file/out")
    assert (
        done.code == 1 and done.stderr.strip().splitlines()[-1] == "error file/out: Not a directory"
    )

    why = "a process that tokenises was killed; dataset_num_proc=1 needs none"
    let_raise(preparation, open_stores=ChildProcessError(why))
    done = within("train", "recipe.yaml", "--check")
    assert (
        done.code == 1
        and done.stderr.strip()
        == "error a process that tokenises was killed; dataset_num_proc: 1 needs none"
    )


def test_a_model_larger_than_the_card_is_an_error_in_a_line(within, let_raise):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 28.00 GiB")
    let_raise(SavedModel, model=full)
    done = within("evaluate", "base", "--data", "data.jsonl")
    assert done.code == 1 and done.stderr.strip().endswith(
        "error CUDA out of memory. Tried to allocate 28.00 GiB"
    )


@pytest.mark.parametrize("command", [["evaluate", "base"], ["verify", "recipe.yaml"]])
def test_where_figures_go_is_seen_to_before_the_work(place, within, let_raise, command):
    let_raise(SavedModel, model=ValueError("the work began"))
    folder = f"figures-of-{command[0]}"
    done = within(*command, "--data", "data.jsonl", "--output", f"{folder}/of/it.json")
    assert "the work began" in done.stderr and (place / folder / "of").is_dir()
    done = within(*command, "--data", "data.jsonl", "--output", folder)
    assert done.code == 1 and f"--output {folder}: is a folder; name a file" in done.stderr
    done = within(*command, "--data", "data.jsonl", "--output", "data.jsonl/it.json")
    assert done.code == 1 and "error data.jsonl: File exists" in done.stderr


def test_unknown_field_names_the_nearest(place, within):
    (place / "typo.yaml").write_text("model: base\ndata: data.jsonl\nlearning_rat: 1.0\n")
    done = within("train", "typo.yaml")
    assert done.code == 1 and "did you mean 'learning_rate'" in done.stderr


def test_a_line_that_does_not_parse_is_named(place, within):
    (place / "bad.jsonl").write_text((place / "data.jsonl").read_text() + '{"messages": [\n')
    done = within("train", "--model", "base", "--data", "bad.jsonl", "--output-dir", "bad")
    assert done.code == 1 and "bad.jsonl:41" in done.stderr


def test_check_stops_after_the_report_in_lines_that_a_pipe_gets_whole(place):
    name = "x" * 200 + ".jsonl"
    (place / name).write_text((place / "data.jsonl").read_text())
    done = chronicals(
        "train", "recipe.yaml", "--data", name, "--check", "--output-dir", "never", folder=place
    )
    assert done.returncode == 0
    assert any(
        line.startswith(f"{name}: 40 rows") and line.endswith("%)")
        for line in done.stderr.splitlines()
    )
    assert [path.name for path in (place / "never").iterdir()] == ["train_dataset.json"]
    assert json.loads((place / "never" / "train_dataset.json").read_text())["rows"] == 40


def test_check_of_wrong_data_says_so_and_writes_it(place, within):
    rows = [*tiny.chat_rows(3), {"prompt": "what?", "completion": ""}]
    (place / "silent.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = within(
        "train", "recipe.yaml", "--data", "silent.jsonl", "--check", "--output-dir", "checked"
    )
    assert done.code == 1 and "silent.jsonl:4" in done.stderr and "Traceback" not in done.stderr
    (finding,) = json.loads((place / "checked" / "train_dataset.json").read_text())["findings"]
    assert (finding["rule"], finding["level"], finding["rows"]) == ("empty_answer", "error", [4])


def test_check_leaves_the_report_of_a_run(place, trained, within, caplog):
    caplog.set_level("INFO")
    before = {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
    (place / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny.chat_rows(3)))
    done = within("train", "recipe.yaml", "--data", "few.jsonl", "--check")
    assert (
        done.code == 0
        and done.stdout == "the data can be trained on; the run in out keeps its own report\n"
    )
    assert "3 rows (3 chat), 3 documents" in caplog.text
    assert re.search(
        r"kind +read +trained +held out +left out +why *\n[ ─]+\n *chat +3 +3 +0 +0", done.stderr
    )
    assert {
        path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()
    } == before


def test_check_maps_the_columns_of_a_recipe(place, within):
    (place / "table.csv").write_text(
        "question,answer,label\nwhat is 3?,three,good\nwhat is 4?,four,bad\n"
    )
    recipe = (
        "model: base\ndata: [{path: table.csv, columns: {prompt: question, completion: answer}}]\n"
    )
    (place / "mapped.yaml").write_text(recipe)
    done = within(
        "train",
        "mapped.yaml",
        "--check",
        "--output-dir",
        "mapped",
        "--validation-data",
        "data.jsonl",
    )
    assert done.code == 0, done.stderr
    assert json.loads((place / "mapped" / "train_dataset.json").read_text())["kinds"] == {
        "completion": 2
    }
    assert json.loads((place / "mapped" / "eval_dataset.json").read_text())["rows"] == 40


def test_data_show_takes_what_a_run_takes(place, within):
    done = within(
        "data",
        "show",
        "data.jsonl=2",
        "--model",
        "base",
        "--rows",
        50,
        "--max-documents",
        1,
        "--packing-strategy",
        "in-order",
    )
    assert done.code == 0, done.stderr
    assert "row 50:" in done.stdout and "pack 50 " in done.stdout


def test_data_show_takes_a_recipe(place, within):
    (place / "asked.csv").write_text("question,answer\nwhat is 3?,three\nwhat is 4?,four\n")
    recipe = (
        "model: base\ndata: [{path: asked.csv, columns: {prompt: question, completion: "
        "answer}}]\nmax_seq_length: 64\n"
    )
    (place / "asked.yaml").write_text(recipe)
    done = within("data", "show", "asked.yaml")
    assert done.code == 0, done.stderr
    assert "what is 3?⟦three<|endoftext|>⟧" in done.stdout and done.stdout.rstrip().endswith(
        "of 64"
    )
    wider = within("data", "show", "asked.yaml", "--max-seq-length", 128)
    assert wider.code == 0 and wider.stdout.rstrip().endswith("of 128")


def test_data_show_draws_the_rows_that_the_seed_of_a_recipe_draws(place, within):
    from chronicals.data import DataSource, read_records

    first = {}
    for seed in range(8):
        (place / "seed.yaml").write_text(f"model: base\ndata: data.jsonl=0.2\nseed: {seed}\n")
        done = within("data", "show", "seed.yaml", "--rows", 1)
        _, record = next(read_records(DataSource(str(place / "data.jsonl"), weight=0.2), seed))
        first[seed] = record["messages"][0]["content"]
        assert first[seed] in done.stdout
    assert len(set(first.values())) > 1


def test_data_show_packs_and_judges_as_the_recipe_says(place, within, caplog):
    row = (place / "data.jsonl").read_text().splitlines()[0]
    (place / "twice.jsonl").write_text(f'{row}\n{row}\n{{"mess\n')
    recipe = "model: base\ndata: twice.jsonl\nmax_seq_length: 128\nuse_sequence_packing: false\n"
    (place / "twice.yaml").write_text(recipe)
    done = within("data", "show", "twice.yaml")
    assert done.code == 1 and "twice.jsonl:3" in done.stderr
    (place / "twice.yaml").write_text(recipe + "gate: {unparsable_line: 0.5, duplicate_row: 0.1}\n")
    done = within("data", "show", "twice.yaml")
    assert done.code == 0, done.stderr
    assert "pack 2 " in done.stdout and "\nrow 3:" not in done.stdout
    assert "warning  unparsable_line" in caplog.text and "error    duplicate_row" in caplog.text
    (place / "twice.yaml").write_text(recipe + "gate: {duplicate_rows: 0.1}\n")
    done = within("data", "show", "twice.yaml")
    assert done.code == 1 and "no rule is named 'duplicate_rows'" in done.stderr


def test_data_show_beyond_the_end_says_how_many_rows_there_are(within):
    done = within("data", "show", "data.jsonl", "--model", "base", "--skip", 100)
    assert done.code == 1 and "--skip 100: there are 40 rows in all" in done.stderr


def test_data_show_says_why_a_row_is_not_shown(place, within):
    rows = [
        {"prompt": "what?", "completion": "this"},
        {"prompt": "what?", "completion": ""},
        ["no row"],
        {"text": ""},
    ]
    (place / "poor.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = within("data", "show", "poor.jsonl", "--model", "base", "--rows", 4)
    assert done.code == 0 and "row 1:" in done.stdout and "pack 1 " in done.stdout
    assert "empty_answer: for one, row 2: completion is empty" in done.stdout
    assert "wrong_type: for one, row 3: a row must be an object" in done.stdout
    done = within("data", "show", "poor.jsonl", "--model", "base", "--skip", 1)
    assert done.code == 1 and "completion is empty" in done.stdout and "pack" not in done.stdout
    assert "poor.jsonl, rows 2 to 4: no document to show" in done.stderr


def test_data_show_needs_a_model(within):
    done = within("data", "show", "data.jsonl")
    assert done.code != 0 and "model" in done.stderr


def test_data_show_draws_what_is_trained_and_the_packs(place, within):
    rows = [
        *tiny.chat_rows(3),
        {
            "conversations": [
                {"from": "human", "value": "née?"},
                {"from": "gpt", "value": "forty ✓"},
            ]
        },
    ]
    (place / "show.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = within("data", "show", "show.jsonl", "--model", "base", "--rows", 2, "--skip", 2)
    assert done.code == 0, done.stderr
    assert "⟦the answer to 2 is very very 4<|im_end|>⟧" in done.stdout
    assert "née?<|im_end|>\n<|im_start|>assistant\n⟦forty ✓<|im_end|>⟧" in done.stdout
    assert (
        "row 3:" in done.stdout
        and "row 4:" in done.stdout
        and "pack 1 " in done.stdout
        and "row 1:" not in done.stdout
    )


def test_ctrl_c_saves_and_says_how_to_resume(place):
    command = [
        sys.executable,
        "-c",
        "from chronicals.cli import main; main()",
        "train",
        "recipe.yaml",
    ]
    arguments = ["--output-dir", "stopped", "--max-steps", "100000"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(
        [*command, *arguments], cwd=place, env=environment, stderr=subprocess.PIPE, text=True
    )
    metrics = place / "stopped" / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and metrics.read_text().count("\n") > 3:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume --output-dir stopped" in " ".join(stderr.split())
    (checkpoint,) = (place / "stopped" / "checkpoints").iterdir()
    assert (checkpoint / "manifest.json").exists()


def test_the_command_that_is_printed_resumes(place, within, caplog):
    """With the recipe as it was, though a run over it was refused in between."""
    caplog.set_level("INFO")
    first = (
        "train",
        "recipe.yaml",
        "--max-steps",
        4,
        "--save-steps",
        2,
        "--lora-rank",
        8,
        "--use-lora",
        "--output-dir",
        "part",
    )
    assert within(*first).code == 0
    shutil.rmtree(place / "part" / "checkpoints" / "step-00000004")
    refused = within("train", "recipe.yaml", "--lora-rank", 2, "--output-dir", "part")
    (printed,) = re.findall(r"go on with chronicals (train [^,]*), replace it with", refused.stderr)
    assert refused.code == 1 and printed == "train --resume --output-dir part"
    done = within(*printed.split())
    assert (
        done.code == 0
        and "2 of 4 steps are done" in caplog.text
        and "trained 4 steps" in done.stdout
    )


def test_the_list_of_commands_says_what_each_does(tmp_path):
    listed = (
        chronicals("--help", folder=tmp_path, columns=80)
        .stdout.partition("Commands:")[2]
        .strip()
        .splitlines()
    )
    for name in ("quickstart", "evaluate", "generate", "benchmark", "verify", "doctor"):
        (line,) = (line for line in listed if line.split()[0] == name)
        assert len(line.split()) > 4 and not line.endswith("...")


@pytest.mark.parametrize(
    "command", ["train", "quickstart", "evaluate", "generate", "benchmark", "verify", "doctor"]
)
def test_help_teaches(command, tmp_path):
    """With a command that can be pasted."""
    done = chronicals(command, "--help", folder=tmp_path)
    assert (
        done.returncode == 0
        and "Usage" in done.stdout
        and f"chronicals {command}" in done.stdout.partition("\n")[2]
    )
    if command == "train":
        assert (
            "--gradient-accumulation-steps" in done.stdout and "Peak learning rate" in done.stdout
        )


@pytest.mark.parametrize("columns", [80, HELP_TABLE_COLUMNS - 1, HELP_TABLE_COLUMNS])
@pytest.mark.parametrize("command", ["train", "verify", "benchmark"])
def test_help_cuts_no_flag_off(command, columns, tmp_path):
    done = chronicals(command, "--help", folder=tmp_path, columns=columns)
    fields = {field.name for field in dataclasses.fields(Recipe)}
    flags = {f"--{name.replace('_', '-')}" for name in fields}
    assert flags | {"--no-use-gradient-checkpointing"} <= set(
        re.findall(r"--[a-z0-9-]+", done.stdout)
    )
    assert "…" not in done.stdout and max(map(len, done.stdout.splitlines())) <= columns


@pytest.mark.parametrize(
    ("objective", "row", "shown"),
    [
        (
            "dpo",
            {"chosen": "forty two", "rejected": "none"},
            ["row 1, chosen (its", "row 1, rejected (its"],
        ),
        (
            "kto",
            {"completion": "forty two", "label": False},
            ["row 1, bad (its", "row 1, with the answer of another row (its"],
        ),
        (
            "cpo",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            ["row 1, chosen: ", "row 1, rejected: "],
        ),
    ],
)
def test_pairs_are_shown_by_their_answers(within, place, objective, row, shown):
    asked = ("what is the answer to everything?", "what is another question?")
    rows = [{"prompt": [{"role": "user", "content": text}], **row} for text in asked]
    (place / f"{objective}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = within("data", "show", f"{objective}.jsonl", "--model", "base", "--objective", objective)
    assert done.code == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("row 1")]
    assert len(lines) == 2 and all(
        line.startswith(words) for line, words in zip(lines, shown, strict=True)
    )
    assert (
        done.stdout.count("everything?") == (0 if objective == "cpo" else 2) and "⟦" in done.stdout
    )


def test_quickstart_small(tmp_path):
    """The road of ``quickstart`` with a smaller model and one epoch."""
    from chronicals.training.quickstart import WRITTEN, Size, run_quickstart

    size = Size(
        width=64,
        layers=2,
        vocab_size=600,
        epochs=1,
        batch_size=2,
        learning_rate=3e-3,
        mixed_precision="fp32",
    )
    done = run_quickstart(tmp_path / "quick", size=size)
    assert done.rows > 2000
    assert done.after.loss < 0.8 * done.before.loss
    assert len(done.answers) == 2 and all(answer.before != answer.after for answer in done.answers)
    assert done.result.report.exists()
    assert {path.name for path in (tmp_path / "quick").iterdir()} <= WRITTEN


@pytest.fixture
def small_quickstart(let_return):
    """A quickstart of few rows and a small model, for one epoch."""
    from chronicals.training import quickstart

    size = quickstart.Size(
        64,
        layers=1,
        vocab_size=400,
        epochs=1,
        batch_size=1,
        learning_rate=3e-3,
        mixed_precision="fp32",
    )
    let_return(quickstart, questions_and_answers=quickstart.questions_and_answers()[:90])
    let_return(quickstart, default_size=size)


@pytest.mark.usefixtures("small_quickstart")
def test_quickstart_of_preferences_small(within, monkeypatch, set_constants, tmp_path):
    """After the usual road DPO on pairs of the same answers; the command prints what changed."""
    from chronicals.training import quickstart
    from chronicals.training.run.callbacks import read_metrics

    set_constants(quickstart, PREFERENCE_EPOCHS=4)
    set_constants(quickstart, PREFERENCE_RATE=0.5)
    made = []
    run = quickstart.run_preferences
    monkeypatch.setattr(
        quickstart, "run_preferences", lambda *given: made.append(run(*given)) or made[0]
    )
    folder = tmp_path / "quick"
    done = within("quickstart", "--folder", folder, "--objective", "dpo")
    assert done.code == 0, done.stderr
    assert "right answer likelier" in done.stdout and done.stdout.endswith(
        f"generate {folder}/preference\n"
    )
    ((_, preferences),) = made
    assert (
        sum(preferences.pairs) > 80
        and {path.name for path in folder.iterdir()} <= quickstart.WRITTEN
    )
    lines = [
        line
        for line in read_metrics(folder / "preference" / "metrics.jsonl")
        if "rewards/margins" in line
    ]
    assert abs(lines[0]["rewards/margins"]) < 1e-4 < lines[-1]["rewards/margins"]
    before, after = (
        side.others["rewards/margins"] for side in (preferences.before, preferences.after)
    )
    assert before != after


@pytest.mark.slow
@pytest.mark.usefixtures("small_quickstart")
def test_quickstart_of_rewards_small(within, monkeypatch, tmp_path):
    """After the usual road GRPO on answers to the same questions; rewards of held-out ones rise."""
    from chronicals.training import quickstart
    from chronicals.training.run.callbacks import read_metrics

    made = []
    run = quickstart.run_rewards
    few = {"steps": 4}
    monkeypatch.setattr(
        quickstart, "run_rewards", lambda *given: made.append(run(*given, **few)) or made[0]
    )
    folder = tmp_path / "quick"
    done = within("quickstart", "--folder", folder, "--objective", "grpo")
    assert done.code == 0, done.stderr
    assert "mean reward" in done.stdout and done.stdout.endswith(f"generate {folder}/rewarded\n")
    ((_, rewarded),) = made
    assert rewarded.prompts[0] > 80
    assert {path.name for path in folder.iterdir()} <= quickstart.WRITTEN
    lines = read_metrics(folder / "rewarded" / "metrics.jsonl")
    assert len([line for line in lines if "reward" in line]) == 4
    for side in (rewarded.before, rewarded.after):
        assert -1 <= side.others["reward"] <= 1


def test_pairs_of_a_quickstart_have_the_answer_of_another_question():
    from chronicals.training.quickstart import preference_rows

    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": f"{n}!"},
            ]
        }
        for n in range(7)
    ]
    pairs = preference_rows([*rows, *rows[:1]], seed=3)
    assert [*dict.fromkeys(pair["prompt"][0]["content"] for pair in pairs)] == [
        f"{n}?" for n in range(7)
    ]
    for pair in pairs:
        assert (
            pair["chosen"][0]["content"]
            == pair["prompt"][0]["content"][0] + "!"
            != pair["rejected"][0]["content"]
        )


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_a_stopped_quickstart_is_started_again(objective, within, let_raise, tmp_path):
    """Its runs have no recipe by which ``train --resume`` goes on."""
    from chronicals.config import ChronicalsConfig
    from chronicals.training import quickstart
    from chronicals.training.errors import Interrupted
    from chronicals.training.run.resume import how_to_resume

    folder = tmp_path / "quick"
    run = folder if objective == "sft" else folder / "preference"
    resume = how_to_resume(ChronicalsConfig(output_dir=run).output_dir)
    stopped = Interrupted(f"SIGINT after step 3; {resume}")
    let_raise(quickstart, run_quickstart=stopped, run_preferences=stopped)
    done = within("quickstart", "--folder", folder, "--objective", objective)
    assert done.code == 130
    assert (
        done.stderr.strip()
        == "SIGINT after step 3; start chronicals quickstart again, which begins anew"
    )


def test_quickstart_deletes_nothing_but_what_one_wrote(within, let_raise, tmp_path):
    from chronicals.training import quickstart

    let_raise(quickstart, run_quickstart=ValueError("training began"))
    (tmp_path / "untrained").mkdir()
    (tmp_path / "my.jsonl").touch()
    done = within("quickstart", "--folder", tmp_path)
    assert done.code == 1 and "holds 'my.jsonl', which no quickstart or export wrote" in done.stderr
    assert (tmp_path / "my.jsonl").exists()
    (tmp_path / "my.jsonl").unlink()
    (tmp_path / "export").mkdir()
    for name in (
        "quick-q8_0.gguf",
        "quick-q8_0.gguf.proof.json",
        "quick-q8_0.Modelfile",
        "my.gguf",
    ):
        (tmp_path / "export" / name).touch()
    done = within("quickstart", "--folder", tmp_path)
    assert (
        done.code == 1
        and "holds 'export/my.gguf', which no quickstart or export wrote; move it" in done.stderr
    )
    (tmp_path / "export" / "my.gguf").unlink()
    assert (
        "training began" in within("quickstart", "--folder", tmp_path).stderr
        and not tmp_path.exists()
    )


@pytest.mark.parametrize(
    "given",
    [
        ["generate", "base", "--seed", 2**63],
        ["generate", "base", "--max-new-tokens", 0],
        ["quickstart", "--seed", -1],
    ],
)
def test_numbers_out_of_range_are_told_with_their_flag(within, given):
    done = within(*given)
    assert done.code == 2 and f"Invalid value for '{given[-2]}'" in done.stderr
