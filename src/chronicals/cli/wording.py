"""Fields of the configuration in the form that the user gives them in: as flags, or as lines of a
recipe.

Messages name fields as Python has them: ``batch_size=2``. The command line shows them as
``--batch-size 2`` or ``batch_size: 2``. This is the one place that translates.
"""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from chronicals.config.values import undivided

TO_RESUME = re.compile(r"""train\(\.\.\., resume=True\) and output_dir=('[^'\n]*'|"[^"\n]*")""")
"""How a run in Python goes on."""

WITHOUT_FLAG = ("columns",)
"""Fields that stand in a recipe where the command has no flag for them."""

VALUE = r"""'[^'\n]*'|"[^"\n]*"|\[[^\]\n]*\]|\{[^}\n]*\}|[\w.+-]*\w"""
"""What a value looks like in a message: a literal of Python, or a word."""


SETTING = re.compile(r"(?<![\w./'\"-])([a-z]\w*)=(\{'\w+': [^}\n]*\})")
"""What settings of an objective look like in a message."""


@dataclasses.dataclass(frozen=True)
class Wording:
    """How the fields of one command are named.

    Attributes:
        switches: the fields, and whether each is a flag without a value.
        in_recipe: whether a recipe was given.
        as_flags: fields that were given as flags beside it, and options that are no fields.
    """

    switches: Mapping[str, bool]
    in_recipe: bool = False
    as_flags: Collection[str] = ()

    def __call__(self, text: str) -> str:
        """``text`` with each field that it names, and the value beside it, in the user's form."""
        if not self.switches:
            return text
        text = TO_RESUME.sub(
            lambda found: (
                f"chronicals train --resume --output-dir {shlex.quote(_value_of(found[1]))}"
            ),
            text,
        )
        name = "|".join(sorted([*self.switches, *WITHOUT_FLAG], key=len, reverse=True))
        distinct = (
            "|".join(sorted((name for name in self.switches if "_" in name), key=len, reverse=True))
            or "(?!)"
        )
        text = re.sub(
            rf"(?<![\w./'\"-])({name})=({VALUE})",
            lambda found: self._with_value(found[1], found[2]),
            text,
        )
        text = SETTING.sub(lambda found: self._setting(found[1], found[2]), text)
        text = re.sub(
            rf"(?m)(?:^|(?<=; ))({name})(?=: )", lambda found: self._named(found[1]), text
        )
        bare = rf"(?<![\w./='\"-])({distinct})(?![\w/='\"-]|\.\w)|(?<=did you mean )'({distinct})'"
        return re.sub(bare, lambda found: self._bare(found[1] or found[2], found[0]), text)

    def _setting(self, section: str, text: str) -> str:
        """``dpo={'beta': 0.1}``, settings of an objective, as flags or as lines of a recipe."""
        settings = _value_of(text)
        if section in self.switches or not isinstance(settings, dict):
            return f"{section}={text}"
        if all(not self.in_recipe or f"{section}.{name}" in self.as_flags for name in settings):
            return " ".join(
                f"{flag(f'{section}.{name}')} {shlex.quote(str(value))}"
                for name, value in settings.items()
            )
        return f"{section}: {_in_yaml(settings)}"

    def _is_flag(self, name: str) -> bool:
        return name in self.switches and (not self.in_recipe or name in self.as_flags)

    def _named(self, name: str) -> str:
        return flag(name) if self._is_flag(name) else name

    def _bare(self, name: str, as_it_is: str) -> str:
        return flag(name) if self._is_flag(name) else as_it_is

    def _with_value(self, name: str, text: str) -> str:
        value = _value_of(text)
        if value == text and text[0] in "[{":
            return f"{name}={text}"
        if not self._is_flag(name):
            return f"{name}: {_in_yaml(value)}"
        if self.switches[name]:
            return flag(f"no_{name}" if value is False else name)
        if value is None:
            return f"no {flag(name)}"
        pairs = list(value.items()) if isinstance(value, dict) else []
        if name == "columns":  # whose flag has the names of the data first
            pairs = [(theirs, ours) for ours, theirs in pairs]
        values = [f"{key}={one}" for key, one in pairs] if isinstance(value, dict) else value
        texts = (
            [undivided(str(one)) for one in values] if isinstance(values, list) else [str(values)]
        )
        return " ".join(f"{flag(name)} {shlex.quote(text)}" for text in texts or ["none"])


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _value_of(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _in_yaml(value: Any) -> str:
    import yaml

    if value == "inf":
        return ".inf"
    return (
        yaml.safe_dump(
            value, default_flow_style=True, width=1 << 16, sort_keys=False, allow_unicode=True
        )
        .removesuffix("...\n")
        .strip()
    )


current = Wording({})
"""Of the command that runs."""


def begin(
    switches: Mapping[str, bool], in_recipe: bool = False, as_flags: Collection[str] = ()
) -> None:
    """From here on ``in_users_form`` speaks to the user of this command."""
    global current
    current = Wording(switches, in_recipe, as_flags)


def in_users_form(text: str) -> str:
    return current(text)


class LogFormatter(logging.Formatter):
    """Log lines in the user's form."""

    def format(self, record: logging.LogRecord) -> str:
        return in_users_form(super().format(record))
