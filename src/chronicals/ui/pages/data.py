"""Rows as the model sees them, and what the checks of the data say."""

from __future__ import annotations

import re

from nicegui import ui

from chronicals.ui.command_forms import CommandField, CommandForm, fields_by_words
from chronicals.ui.form import CommandDraft
from chronicals.ui.frame import card, command_line, frame, heading
from chronicals.ui.jobs import typed_command
from chronicals.ui.recipes import Faults
from chronicals.ui.services import OBJECTIVES, Services
from chronicals.ui.words import Say

DRAFT = "data"

FIELDS: tuple[CommandField, ...] = (
    ("file", "text", "", ()),
    ("model", "text", "", ()),
    ("objective", "choice", "sft", OBJECTIVES),
    ("rows", "number", "3", ()),
    ("skip", "number", "0", ()),
    ("max_seq_length", "number", "2048", ()),
    ("columns", "text", "", ()),
    ("chat_template", "text", "", ()),
)
REQUIRED = ("file", "model")

TRAINED = re.compile(r"(⟦.*?⟧)", re.DOTALL)
"""Spans that are trained, as ``chronicals data show`` marks them off a terminal."""


def add_data(services: Services) -> None:
    """Add the page."""

    @ui.page("/data")
    def data() -> None:
        with frame(services, "data") as say:
            heading(say("nav.data"), say("data.about"))
            _DataPanel(services, say).build()


def data_form(services: Services, say: Say) -> CommandForm:
    """Return the form of ``chronicals data show``."""
    fields = fields_by_words(say, "data", FIELDS, REQUIRED)
    paths = ["file", "model", "chat_template"]
    return CommandForm(services.place, ["data", "show"], fields, ["file"], paths)


class _DataPanel:
    """The form, the command, and what it printed."""

    def __init__(self, services: Services, say: Say):
        self.services = services
        self.say = say

    def build(self) -> None:
        form = data_form(self.services, self.say)
        self.draft = CommandDraft(self.services, DRAFT, lambda: form, self.say)
        with card():
            self.draft.build(form.fields.values())
            self.command = command_line()
            show = ui.button(self.say("data.show"), on_click=self.show)
            show.props("unelevated no-caps").classes("primary fit")
        self.rows = ui.element("div").classes("rows")
        self.draft.changed.append(self._show_command)
        self.draft.follow()

    def _show_command(self) -> None:
        try:
            self.command.set_text(typed_command(self.draft.arguments()))
        except Faults:
            self.command.set_text("")

    async def show(self) -> None:
        """Run the command, and show the rows with their trained spans."""
        self.draft.strict = True
        if self.draft.show_faults() is not None:
            return
        self.rows.clear()
        with self.rows:
            ui.label(self.say("data.reading")).classes("quiet")
        arguments = self.draft.arguments()
        answer = await self.services.commands.run(arguments)
        self.rows.clear()
        with self.rows:
            with card(self.say("data.checks")):
                text = answer.error if answer.code else answer.errors.strip()
                ui.label(text).classes("pre" + (" warning" if answer.code else " quiet"))
            for row in re.split(r"\n(?=row \d+:)", answer.output.strip()):
                if row.strip():
                    with card():
                        _show_row(row)


def _show_row(row: str) -> None:
    """Show a row: its head, and its text with trained spans set off."""
    head, _, text = row.strip().partition("\n")
    ui.label(head).classes("card-title")
    with ui.element("div").classes("pre tokens"):
        for part in TRAINED.split(text):
            if part:
                span = ui.label(part.removeprefix("⟦").removesuffix("⟧"))
                span.classes("trained" if part.startswith("⟦") else "context")
