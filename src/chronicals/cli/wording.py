"""Names of fields in messages, in the form in which the user gave them: flags or lines of a recipe.

Messages name fields as Python has them: ``batch_size=2``. The command line shows them as
``--batch-size 2`` or ``batch_size: 2``. Only this module translates.
"""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from chronicals.config.values import as_one_value

TO_RESUME = re.compile(r"""train\(\.\.\., resume=True\) and output_dir=('[^'\n]*'|"[^"\n]*")""")
"""The remedy in messages of Python runs that can be resumed."""

WITHOUT_FLAG = ("columns",)
"""Fields that are in a recipe if the command has no flag for them."""

_VALUE = r"""'[^'\n]*'|"[^"\n]*"|\[[^\]\n]*\]|\{[^}\n]*\}|[\w.+-]*\w"""
"""Pattern of a value in a message: a literal of Python, or a word."""

SETTINGS_IN_TEXT = re.compile(r"(?<![\w./'\"-])([a-z]\w*)=(\{'\w+': [^}\n]*\})")
"""Pattern of an objective's settings in a message."""


@dataclasses.dataclass(frozen=True)
class Wording:
    """Translation of field names in messages to those that the user of one command wrote.

    Attributes:
        switches: the fields; True for a flag without a value.
        in_recipe: True if a recipe was given.
        as_flags: fields that were given as flags beside it, and options that are no fields.
    """

    switches: Mapping[str, bool]
    in_recipe: bool = False
    as_flags: Collection[str] = ()

    def __call__(self, text: str) -> str:
        """Return ``text`` with each field that it names, and its value, in the user's form."""
        if not self.switches:
            return text
        resume = "chronicals train --resume --output-dir"
        text = TO_RESUME.sub(
            lambda match: f"{resume} {shlex.quote(_value_of(match[1]))}",
            text,
        )
        # Longer names come first: a pattern takes the first alternative that matches.
        names = sorted([*self.switches, *WITHOUT_FLAG], key=len, reverse=True)
        any_name = "|".join(names)
        text = re.sub(
            rf"(?<![\w./'\"-])({any_name})=({_VALUE})",
            lambda match: self._with_value(match[1], match[2]),
            text,
        )
        text = SETTINGS_IN_TEXT.sub(lambda match: self._setting(match[1], match[2]), text)
        text = re.sub(
            rf"(?m)(?:^|(?<=; ))({any_name})(?=: )",
            lambda match: flag(match[1]) if self._is_flag(match[1]) else match[1],
            text,
        )
        # Names of one word are words of English, too; those with an underscore are fields.
        distinct = [name for name in names if "_" in name and name in self.switches]
        bare = "|".join(distinct) or "(?!)"
        return re.sub(
            rf"(?<![\w./='\"-])({bare})(?![\w/='\"-]|\.\w)|(?<=did you mean )'({bare})'",
            lambda match: (
                flag(match[1] or match[2]) if self._is_flag(match[1] or match[2]) else match[0]
            ),
            text,
        )

    def _setting(self, section: str, text: str) -> str:
        """Return settings of an objective, ``dpo={'beta': 0.1}``, as flags or recipe lines."""
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

    def _with_value(self, name: str, text: str) -> str:
        """Return ``name=value`` as a flag or as a line of a recipe."""
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
            [as_one_value(str(one)) for one in values]
            if isinstance(values, list)
            else [str(values)]
        )
        return " ".join(f"{flag(name)} {shlex.quote(text)}" for text in texts or ["none"])


def flag(name: str) -> str:
    """Return the flag of a field: ``--batch-size`` of ``batch_size``."""
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
"""Wording of the command that runs."""


def set_wording(
    switches: Mapping[str, bool], in_recipe: bool = False, as_flags: Collection[str] = ()
) -> None:
    """Set the wording of ``in_users_form`` to that of a command. For arguments see ``Wording``."""
    global current
    current = Wording(switches, in_recipe, as_flags)


def in_users_form(text: str) -> str:
    """Return a message with the fields it names in the form that the user gave them in."""
    return current(text)


class LogFormatter(logging.Formatter):
    """Formatter of log lines in the user's form."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return in_users_form(super().format(record))
