"""Inputs of a form's fields, over a draft that all tabs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nicegui import ui

from chronicals.ui.command_forms import CommandForm
from chronicals.ui.fields import FormField
from chronicals.ui.recipes import Faults, RecipeForm
from chronicals.ui.services import Services
from chronicals.ui.words import Say

SECONDS_BETWEEN_LOOKS = 0.7
"""Seconds after which what was typed in another tab is seen here."""

NOT_GIVEN = "required, and was not given"
"""Words of a fault that is no news while a form is being filled in."""


@dataclass
class FieldInput:
    """An input on the page.

    Attributes:
        field: that it is for.
        box: element around label, input, help and fault.
        input: the element with the text as its value.
        fault: label under it.
    """

    field: FormField
    box: ui.element
    input: Any
    fault: ui.label


@dataclass
class DraftForm:
    """Inputs of some fields of a form, whose texts are those of a draft.

    Attributes:
        services: of the server.
        name: of the draft.
        form: returns the form; more of its fields may become known.
        say: words of the page.
        changed: called after each change, in this tab or another.
        defaults: of fields whose default on the page is another than the command line's.
        strict: True after an attempt to start, when what is missing is told, too.
    """

    services: Services
    name: str
    form: Callable[[], RecipeForm | CommandForm]
    say: Say
    changed: list[Callable[[], None]] = field(default_factory=list)
    defaults: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    inputs: dict[str, FieldInput] = field(default_factory=dict)
    _seen: int = -1

    @property
    def texts(self) -> dict[str, str]:
        """The texts of the draft, of fields that the form has."""
        kept = self.services.drafts.texts(self.name)
        known = self.form().fields
        return {name: text for name, text in kept.items() if name in known}

    def build(self, fields: Iterable[FormField]) -> None:
        """Build an input for each field, in a grid."""
        with ui.element("div").classes("fields"):
            for one in fields:
                self._build(one)

    def follow(self) -> None:
        """Show what other tabs type from now on, and the faults."""
        self.look()
        ui.timer(SECONDS_BETWEEN_LOOKS, self.look)

    def look(self) -> None:
        """Show the draft, if it was changed since the last look."""
        revision = self.services.drafts.revision(self.name)
        if revision == self._seen:
            return
        self._seen = revision
        texts = self.texts
        for name, one in self.inputs.items():
            text = texts.get(name, "")
            if (one.input.value or "") != text:
                one.input.set_value(text)
            one.box.classes(**{"add" if text else "remove": "set"})
        self.show_faults()
        for tell in self.changed:
            tell()

    def show_faults(self) -> Faults | None:
        """Tell what is wrong at its field, and return it; None if nothing is."""
        faults: Faults | None = None
        try:
            self.form().check(self.texts)
        except Faults as found:
            faults = found
        for name, one in self.inputs.items():
            text = faults.by_field.get(name, "") if faults else ""
            if NOT_GIVEN in text and not self.strict:
                text = ""
            one.fault.set_text(text)
            one.box.classes(**{"add" if text else "remove": "wrong"})
        return faults

    def _typed(self, name: str, value: str | None) -> None:
        if (value or "") != self.services.drafts.texts(self.name).get(name, ""):
            self.services.drafts.fill_in(self.name, name, value or "")
            self.look()

    def _build(self, one: FormField) -> None:
        box = ui.element("div").classes("field")
        with box:
            with ui.element("div").classes("field-head"):
                # The name may be broken behind a line, by a space of no width.
                shown = one.name.rpartition(".")[2].replace("_", "_\u200b")
                ui.label(shown).classes("field-name")
                note = self.say("required") if one.required else one.bounds
                ui.label(note).classes("field-note")
            made = self._input(one)
            made.classes("field-input").props(f'aria-label="{one.name}" data-field="{one.name}"')
            made.on_value_change(lambda event: self._typed(one.name, event.value))
            help_text = self.help_of(one)
            if help_text:
                ui.label(help_text).classes("field-help")
            fault = ui.label().classes("field-fault").props('role="alert"')
        self.inputs[one.name] = FieldInput(one, box, made, fault)

    def help_of(self, one: FormField) -> str:
        """Return the help of a field in the language of the page."""
        return one.help

    def _input(self, one: FormField) -> Any:
        """Build the input of a field's kind; empty is the default, which it shows."""
        text = self.texts.get(one.name, "")
        words = one.choices or (("true", "false") if one.kind == "switch" else ())
        if words and one.kind in ("switch", "choice"):
            options = {"": self.say("default", value=one.default or self.say("none"))}
            options |= {word: word for word in words}
            options |= {text: text} if text not in options else {}
            return ui.select(options, value=text).props("outlined dense options-dense")
        made: Any
        if one.kind == "sources":
            made = ui.textarea(value=text).props("outlined dense autogrow rows=1 debounce=250")
        else:
            made = ui.input(value=text, placeholder=self.defaults.get(one.name, one.default))
            made.props("outlined dense debounce=250")
        return made.props('spellcheck="false" autocomplete="off"')


@dataclass
class RecipeDraft(DraftForm):
    """Inputs of the recipe of an objective, which is the name of the draft."""

    @property
    def recipe_form(self) -> RecipeForm:
        """The form as it is known now."""
        return self.services.form(self.name)

    def help_of(self, one: FormField) -> str:
        """Return the help of a field in the language of the page; the schema has it in English."""
        return self.say.translated(f"field.{one.name}", one.help)


@dataclass
class CommandDraft(DraftForm):
    """Inputs of a command with flags."""

    @property
    def command_form(self) -> CommandForm:
        """The form, which is known from the start."""
        form = self.form()
        assert isinstance(form, CommandForm)
        return form

    def arguments(self, more: Sequence[str] = ()) -> list[str]:
        """Return the arguments of the command as it stands.

        Args:
            more: flags that the form has no field for.

        Raises:
            Faults: something is missing or wrong.
        """
        return self.command_form.arguments(self.texts, more)


def recipe_draft(services: Services, objective: str, say: Say) -> RecipeDraft:
    """Return the inputs of a stage's draft, whose run gets a folder of its own by default."""
    free = {"output_dir": services.runs.free_folder(objective)}
    return RecipeDraft(services, objective, partial(services.form, objective), say, defaults=free)
