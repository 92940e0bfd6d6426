import dataclasses
import inspect
import re
from typing import ClassVar

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from chronicals import __version__
from chronicals.cli.app import COMMANDS, COMMANDS_OF_OTHERS, HELP_TABLE_COLUMNS, app
from chronicals.cli.options import OWN_HEADING, flag, objective_names, with_recipe_flags
from chronicals.config import PRESETS, Recipe
from chronicals.config.checked_class import Heading, headings_of
from chronicals.objectives import OBJECTIVES


def ran(*arguments, columns=200):
    return CliRunner().invoke(
        app, list(arguments), env={"COLUMNS": str(columns)}, prog_name="chronicals"
    )


@pytest.mark.parametrize(
    "name, kind", [("trackers", list[str]), ("lora_target_modules", list[str]), ("project", str)]
)
def test_a_list_may_be_repeated_as_a_flag(name, kind):
    def command(**flags):
        return flags

    command = with_recipe_flags(command)
    assert inspect.signature(command).parameters[name].annotation == kind | None
    assert command(trackers=["wandb", "mlflow"], project=None) == {"trackers": ["wandb", "mlflow"]}


@pytest.mark.parametrize(
    "given, meant",
    [
        (["q_proj"], ["q_proj"]),
        (["model.layers.0.mlp.up_proj"], ["model.layers.0.mlp.up_proj"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        (["all-linear"], "all-linear"),
        ([r".*\.(q|v)_proj"], r".*\.(q|v)_proj"),
        ([".*q_proj", "v_proj"], [".*q_proj", "v_proj"]),
    ],
)
def test_layers_to_adapt_are_names_or_one_regular_expression(given, meant):
    command = with_recipe_flags(
        lambda **flags: Recipe(model="m", data="d", **flags).lora_target_modules
    )
    assert command(lora_target_modules=given) == meant


@pytest.mark.parametrize(
    "arguments, meant",
    [
        (["train", "--lr", "1e-4"], "--lr; use --learning-rate 1e-4"),
        (["train", "--num-train-epochs=3"], "--num-train-epochs; use --num-epochs 3"),
        (
            ["verify", "--per_device_train_batch_size", "2"],
            "--per_device_train_batch_size; use --batch-size 2",
        ),
        (["train", "--lora-r", "8"], "--lora-r; use --lora-rank 8"),
        (["train", "--bf16"], "--bf16; use --mixed-precision bf16"),
        (["train", "--adapter", "lora"], "--adapter; use --use-lora"),
        (["train", "--resume-from-checkpoint"], "--resume-from-checkpoint; use --resume where"),
        (["data", "show", "x", "--cutoff-len", "3"], "--cutoff-len; use --max-seq-length 3"),
        (["train", "--packing"], "--packing; use --use-sequence-packing"),
        (["train", "--logging-steps", "3"], "--logging-steps; leave it out: every step is a line"),
        (["train", "--learning-rat", "3"], "--learning-rat; did you mean --learning-rate?"),
        (["generate", "x", "--lr", "3"], "--lr"),
        (["train", "--adapter", "qlora"], "--adapter; use --use-lora and --quantization nf4"),
        (["train", "--load-in-8bit"], "--load-in-8bit; use --quantization nf4, which is 4 bits"),
        (["train", "--load-in-8bit", "false"], "--load-in-8bit; leave it out"),
        (
            ["train", "--wandb-project", "a b"],
            "--wandb-project; use --project 'a b' and --trackers wandb",
        ),
        (
            ["train", "--lora-target", "all"],
            "--lora-target; leave it out: every linear layer but the head",
        ),
        (["train", "--optim=adamw_torch_fused"], "--optim; leave it out: AdamW is the optimizer"),
        (
            ["train", "--optim", "paged_adamw_8bit"],
            "--optim; use --use-8bit-optimizer and --memory offload_optimizer_states",
        ),
        (["train", "--pref-loss", "orpo"], "--pref-loss; use --objective orpo"),
        (
            ["train", "--rl-beta", "0.2"],
            "--rl-beta; use beta in the section of the objective: --dpo.beta 0.2",
        ),
        (
            ["train", "--template", "qwen"],
            "--template; leave it out: the tokenizer's own chat template",
        ),
        (
            ["train", "--stage", "ppo"],
            "--stage; 'ppo' is not part of this version: its loss is not written yet",
        ),
        (
            ["train", "--per-device-eval-batch-size", "4"],
            "--per-device-eval-batch-size; leave it out: evaluation takes",
        ),
    ],
)
def test_a_flag_of_another_trainer_is_answered_with_ours(arguments, meant):
    done = ran(*arguments)
    assert done.exit_code == 2 and f"No such option: {meant}" in done.output


def test_help_shows_every_choice_and_only_what_works():
    text = " ".join(ran("train", "--help", columns=79).output.split())
    squeezed = "".join(text.split())
    known = [
        "cosine, linear, constant, wsd [cosine]",
        "bf16, fp16, fp32 [bf16]",
        "cut, split, drop",
        "all, last [all]",
    ]
    known += [
        "system, developer, user, assistant, tool [assistant]",
        "tensorboard, wandb, mlflow",
        ", ".join(PRESETS),
    ]
    for choices in known:
        assert choices.replace(" ", "") in squeezed
    assert "--memory" in text and "optimizer_in_backward" in text and "--use-8bit-optimizer" in text


def headings_of_help(command, columns):
    """Headings in order, each with the flags under it."""
    found = {}
    heading = ""
    for line in ran(command, "--help", columns=columns).output.splitlines():
        if title := re.match(r"(?:╭─ )?([A-Z][\w, -]*?)(?:\:$| ─+╮$)", line):
            heading = title[1]
        found.setdefault(heading, []).extend(re.findall(r"^[ │]+(--[a-z0-9-]+)", line))
    return {heading: flags for heading, flags in found.items() if heading and flags}


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("command", ["train", "verify", "plan", "benchmark"])
def test_help_is_divided_by_the_headings_of_the_fields(command, columns, monkeypatch):
    monkeypatch.setattr(
        app, "rich_markup_mode", "markdown" if columns >= HELP_TABLE_COLUMNS else None
    )
    shown = headings_of_help(command, columns)
    headings = headings_of(Recipe)
    assert list(shown)[:2] == [headings["model"], OWN_HEADING] and shown[headings["model"]][:2] == [
        "--model",
        "--data",
    ]
    assert "--help" in shown[OWN_HEADING]
    for field in dataclasses.fields(Recipe):
        assert flag(field.name) in shown[headings[field.name]]


def test_every_field_stands_under_a_heading():
    """Where one does not, help has it under another heading, and this names it."""
    headings = headings_of(Recipe)
    assert [field.name for field in dataclasses.fields(Recipe) if field.name not in headings] == []
    of_lora = {name for name in headings if name.startswith("lora_")}
    assert len({headings[name] for name in of_lora}) == 1


def test_a_field_without_a_heading_is_among_the_others():
    @dataclasses.dataclass
    class Parent:
        first: int = 0
        _some: ClassVar = Heading("some")
        second: int = 0

    @dataclasses.dataclass
    class Child(Parent):
        third: int = 0
        _more: ClassVar = Heading("more")
        fourth: int = 0

    assert headings_of(Child) == {"second": "some", "fourth": "more"}


@pytest.mark.slow
def test_a_number_that_the_run_decides_may_be_auto(monkeypatch):
    given = []
    monkeypatch.setattr(Recipe, "given", lambda *_, **flags: given.append(flags) or 1 / 0)
    ran(
        "train",
        "--batch-size",
        "auto",
        "--learning-rate",
        "1e-4",
        "--warmup-steps",
        "3",
        "--max-steps",
        "auto",
    )
    assert given == [
        {"batch_size": "auto", "learning_rate": 1e-4, "warmup_steps": 3, "max_steps": "auto"}
    ]
    result = ran("train", "--batch-size", "four")
    assert result.exit_code == 2 and "'four' is neither an integer nor auto" in result.output
    assert ran("train", "--seed", "auto").exit_code == 2
    assert "<int|auto>" in ran("train", "--help").output


def test_version():
    assert ran("--version").output == f"chronicals {__version__}\n"


@pytest.mark.parametrize("command", [["train"], ["evaluate"], ["data", "show"]], ids=" ".join)
def test_help_lists_every_objective(command):
    from chronicals.objectives import OBJECTIVES

    assert sorted(objective_names()) == sorted(OBJECTIVES)
    squeezed = "".join(ran(*command, "--help", columns=400).output.replace("│", " ").split())
    assert ",".join(objective_names()) in squeezed


@pytest.mark.parametrize("theirs", sorted(COMMANDS_OF_OTHERS))
def test_a_command_of_another_trainer_is_answered_with_ours(theirs):
    ours, *flags = COMMANDS_OF_OTHERS[theirs].split()
    done = CliRunner().invoke(app, [theirs, "recipe.yaml"])
    assert done.exit_code == 2 and theirs not in COMMANDS
    assert f"No such command '{theirs}'; use chronicals {' '.join([ours, *flags])}" in done.output
    known = {name for option in get_command(app).commands[ours].params for name in option.opts}
    assert {flag for flag in flags if flag.startswith("--")} <= known
    if "--objective" in flags:
        assert flags[-1] in OBJECTIVES
