"""Real text that every machine has: the documentation strings of Python's standard library, as
questions and answers.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {"test", "tests", "idlelib", "site-packages", "lib2to3", "turtledemo", "__pycache__"}
LONGEST_ANSWER = 300
"""Characters; whole sentences are kept up to here."""


def questions_and_answers(folder: Path | None = None) -> list[dict]:
    """Chat rows "What does json.dumps do?" → the first paragraph of its documentation, sorted by
    name.

    Args:
        folder: the library's sources; those of the running Python by default. Files are parsed,
            never imported.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    rows = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if SKIPPED & set(parts) or any(part.startswith("_") for part in parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for name, text in _documented(tree, ".".join(parts)):
            answer = _first_sentences(text)
            if answer:
                rows[name] = answer
    return [
        {
            "messages": [
                {"role": "user", "content": f"What does {name} do?"},
                {"role": "assistant", "content": rows[name]},
            ]
        }
        for name in sorted(rows)
    ]


def _documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """Names and documentation of public functions, classes and methods below ``node``."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(
            child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ) or child.name.startswith("_"):
            continue
        name = f"{prefix}.{child.name}"
        text = ast.get_docstring(child)
        if text:
            yield name, text
        if isinstance(child, ast.ClassDef):
            yield from _documented(child, name)


def _first_sentences(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    kept = ""
    for sentence in paragraph.replace(". ", ".\n").split("\n"):
        if len(kept) + len(sentence) + 1 > LONGEST_ANSWER:
            break
        kept = f"{kept} {sentence}".strip()
    return kept if len(kept) > 20 and kept.isascii() else ""
