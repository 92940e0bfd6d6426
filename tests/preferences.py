"""Preference rows, the registered objectives over them, one step of an objective, and how its
gradients are compared: what several tests share.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import runs
import tiny
from chronicals.data import BatchStream, Tokenizer, build_store
from chronicals.data.kinds.preferences import JUDGED, PREFERENCE
from chronicals.data.kinds.rows import PROMPT
from chronicals.objectives import OBJECTIVES, build_objective
from chronicals.objectives.reference import WithReference
from chronicals.training.session import prepared

WORDS = (
    "hello",
    "world",
    "the",
    "answer",
    "life",
    "forty",
    "two",
    "everything",
    "0",
    "1",
    "2",
    "3",
)


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Questions with two answers, of different lengths."""
    draw = random.Random(seed)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    return [
        {
            "prompt": [{"role": "user", "content": text(1, 12)}],
            "chosen": [{"role": "assistant", "content": f"{text(1, 10)} yes"}],
            "rejected": [{"role": "assistant", "content": f"{text(1, 10)} no"}],
        }
        for _ in range(count)
    ]


def judged_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Questions with one answer each, good or bad."""
    pairs = rows(count, seed)
    return [
        {
            "prompt": row["prompt"],
            "completion": row["chosen" if n % 3 else "rejected"],
            "label": bool(n % 3),
        }
        for n, row in enumerate(pairs)
    ]


IN_TREE = {
    name: cls for name, cls in OBJECTIVES.items() if cls.__module__.startswith("chronicals.")
}
"""The registered objectives of the package."""

OF_ANSWERS = tuple(
    name for name, cls in IN_TREE.items() if {PREFERENCE, JUDGED} & set(cls.row_kinds)
)
"""Objectives over pairs or judged answers."""

WITH_REFERENCE = tuple(name for name, cls in IN_TREE.items() if issubclass(cls, WithReference))


def rows_of(objective: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of the kind that the objective takes."""
    row_kinds = OBJECTIVES[objective].row_kinds
    if JUDGED in row_kinds:
        return judged_rows(count, seed)
    if PREFERENCE in row_kinds:
        return rows(count, seed)
    if PROMPT in row_kinds:
        return [{"prompt": row["prompt"]} for row in rows(count, seed)]
    return tiny.chat_rows(count)


def store_of(
    folder: Path,
    given: list[dict[str, Any]],
    kinds: tuple[str, ...] = ("preference",),
    width: int = 128,
) -> Any:
    return build_store(given, Tokenizer(tiny.tokenizer(), kinds=kinds), width, folder / "tokens")


DIVISIONS = [
    (1, 8, {"max_documents": 3}),
    (2, 4, {"max_documents": 3}),
    (8, 1, {"max_documents": 3}),
    (1, 8, {}),
]
"""Ways to divide a step of eight pairs: packs, micro-batches, and other fields."""


def one_step(
    folder: Path,
    given: list[dict[str, Any]],
    objective: str,
    section: dict[str, Any],
    model: Any = None,
    column: Any = None,
    padded: bool = False,
    ready: Callable[[Any], None] | None = None,
    **changes: Any,
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Terms and gradients of one step over all rows: the gradients before clipping, by the name of
    the parameter.

    Args:
        column: values of the documents' ``reference``, if the store is to have some.
        ready: called with the model when it is prepared, before the step.
        padded: each document behind its prompt in a row of its own, as of a class that does not
            keep documents apart.
    """
    usual = {
        "batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": float("inf"),
        "objective": objective,
    }
    config = runs.config(folder, **{**usual, objective: section, **changes})
    store = store_of(folder, given, build_objective(config).row_kinds, config.max_seq_length)
    if column is not None:
        store = store.with_column("reference", column)
    stream = BatchStream(store, config, tiny.tokenizer().pad_token_id, epochs=1, shuffle=False)
    assert stream.left(None) == 1, "all rows must be one step"
    gradients: dict[str, torch.Tensor] = {}
    model = model or tiny.llama()

    def look() -> None:
        gradients.update(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )

    with prepared(model, config, build_objective(config), tokenizer=tiny.tokenizer()) as session:
        session.presented.packed &= not padded
        if ready is not None:
            ready(model)
        with session.stepping():
            model.train()
            (step,) = stream.steps(count=1)
            terms = session.train_once(step, look)
    return {name: float(value) for name, value in terms.items()}, gradients


def gradients_of(model, loss):
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return {name: g for (name, _), g in zip(model.named_parameters(), found) if g is not None}


def assert_close(found, expected, relative=1e-4):
    """Of each parameter the norm of the deviation is below ``relative`` of the gradient's own."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        deviation = (
            found[name].double() - gradient.double()
        ).norm() / gradient.double().norm().clamp(min=1e-12)
        assert deviation < relative, f"{name}: {deviation:.2e}"
