"""Messages name fields as the user gives them, and none escapes."""

import ast
import dataclasses
import logging
import re
from pathlib import Path

import pytest

from chronicals.cli.wording import LogFormatter, Wording, set_wording
from chronicals.config import Recipe
from chronicals.data.reading.gate import RULES

SOURCE = Path(__file__).parent.parent.parent / "src" / "chronicals"
FIELDS = [field.name for field in dataclasses.fields(Recipe)]
SWITCHES = {name: isinstance(getattr(Recipe(model="m", data="d"), name), bool) for name in FIELDS}
OPTIONS = {**SWITCHES, "resume": True, "steps": False, "output": False}
IN_FLAGS = Wording(OPTIONS)
IN_RECIPE = Wording(OPTIONS, in_recipe=True, as_flags={"resume", "steps", "output"})

MESSAGES = [
    ("lower batch_size=4: fewer", "lower --batch-size 4: fewer", "lower batch_size: 4: fewer"),
    ("set use_lora=True", "set --use-lora", "set use_lora: true"),
    ("use_fp8=True cannot be", "--use-fp8 cannot be", "use_fp8: true cannot be"),
    ("master_weights=False: with", "--no-master-weights: with", "master_weights: false: with"),
    ("use mixed_precision='fp16'", "use --mixed-precision fp16", "use mixed_precision: fp16"),
    (
        "allow it: gate={'cut_row': 0.1, 'x': 1.0}",
        "allow it: --gate cut_row=0.1 --gate x=1.0",
        "allow it: gate: {cut_row: 0.1, x: 1.0}",
    ),
    (
        "memory=['recompute_layers', 'tiled_mlp'] and activation_offload=False: they",
        "--memory recompute_layers --memory tiled_mlp and --no-activation-offload: they",
        "memory: [recompute_layers, tiled_mlp] and activation_offload: false: they",
    ),
    (
        "set max_grad_norm=inf, gradient",
        "set --max-grad-norm inf, gradient",
        "set max_grad_norm: .inf, gradient",
    ),
    (
        "raise max_seq_length, or set overlong='drop'",
        "raise --max-seq-length, or set --overlong drop",
        "raise max_seq_length, or set overlong: drop",
    ),
    (
        "did you mean 'learning_rate'?",
        "did you mean --learning-rate?",
        "did you mean 'learning_rate'?",
    ),
    ("model: required", "--model: required", "model: required"),
    ("a; data: no such", "a; --data: no such", "a; data: no such"),
    ("the model: it is", "the model: it is", "the model: it is"),
    (
        "lora_target_modules=['q']: matches",
        "--lora-target-modules q: matches",
        "lora_target_modules: [q]: matches",
    ),
    ("output_dir='my run' holds", "--output-dir 'my run' holds", "output_dir: my run holds"),
    ("steps=3: give 5 to 20", "--steps 3: give 5 to 20", "--steps 3: give 5 to 20"),
    (
        "go on with train(..., resume=True) and output_dir='a b', or",
        "go on with chronicals train --resume --output-dir 'a b', or",
        "go on with chronicals train --resume --output-dir 'a b', or",
    ),
    (
        "map it: columns={'completion': 'x'}",
        "map it: --columns x=completion",
        "map it: columns: {completion: x}",
    ),
    (
        "map: columns={'prompt': 'Q', 'completion': 'A', 'system': 'A'}",
        "map: --columns Q=prompt --columns A=completion --columns A=system",
        "map: columns: {prompt: Q, completion: A, system: A}",
    ),
    (
        "columns={'prompt': …} and memory=['a', b]",
        "columns={'prompt': …} and memory=['a', b]",
        "columns={'prompt': …} and memory=['a', b]",
    ),
    (
        "the field 'output_dir' is missing",
        "the field 'output_dir' is missing",
        "the field 'output_dir' is missing",
    ),
    (
        "learning_rate=0.001 (before: 0.003)",
        "--learning-rate 0.001 (before: 0.003)",
        "learning_rate: 0.001 (before: 0.003)",
    ),
    (
        "batch_size * max_seq_length=100 is",
        "--batch-size * --max-seq-length 100 is",
        "batch_size * max_seq_length: 100 is",
    ),
    (
        "/some/output_dir/x, run-seed=3, my_model=2",
        "/some/output_dir/x, run-seed=3, my_model=2",
        "/some/output_dir/x, run-seed=3, my_model=2",
    ),
    (
        "dpo={'reference_model': 'x'}: there is",
        "--dpo.reference-model x: there is",
        "dpo: {reference_model: x}: there is",
    ),
    ("data='a.jsonl': no such file", "--data a.jsonl: no such file", "data: a.jsonl: no such file"),
]


@pytest.mark.parametrize("said, in_flags, in_recipe", MESSAGES)
def test_a_message_names_fields_as_its_user_does(said, in_flags, in_recipe):
    assert (IN_FLAGS(said), IN_RECIPE(said), Wording({})(said)) == (in_flags, in_recipe, said)


def test_what_has_no_flag_stands_in_a_recipe():
    assert (
        Wording({"data": False})("columns={'completion': 'x'}, data='d'")
        == "columns: {completion: x}, --data d"
    )


def test_a_flag_beside_a_recipe_is_a_flag():
    both = Wording(SWITCHES, in_recipe=True, as_flags={"batch_size"})
    assert both("batch_size=4 and seed=3") == "--batch-size 4 and seed: 3"


def messages() -> list[tuple[str, str]]:
    """Every text of the package with spaces in it, outside docstrings, with 1 in the place of
    what is filled in.
    """
    found = []
    for path in sorted(set(SOURCE.rglob("*.py")) - {SOURCE / "cli" / "wording.py"}):
        tree = ast.parse(path.read_text())
        passed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        passed |= {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in node.values
        }
        for node in ast.walk(tree):
            if id(node) in passed or not isinstance(node, (ast.Constant, ast.JoinedStr)):
                continue
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "1" for part in parts
            )
            if " " in text and not text.startswith("<"):
                found.append(
                    (
                        f"{path.relative_to(SOURCE)}:{node.lineno}",
                        re.sub(r"%[\d.]*[dsfgr]", "1", text).strip(),
                    )
                )
    return found


@pytest.mark.slow
def test_every_message_is_translated():
    """Names that are a word of their own in a message become flags; remedies are written as
    Python, not as YAML.
    """
    name = "|".join(name for name in FIELDS if "_" in name)
    left = [
        (place, text)
        for place, text in messages()
        if re.search(rf"(?<![\w./-])({name})(?![\w/])", IN_FLAGS(text))
    ]
    assert not left, "\n".join(map(str, left))
    in_yaml = re.compile(rf"(\b(set|or|with|use|nor)|it:) ({'|'.join([*FIELDS, 'columns'])}): ")
    assert not [(place, text) for place, text in messages() if in_yaml.search(text)]


@pytest.mark.slow
def test_the_scan_finds_messages():
    assert len([text for _, text in messages() if "max_seq_length" in text]) > 10


def test_log_lines_are_in_the_users_form():
    record = logging.LogRecord(
        "chronicals", logging.WARNING, "", 1, "lower %s=%d", ("batch_size", 4), None
    )
    try:
        set_wording(SWITCHES)
        assert LogFormatter("%(message)s").format(record) == "lower --batch-size 4"
    finally:
        set_wording({})
    assert LogFormatter("%(message)s").format(record) == record.getMessage() == "lower batch_size=4"


def test_remedies_of_the_gate_name_different_columns():
    said = IN_FLAGS(RULES["columns_recognised"].remedy)
    assert said.endswith("--columns THEIR_PROMPT=prompt --columns THEIR_ANSWER=completion")


@pytest.mark.slow
def test_remedies_give_every_value_and_set_it_in_a_form_that_can_be_typed():
    """A field that is set has its value, and what is in brackets is a literal."""
    for rule in RULES.values():
        assert not re.search(r"\bset (\w+)(?!\w|=)", rule.remedy), rule.remedy
    bracketed = re.compile(rf"\b(?:{'|'.join(FIELDS)})=(\[[^\]]*\]|\{{[^}}]*\}})")
    values = [found for _, text in messages() for found in bracketed.findall(text)]
    assert len(values) > 5 and all(ast.literal_eval(value) for value in values)
