"""Forms of commands that have flags instead of a recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from chronicals.ui.fields import FieldKind, FormField
from chronicals.ui.place import OutsideRoot, Place
from chronicals.ui.recipes import READ_BELOW, Faults, check_path
from chronicals.ui.words import Say

CommandField = tuple[str, FieldKind, str, tuple[str, ...]]
"""Name, kind, default and choices of a field, whose help is a text of its page."""


def fields_by_words(
    say: Say, page: str, fields: Sequence[CommandField], required: Collection[str] = ()
) -> dict[str, FormField]:
    """Return fields whose help is a text of the page.

    Args:
        say: words of the page.
        page: its name, with which the names of the texts begin.
        fields: of each the name, the kind, the default and the choices.
        required: names of those that must be given.
    """
    return {
        name: FormField(
            name,
            "",
            kind,
            say(f"{page}.{name}"),
            default,
            choices,
            required=name in required,
        )
        for name, kind, default, choices in fields
    }


@dataclass(frozen=True)
class CommandForm:
    """The form of a command.

    Attributes:
        place: whose paths may be named.
        command: words of the command.
        fields: its fields by name; the flag of ``batch_size`` is ``--batch-size``.
        arguments_first: fields that are arguments, in their order.
        paths: fields that name files or folders.
    """

    place: Place
    command: Sequence[str]
    fields: Mapping[str, FormField]
    arguments_first: Sequence[str] = ()
    paths: Sequence[str] = ()

    def check(self, texts: Mapping[str, str]) -> None:
        """Check what is known without the command.

        Raises:
            Faults: something required is missing, a path is outside of the root, or a number is
                none.
        """
        faults: dict[str, str] = {}
        for name, field in self.fields.items():
            text = texts.get(name, "")
            if field.required and not text:
                faults[name] = f"{name}: required, and was not given"
            elif text and field.kind == "number" and isinstance(field.value(text), str):
                faults[name] = f"{name}={text!r}: is no number"
            elif text.startswith("-") and field.kind != "number":
                faults[name] = f"{name}={text!r}: begins like a flag"
            elif text and name in self.paths:
                try:
                    check_path(self.place, text, name in READ_BELOW)
                except OutsideRoot as error:
                    faults[name] = f"{name}={error}"
        if faults:
            raise Faults(faults)

    def arguments(self, texts: Mapping[str, str], more: Sequence[str] = ()) -> list[str]:
        """Return the arguments of the command.

        Args:
            texts: of the fields.
            more: flags that the form has no field for.

        Raises:
            Faults: as ``check``.
        """
        self.check(texts)
        given = {name: texts[name].strip() for name in self.fields if texts.get(name, "").strip()}
        first = [given.pop(name) for name in self.arguments_first if name in given]
        flags = [f"--{name.replace('_', '-')}={text}" for name, text in given.items()]
        return [*self.command, *first, *flags, *more]
