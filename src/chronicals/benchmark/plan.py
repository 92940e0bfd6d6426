"""Planning a row: the class of its work, its fields and its documents."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from chronicals.benchmark.distillation import DISTILLATION, DistillationWork
from chronicals.benchmark.pairs import PAIR_OBJECTIVES, PROMPT_SHARES, PairWork
from chronicals.benchmark.shapes import BUILT_IN_DATA, SHAPES
from chronicals.benchmark.work import DECIDED_FIELDS, MODES, Work
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.model_shape import ModelShape

OUR_FIELDS = (
    "lora_init",
    "lora_modules_to_save",
    "lora_trainable_tokens",
    "lora_target_parameters",
)
"""Fields of adapters that only our arm has."""


def plan_work(
    folder: Path,
    model: str,
    data: str,
    mode: str,
    fields: dict[str, Any],
    steps: int | None,
    warm_up: int,
) -> Work:
    """Plan a row and write its documents; ``prepare`` writes the weights later, in a process of its
    own.

    Args:
        folder: shared by rows; the row gets a folder in it.
        model: a built-in shape or a model's folder or hub name.
        data: built-in data or a file.
        fields: configuration fields set by the user; they override those of the mode.
        steps: sampled steps of a round; None takes the shape's number, or 20.

    Raises:
        ConfigurationError: an unknown mode, fields that contradict it or that not every arm has, or
            built-in data for another objective or for a model whose vocabulary is not known.
    """
    _check_fields(mode, fields)
    shape = SHAPES.get(model)
    work_class = work_class_of(fields)
    _check_data(data, work_class)
    chosen = {**work_class.usual_fields(shape, mode, fields), **fields}
    chosen = {name: value for name, value in chosen.items() if name not in DECIDED_FIELDS}
    chosen = work_class.placed(folder, chosen)
    objective = [chosen["objective"]] if work_class is not Work else []
    row = folder / "-".join([Path(model).name, mode, *objective, Path(data).stem])
    row = row.absolute()
    row.mkdir(parents=True, exist_ok=True)
    built_in = data in work_class.built_in
    documents = row / "documents.jsonl" if built_in else Path(os.path.expanduser(data)).absolute()
    work = work_class(
        folder=row,
        model=work_class.place_of(folder, model),
        name=model,
        mode=mode,
        data=data,
        documents=documents,
        fields=chosen,
        steps=steps or (shape.steps if shape else 20),
        warm_up=warm_up,
    )
    work.check_settings()
    if built_in:
        work.write_documents(shape.sizes["vocab_size"] if shape else _vocabulary(model))
    work.write()
    return work


def read_work(folder: Path) -> Work:
    """Read a work that was written to the row's folder."""
    fields = json.loads((folder / "work.json").read_text())
    for name in ("folder", "documents"):
        fields[name] = Path(fields[name])
    return work_class_of(fields["fields"])(**fields)


def work_class_of(fields: dict[str, Any]) -> type[Work]:
    """Return the class of the work whose configuration has these fields."""
    objective = fields.get("objective", "")
    if objective in PAIR_OBJECTIVES:
        return PairWork
    return DistillationWork if objective == DISTILLATION else Work


def _check_fields(mode: str, fields: dict[str, Any]) -> None:
    """Raise ConfigurationError if the mode is unknown or fields contradict or are ours alone."""
    if mode not in MODES:
        raise ConfigurationError(f"mode={mode!r}: no such mode; there are {', '.join(MODES)}")
    if fields.get("use_lora", mode != "full") != (mode != "full"):
        raise ConfigurationError(
            f"mode={mode!r} contradicts use_lora={fields['use_lora']}: give one of the two"
        )
    for name in ("quantization", "load_in_4bit"):
        if name in fields and bool(fields[name]) != (mode == "qlora"):
            raise ConfigurationError(
                f"mode={mode!r} contradicts {name}={fields[name]!r}: give one of the two"
            )
    defaults = ChronicalsConfig()
    for name in OUR_FIELDS:
        if name in fields and fields[name] != getattr(defaults, name):
            raise ConfigurationError(
                f"{name}={fields[name]!r}: not every arm has it; leave it out, or give it "
                "to ours alone as a variant"
            )


def _check_data(data: str, work_class: type[Work]) -> None:
    """Raise ConfigurationError if built-in data are for another objective."""
    if data not in (*BUILT_IN_DATA, *PROMPT_SHARES) or data in work_class.built_in:
        return
    objectives = "another objective"
    if data in PROMPT_SHARES:
        objectives = " or ".join(f"objective={name!r}" for name in PAIR_OBJECTIVES)
    raise ConfigurationError(
        f"data={data!r}: is for {objectives}; there are {', '.join(work_class.built_in)}, or a file"
    )


def _vocabulary(model: str) -> int:
    from transformers import AutoConfig

    try:
        return ModelShape.of(AutoConfig.from_pretrained(model)).vocabulary
    except (OSError, ValueError) as error:
        shapes = ", ".join(SHAPES)
        raise ConfigurationError(
            f"model={model!r}: neither a built-in shape ({shapes}) nor a model: {error}"
        ) from None
