"""Documentation strings of Python's standard library as questions and answers.

They are real text that every machine has.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED_PACKAGES = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
    "lib2to3",
    "turtledemo",
    "__pycache__",
}

MAX_ANSWER_LETTERS = 300
"""An answer is the whole sentences up to here."""


def questions_and_answers(folder: Path | None = None) -> list[dict]:
    """Return chat rows, sorted by name: "What does json.dumps do?" and its documentation.

    Args:
        folder: the library's sources; those of the running Python by default. Files are parsed,
            never imported.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    rows = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if SKIPPED_PACKAGES & set(parts) or any(part.startswith("_") for part in parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for name, text in _documented(tree, ".".join(parts)):
            answer = _first_sentences(text)
            if answer:
                rows[name] = answer
    chats = []
    for name in sorted(rows):
        question = {"role": "user", "content": f"What does {name} do?"}
        chats.append({"messages": [question, {"role": "assistant", "content": rows[name]}]})
    return chats


def _documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield names and documentation of public functions, classes and methods below ``node``."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, definitions) or child.name.startswith("_"):
            continue
        name = f"{prefix}.{child.name}"
        text = ast.get_docstring(child)
        if text:
            yield name, text
        if isinstance(child, ast.ClassDef):
            yield from _documented(child, name)


def _first_sentences(text: str) -> str:
    """Return the first sentences of a text; empty if they are too short or not ASCII."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    answer = ""
    for sentence in paragraph.replace(". ", ".\n").split("\n"):
        if len(answer) + len(sentence) + 1 > MAX_ANSWER_LETTERS:
            break
        answer = f"{answer} {sentence}".strip()
    return answer if len(answer) > 20 and answer.isascii() else ""
