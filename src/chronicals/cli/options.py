"""An option for each field of a recipe, made from the field's own name, type and help text."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import PydanticCustomError
from typer.core import TyperCommand

import chronicals
from chronicals.cli import wording
from chronicals.cli.wording import flag
from chronicals.config import ConfigurationError, Recipe
from chronicals.config.checked_class import AUTO, DECIDED, headings_of
from chronicals.config.foreign import NOT_SHOWN, no_such_field, no_such_objective, suggestion
from chronicals.config.sections import SECTIONS_FIELD, SHARED, of_flags
from chronicals.config.values import LAYER_NAME, split_values

SETTING_FLAG = re.compile(r"--[a-z]\w*\.[a-z]")
"""Flag of a setting of an objective, ``--dpo.beta``."""

OWN_HEADING = "This command"
"""Heading, in a help text, of options that are no fields of a recipe."""

NO_HEADING = "Other fields"
"""Heading of fields that have none of their own."""

SOURCE_FLAGS = ("data", "validation_data")
"""Fields that read their texts themselves, because the name of a file may have a comma."""

NEGATIVE_NUMBER = re.compile(r"-[.\d].*")
"""A value that begins like a flag."""

OWN_TEXTS = {
    "gpu_memory": "<GB>",
    "cache_memory": "<GB>",
    "expert_memory": "<GB>",
    "reward_on_error": "<float|drop>",
}
"""Fields that read their texts themselves, because a size may have a unit and an error a word, and
what help says that they take."""

YAML_NUMBERS = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
"""Numbers as YAML writes them, and as Python does."""

YAML_FLOATS = {text: float(number) for text, number in YAML_NUMBERS.items()}

SHORT_FLAGS = {"--teacher": "--distill.teacher"}
"""Settings that have a flag without their section."""

REGISTER_CALL = re.compile(r"^@register\((.*)\)$", re.MULTILINE)
QUOTED_NAME = re.compile(r'"(\w+)"')
"""How the files of ``objectives`` name what they register."""


def objective_names() -> list[str]:
    """Return the objectives that the files of ``objectives`` register.

    They are read from the text of these files: importing them imports torch, which takes too long
    for a help text.
    """
    names: list[str] = []
    for file in sorted((Path(chronicals.__file__).parent / "objectives").glob("*.py")):
        for arguments in REGISTER_CALL.findall(file.read_text()):
            names += QUOTED_NAME.findall(arguments)
    return names


def with_known_names(recipe: Recipe) -> Recipe:
    """Return the recipe, if its objective and its sections exist.

    If objectives are imported already, there may be more than those in the files; then
    ``build_objective`` checks names.

    Raises:
        ConfigurationError: there is no such objective, or a section is of none.
    """
    if "chronicals.objectives" in sys.modules:
        return recipe
    known = objective_names()
    lines = [] if recipe.objective in known else [no_such_objective(recipe.objective, known)]
    fields = [*known, SHARED, *(field.name for field in dataclasses.fields(recipe))]
    for name, settings in recipe.sections.items():
        if name not in (*known, SHARED):
            lines.append(no_such_field(name, settings, fields))
    if lines:
        raise ConfigurationError("\n".join(lines))
    return recipe


class Command(TyperCommand):
    """A command whose messages use the user's names of fields.

    For a flag of another trainer it suggests ours.
    """

    def get_help_option(self, ctx: Any) -> Any:
        """Put ``--help`` beside the command's own options, if these have a heading."""
        option: Any = super().get_help_option(ctx)
        panels = [getattr(parameter, "rich_help_panel", None) for parameter in self.params]
        if option is not None and OWN_HEADING in panels:
            option.rich_help_panel = OWN_HEADING
        return option

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options under their headings, as the wide help shows them."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                title = getattr(param, "rich_help_panel", None) or usual
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and let messages have the form that they have there."""
        switches = {p.name: bool(getattr(p, "is_flag", False)) for p in self.params if p.name}
        wording.set_wording(switches)
        words = list(args)
        if SECTIONS_FIELD in switches:
            # ``--dpo.beta 0.1`` becomes ``--sections dpo.beta=0.1``.
            words = []
            remaining = iter(args)
            for arg in remaining:
                word, sign, value = arg.partition("=")
                arg = SHORT_FLAGS.get(word, word) + sign + value
                if not SETTING_FLAG.match(arg):
                    words.append(arg)
                    continue
                name, sign, value = arg.removeprefix("--").partition("=")
                section, _, setting = name.partition(".")
                if not sign:
                    value = next(remaining, "--")
                    if value.startswith("--"):
                        raise typer.BadParameter(f"Option {arg!r} requires an argument.")
                words += [flag(SECTIONS_FIELD), f"{section}.{setting.replace('-', '_')}={value}"]
        try:
            rest = super().parse_args(ctx, list(words))
        except Exception as caught:
            error: Any = caught
            option = getattr(error, "option_name", None)
            if type(error).__name__ == "NoSuchOption" and option:  # typer does not export the class
                typed = (arg.partition("=")[2] for arg in args if arg.startswith(f"{option}="))
                text = next(typed, "")
                if not text and option in args:
                    text = [*args, "-"][args.index(option) + 1]
                    if text.startswith("-") and not NEGATIVE_NUMBER.fullmatch(text):
                        text = ""
                shown: Any = NOT_SHOWN
                if text:  # the value that a recipe would have, but a number as it was typed
                    shown = next(iter(of_flags([f"flag.value={text}"])["flag"].values()))
                    shown = text if shown is None or isinstance(shown, float) else shown
                # An option of another trainer: ours is named.
                unknown = option.lstrip("-").replace("-", "_")
                meant = suggestion(unknown, shown, list(switches))
                error.message = f"No such option: {option}"
                if meant:
                    error.message += f"; {wording.in_users_form(meant)}"
                error.possibilities = None
            raise
        fields = {field.name for field in dataclasses.fields(Recipe)}
        as_flags = {
            p
            for p in switches
            if p not in fields or str(ctx.get_parameter_source(p)).endswith("COMMANDLINE")
        }
        for option, value in itertools.pairwise(words):
            if option == flag(SECTIONS_FIELD):
                as_flags.add(value.partition("=")[0])
        wording.set_wording(switches, ctx.params.get("recipe") is not None, as_flags)
        return rest


def with_recipe_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the ``**flags`` of ``command`` by an option for each field of ``Recipe``.

    The command gets only the fields that were set.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    required, others = _field_options()
    names = [parameter.name for parameter in own]

    def wrapper(**given: Any) -> Any:
        flags = {name: given.pop(name) for name in list(given) if name not in names}
        return command(**given, **fields_from_flags(flags))

    hinted = typing.get_type_hints(command, include_extras=True)
    own = [
        p.replace(annotation=_with_own_heading(hinted[p.name]), kind=inspect.Parameter.KEYWORD_ONLY)
        for p in own
    ]
    # a command's own options come after the model and the data
    options = [*required, *own, *others]
    wrapper.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    wrapper.__name__ = command.__name__
    wrapper.__doc__ = command.__doc__
    wrapper.__annotations__ = {p.name: p.annotation for p in options}
    return wrapper


def _with_own_heading(annotation: Any) -> Any:
    """Return the annotation of an argument or option; an option without a heading gets one.

    The option is a copy, because other commands may have the same one under no heading.
    """
    kind, *about = typing.get_args(annotation)
    headed = []
    for info in about:
        if isinstance(info, typer.models.OptionInfo) and info.rich_help_panel is None:
            info = copy.copy(info)
            info.rich_help_panel = OWN_HEADING
        headed.append(info)
    return Annotated[(kind, *headed)]


def _field_options() -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """Return an option for each field of ``Recipe``, in two groups.

    The first is the group of the required fields, required ones first; the second has the others.
    """
    hints = typing.get_type_hints(Recipe)
    headings = headings_of(Recipe)
    recipe: Any = Recipe  # pydantic adds its fields to the dataclass
    about = recipe.__pydantic_fields__
    fields = sorted(
        dataclasses.fields(Recipe), key=lambda field: not about[field.name].is_required()
    )
    first = headings.get(fields[0].name)
    options = {
        field.name: inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                None,
                help=_help(field.name, about[field.name], hints[field.name]),
                rich_help_panel=headings.get(field.name, NO_HEADING),
                show_default=False,
                **_parsed_as(field.name, _flag_type(hints[field.name])),
            ),
            annotation=_flag_type(hints[field.name]) | None,
        )
        for field in fields
    }
    return (
        [option for name, option in options.items() if headings.get(name) == first],
        [option for name, option in options.items() if headings.get(name) != first],
    )


def make_room_for(output: Path | None, option: str = "output") -> None:
    """Create the folder of an output file, and check before the work that it can be written.

    Args:
        output: the file; None for none.
        option: that names it, for the message.

    Raises:
        ConfigurationError: it cannot.
    """
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        reason = "is a folder" if output.is_dir() else "may not be written"
        raise ConfigurationError(
            f"{option}={str(output)!r}: {reason}; name a file that can be written"
        )


def fields_from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe that were set as flags.

    A list may be given by repeated flags, with commas, or both.
    """
    hints = typing.get_type_hints(Recipe)
    fields: dict[str, Any] = {}
    for name, value in flags.items():
        if name == SECTIONS_FIELD and value:
            fields[name] = of_flags(value)
        elif isinstance(value, list) and name not in SOURCE_FLAGS and value:
            values = values_of(name, value)
            # A single value is a text if its field takes a text that is not a name, as patterns
            # and ``all-linear`` are.
            hint = hints[name]
            takes_text = typing.get_origin(hint) is types.UnionType and str in typing.get_args(hint)
            if takes_text and len(values) == 1 and not LAYER_NAME.fullmatch(values[0]):
                fields[name] = values[0]
            else:
                fields[name] = values
        elif value not in (None, []):
            fields[name] = value
    return fields


def values_of(option: str, texts: Sequence[str]) -> list[str]:
    """Return the values of an option that takes several: repeated, with commas, or both.

    Raises:
        ConfigurationError: there is an empty one.
    """
    values: list[str] = []
    for text in texts:
        try:
            values += split_values(text)
        except PydanticCustomError as error:
            raise ConfigurationError(f"{option}={text!r}: {error.message()}") from None
    return values


def _help(name: str, about: Any, hint: Any) -> str:
    """Return the help text of a field's option.

    Args:
        name: of the field.
        about: pydantic's information on it.
        hint: its type.
    """
    default = about.get_default(call_default_factory=True)
    in_words = wording.Wording({other.name: False for other in dataclasses.fields(Recipe)})
    text = in_words(about.description or name)
    choices = objective_names() if name == "objective" else _choices(hint)
    if choices:
        text += f"; choices: {', '.join(choices)}"
    if isinstance(default, list):
        default = ", ".join(default)
    return text if about.is_required() or default in (None, {}) else f"{text} [{default}]"


def _choices(hint: Any) -> list[str]:
    """Return the words that a field takes, one or several at a time.

    It is empty if the field takes other values.
    """
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [choice for part in typing.get_args(hint) for choice in _choices(part)]


def _parsed_as(name: str, number: Any) -> dict[str, Any]:
    """Return arguments of an option for a number that make it read numbers as a recipe does.

    It then takes ``.inf``, and ``auto`` if its field takes that.
    """
    if name in OWN_TEXTS:
        metavar = OWN_TEXTS[name]
        return {"parser": lambda text: YAML_FLOATS.get(text.lower(), text), "metavar": metavar}
    decided = name in DECIDED
    if number is not float and not (decided and number is int):
        return {}
    word = "an integer" if number is int else "a number"

    def parsed(text: str) -> Any:
        if decided and text == AUTO:
            return text
        try:
            return number(YAML_NUMBERS.get(text.lower(), text))
        except ValueError:
            raise typer.BadParameter(
                f"{text!r} is neither {word} nor {AUTO}." if decided else f"{text!r} is not {word}."
            ) from None

    return {
        "parser": parsed,
        "metavar": f"<{number.__name__}|{AUTO}>" if decided else f"<{number.__name__}>",
    }


def _flag_type(annotation: Any) -> Any:
    """Return the type of a field's flag.

    The configuration checks limits; flags of lists and of ``name=value`` may be repeated.
    """
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        kinds = [_flag_type(kind) for kind in typing.get_args(annotation) if kind is not type(None)]
        return list[str] if list[str] in kinds else kinds[0]
    if typing.get_origin(annotation) in (list, dict):
        return list[str]
    if typing.get_origin(annotation) is typing.Literal:
        return str
    return annotation if annotation in (int, float, bool, str, Path) else str


def without_option(args: Sequence[str], name: str) -> list[str]:
    """Return ``args`` without an option and its value: ``--name value`` or ``--name=value``."""
    others = []
    rest = iter(args)
    for arg in rest:
        if arg == name:
            next(rest, None)
        elif not arg.startswith(f"{name}="):
            others.append(arg)
    return others
