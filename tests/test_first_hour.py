"""The script of the first hour: its commands parse as the command line has them, and what it
judges wrong is wrong.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("first_hour", ROOT / "benchmarks" / "first_hour.py")
first_hour = sys.modules["first_hour"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(first_hour)
Step = first_hour.Step
Outcome = first_hour.Outcome

RIGHT = Outcome(0, 1.0, "the answer\n", "step 1\npassed 3\n")


@pytest.mark.parametrize(
    ("step", "outcome", "wrong"),
    [
        (Step(["x"], ["^step"], only_answers=1), RIGHT, ""),
        (Step(["x"], ["^step 2"]), RIGHT, "no line matches '^step 2'"),
        (Step(["x"], code=1), RIGHT, "exit code 0, not 1"),
        (Step(["x"], last="^passed"), RIGHT, "the last line does not match"),
        (Step(["x"], only_answers=2), RIGHT, "1 lines on standard output, not 2"),
        (
            Step(["x"], code=1),
            Outcome(1, 1.0, "", "Traceback (most recent call last):"),
            "a traceback",
        ),
        (Step(["x"], last="^passed"), Outcome(0, 1.0, "", ""), "the last line does not match"),
    ],
)
def test_what_is_wrong_is_said(step, outcome, wrong):
    found = outcome.wrong(step)
    assert len(found) == bool(wrong) and all(words.startswith(wrong) for words in found)


def test_the_flags_of_its_commands_exist():
    """Those that are wrong on purpose apart."""
    import typer

    from chronicals.cli.app import app

    commands = typer.main.get_command(app).commands
    for step in first_hour.steps(full_quickstart=True):
        program, name, *rest = step.command
        if program == "chronicals" and step.code != 2 and name in commands:
            command = (
                commands[name].commands[rest[0]]
                if hasattr(commands[name], "commands")
                else commands[name]
            )
            known = {
                flag for option in command.params for flag in (*option.opts, *option.secondary_opts)
            }
            assert {word for word in rest if re.match("--[a-z]", word)} <= known, step


def test_it_covers_every_command_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^(?:\$ )?chronicals ([a-z]+)", readme, re.MULTILINE))
    run = {
        step.command[1]
        for step in first_hour.steps(full_quickstart=True)
        if step.command[0] == "chronicals"
    }
    assert named and named <= run
