"""What is wrong with a recipe is told at once, all of it, before torch is imported."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from chronicals.cli import main
try:
    main()
except SystemExit as exit:
    print(exit.code, sorted({"torch", "transformers", "datasets"} & set(sys.modules)))
"""

WRONG = {
    "a mistyped key": (
        "learnin_rate: 3e-3",
        ["learnin_rate: no such field; did you mean 'learning_rate'?"],
    ),
    "a section of no objective": ("dop: {beta: 0.1}", ["dop: no such field; did you mean 'dpo'?"]),
    "an objective that there is not": (
        "objective: ppo",
        ["objective: ppo: not part of this version: its loss is not written yet"],
    ),
    "a field twice": ("data: e", ["recipe.yaml: not YAML: data stands twice; keep one"]),
    "several": (
        "lr: 3.0\nbatch_size: none\nrl: dpo",
        [
            "batch_size: none: Input should be",
            "lr: no such field; use learning_rate: 3.0",
            "rl: no such field; use objective: dpo",
        ],
    ),
    "entries of data": (
        "validation_data: [{path: x, type: alpaca, field_messages: talk}]",
        [
            "validation_data: type: no such field of data; leave it out: ",
            "validation_data: field_messages: no such field of data; use columns: {messages: talk}",
        ],
    ),
}


def told(folder, text, *command):
    """Exit code, modules and lines of a command with the recipe."""
    (folder / "recipe.yaml").write_text(f"model: m\ndata: d\n{text}\n")
    arguments = [sys.executable, "-c", PROGRAM, *command, "recipe.yaml"]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.stdout.strip(), done.stderr.removeprefix("error ").strip().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_it_is_a_line_each_before_torch_is_imported(case, tmp_path):
    text, lines = WRONG[case]
    code, said = told(tmp_path, text, "train")
    assert code == "1 []"
    assert all(
        line.startswith(expected)
        for line, expected in zip(said, lines, strict=case != "a field twice")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["verify"], ["plan"], ["benchmark"], ["data", "show"]], ids=" ".join
)
def test_every_command_that_reads_a_recipe_tells_it_so(command, tmp_path):
    code, said = told(tmp_path, "learnin_rate: 3e-3", *command)
    assert (code, said) == ("1 []", ["learnin_rate: no such field; did you mean 'learning_rate'?"])
