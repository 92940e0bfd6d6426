"""Sizes of a native mixture of experts: its parameters as they are typed, and the model made of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from nicegui import ui

from chronicals.ui.command_forms import CommandField, CommandForm, fields_by_words
from chronicals.ui.fields import FieldKind, FormField
from chronicals.ui.form import CommandDraft
from chronicals.ui.frame import card, command_line, frame, heading
from chronicals.ui.jobs import typed_command
from chronicals.ui.panels import SECONDS_OF_STILLNESS
from chronicals.ui.recipes import Faults
from chronicals.ui.services import Services
from chronicals.ui.words import Say

DRAFT = "mixture"

FIELDS: tuple[CommandField, ...] = (
    ("output", "text", "", ()),
    ("tokenizer", "text", "", ()),
    ("dtype", "choice", "bf16", ("bf16", "fp16", "fp32")),
    ("seed", "number", "42", ()),
)

FROM_TOKENIZER = ("vocab_size",)
"""Sizes that the tokenizer decides."""


def add_mixture(services: Services) -> None:
    """Add the page."""

    @ui.page("/mixture")
    def mixture() -> None:
        with frame(services, "mixture") as say:
            heading(say("nav.mixture"), say("mixture.about"))
            _MixturePanel(services, say).build()


def size_fields(sizes: dict[str, Any]) -> dict[str, FormField]:
    """Return a field for each size of the model, with its default.

    Args:
        sizes: defaults by name, as ``chronicals.ui.settings`` prints them.
    """
    found = {}
    for name, default in sizes.items():
        if name not in FROM_TOKENIZER:
            kind: FieldKind = "number"
            if isinstance(default, (bool, str)):
                kind = "switch" if isinstance(default, bool) else "text"
            plain = FormField(name, "", kind, "")
            found[name] = replace(plain, default=plain.text(default))
    return found


class _MixturePanel:
    """Forms of the command and of the sizes; the count follows what is typed."""

    def __init__(self, services: Services, say: Say):
        self.services = services
        self.say = say
        self.due: float | None = None

    def build(self) -> None:
        """Build the panel."""
        own = fields_by_words(self.say, "mixture", FIELDS, ["output", "tokenizer"])
        sizes = size_fields(self.services.schemas.get("mixture", {}))
        paths = ["output", "tokenizer"]
        form = CommandForm(self.services.place, ["moe", "new"], {**own, **sizes}, ["output"], paths)
        self.sizes = sizes
        self.draft = CommandDraft(self.services, DRAFT, lambda: form, self.say)
        with card():
            self.draft.build(own.values())
            self.command = command_line()
            with ui.element("div").classes("row"):
                make = ui.button(self.say("mixture.make"), on_click=self.make)
                make.props("unelevated no-caps").classes("primary")
                self.said = ui.label().classes("pre said grow").props('role="status"')
        with card(self.say("mixture.sizes")):
            if not sizes:
                ui.label(self.say("doctor.reading")).classes("quiet")
                ui.timer(1.0, self._reload_when_known)
            self.draft.build(sizes.values())
        self.draft.changed.append(self._touch)
        self.draft.follow()
        ui.timer(0.2, self._when_still)

    def _reload_when_known(self) -> None:
        if self.services.schemas:
            ui.navigate.reload()

    def arguments(self, *more: str) -> list[str]:
        """Return the arguments of ``chronicals moe new``; sizes are values of ``--set``.

        Raises:
            Faults: something is missing or wrong.
        """
        texts = self.draft.texts
        self.draft.command_form.check(texts)
        own = {name: text for name, text in texts.items() if name not in self.sizes}
        sizes = [f"--set={name}={texts[name].strip()}" for name in self.sizes if name in texts]
        return self.draft.command_form.arguments(own, [*sizes, *more])

    def _touch(self) -> None:
        self.due = time.monotonic() + SECONDS_OF_STILLNESS

    async def _when_still(self) -> None:
        """Count the parameters of what was typed."""
        if self.due is None or time.monotonic() < self.due:
            return
        self.due = None
        try:
            arguments = self.arguments()
        except Faults:
            self.command.set_text("")
            return
        self.command.set_text(typed_command(arguments))
        answer = await self.services.commands.run([*arguments, "--count"])
        self.said.set_text(answer.output.strip() or answer.error)

    async def make(self) -> None:
        """Make the model, and take it into the form of pretraining."""
        self.draft.strict = True
        if self.draft.show_faults() is not None:
            return
        answer = await self.services.commands.run(self.arguments())
        self.said.set_text(answer.output.strip() or answer.error)
        if answer.code == 0:
            output = self.draft.texts["output"]
            self.services.drafts.fill_in("pretraining", "model", output)
            ui.navigate.to("/train/pretraining")
