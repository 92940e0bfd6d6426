"""The road from another tool's configuration to a recipe: settings, defaults, checks, text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml

from chronicals.config import ConfigurationError, Recipe
from chronicals.config.config import EXCLUSIVE_PAIRS
from chronicals.config.foreign import SOURCE_FIELDS
from chronicals.config.foreign_data import advice_on_data_field
from chronicals.config.foreign_values import ABSENT_OBJECTIVES
from chronicals.config.sections import in_sections
from chronicals.convert.answers import FIELDS, Answer, mapped, not_needed, not_there
from chronicals.convert.defaults import adapters_of, defaults_of
from chronicals.convert.lengths import has_conversations
from chronicals.convert.meanings import answered
from chronicals.convert.numbers import check_numbers
from chronicals.convert.reading import TRL, Setting, Theirs, read

LISTS = ("memory", "trackers")
"""Fields that several settings may add to."""

OF_ADAPTERS = ("lora_", "use_dora", "use_rslora")
"""Beginnings of the fields that only adapters have."""

ENTRIES = ("datasets", "test_datasets", "pretraining_dataset")
"""Settings that are lists of data sets with settings of their own."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A setting of theirs and what became of it."""

    setting: Setting
    answer: Answer


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A configuration of another tool as a recipe.

    Attributes:
        theirs: the configuration.
        lines: what became of each of its settings.
        fields: of the recipe, that its settings became.
        defaults: fields for what it leaves out, where the tool's default is not ours.
    """

    theirs: Theirs
    lines: tuple[Line, ...]
    fields: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def recipe(self) -> Recipe:
        """Return the recipe.

        Raises:
            ConfigurationError: a value is out of range, something that a recipe needs is missing,
                or the objective is not part of this version.
        """
        objective = self.theirs.objective
        if objective in ABSENT_OBJECTIVES:
            raise ConfigurationError(
                f"{self.theirs.file}: objective {objective!r} is not part of this version: "
                f"{ABSENT_OBJECTIVES[objective]}"
            )
        wrong = [text for line in self.lines for text in _out_of_range(line)]
        if wrong:
            raise ConfigurationError("\n".join(wrong))
        try:
            return Recipe(**in_sections({**self.fields, **self.defaults}))
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.theirs.file}: {error}") from None

    @property
    def depends_on_rows(self) -> bool:
        """True if what is trained depends on rows that are not here."""
        theirs = self.theirs
        masks_none = not theirs.get("assistant_only_loss", "completion_only_loss", default=False)
        trained_by_kind = theirs.tool == TRL and theirs.objective == "sft" and masks_none
        return trained_by_kind and has_conversations(theirs) is None

    def text(self) -> str:
        """Return the recipe in YAML, with what was computed, assumed and left out as comments."""
        self.recipe()
        reasons: dict[str, str] = {}
        for line in self.lines:
            if line.answer.kind == "mapped" and line.answer.reason:
                said = f"{line.setting.name}: {_short(line.setting.value)}: {line.answer.reason}"
                reasons |= dict.fromkeys(line.answer.fields, said)
        tool = self.theirs.tool
        # a section stands once, with what is set there and what is left out
        sections = {name.partition(".")[0] for name in self.fields if "." in name}
        beside = {
            name: value
            for name, value in self.defaults.items()
            if name.partition(".")[0] in sections
        }
        reasons |= {
            name: f"{name}: left out there: what {tool} takes by default" for name in beside
        }
        parts = [f"# From {tool}, {self.theirs.file.name}\n"]
        parts += _in_yaml({**self.fields, **beside}, reasons)
        others = {name: self.defaults[name] for name in self.defaults if name not in beside}
        if others:
            parts.append(f"# Left out there: what {tool} takes by default\n")
            parts += _in_yaml(others, {})
        if self.depends_on_rows:
            parts.append(
                "# No row is here: TRL trains every token of a conversation, for which this is "
                "needed: train_on: all\n"
            )
        absent = [line for line in self.lines if line.answer.kind in ("not there", "not known")]
        if absent:
            parts.append("# Not there:\n")
        for line in absent:
            parts.append(
                f"# {line.setting.name}: {_short(line.setting.value)}: {line.answer.reason}\n"
            )
        return "".join(parts)


def convert(file: Path, cards: int | None = None, nproc: int | None = None) -> Conversion:
    """Convert a configuration of Axolotl, LLaMA-Factory or TRL.

    Args:
        file: its YAML, or a file with a command line.
        cards: how many cards it ran on; by default what its command line says.
        nproc: how many cards ours runs on; by default as many. With fewer, micro-batches are added
            so that a step has as many documents.

    Raises:
        ConfigurationError: the file is of none of the tools, or a value that is computed with is
            no number.
    """
    theirs = read(file)
    check_numbers(theirs)
    if cards is not None:
        theirs = dataclasses.replace(theirs, cards=cards)
    lines = [
        Line(setting, answered(setting.key, setting.value, theirs)) for setting in theirs.settings
    ]
    lines = _without_idle_adapters(theirs, lines)
    fields = _together(lines)
    if fields.get("max_steps") is not None:
        fields.pop("num_epochs", None)
    if theirs.objective != "sft" and "objective" not in fields:
        fields["objective"] = theirs.objective
    defaults = _defaults(theirs, fields)
    _scale_data(theirs, fields)
    _spread(theirs.cards or 1, nproc, fields, defaults)
    _join_memory(fields)
    whole: list[Line] = []
    for line in lines:
        whole.append(line)
        whole += _entries(line.setting)
    return Conversion(theirs, tuple(whole), fields, defaults)


def _without_idle_adapters(theirs: Theirs, lines: list[Line]) -> list[Line]:
    """Return the lines, without settings of adapters where none is trained."""
    fields = {**defaults_of(theirs), **_together(lines)}
    if fields.get("use_lora") or fields.get("quantization"):
        return lines
    idle = not_needed("no adapter is trained")
    return [
        Line(line.setting, idle)
        if line.answer.fields and all(name.startswith(OF_ADAPTERS) for name in line.answer.fields)
        else line
        for line in lines
    ]


def _together(lines: list[Line]) -> dict[str, Any]:
    """Return the fields of all answers; those of lists are joined."""
    fields: dict[str, Any] = {}
    for line in lines:
        for name, value in line.answer.fields.items():
            if name in LISTS and value not in ("none", []):
                added = value if isinstance(value, list) else [value]
                before = fields.get(name)
                kept = before if isinstance(before, list) else []
                fields[name] = [*kept, *(one for one in added if one not in kept)]
            elif name not in LISTS or name not in fields:
                fields[name] = value
    return fields


def _defaults(theirs: Theirs, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for what is left out, where the tool's default is not ours."""
    there = set(fields)
    for first, second in EXCLUSIVE_PAIRS:
        if first in there or second in there:
            there |= {first, second}
    of_tool = defaults_of(theirs)
    lora = fields.get("use_lora", of_tool.get("use_lora", False)) or fields.get("quantization")
    if lora:
        of_tool |= adapters_of(theirs, fields.get("lora_rank"))
        if "lora_plus_ratio" not in there:
            of_tool["use_lora_plus"] = False
    chosen: dict[str, Any] = {}
    for name, value in of_tool.items():
        ours = FIELDS[name].get_default(call_default_factory=True) if name in FIELDS else None
        decided = name in ("num_epochs", "warmup_steps", "learning_rate", "batch_size", "overlong")
        if name not in there and (value != ours or decided):
            chosen[name] = value
    written = {**chosen, **fields}
    if written.get("warmup_steps") or written.get("warmup_ratio"):
        chosen["warmup_from_zero"] = True  # the schedules of transformers, which all three call
    return chosen


def _scale_data(theirs: Theirs, fields: dict[str, Any]) -> None:
    """Give data the weight that stands for a part of an epoch."""
    epochs = theirs.get("num_epochs", "num_train_epochs")
    if (
        epochs is None
        or float(epochs) == int(epochs)
        or "max_steps" in fields
        or "num_epochs" not in fields
    ):
        return
    data = fields.get("data")
    entries = data if isinstance(data, list) else [data]
    fields["data"] = [
        {**entry, "weight": entry.get("weight", 1.0) * epochs}
        if isinstance(entry, dict)
        else {"path": entry, "weight": epochs}
        for entry in entries
    ]


def _spread(
    cards: int, nproc: int | None, fields: dict[str, Any], defaults: dict[str, Any]
) -> None:
    """Give a step as many documents on ``nproc`` cards as theirs has on ``cards``.

    Raises:
        ConfigurationError: no number of micro-batches does.
    """
    if nproc is None or nproc == cards:
        return
    owner = fields if "gradient_accumulation_steps" in fields else defaults
    steps = owner.get("gradient_accumulation_steps", 1)
    if steps * cards % nproc:
        raise ConfigurationError(
            f"nproc={nproc}: {steps} micro-batches on {cards} cards are not a whole number on "
            f"{nproc}; take a divisor of {steps * cards}"
        )
    owner["gradient_accumulation_steps"] = steps * cards // nproc


def _join_memory(fields: dict[str, Any]) -> None:
    """Move switches that are entries of ``memory`` into it, where it is set."""
    if "memory" not in fields:
        return
    for switch, entry in (
        ("use_gradient_checkpointing", "recompute_layers"),
        ("activation_offload", "offload_activations"),
    ):
        if fields.pop(switch, False) and entry not in fields["memory"]:
            fields["memory"].append(entry)


def _entries(setting: Setting) -> Iterator[Line]:
    """Yield what becomes of each setting inside a list of data sets."""
    if setting.key not in ENTRIES:
        return
    entries = setting.value if isinstance(setting.value, list) else [setting.value]
    for number, entry in enumerate(entries):
        for name, value in entry.items() if isinstance(entry, Mapping) else ():
            inner = dataclasses.replace(
                setting, name=f"{setting.name}[{number}].{name}", value=value
            )
            yield Line(inner, _of_entry(name, value))


def _of_entry(name: str, value: Any) -> Answer:
    """Return what becomes of a setting of a data set."""
    if value is None:
        return not_needed("it is not set")
    if name == "type" and isinstance(value, Mapping):
        return not_there(
            "a format of one's own; rows of instruction, input and output are read, and columns "
            "renames theirs"
        )
    if name in SOURCE_FIELDS:
        return mapped("of data")
    advice = advice_on_data_field(name, value)
    if advice is None:
        return Answer("not known", reason="no table has this name")
    if advice.startswith("leave it out"):
        return not_needed(advice.partition(": ")[2])
    return mapped(advice.removeprefix("use "))


def _out_of_range(line: Line) -> Iterator[str]:
    """Yield what is wrong with the values of a setting, with its place in the file."""
    for name, value in line.answer.fields.items():
        if name not in FIELDS:
            continue
        field = FIELDS[name]
        annotation: Any = Annotated[field.rebuild_annotation(), field]
        try:
            pydantic.TypeAdapter(annotation).validate_python(value)
        except pydantic.ValidationError as error:
            setting = line.setting
            message = error.errors()[0]["msg"]
            yield f"{setting.place}: {setting.name}: {setting.value!r}: {message} ({name})"


FIRST = ("model", "data", "validation_data", "objective", "output_dir")
"""Fields at the head of a recipe."""


def _in_yaml(fields: Mapping[str, Any], reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of fields, each behind the reason for its value."""
    nested = in_sections(fields)
    order = [name for name in FIRST if name in nested]
    for name in [*order, *(name for name in nested if name not in FIRST)]:
        within = [name, *(one for one in fields if one.startswith(f"{name}."))]
        for reason in dict.fromkeys(reasons[one] for one in within if one in reasons):
            yield f"# {reason}\n"
        yield yaml.safe_dump({name: nested[name]}, sort_keys=False, allow_unicode=True, width=100)


def _short(value: Any) -> str:
    """Return a value in one short line."""
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}…"
